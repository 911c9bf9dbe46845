"""The paper's nine datasets, each a YAML file here: where it is published, how its files are read, split and asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from cauc_ray.data.splits import Rule


class Metadata(BaseModel):
    """A table that lists images which lie together in one folder.

    Attributes:
        file: The table.
        images: The folder of the images, next to it.
        partition: The column that says which partition a row is of.
        partitions: Values of that column to partitions; other rows are left out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    images: str
    partition: str
    partitions: dict[str, str]


class Benchmark(BaseModel):
    """How a dataset is published, and how it is split and asked.

    Attributes:
        name: Its name; "" for any other dataset.
        hub: The id that the datasets library loads; "" for a dataset that is not on the hub.
        config: The configuration there.
        revision: The revision there.
        files: The files to load, by partition, if other partitions are large and not needed.
        columns: Canonical name to the file's own name, for choices several joined with "+".
        first_label: The label of the first option.
        choices_pattern: A regular expression whose groups are the options of a text of choices.
        rows: A column to the value of the rows that count, where the files have that column.
        split: The paper's split rule, None for the rule that fits the partitions.
        split_without_test: The rule where the test partition is missing, as it is on the hub.
        tests: Its test partitions, one split each.
        unsplit: Published without partitions; cut 25/25/50.
        metadata: The table that lists its images.
        prompt: The template of its questions, which `prompt: NAME` stands for in a pool file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = ""
    hub: str = ""
    config: str | None = None
    revision: str | None = None
    files: dict[str, str] | None = None
    columns: dict[str, str] = {}
    first_label: int = 0
    choices_pattern: str | None = None
    rows: dict[str, str] = {}
    split: Rule | None = None
    split_without_test: Rule | None = None
    tests: tuple[str, ...] = ("test",)
    unsplit: bool = False
    metadata: Metadata | None = None
    prompt: str | None = None


def _read(path: Path) -> Benchmark:
    return Benchmark(name=path.stem, **yaml.safe_load(path.read_text(encoding="utf-8")))


BENCHMARKS: Mapping[str, Benchmark] = {path.stem: _read(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))}
