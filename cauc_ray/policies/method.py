"""The protocol that every method shares: fit on two splits, choose a setting for a budget, answer on a third."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

import numpy as np

from cauc_ray.numbers.metrics import macro_f1
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
    seed: of everything drawn by lot.   checkpoints: of the encoders that some methods train on texts, by method.
    """

    calibration: Examples
    validation: Examples
    seed: int = 0
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Method:
    """A method by its name.

    paradigm: as the paper's tables group methods.   fit: from the fitting splits.   packages: those it imports
    beside cauc-ray's own.   extra: the extra of cauc-ray that installs them.   needs_texts: it trains on the queries'
    texts, from a checkpoint.   sees_labels: it is told the answers, to show what nobody can reach.
    """

    name: str
    paradigm: Paradigm
    fit: Callable[[Fitting], Fitted]
    packages: tuple[str, ...] = ()
    extra: str = ""
    needs_texts: bool = False
    sees_labels: bool = False


@dataclass(frozen=True)
class Steered:
    """A fitted method that one threshold steers.

    given: the threshold without a budget; None for the best on validation.
    """

    cascade: Cascade
    validation: Examples
    given: float | None = None
    note: str = ""

    @cached_property
    def points(self) -> OperatingPoints:
        """Return what validation had at every threshold."""
        return self.cascade.trace(self.validation).frontier(self.validation.chain).points()

    @property
    def default(self) -> float:
        """Return the threshold without a budget."""
        if self.given is not None:
            return self.given
        return float(self.points.settings[self.points.index_of_best()])

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a threshold."""
        return self.cascade.trace(examples).answers(setting)

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure thresholds on labelled examples, all by one sweep."""
        trace = self.cascade.trace(examples)
        accuracy, f1 = (trace.frontier(examples.chain, objective) for objective in ("accuracy", "macro-f1"))
        at = accuracy.index(settings)
        return Curve(settings, accuracy.cost[at], accuracy.quality[at], f1.quality[at], _last_share(trace, settings))


def _last_share(trace: Trace, settings: Floats) -> Floats:
    reached = reached_shares(trace.confidences[:, :-1], settings)
    stopped = reached - np.pad(reached[:, 1:], ((0, 0), (0, 1)))
    share: Floats = stopped[:, trace.calls[:, -1]].sum(axis=1)
    return share


def measured(answers: Answers, examples: Examples, setting: float) -> Curve:
    """Measure one setting's answers on labelled examples."""
    labels = examples.chain.labels
    return Curve(
        settings=np.array([setting]),
        cost=np.array([answers.costs(examples.chain).mean()]),
        accuracy=np.array([np.mean(answers.predictions == labels)]),
        macro_f1=np.array([macro_f1(answers.predictions, labels)]),
        last_share=np.array([answers.calls[:, -1].mean()]),
    )
