"""The config of the paper's tables and figures: which chain of which logit table fills which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, Field, model_validator

from cauc_ray.api.options import Location, Seed
from cauc_ray.errors import unknown_name
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.kind import Section
from cauc_ray.numbers.sweep import Objective
from cauc_ray.paper.quoted import columns_of

# Tables in which all methods are compared on chains.
COMPARED = ("two-model-language", "two-model-image", "three-model-language")


class Entry(Section):
    """What one task measures.

    name: in tables and figures.   set: a logit table, a folder below `logits`.   split: what is measured on.
    """

    name: str = Field(pattern=r"^[^\x00-\x1f]+$")
    set: str = Field(min_length=1)
    split: str = "test"

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the models that the table must hold."""
        return ()

    def reads(self, root: AnyPath) -> tuple[AnyPath, ...]:
        """Return the files and folders that its figures depend on.   root: of all sets."""
        return (root / self.set,)

    def surrogates(self, root: AnyPath) -> list[str]:
        """Return its models whose logits are surrogates, whose figures are compared with no published ones."""
        from cauc_ray.data.logits import LogitTable  # pyarrow, which an edge box does not have

        kinds = LogitTable(root / self.set).kinds
        return [model for model in self.wanted or kinds if kinds[model] == "surrogate"]


class Chain(Entry):
    """A chain of models of one logit table.

    models: cheapest first.   objective: the quality that the table shows.   published: the column of the paper's table
    that is shown next to it.
    """

    models: tuple[str, ...] = Field(min_length=1)
    objective: Objective = "accuracy"
    published: str | None = None

    @property
    def keys(self) -> dict[str, Any]:
        """Return the columns of each of its rows that name it."""
        own = {"set": self.set, "split": self.split, "models": list(self.models), "objective": self.objective}
        return {"chain": self.name, **own, "published_column": self.published}

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the models that the table must hold."""
        return self.models


class ComparedChain(Chain):
    """A chain that all methods are compared on; embedding, text_column and checkpoints are as compare() takes them.

    encoder_rows_per_s: how fast the embedding was collected, as `cauc collect` reports it: setup times are then also
    given with it.   texts: a file below `logits`.
    """

    embedding: str | None = None
    encoder_rows_per_s: float | None = Field(default=None, gt=0)
    texts: str | None = None
    text_column: str = "question"
    checkpoints: dict[str, str] = Field(default_factory=dict)

    def reads(self, root: AnyPath) -> tuple[AnyPath, ...]:
        """Return the table, the texts, and those checkpoints that are local folders and not hub ids."""
        texts = () if self.texts is None else (root / self.texts,)
        local = (path for path in map(Path, self.checkpoints.values()) if path.exists())
        return (root / self.set, *texts, *local)


class GrowingChain(Chain):
    """A chain that grows: the last model alone, then with one more of the models, in their order, before it."""

    last: str

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the models that the table must hold."""
        return (*self.models, self.last)


class ReliabilityFigure(Entry):
    """What a figure of calibration shows.

    model: whose confidence is shown before and after.   models: whose accuracy is shown at matched confidence.
    counted: whose high-confidence examples are counted, cheapest first.
    """

    name: str = Field(pattern=r"^\w[\w.-]*$")
    model: str
    models: tuple[str, ...] = Field(min_length=2, max_length=6)
    counted: tuple[str, ...] = Field(min_length=2)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the models that the table must hold."""
        return tuple(dict.fromkeys((*self.counted, *self.models, self.model)))


class _Parts(Section):
    """A section whose keys are the names of tables or figures."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

    @property
    def by_name(self) -> dict[str, tuple[Entry, ...]]:
        """Return the entries by the name of their table or figure."""
        return {name.replace("_", "-"): tuple(map(_entry, each)) for name, each in self}

    @model_validator(mode="after")
    def _names_once(self) -> _Parts:
        for part, entries in self.by_name.items():
            _require_once(f"{part}: two entries are named", [entry.name for entry in entries])
        return self


def _entry(named: Entry | str) -> Entry:
    return Entry(name=named, set=named) if isinstance(named, str) else named


def _require_once(what: str, names: Sequence[str]) -> None:
    twice = next((name for name, n in Counter(names).items() if n > 1), None)
    if twice is not None:
        raise ValueError(f"{what} {twice!r}")


class Tables(_Parts):
    """What fills each table; a table without entries is not made.

    setup_time: a chain that setup is timed on while nothing else runs.
    """

    LENGTHS: ClassVar = {"two-model-language": 2, "two-model-image": 2, "complementarity": 2, "three-model-language": 3}

    two_model_language: tuple[ComparedChain, ...] = ()
    two_model_image: tuple[ComparedChain, ...] = ()
    complementarity: tuple[Chain, ...] = ()
    growing_chain: tuple[GrowingChain, ...] = ()
    three_model_language: tuple[ComparedChain, ...] = ()
    setup_time: tuple[ComparedChain, ...] = Field(default=(), max_length=1)

    @model_validator(mode="after")
    def _chains_fit(self) -> Tables:
        for part, chains in self.by_name.items():
            for chain in chains:
                assert isinstance(chain, Chain)
                where, length = f"{part}: {chain.name!r}", self.LENGTHS.get(part, len(chain.models))
                if len(chain.models) != length:
                    raise ValueError(f"{where} needs {length} models, got {len(chain.models)}")
                _require_once(f"{where} has twice the model", chain.wanted)
                if chain.published is not None and chain.published not in columns_of(part):
                    raise ValueError(f"{where}: {unknown_name('published column', chain.published, columns_of(part))}")
        return self


class Figures(_Parts):
    """What the figures show that are not drawn from the tables.

    complementarity_gain: sets, each with all pairs of its models of which the more expensive is the more accurate.
    """

    calibration_reliability: tuple[ReliabilityFigure, ...] = ()
    complementarity_gain: tuple[str, ...] = ()


class PaperConfig(Section):
    """A run of the paper's tables and figures.

    logits: the folder of all sets.   methods: of the comparisons, as compare() takes them.   seed: of all random draws.
    deadline_s: how long a chain may take, in seconds from the start of its task.
    """

    logits: Location
    methods: tuple[str, ...] = Field(default=("all",), min_length=1)
    seed: Seed = 0
    deadline_s: float = Field(default=7200.0, gt=0)
    tables: Tables = Tables()
    figures: Figures = Figures()

    @property
    def parts(self) -> dict[str, tuple[Entry, ...]]:
        """Return the entries by the name of their table or figure."""
        return self.tables.by_name | self.figures.by_name

    def reads(self) -> set[AnyPath]:
        """Return all files and folders that the entries' figures depend on."""
        return {path for entries in self.parts.values() for entry in entries for path in entry.reads(self.logits)}
