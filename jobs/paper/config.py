"""The config of the paper's tables and figures: which chain of which logit table fills which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from json import loads
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from cauc_ray.api.options import Location, Names, Options, OutputPath, Seeds
from cauc_ray.data.logits import LogitTable, encoders
from cauc_ray.errors import DataError, unknown_name
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.kind import Section
from cauc_ray.numbers.sweep import Objective

# Tables in which all methods are compared on chains.
COMPARED = ("two-model-language", "two-model-image", "three-model-language")
N_MODELS = {"two-model-language": 2, "two-model-image": 2, "complementarity": 2, "three-model-language": 3}


@cache
def published_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the paper's own tables by name: title, caption, figures and columns."""
    tables: Mapping[str, Mapping[str, Any]] = loads(
        (Path(__file__).parent / "published.json").read_text(encoding="utf-8")
    )
    return tables


def published_columns(table: str) -> Mapping[str, Any]:
    """Return the columns of a table of the paper, each a data set or a pair of models; empty if it has none."""
    columns: Mapping[str, Any] = published_tables().get(table, {}).get("columns", {})
    return columns


class Entry(Section):
    """What a table or figure shows of one logit table.

    Attributes:
        name: In tables and figures.
        set: A logit table, as a folder below `logits`.
        split: The split that is measured on.
    """

    name: str = Field(pattern=r"^[^\x00-\x1f]+$")
    set: str = Field(min_length=1)
    split: str = "test"

    @property
    def required_models(self) -> tuple[str, ...]:
        """Return the models that the table must hold; without any, all of them are read."""
        return ()

    def surrogates(self, root: AnyPath) -> list[str]:
        """Return its models whose logits are surrogates, which are compared with no published number."""
        kinds = LogitTable(root / self.set).kinds
        return [model for model in self.required_models or kinds if kinds[model] == "surrogate"]

    def obstacle(self, root: AnyPath) -> str | None:
        """Return which of its data are missing below the folder of all sets, None where all are there."""
        try:
            table = LogitTable(root / self.set)
        except DataError as error:
            return str(error)
        for model in self.required_models or table.models:
            if model not in table.models:
                return f"{table.path}: {unknown_name('model', model, table.models)}"
            if self.split not in table.splits(model):
                return f"{table.path}: model {model!r}: {unknown_name('split', self.split, table.splits(model))}"
        return None


class Chain(Entry):
    """A chain of models of one logit table.

    Attributes:
        models: Cheapest first; of a growing chain in the order in which they are added before the last.
        objective: The quality that the table shows.
        published: The column of the paper's table that is shown next to it.
    """

    models: tuple[str, ...] = Field(min_length=1)
    objective: Objective = "accuracy"
    published: str | None = None

    @property
    def required_models(self) -> tuple[str, ...]:
        """Return the models that the table must hold."""
        return self.models

    @property
    def keys(self) -> dict[str, Any]:
        """Return the columns of each of its rows that name it."""
        keys = {"set": self.set, "split": self.split, "models": list(self.models), "objective": self.objective}
        return {"chain": self.name, **keys, "published_column": self.published}


class ComparedChain(Chain):
    """A chain that all methods are compared on.

    Attributes:
        embedding: As compare() takes it.
        texts: As compare() takes it; a file below `logits`.
        checkpoints: As compare() takes them.
    """

    embedding: str | None = None
    texts: str | None = None
    checkpoints: dict[str, str] = Field(default_factory=dict)

    def obstacle(self, root: AnyPath) -> str | None:
        """Return which of its data are missing, the encoder's among them."""
        obstacle = super().obstacle(root)
        if obstacle is None and self.embedding is not None:
            names = encoders(root / self.set)
            if self.embedding not in names:
                return f"{root / self.set}: {unknown_name('encoder', self.embedding, names)}"
        return obstacle


class ReliabilityFigure(Entry):
    """A figure of calibration.

    Attributes:
        model: The model whose confidence is shown before and after.
        models: Models whose accuracy is shown at matched confidence.
        counted: Models whose high-confidence examples are counted, cheapest first.
    """

    name: str = Field(pattern=r"^\w[\w.-]*$")
    model: str
    models: tuple[str, ...] = Field(min_length=2, max_length=6)
    counted: tuple[str, ...] = Field(min_length=2)

    @property
    def required_models(self) -> tuple[str, ...]:
        """Return the models that the table must hold."""
        return tuple(dict.fromkeys((*self.counted, *self.models, self.model)))


class _Parts(Section):
    """A section whose keys are the names of tables or figures."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

    @property
    def by_name(self) -> dict[str, tuple[Entry, ...]]:
        """Return the entries by the name of their table or figure."""
        return {name.replace("_", "-"): tuple(map(_entry, entries)) for name, entries in self}

    @model_validator(mode="after")
    def _unique(self) -> _Parts:
        for part, entries in self.by_name.items():
            _require_unique(f"{part}: two entries are named", [entry.name for entry in entries])
        return self


def _entry(item: Entry | str) -> Entry:
    return Entry(name=item, set=item) if isinstance(item, str) else item


def _require_unique(what: str, names: Sequence[str]) -> None:
    duplicate = next((name for name, n in Counter(names).items() if n > 1), None)
    if duplicate is not None:
        raise ValueError(f"{what} {duplicate!r}")


class Tables(_Parts):
    """The chains of each table; a table without entries is not made.

    Attributes:
        setup_time: A chain that setup is timed on while nothing else runs.
    """

    two_model_language: tuple[ComparedChain, ...] = ()
    two_model_image: tuple[ComparedChain, ...] = ()
    complementarity: tuple[Chain, ...] = ()
    growing_chain: tuple[Chain, ...] = ()
    three_model_language: tuple[ComparedChain, ...] = ()
    setup_time: tuple[ComparedChain, ...] = Field(default=(), max_length=1)

    @model_validator(mode="after")
    def _chains_fit(self) -> Tables:
        for part, chains in self.by_name.items():
            for chain in chains:
                assert isinstance(chain, Chain)
                place, n_models = f"{part}: {chain.name!r}", N_MODELS.get(part, len(chain.models))
                if len(chain.models) != n_models:
                    raise ValueError(f"{place} needs {n_models} models, got {len(chain.models)}")
                _require_unique(f"{place} has twice the model", chain.models)
                columns = published_columns(part)
                if chain.published is not None and chain.published not in columns:
                    raise ValueError(f"{place}: {unknown_name('published column', chain.published, columns)}")
        return self


class Figures(_Parts):
    """The figures that are not drawn from the tables.

    Attributes:
        complementarity_gain: Sets, each with all pairs of its models of which the more expensive is the more accurate.
    """

    calibration_reliability: tuple[ReliabilityFigure, ...] = ()
    complementarity_gain: tuple[str, ...] = ()


class PaperConfig(Options):
    """The tables and figures to make, and their data.

    Attributes:
        logits: The folder of all sets.
        output: A folder, new or of an earlier attempt.
        methods: The methods of comparisons, as compare() takes them.
        seeds: Random seeds; tables show means over several.
        redrawn: Splits that each seed draws again, as compare() takes them.
        deadline_s: On a cluster, the seconds that one method may take on one chain.
        address: Address of a Ray cluster.
    """

    logits: Location
    output: OutputPath = Path("paper")
    methods: Names = Field(default=("all",), min_length=1)
    seeds: Seeds = Field(default=(0,), min_length=1)
    redrawn: Names | None = None
    deadline_s: float = Field(default=7200.0, gt=0)
    tables: Tables = Tables()
    figures: Figures = Figures()
    address: str | None = None

    @property
    def parts(self) -> dict[str, tuple[Entry, ...]]:
        """Return the entries by the name of their table or figure."""
        return self.tables.by_name | self.figures.by_name
