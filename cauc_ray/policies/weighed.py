"""Fits of temperatures over the parts of a chain, each of which computes what is fitted from the logits that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.calibrators import UNCALIBRATED, Calibrator
from cauc_ray.numbers.chain import Chain, ChainPart
from cauc_ray.numbers.likelihood import Likelihood, Rows
from cauc_ray.numbers.offsets import MOST_OPTIONS, PRIOR_VARIANCE, OffsetFit, solve_offsets
from cauc_ray.numbers.problem import Problem
from cauc_ray.numbers.temperature import PairFit, TemperatureFit, solve_pair, solve_temperature
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.cauc_rf import fold

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Folded:
    """What folds a stage into r (paper, eq. 8).   alpha, beta: None for the first stage."""

    calibrator: Calibrator
    alpha: float | None = None
    beta: float | None = None


@dataclass(frozen=True, slots=True)
class Shifted:
    """A stage's own logits, whose temperature is fitted with an offset for each option.   variance: of the prior."""

    shifted: int
    variance: float = PRIOR_VARIANCE


@dataclass(frozen=True, slots=True)
class Weighed:
    """The logit arrays whose weights are fitted: a stage's own logits, or r of the stages before and its scaled ones.

    before: the stages before, in a pair's fit.   calibrator: the stage's, in a pair's fit.   narrow: in float32.
    """

    stage: int
    narrow: bool
    before: tuple[Folded, ...] = ()
    calibrator: Calibrator = UNCALIBRATED

    def likelihood(self, part: ChainPart) -> Likelihood:
        """Return the likelihood of a part, made once for as long as this is what is fitted there."""
        kept: tuple[Weighed, Likelihood] | None = part.cache.get("likelihood")
        if kept is None or kept[0] != self:
            kept = self, Likelihood(self._sources(part), part.labels, narrow=self.narrow, ranks=part.ranks)
            part.cache["likelihood"] = kept
        return kept[1]

    def _sources(self, part: ChainPart) -> list[Rows]:
        own = part.logits[self.stage]
        if not self.before:
            return [own]
        return [_FoldedRows(part.logits[: self.stage], self.before), _FoldedRows((own,), (Folded(self.calibrator),))]


@dataclass(frozen=True, slots=True)
class _FoldedRows:
    """r after some stages, float64 (n, K), computed from these stages' logits as it is read."""

    logits: tuple[Rows, ...]
    folds: tuple[Folded, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.logits[0].shape

    @property
    def dtype(self) -> np.dtype[np.float64]:
        return np.dtype(np.float64)

    def __getitem__(self, rows: slice | Ints, /) -> Floats:
        r: Floats | None = None
        for logits, by in zip(self.logits, self.folds, strict=True):
            r = fold(by.calibrator.scores(logits[rows]), by.alpha, by.beta, r)
        assert r is not None
        return r


def temperature_of(chain: Chain, stage: int) -> TemperatureFit:
    """Fit a stage's temperature (paper, eq. 2). Raises DataError as fit_temperature does."""
    what = Weighed(stage, chain.narrow)
    return chain.remembered(what, lambda: solve_temperature(_problem(chain, what)))


def offsets_of(chain: Chain, stage: int) -> OffsetFit:
    """Fit a stage's temperature with an offset for each option.

    Raises DataError as fit_temperature does, and naming an example that lacks an option or a model with too many.
    """
    return chain.remembered(Shifted(stage), lambda: _solve_offsets(chain, stage))


def _solve_offsets(chain: Chain, stage: int) -> OffsetFit:
    alone = temperature_of(chain, stage)
    problem = _problem(chain, Weighed(stage, chain.narrow))
    if problem.lacking is not None:
        raise DataError(
            f"{chain.source}: example {chain.example_ids[problem.lacking]!r} lacks some of the {problem.n_options} "
            f"options of model {chain.models[stage]!r}; offsets need a fixed set, take --calibrator temperature"
        )
    if problem.n_options > MOST_OPTIONS:
        raise DataError(
            f"{chain.source}: offsets are fitted for up to {MOST_OPTIONS:,} options, model {chain.models[stage]!r} "
            f"has {problem.n_options:,}; take --calibrator temperature"
        )
    return solve_offsets(problem, alone)


def pair_of(chain: Chain, stage: int, before: tuple[Folded, ...], calibrator: Calibrator) -> PairFit:
    """Fit a stage's alpha and beta to those before it (paper, eq. 8-9).   calibrator: the stage's own."""
    what = Weighed(stage, False, before, calibrator)
    return chain.remembered(what, lambda: solve_pair(_problem(chain, what)))


def _problem(chain: Chain, what: Weighed) -> Problem:
    def each(ask: Callable[[Likelihood], T], /) -> list[T]:
        return chain.each(partial(_asked, what, ask))

    return Problem(each, narrow=what.narrow)


def _asked(what: Weighed, ask: Callable[[Likelihood], T], part: ChainPart) -> T:
    return ask(what.likelihood(part))
