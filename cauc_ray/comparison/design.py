"""The design of a comparison: logit tables, chains, splits, budgets and seeds, and what these must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from cauc_ray.api.options import Cut, Location
from cauc_ray.api.sources import ChainOptions
from cauc_ray.errors import OptionError, unknown_name
from cauc_ray.files.documents import Settings


class ComparedSet(Settings):
    """A logit table of a comparison.

    Attributes:
        name: What the results call it.
        logits: The table.
        chains: Chains of its models, each cheapest first; without any all models by cost.
        embedding: An encoder of the table, for routers.
    """

    name: str = Field(pattern=r"^[^\x00-\x1f]+$")
    logits: Location
    chains: tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...] = ()
    embedding: str | None = None

    @model_validator(mode="after")
    def _unique(self) -> Self:
        _require_chains(f"set {self.name!r}, ", self.chains)
        return self


class CompareOptions(ChainOptions):
    """Options of a comparison."""

    takes_scores: ClassVar[bool] = True

    @property
    def cuts(self) -> dict[str, Cut]:
        """Return by name the splits that are read: fitted, chosen and measured on; then trained on, if any."""
        training = {} if self.training_split is None else {self.training_split: None}
        return {**super().cuts, self.split: self.test, **training}

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """Return the seeds."""
        return self.seeds or (self.seed,)

    @property
    def all_budgets(self) -> tuple[float, ...]:
        """Return the budgets that are costs, in the table's unit."""
        return self.budgets if self.budget is None else (self.budget,)

    @property
    def pooled(self) -> tuple[str, ...]:
        """Return the splits that each seed cuts again."""
        return self.redrawn if self.redrawn is not None else self.splits if len(self.all_seeds) > 1 else ()

    def require_agreement(self) -> None:
        """Raise ConfigError where splits have two uses, or chains or budgets are given in two ways or twice."""
        super().require_agreement()
        self._require_splits()
        if self.sets and (self.chains or self.models is not None):
            raise OptionError("{sets} have chains of their own; leave {models} and {chains} out")
        if self.chains and self.models is not None:
            raise OptionError("{models} are one chain, {chains} several; give one of the two")
        if sum((self.budget is not None, bool(self.budgets or self.relative_budgets), self.points is not None)) > 1:
            raise OptionError(
                "{budget} is one, {budgets} are several, {points} are evenly spaced ones; give one of the three"
            )
        for name in ("methods", "seeds", "budgets", "relative_budgets"):
            _require_unique(f"{{{name}}}:", getattr(self, name))
        _require_chains("{chains}: ", self.chains)
        _require_unique("{sets}: set", [compared.name for compared in self.sets])

    def _require_splits(self) -> None:
        """Raise ConfigError where a split has two uses, or those that are drawn again are not among them."""
        if self.split in self.splits:
            raise OptionError(
                f"{{split}} {self.split!r} is what methods are fitted or chosen on; measure them on another"
            )
        if self.training_split in (*self.splits, self.split):
            raise OptionError(
                f"{{training_split}}: split {self.training_split!r} has another use already; give one of its own"
            )
        redrawn: tuple[str, ...] = self.redrawn or ()
        _require_unique("{redrawn}:", redrawn)
        for name in redrawn:
            if name not in self.cuts:
                raise OptionError(f"{{redrawn}}: {unknown_name('split', name, self.cuts)}")
        if len(redrawn) == 1:
            raise OptionError(f"{{redrawn}}: {redrawn[0]!r} cannot be pooled with nothing; name two splits or none")


def _require_unique(what: str, values: Sequence[Any]) -> None:
    duplicate = next((value for index, value in enumerate(values) if value in values[:index]), None)
    if duplicate is not None:
        raise OptionError(f"{what} {duplicate!r} is a duplicate")


def _require_chains(place: str, chains: Sequence[Sequence[str]]) -> None:
    for chain in chains:
        _require_unique(f"{place}in a chain, model", chain)
    _require_unique(f"{place}chain", chains)
