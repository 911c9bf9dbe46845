"""The nine datasets of the paper: where they are published and what their columns are called there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cauc_ray.data.columns import Published
from cauc_ray.data.folders import Openers, wilds_partitions
from cauc_ray.data.splits import Rule

# The hub's own conversion to Parquet, of datasets whose repository holds a loading script.
_CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One dataset of the paper.

    hub, config, revision: what the datasets library loads; hub is "" for a dataset that is not there.
    files: the files to load, where the other partitions are large and not needed.   tests: its test partitions, a
    split each.   find: finds partitions in a folder as published, where that is no folder of tables or classes.
    rule: how the paper splits it.   unsplit: published as one whole, which is cut 25/25/50 where it is given so.
    """

    hub: str
    config: str | None = None
    revision: str | None = None
    files: Mapping[str, str] | None = None
    published: Published = field(default_factory=Published)
    tests: tuple[str, ...] = ("test",)
    find: Callable[[Path], Openers | None] | None = None
    rule: Rule = "halve-validation"
    unsplit: bool = False


def mathqa_choices(text: str) -> list[str] | None:
    """Split MathQA's text of five options; None where it has not all five.

    >>> mathqa_choices("a ) 38 , b ) 27.675 , c ) rs . 1 , 200 , d ) 5 , e ) none of these")
    ['38', '27.675', 'rs . 1 , 200', '5', 'none of these']
    """
    found = re.fullmatch(r"\s*a \)(.*?),\s*b \)(.*?),\s*c \)(.*?),\s*d \)(.*?),\s*e \)(.*)", text, re.DOTALL)
    return [option.strip() for option in found.groups()] if found else None


BENCHMARKS: Mapping[str, Benchmark] = {
    "mmlu": Benchmark("cais/mmlu", "all", published=Published({"label": "answer"})),
    "logiqa": Benchmark(
        "lucasmccabe/logiqa",
        revision=_CONVERTED,
        published=Published({"question": "query", "choices": "options", "label": "correct_option"}),
    ),
    "mathqa": Benchmark(
        "allenai/math_qa",
        revision=_CONVERTED,
        published=Published(
            {"question": "Problem", "choices": "options", "label": "correct"}, split_choices=mathqa_choices
        ),
    ),
    "medmcqa": Benchmark(
        "openlifescienceai/medmcqa",
        published=Published({"choices": "opa+opb+opc+opd", "label": "cop", "subject": "subject_name"}),
        rule="sample-train",
    ),
    "piqa": Benchmark(
        "ybisk/piqa",
        revision=_CONVERTED,
        published=Published({"question": "goal", "choices": "sol1+sol2"}),
        rule="sample-train",
    ),
    "socialiqa": Benchmark(
        "allenai/social_i_qa",
        revision=_CONVERTED,
        published=Published({"choices": "answerA+answerB+answerC"}, first_label=1),
    ),
    # All 257 folders of 256_ObjectCategories are classes, 257.clutter too.
    "caltech256": Benchmark("ilee0022/Caltech-256", unsplit=True),
    "iwildcam": Benchmark("", tests=("test-id", "test-ood"), find=wilds_partitions),
    "imagenet": Benchmark("ILSVRC/imagenet-1k", files={"validation": "data/validation-*"}, rule="three-way"),
}
