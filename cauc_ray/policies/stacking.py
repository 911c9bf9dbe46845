"""Fits of stacked cascades' stages, each on those before it, with penalties chosen by cross-validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from cauc_ray.numbers.calibration import fit_temperatures
from cauc_ray.numbers.gains import Gains, fit_gains
from cauc_ray.numbers.logits import LOG_FLOOR, floored_logs, plain_scores, top_option
from cauc_ray.numbers.multinomial import FINE, ROUGH, RidgeFit, fit_multinomial, folds_of, nll_of
from cauc_ray.numbers.types import Floats, Ints

# Without a penalty of its own, a stage has no biases: it is CAUC-RF's.
PLAIN = (math.inf,)
PENALTIES = (math.inf, 300.0, 30.0, 3.0, 0.3, 0.03)
# A matrix has K x K numbers; above so many options it fits the noise of one stage, which the next one then relies on.
MOST_MATRIX_OPTIONS = 20
# Of more options, penalties that are worse than the best before the rest is left out.
_PATIENCE = 2
# From so many numbers on, arrays are float32, whose rounding is that of the logits.
_FLOAT32_ELEMENTS = 4_000_000
_FLAT = 1e-9

AnyArray = TypeVar("AnyArray", Floats, Ints)


@dataclass(frozen=True, slots=True)
class StageFit:
    """A fitted stage.

    Attributes:
        penalty: Of its biases and matrix; infinity for none.
        numbers: Fields of a StackedStage.
        held_out: Confidence in each row's answer, by fits on the other folds, float64 (N,).
        states: Scores r after the stage by the fit of each fold, then by that of all rows, float (N, K) each, in the
            order of rows of that fit (Folds).
    """

    penalty: float
    numbers: dict[str, Any]
    held_out: Floats
    states: tuple[Floats, ...]


class Folds:
    """Random folds of n rows, each with an order of all rows, in which those that it is fitted on come first.

    Arrays lie in memory twice, fold after fold, so that an order of them is a view. The last order is for the fit of
    all rows.

    Attributes:
        n_fitted: Rows that the fit of each order is fitted on; the rest is the fold.
    """

    def __init__(self, n: int, seed: int) -> None:
        """Draw the folds; a single row has none."""
        folds = [fold for fold, _ in folds_of(n, seed)]
        sizes = [len(fold) for fold in folds]
        self._twice, self._n = np.tile(np.concatenate(folds) if folds else np.arange(n), 2), n
        self._starts = (*(np.cumsum(sizes, dtype=np.int64) % n).tolist(), 0)
        self.n_fitted = (*(n - size for size in sizes), n)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def twice(self, values: AnyArray) -> AnyArray:
        """Return values of all rows, (N, ...), as they lie in memory, (2 N, ...)."""
        return values[self._twice]

    def ordered(self, fit: int, values: AnyArray) -> AnyArray:
        """Return values, (2 N, ...), in the order of a fit, (N, ...)."""
        return values[self._starts[fit] : self._starts[fit] + self._n]

    def held_out(self, fit: int) -> Ints:
        """Return the rows of a fold, in its order."""
        rows: Ints = self.ordered(fit, self._twice)
        return rows[self.n_fitted[fit] :]


class Stacking:
    """Fits of chains of some models on the same labelled rows; chains that begin alike share fits.

    Args:
        logits: By model, float (N, K), bounded below; -inf where a row has no such option.
        labels: Int (N,).
        prior: Scores of the rows before the first model, which did not fit them, float64 (N, K); None for none.
    """

    def __init__(self, logits: Sequence[Floats], labels: Ints, prior: Floats | None = None, seed: int = 0) -> None:
        """Keep the rows."""
        n, k = logits[0].shape
        self._dtype: type[np.floating[Any]] = np.float32 if n * k >= _FLOAT32_ELEMENTS else np.float64
        self._logits, self._labels, self._folds = logits, labels, Folds(n, seed)
        narrow: Floats | None = None if prior is None else prior.astype(self._dtype)
        self._prior = None if narrow is None else self._folds.twice(narrow)
        self._fits: dict[tuple[bool, tuple[int, ...]], StageFit] = {}

    def chain(self, models: Sequence[int], penalties: Sequence[float]) -> list[StageFit]:
        """Fit a chain of models, by index.   penalties: to choose among, by falling penalty, the first infinite."""
        chain, fits = tuple(models), list[StageFit]()
        ridged = len(penalties) > 1
        self._fits = {key: fit for key, fit in self._fits.items() if chain[: len(key[1])] == key[1]}
        before: tuple[Floats, ...] = ()
        if self._prior is not None:
            before = tuple(self._folds.ordered(fit, self._prior) for fit in range(len(self._folds) + 1))
        for end in range(1, len(chain) + 1):
            key = ridged, chain[:end]
            if key not in self._fits:
                self._fits[key] = self._stage(chain[end - 1], before, penalties)
            fits.append(self._fits[key])
            before = fits[-1].states
        return fits

    def gains(self, fits: Sequence[StageFit], costs: Floats) -> Gains:
        """Fit the expected gains of a chain.   costs: mean costs of its calls, float64 (M,)."""
        return fit_gains(np.stack([fit.held_out for fit in fits]), costs)

    def held_out_scores(self, fit: StageFit) -> Floats:
        """Return each row's scores after a stage by the fit on the other folds, float64 (N, K)."""
        scores = np.array(fit.states[-1], dtype=np.float64)
        for fold in range(len(self._folds)):
            scores[self._folds.held_out(fold)] = fit.states[fold][self._folds.n_fitted[fold] :]
        return scores

    def _stage(self, model: int, before: tuple[Floats, ...], penalties: Sequence[float]) -> StageFit:
        folds = self._folds
        stage = _Stage(self._logits[model], self._labels, folds, before, self._dtype)
        best, n_worse = stage.validated(math.inf, None), 0
        last = best
        for penalty in penalties[1:] if len(folds) else ():
            last = stage.validated(penalty, last.fits)
            best, n_worse = (last, 0) if last.nll < best.nll else (best, n_worse + 1)
            if not stage.has_matrix and n_worse == _PATIENCE:
                break
        whole = stage.fit(len(folds), best.penalty, None, FINE)
        # A single row has no other: what it gains by going on is not known, and counts as nothing.
        held_out, states = np.ones(len(self._labels)), list[Floats]()
        for fold, fit in enumerate(best.fits):
            states.append(stage.applied(fold, fit, best.penalty))
            held_out[folds.held_out(fold)] = top_option(states[-1][folds.n_fitted[fold] :])[1]
        states.append(stage.applied(len(folds), whole, best.penalty))
        return StageFit(best.penalty, stage.numbers(whole, best.penalty), held_out, tuple(states))


@dataclass(frozen=True, slots=True)
class _Validated:
    """A penalty with the fits on all folds but one, and the negative log likelihood of the rows that they left out."""

    penalty: float
    nll: float
    fits: list[RidgeFit]


class _Stage:
    """A model's logits as a stage reads them, after the states of the stages before, in the order of each fit."""

    def __init__(
        self,
        logits: Floats,
        labels: Ints,
        folds: Folds,
        before: tuple[Floats, ...],
        dtype: type[np.floating[Any]],
    ) -> None:
        self._labels, self._folds, self._before = folds.twice(labels), folds, before
        self._logits, self._dtype = logits, dtype
        self._plain = folds.twice(plain_scores(logits).astype(dtype))
        self._logs: Floats | None = None
        self._features: Floats | None = None
        self.has_matrix = logits.shape[1] <= MOST_MATRIX_OPTIONS

    def _prepared(self, penalty: float) -> tuple[Floats, Floats | None]:
        """Return what the stage weighs, float (2 N, K), and what its biases are linear in."""
        if math.isinf(penalty):
            return self._plain, None
        if self._logs is None:
            logs = floored_logs(self._logits).astype(self._dtype)
            self._logs = self._folds.twice(logs)
            if self.has_matrix:
                values = np.where(np.isfinite(logs), logs, LOG_FLOOR)
                self._means, self._scales = values.mean(axis=0), values.std(axis=0)
                self._scales = np.where(self._scales < _FLAT, 1.0, self._scales)
                scaled = np.column_stack([np.ones(len(values)), (values - self._means) / self._scales])
                self._features = self._folds.twice(scaled)
        return self._logs, self._features

    def _ordered(self, fit: int, penalty: float, rows: slice) -> tuple[list[Floats], Ints, Floats | None]:
        """Return what a fit weighs, the labels, and its features, of some rows in its order."""
        source, features = self._prepared(penalty)
        sources = [self._folds.ordered(fit, source)[rows], *(state[rows] for state in self._before[fit : fit + 1])]
        labels = self._folds.ordered(fit, self._labels)[rows]
        return sources, labels, None if features is None else self._folds.ordered(fit, features)[rows]

    def fit(self, fit: int, penalty: float, start: RidgeFit | None, ends: float) -> RidgeFit:
        """Fit a fold, or all rows."""
        sources, labels, features = self._ordered(fit, penalty, slice(self._folds.n_fitted[fit]))
        k = sources[0].shape[1]
        if math.isinf(penalty):
            return RidgeFit(np.array(fit_temperatures(sources, labels).weights), np.zeros((1, k)))
        n_features = 1 if features is None else features.shape[1]
        if start is None or len(start.biases) != n_features:
            weights = np.full(len(sources), 1.0 / len(sources)) if start is None else start.weights
            start = RidgeFit(weights, np.zeros((n_features, k)))
        return fit_multinomial(sources, labels, features, penalty, start, ends=ends)

    def applied(self, fit: int, numbers: RidgeFit, penalty: float, first: int = 0) -> Floats:
        """Return r after the stage by the numbers of a fit, from a row in its order on."""
        sources, _, features = self._ordered(fit, penalty, slice(first, None))
        weights, biases = numbers.weights.astype(self._dtype), numbers.biases.astype(self._dtype)
        r: Floats = weights[0] * sources[0]
        for weight, state in zip(weights[1:], sources[1:], strict=True):
            r += weight * state
        if not math.isinf(penalty):
            r += biases[0] if features is None else features @ biases
        r -= r.max(axis=1, keepdims=True)
        return r

    def validated(self, penalty: float, starts: list[RidgeFit] | None) -> _Validated:
        """Fit every fold at a penalty.   starts: fits to begin at."""
        nll, fits = 0.0, list[RidgeFit]()
        for fold in range(len(self._folds)):
            fits.append(self.fit(fold, penalty, starts[fold] if starts else None, ROUGH))
            first = self._folds.n_fitted[fold]
            labels = self._folds.ordered(fold, self._labels)[first:]
            nll += nll_of(self.applied(fold, fits[-1], penalty, first), labels)
        return _Validated(penalty, nll, fits)

    def numbers(self, fit: RidgeFit, penalty: float) -> dict[str, Any]:
        """Return the fields of a StackedStage, whose matrix is of log probabilities as they are."""
        weights = fit.weights.tolist()
        fields = {"logit_weight": weights[0], "state_weight": weights[1] if len(weights) > 1 else None}
        if math.isinf(penalty):
            return fields
        biases, matrix = fit.biases[0], None
        if self.has_matrix:
            matrix = fit.biases[1:] / self._scales[:, None]
            biases = biases - self._means @ matrix
            matrix = tuple(map(tuple, matrix.tolist()))
        return {**fields, "penalty": penalty, "biases": tuple(biases.tolist()), "matrix": matrix}
