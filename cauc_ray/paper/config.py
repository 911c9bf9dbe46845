"""What a run of the paper's tables is told: which chain of which logit table fills which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import ConfigDict, Field, field_validator, model_validator

from cauc_ray.api.options import Location, Seed
from cauc_ray.comparison.comparing import SINGLE
from cauc_ray.comparison.quoted import columns_of
from cauc_ray.errors import unknown_name
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.service import Section
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.methods import METHODS


class _NamedParts(Section):
    """A section whose keys are names of tables or figures."""

    model_config = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))


def _require_own_names(where: str, names: tuple[str, ...] | list[str]) -> None:
    twice = [name for name, n in Counter(names).items() if n > 1]
    if twice:
        raise ValueError(f"{where}: two entries are named {twice[0]!r}")


class Chain(Section):
    """A chain of models of one logit table.

    name: as tables and figures call it.   set: the table, a folder below the root.   models: cheapest first.
    objective: the quality that the table shows.   published: the column of the paper's table to stand beside it.
    """

    name: str = Field(pattern=r"^[^\x00-\x1f]+$")
    set: str = Field(min_length=1)
    models: tuple[str, ...] = Field(min_length=1)
    objective: Objective = "accuracy"
    published: str | None = None

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the models that the table must hold."""
        return self.models

    def reads(self, root: AnyPath) -> tuple[AnyPath, ...]:
        """Return the files and folders that its figures come from.   root: of all sets."""
        return (root / self.set,)


class ComparedChain(Chain):
    """A chain that all methods are compared on; the last four are as compare() has them.

    texts: a file below the root.
    """

    embedding: str | None = None
    texts: str | None = None
    text_column: str = "question"
    checkpoints: dict[str, str] = Field(default_factory=dict)

    def reads(self, root: AnyPath) -> tuple[AnyPath, ...]:
        """Return the table, the texts, and those checkpoints that are folders here and not hub ids."""
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

    @property
    def chains(self) -> list[tuple[str, ...]]:
        """Return the chains from one model to all."""
        return [(*self.models[:n], self.last) for n in range(len(self.models) + 1)]


class Tables(_NamedParts):
    """What fills each table; a table without entries is not made.

    setup_time: a chain that setup is timed on while nothing else runs.
    """

    LENGTHS: ClassVar[Mapping[str, int]] = {
        "two_model_language": 2,
        "two_model_image": 2,
        "complementarity": 2,
        "three_model_language": 3,
    }

    two_model_language: tuple[ComparedChain, ...] = ()
    two_model_image: tuple[ComparedChain, ...] = ()
    complementarity: tuple[Chain, ...] = ()
    growing_chain: tuple[GrowingChain, ...] = ()
    three_model_language: tuple[ComparedChain, ...] = ()
    setup_time: tuple[ComparedChain, ...] = Field(default=(), max_length=1)

    @property
    def by_name(self) -> dict[str, tuple[Chain, ...]]:
        """Return the entries by the name of their table."""
        return {name.replace("_", "-"): getattr(self, name) for name in type(self).model_fields}

    @model_validator(mode="after")
    def _entries_fit(self) -> Tables:
        for name, chains in self.by_name.items():
            length = self.LENGTHS.get(name.replace("-", "_"))
            for chain in chains:
                if length is not None and len(chain.models) != length:
                    raise ValueError(f"{name}: {chain.name!r} needs {length} models, got {len(chain.models)}")
                twice = [model for model, n in Counter(chain.wanted).items() if n > 1]
                if twice:
                    raise ValueError(f"{name}: {chain.name!r} has model {twice[0]!r} twice")
                if chain.published is not None and chain.published not in columns_of(name):
                    known = unknown_name("published column", chain.published, columns_of(name))
                    raise ValueError(f"{name}: {chain.name!r}: {known}")
            _require_own_names(name, [chain.name for chain in chains])
        return self


class ReliabilityFigure(Section):
    """What a figure of calibration shows, each on the test split.

    model: whose confidence is shown before and after.   models: whose accuracy is shown at matched confidence.
    counted: whose high-confidence examples are counted, cheapest first.
    """

    name: str = Field(pattern=r"^\w[\w.-]*$")
    set: str = Field(min_length=1)
    model: str
    models: tuple[str, ...] = Field(min_length=2, max_length=6)
    counted: tuple[str, ...] = Field(min_length=2)

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return the models that the table must hold."""
        return tuple(dict.fromkeys((*self.counted, *self.models, self.model)))


class Figures(_NamedParts):
    """What the figures show that are not drawn from the tables.

    complementarity_gain: sets, each with all pairs of its models of which the dearer is the more accurate.
    """

    calibration_reliability: tuple[ReliabilityFigure, ...] = ()
    complementarity_gain: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _entries_fit(self) -> Figures:
        _require_own_names("calibration-reliability", [figure.name for figure in self.calibration_reliability])
        _require_own_names("complementarity-gain", self.complementarity_gain)
        return self


class PaperConfig(Section):
    """A run of the paper's tables and figures.

    logits: the folder of all sets.   methods: of the comparisons, as compare() takes them.   seed: of all lots.
    deadline_s: how long a chain may take, in seconds from where its task has begun.
    """

    logits: Location
    methods: tuple[str, ...] = Field(default=("all",), min_length=1)
    seed: Seed = 0
    deadline_s: float = Field(default=7200.0, gt=0)
    tables: Tables = Tables()
    figures: Figures = Figures()

    def reads(self) -> set[AnyPath]:
        """Return all files and folders that the entries' figures come from."""
        of_tables = {
            path for chains in self.tables.by_name.values() for each in chains for path in each.reads(self.logits)
        }
        of_figures = {self.logits / figure.set for figure in self.figures.calibration_reliability}
        return of_tables | of_figures | {self.logits / name for name in self.figures.complementarity_gain}

    @field_validator("methods")
    @classmethod
    def _methods_are_known(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        known = ("all", SINGLE, *METHODS)
        for name in methods:
            if name not in known:
                raise ValueError(unknown_name("method", name, known))
        return methods
