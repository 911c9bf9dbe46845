"""Fits of stacked cascades' stages, each on those before it, with penalties chosen by cross-validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, slots=True)
class StageFit:
    """A fitted stage.

    Attributes:
        penalty: Of its biases and matrix; infinity for none.
        numbers: Fields of a StackedStage.
        held_out: Confidence in each row's answer, by fits on the other folds, float64 (N,).
        states: Scores r after the stage by the fit of each fold, then by that of all rows, float (N, K) each.
    """

    penalty: float
    numbers: dict[str, Any]
    held_out: Floats
    states: tuple[Floats, ...]


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
        self._logits, self._labels, self._folds = logits, labels, folds_of(n, seed)
        self._prior: Floats | None = None if prior is None else prior.astype(self._dtype)
        self._fits: dict[tuple[bool, tuple[int, ...]], StageFit] = {}

    def chain(self, models: Sequence[int], penalties: Sequence[float]) -> list[StageFit]:
        """Fit a chain of models, by index.   penalties: to choose among, by falling penalty, the first infinite."""
        chain, fits = tuple(models), list[StageFit]()
        ridged = len(penalties) > 1
        self._fits = {key: fit for key, fit in self._fits.items() if chain[: len(key[1])] == key[1]}
        before: tuple[Floats, ...] = () if self._prior is None else (self._prior,) * (len(self._folds) + 1)
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

    def _stage(self, model: int, before: tuple[Floats, ...], penalties: Sequence[float]) -> StageFit:
        stage = _Stage(self._logits[model], self._labels, self._dtype)
        best, n_worse = stage.validated(math.inf, before, self._folds, None), 0
        last = best
        for penalty in penalties[1:] if self._folds else ():
            last = stage.validated(penalty, before, self._folds, last.fits)
            best, n_worse = (last, 0) if last.nll < best.nll else (best, n_worse + 1)
            if not stage.has_matrix and n_worse == _PATIENCE:
                break
        every = np.arange(len(self._labels))
        whole = stage.fit(every, before[-1:], best.penalty, None, FINE)
        # A single row has no other: what it gains by going on is not known, and counts as nothing.
        held_out, states = np.ones(len(every)), list[Floats]()
        for index, (fold, _) in enumerate(self._folds):
            states.append(stage.applied(best.fits[index], before[index : index + 1], best.penalty, every))
            held_out[fold] = top_option(states[-1][fold])[1]
        states.append(stage.applied(whole, before[-1:], best.penalty, every))
        return StageFit(best.penalty, stage.numbers(whole, best.penalty), held_out, tuple(states))


@dataclass(frozen=True, slots=True)
class _Validated:
    """A penalty with the fits on all folds but one, and the negative log likelihood of the rows that they left out."""

    penalty: float
    nll: float
    fits: list[RidgeFit]


class _Stage:
    """A model's logits as a stage reads them."""

    def __init__(self, logits: Floats, labels: Ints, dtype: type[np.floating[Any]]) -> None:
        self._labels, self._logits, self._dtype = labels, logits, dtype
        self._plain = plain_scores(logits).astype(dtype)
        self._logs: Floats | None = None
        self._features: Floats | None = None
        self.has_matrix = logits.shape[1] <= MOST_MATRIX_OPTIONS

    def _prepared(self, penalty: float) -> tuple[Floats, Floats | None]:
        """Return what the stage weighs, float (N, K), and what its biases are linear in."""
        if math.isinf(penalty):
            return self._plain, None
        if self._logs is None:
            self._logs = floored_logs(self._logits).astype(self._dtype)
            if self.has_matrix:
                values = np.where(np.isfinite(self._logs), self._logs, LOG_FLOOR)
                self._means, self._scales = values.mean(axis=0), values.std(axis=0)
                self._scales = np.where(self._scales < _FLAT, 1.0, self._scales)
                self._features = np.column_stack([np.ones(len(values)), (values - self._means) / self._scales])
        return self._logs, self._features

    def fit(
        self, rows: Ints, before: Sequence[Floats], penalty: float, start: RidgeFit | None, ends: float
    ) -> RidgeFit:
        source, features = self._prepared(penalty)
        sources = [source[rows], *(state[rows] for state in before)]
        k = source.shape[1]
        if math.isinf(penalty):
            temperatures = fit_temperatures(sources, self._labels[rows])
            return RidgeFit(np.array(temperatures.weights), np.zeros((1, k)))
        n_features = 1 if features is None else features.shape[1]
        if start is None or len(start.biases) != n_features:
            weights = np.full(len(sources), 1.0 / len(sources)) if start is None else start.weights
            start = RidgeFit(weights, np.zeros((n_features, k)))
        of_rows = None if features is None else features[rows]
        return fit_multinomial(sources, self._labels[rows], of_rows, penalty, start, ends=ends)

    def applied(self, fit: RidgeFit, before: Sequence[Floats], penalty: float, rows: Ints) -> Floats:
        """Return r of rows after the stage."""
        source, features = self._prepared(penalty)
        weights, biases = fit.weights.astype(self._dtype), fit.biases.astype(self._dtype)
        r: Floats = weights[0] * source[rows]
        for weight, state in zip(weights[1:], before, strict=True):
            r += weight * state[rows]
        if not math.isinf(penalty):
            r += biases[0] if features is None else features[rows] @ biases
        r -= r.max(axis=1, keepdims=True)
        return r

    def validated(
        self,
        penalty: float,
        before: Sequence[Floats],
        folds: Sequence[tuple[Ints, Ints]],
        starts: list[RidgeFit] | None,
    ) -> _Validated:
        nll, fits = 0.0, list[RidgeFit]()
        for index, (fold, fitted_rows) in enumerate(folds):
            states = before[index : index + 1]
            fits.append(self.fit(fitted_rows, states, penalty, starts[index] if starts else None, ROUGH))
            nll += nll_of(self.applied(fits[-1], states, penalty, fold), self._labels[fold])
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
