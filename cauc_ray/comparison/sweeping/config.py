"""What a budget sweep is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from cauc_ray.api.config import Location
from cauc_ray.api.options import Seed
from cauc_ray.comparison.comparing import SINGLE
from cauc_ray.errors import unknown_name
from cauc_ray.models.service import Section
from cauc_ray.policies.methods import METHODS

BudgetKind: TypeAlias = Literal["relative", "cost"]
Amount: TypeAlias = Annotated[float, Field(gt=0)]


def _require_once(what: str, values: Sequence[Any]) -> None:
    twice = next((value for place, value in enumerate(values) if value in values[:place]), None)
    if twice is not None:
        raise ValueError(f"{what} {twice!r} is a duplicate")


class SweptSet(Section):
    """A set of logits.

    name: as the results call it.   logits: the table.   chains: of its models, each cheapest first.
    embedding: an encoder of the table, for routers.
    """

    name: str = Field(pattern=r"^[^\x00-\x1f]+$")
    logits: Location
    chains: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = Field(min_length=1)
    embedding: str | None = None

    @model_validator(mode="after")
    def _models_and_chains_once(self) -> SweptSet:
        for chain in self.chains:
            _require_once(f"{self.name}: in a chain, model", chain)
        _require_once(f"{self.name}: chain", self.chains)
        return self


class SweepConfig(Section):
    """A budget sweep: every method on every chain of every set, with every seed, at every budget.

    methods: by name, "single" for each model of a chain alone.   seeds: of what methods draw by lot, and of the
    splits that are redrawn.   relative_budgets: mean cost per example on validation, as a share of the mean cost of
    the chain's dearest model; budgets: the same in the table's unit.   redrawn: splits that are put together and,
    with each seed, cut anew into the same sizes; none keeps all as the table has them.   split: where final figures
    are measured.   deadline_s: how long a method may take on a chain with a seed, all budgets together.
    """

    sets: tuple[SweptSet, ...] = Field(min_length=1)
    methods: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[Seed, ...] = Field(default=(0,), min_length=1)
    relative_budgets: tuple[Amount, ...] = ()
    budgets: tuple[Amount, ...] = ()
    calibration_split: str = "calibration"
    validation_split: str = "validation"
    split: str = "test"
    redrawn: tuple[str, ...] = ("calibration", "validation")
    deadline_s: float = Field(default=3600.0, gt=0)

    @property
    def splits(self) -> tuple[str, str, str]:
        """Return the splits to fit on, to choose thresholds on, and to measure on."""
        return self.calibration_split, self.validation_split, self.split

    @property
    def all_budgets(self) -> tuple[tuple[BudgetKind, float], ...]:
        """Return every budget and what it is a number of."""
        relative: list[tuple[BudgetKind, float]] = [("relative", share) for share in self.relative_budgets]
        return (*relative, *(("cost", budget) for budget in self.budgets))

    @field_validator("methods")
    @classmethod
    def _methods_serve(cls, methods: tuple[str, ...]) -> tuple[str, ...]:
        for name in methods:
            if name != SINGLE and name not in METHODS:
                raise ValueError(unknown_name("method", name, (SINGLE, *METHODS)))
            if name != SINGLE and METHODS[name].needs_texts:
                raise ValueError(f"method {name!r} trains a model on texts, which only a comparison takes")
        _require_once("method", methods)
        return methods

    @model_validator(mode="after")
    def _all_fits(self) -> SweepConfig:
        _require_once("set", [each.name for each in self.sets])
        _require_once("seed", self.seeds)
        _require_once("relative budget", self.relative_budgets)
        _require_once("budget", self.budgets)
        _require_once("as calibration, validation and final split,", self.splits)
        _require_once("in redrawn, split", self.redrawn)
        if not self.all_budgets:
            raise ValueError("a sweep needs budgets: give relative_budgets, budgets or both")
        for name in self.redrawn:
            if name not in self.splits:
                raise ValueError(f"redrawn: {unknown_name('split', name, self.splits)}")
        if len(self.redrawn) == 1:
            raise ValueError(f"redrawn: {self.redrawn[0]!r} alone cannot be drawn anew; name two splits or none")
        return self
