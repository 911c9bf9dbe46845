"""Fits of stacked cascades' stages, each on those before it, with penalties chosen by cross-validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.numbers.calibration import FitStatus, dtype_of, fit_temperatures
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
# Scores are computed in blocks of rows of so many numbers: whole arrays in float64 would be the peak of memory.
_BLOCK_ELEMENTS = 1 << 18
_FLAT = 1e-9
# Weights that grow by more where a fold is left out are those of rows that can be separated.
_MOST_GROWTH = 8.0


@dataclass(frozen=True, slots=True)
class StageFit:
    """A fitted stage.

    Attributes:
        penalty: Of its biases and matrix; infinity for none.
        numbers: Fields of a StackedStage.
        held_out: Confidence in each row's answer, by fits on the other folds, float64 (N,).
        fits: The fit without each fold, then that of all rows.
    """

    penalty: float
    numbers: dict[str, Any]
    held_out: Floats
    fits: tuple[RidgeFit, ...]


class Folds:
    """Random folds of n rows.

    Attributes:
        order: All rows, fold after fold, int (n,). Arrays of fits are in this order.
        held_out: The places of each fold in it, then of the rows that the fit of all rows leaves out, which are none.
    """

    def __init__(self, n: int, seed: int) -> None:
        """Draw the folds; a single row has none."""
        folds = [fold for fold, _ in folds_of(n, seed)]
        self.order: Ints = np.concatenate(folds) if folds else np.arange(n)
        ends = np.cumsum([0, *map(len, folds)]).tolist()
        self.held_out = (*map(slice, ends[:-1], ends[1:]), slice(n, n))

    def __len__(self) -> int:
        return len(self.held_out) - 1

    def restored(self, values: Floats) -> Floats:
        """Return values of all rows as these were given, (n, ...)."""
        rows = np.empty_like(values)
        rows[self.order] = values
        return rows


class Stacking:
    """Fits of chains of some models on the same labelled rows; chains that begin alike share fits.

    Args:
        logits: By model, float (N, K), bounded below; -inf where a row has no such option.
        labels: Int (N,).
        prior: Scores of the rows before the first model, which did not fit them, float64 (N, K); None for none.
    """

    def __init__(self, logits: Sequence[Floats], labels: Ints, prior: Floats | None = None, seed: int = 0) -> None:
        """Keep the rows."""
        self._dtype: type[np.floating[Any]] = dtype_of(*logits[0].shape)
        self._logits, self._folds = logits, Folds(len(labels), seed)
        self._labels = labels[self._folds.order]
        self._prior: Floats | None = None
        if prior is not None:
            self._prior = prior[self._folds.order].astype(self._dtype)
        self._fits: dict[tuple[tuple[int, ...], tuple[float, ...], bool], StageFit] = {}

    def chain(self, models: Sequence[int], penalties: Sequence[float]) -> list[StageFit]:
        """Fit a chain of models.

        Args:
            models: Indices of the models.
            penalties: Penalties to choose among, falling, the first infinite.
        """
        return [fit for _, fit in self._stages(models, penalties)]

    def gains(self, fits: Sequence[StageFit], costs: Floats) -> Gains:
        """Fit the expected gains of a chain.   costs: mean costs of its calls, float64 (M,)."""
        return fit_gains(np.stack([fit.held_out for fit in fits]), costs)

    def held_out_scores(self, models: Sequence[int], penalties: Sequence[float]) -> Floats:
        """Return each row's scores after a chain by the fits on the other folds, float64 (N, K)."""
        *_, (stage, fit) = self._stages(models, penalties)
        if not len(self._folds):  # a single row has no other
            return stage.applied(0, fit.fits[0], fit.penalty).astype(np.float64)
        held_out = self._folds.held_out[:-1]
        scores = [stage.applied(fold, fit.fits[fold], fit.penalty, rows) for fold, rows in enumerate(held_out)]
        return self._folds.restored(np.concatenate(scores).astype(np.float64))

    def _stages(self, models: Sequence[int], penalties: Sequence[float]) -> Iterator[tuple[_Stage, StageFit]]:
        """Yield the stages of a chain with their fits, which other chains may have made."""
        chain, chosen = tuple(models), tuple[float, ...]()
        states: list[Floats] | None = None
        if self._prior is not None:
            states = [self._prior.copy() for _ in self._folds.held_out]  # stages overwrite them
        for end, model in enumerate(chain, start=1):
            stage = _Stage(self._logits[model], self._labels, self._folds, states, self._dtype)
            key = chain[:end], chosen, len(penalties) > 1
            if key not in self._fits:
                self._fits[key] = stage.fitted(penalties)
            fit = self._fits[key]
            yield stage, fit
            chosen = *chosen, fit.penalty
            if end < len(chain):
                states = stage.states_after(fit)


@dataclass(frozen=True, slots=True)
class _Validated:
    """A penalty with the fits on all folds but one, and the negative log likelihood of the rows that they left out."""

    penalty: float
    nll: float
    fits: list[RidgeFit]


class _Stage:
    """A model's logits as a stage reads them, after the states of the stages before by each fit; fold after fold."""

    def __init__(
        self,
        logits: Floats,
        labels: Ints,
        folds: Folds,
        states: list[Floats] | None,
        dtype: type[np.floating[Any]],
    ) -> None:
        self._logits, self._labels, self._folds, self._states = logits, labels, folds, states
        self._dtype = dtype
        self._plain = self._ordered(plain_scores)
        self._logs: Floats | None = None
        self._features: Floats | None = None
        k = logits.shape[1]
        self.has_matrix = k <= MOST_MATRIX_OPTIONS
        self._no_biases = np.zeros((k + 1 if self.has_matrix else 1, k))

    def _ordered(self, scores_of: Callable[[Floats], Floats]) -> Floats:
        """Return scores of the logits, float (N, K)."""
        scores = np.empty(self._logits.shape, dtype=self._dtype)
        for rows in self._blocks(slice(0, len(scores))):
            scores[rows] = scores_of(self._logits[self._folds.order[rows]])
        return scores

    def _blocks(self, rows: slice) -> Iterator[slice]:
        size = max(1, _BLOCK_ELEMENTS // self._logits.shape[1])
        return (slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size))

    def _read(self, fit: int, penalty: float) -> tuple[list[Floats], Floats | None]:
        """Return what a fit weighs, float (N, K) each, and what its biases are linear in."""
        states = [] if self._states is None else [self._states[fit]]
        if math.isinf(penalty):
            return [self._plain, *states], None
        if self._logs is None:
            self._logs = self._ordered(floored_logs)
            if self.has_matrix:
                values = np.where(np.isfinite(self._logs), self._logs, self._dtype(LOG_FLOOR))
                self._means, self._scales = values.mean(axis=0), values.std(axis=0)
                self._scales = np.where(self._scales < _FLAT, 1.0, self._scales)
                self._features = np.column_stack([np.ones(len(values)), (values - self._means) / self._scales])
        return [self._logs, *states], self._features

    def applied(
        self, fit: int, numbers: RidgeFit, penalty: float, rows: slice | None = None, out: Floats | None = None
    ) -> Floats:
        """Return r after the stage by the numbers of a fit, float (n, K).

        Args:
            fit: Index of the fit.
            numbers: Its numbers.
            penalty: Its penalty.
            rows: Places of the rows; None for all.
            out: Where to write r, which may be the state before the stage; None for a new array.
        """
        sources, features = self._read(fit, penalty)
        rows = rows or slice(0, len(self._labels))
        weights, biases = numbers.weights.astype(self._dtype), numbers.biases.astype(self._dtype)
        r = np.empty((rows.stop - rows.start, sources[0].shape[1]), self._dtype) if out is None else out
        for block in self._blocks(rows):
            scores = weights[0] * sources[0][block]
            for weight, state in zip(weights[1:], sources[1:], strict=True):
                scores += weight * state[block]
            if not math.isinf(penalty):
                scores += biases[0] if features is None else features[block] @ biases
            scores -= scores.max(axis=1, keepdims=True)
            r[block.start - rows.start : block.stop - rows.start] = scores
        return r

    def fitted(self, penalties: Sequence[float]) -> StageFit:
        """Fit the stage at the penalty of least cross-validated loss.   penalties: as Stacking.chain takes them."""
        whole, fits = self._unpenalised()
        best = last = self._validated(math.inf, fits)
        n_worse = 0
        for penalty in penalties[1:] if fits else ():
            last = self._validated(penalty, self._penalised(penalty, last.fits))
            best, n_worse = (last, 0) if last.nll < best.nll else (best, n_worse + 1)
            if not self.has_matrix and n_worse == _PATIENCE:
                break
        if not math.isinf(best.penalty):
            mean = _combined(*((1 / len(fits), without_fold) for without_fold in best.fits))
            whole = self._fit(len(fits), best.penalty, mean, FINE)
        # A single row has no other: what it gains by going on is not known, and counts as nothing.
        held_out = np.ones(len(self._labels))
        for fold, numbers in enumerate(best.fits):
            rows = self._folds.held_out[fold]
            held_out[rows] = top_option(self.applied(fold, numbers, best.penalty, rows))[1]
        confidences = self._folds.restored(held_out)
        return StageFit(best.penalty, self._numbers(whole, best.penalty), confidences, (*best.fits, whole))

    def _unpenalised(self) -> tuple[RidgeFit, list[RidgeFit]]:
        """Fit weights alone to all rows, as CAUC-RF does, and without each fold."""
        n_folds = len(self._folds)
        every = fit_temperatures(self._read(n_folds, math.inf)[0], self._labels)
        weights = np.array(every.weights)
        is_regular = set(every.statuses) == {FitStatus.CONVERGED}
        fits = [self._weights_without(fold, weights if is_regular else None) for fold in range(n_folds)]
        return RidgeFit(weights, self._no_biases), [RidgeFit(of_fold, self._no_biases) for of_fold in fits]

    def _weights_without(self, fold: int, start: Floats | None) -> Floats:
        """Fit weights alone without a fold.   start: where to begin; None for a fit of CAUC-RF's own."""
        (sources, _), rows = self._read(fold, math.inf), self._folds.held_out[fold]
        if start is not None:
            first = RidgeFit(start, self._no_biases[:0])
            weights = fit_multinomial(sources, self._labels, None, math.inf, first, held_out=rows).weights
            if (weights < _MOST_GROWTH * start).all():
                return weights
        # Rows that can be separated have no best weights; CAUC-RF's fit smooths their labels.
        *fitted, labels = (np.delete(of, rows, axis=0) for of in (*sources, self._labels))
        return np.array(fit_temperatures(fitted, labels).weights)

    def _penalised(self, penalty: float, starts: Sequence[RidgeFit]) -> list[RidgeFit]:
        """Fit all rows but each fold.   starts: the fits at another penalty."""
        fits = list[RidgeFit]()
        for fold, start in enumerate(starts):
            # From one penalty to the next, fits of two folds move alike: they share most of their rows.
            moved = _combined((1, start), (1, fits[0]), (-1, starts[0])) if fits else start
            fits.append(self._fit(fold, penalty, moved, ROUGH))
        return fits

    def _fit(self, fit: int, penalty: float, start: RidgeFit, ends: float) -> RidgeFit:
        """Fit all rows but a fold, or all rows."""
        sources, features = self._read(fit, penalty)
        held_out = self._folds.held_out[fit]
        return fit_multinomial(sources, self._labels, features, penalty, start, ends=ends, held_out=held_out)

    def states_after(self, stage: StageFit) -> list[Floats]:
        """Return r after the stage by each of its fits, float (N, K) each, in place of the states before."""
        states = []
        for fit, numbers in enumerate(stage.fits):
            before = None if self._states is None else self._states[fit]
            states.append(self.applied(fit, numbers, stage.penalty, out=before))
        self._states = None
        return states

    def _validated(self, penalty: float, fits: list[RidgeFit]) -> _Validated:
        """Measure the fits without each fold on its rows."""
        nll = 0.0
        for fold, numbers in enumerate(fits):
            rows = self._folds.held_out[fold]
            nll += nll_of(self.applied(fold, numbers, penalty, rows), self._labels[rows])
        return _Validated(penalty, nll, fits)

    def _numbers(self, fit: RidgeFit, penalty: float) -> dict[str, Any]:
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


def _combined(*terms: tuple[float, RidgeFit]) -> RidgeFit:
    """Return a sum of fits, each times a factor."""
    weights, biases = (sum(factor * getattr(fit, name) for factor, fit in terms) for name in ("weights", "biases"))
    return RidgeFit(weights, biases)
