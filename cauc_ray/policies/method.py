"""The protocol that every method shares: fit on two splits, choose a setting for a budget, answer on a third."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Literal, Protocol, TypeAlias

import numpy as np

from cauc_ray.numbers.sweep import OperatingPoints, reached_shares
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.trace import Answers, Cascade, Examples, Trace

Paradigm: TypeAlias = Literal["single-model", "ours", "ensemble", "cascade", "router", "control"]


@dataclass(frozen=True, slots=True)
class Curve:
    """What a method did on labelled examples at P settings; float64 (P,) each.

    cost: mean per example.   last_share: of the examples, how many called the last model.
    """

    settings: Floats
    cost: Floats
    accuracy: Floats
    macro_f1: Floats
    last_share: Floats


class Fitted(Protocol):
    """A fitted method, whose operating point is still open; it may not look at labels any more."""

    @property
    def note(self) -> str:
        """Return how it differs from the published method, for every table; empty where it does not."""
        ...

    @property
    def points(self) -> OperatingPoints:
        """Return what the validation split had at every setting that it tells apart."""
        ...

    @property
    def default(self) -> float:
        """Return the setting where no budget is given."""
        ...

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a setting."""
        ...

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure settings on labelled examples."""
        ...


@dataclass(frozen=True, slots=True)
class Fitting:
    """What a method is fitted from.

    calibration: what its numbers are fitted on.   validation: what thresholds, epochs and sizes are chosen on.
    seed: of everything random.   checkpoint: the model that some methods train on texts, a hub id or a folder.
    """

    calibration: Examples
    validation: Examples
    seed: int = 0
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """A method by its name.

    paradigm: as the paper's tables group methods.   where: "module:function" that fits it from a Fitting.
    packages: those it imports in addition to cauc-ray's own.   extra: the extra of cauc-ray that installs them.
    needs_texts: it trains on the queries' texts, from a checkpoint.   spends_budget: at a budget it takes the most
    expensive point within it, not the best.   sees_labels: it knows the answers, to show what no method can reach.
    """

    name: str
    paradigm: Paradigm
    where: str
    packages: tuple[str, ...] = ()
    extra: str = ""
    needs_texts: bool = False
    spends_budget: bool = False
    sees_labels: bool = False

    @property
    def absent(self) -> list[str]:
        """Return the packages that it imports and that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]

    def load(self) -> Callable[[Fitting], Fitted]:
        """Return the function that fits it; what it needs, such as torch, is imported only now."""
        module, _, function = self.where.partition(":")
        fit: Callable[[Fitting], Fitted] = getattr(import_module(module), function)
        return fit

    def setting(self, fitted: Fitted, budget: float) -> float | None:
        """Return its setting for a budget, a mean cost per example on validation; None where it has only one.

        Raises BudgetError where no point is so cheap.
        """
        points = fitted.points
        if self.sees_labels or len(points.settings) == 1:
            return None
        point = points.index_of_most_expensive(budget) if self.spends_budget else points.index_of_best(budget)
        return float(points.settings[point])


@dataclass(frozen=True)
class Thresholded:
    """A fitted method with one threshold, which is still open.

    given: the threshold without a budget; None for the best on validation.
    """

    cascade: Cascade
    validation: Examples
    given: float | None = None
    note: str = ""
    sees_labels: bool = False

    @cached_property
    def points(self) -> OperatingPoints:
        """Return what validation had at every threshold."""
        return self._trace(self.validation).frontier(self.validation.chain).points()

    @property
    def default(self) -> float:
        """Return the threshold without a budget."""
        if self.given is not None:
            return self.given
        return float(self.points.settings[self.points.index_of_best()])

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a threshold."""
        return self._trace(examples).answers(setting)

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure thresholds on labelled examples, all by one sweep."""
        trace = self._trace(examples)
        accuracy = trace.frontier(examples.chain, "accuracy")
        f1 = trace.frontier(examples.chain, "macro-f1")
        at = accuracy.index(settings)
        return Curve(settings, accuracy.cost[at], accuracy.quality[at], f1.quality[at], _last_share(trace, settings))

    def _trace(self, examples: Examples) -> Trace:
        """Let the cascade answer examples whose labels it is not shown."""
        return self.cascade.trace(examples if self.sees_labels else examples.without_labels())


def _last_share(trace: Trace, settings: Floats) -> Floats:
    reached = reached_shares(trace.confidences[:, :-1], settings)
    stopped = reached - np.pad(reached[:, 1:], ((0, 0), (0, 1)))
    share: Floats = stopped[:, trace.calls[:, -1]].sum(axis=1)
    return share
