"""Multinomial ridge regression: weights of logit arrays, and biases that are linear in features, by one solver.

Minimise  -mean log softmax(w_1 S_1 + ... + w_P S_P + x B)_y + penalty / (2 N) |B|^2  over w >= 0 and B: it is convex.
Newton steps are solved by conjugate gradients: a product with the curvature takes N F K operations and no matrix of
its size, so that a thousand options, and embeddings as features, fit too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.threads import in_threads
from cauc_ray.numbers.types import Floats, Ints

# A fit ends where a step would lower the mean negative log likelihood by less than this: where penalties are compared,
# and for what is published.
ROUGH, FINE = 1e-7, 1e-10
# Below it, differences of float32 likelihoods are rounding.
_FLOAT32_ENDS = 1e-7
_MOST_STEPS, _MOST_PRODUCTS, _MOST_HALVINGS = 60, 200, 30
# In units of 1 / the mean distance of a row's largest logit from its mean; see calibration.
_LOWEST, _HIGHEST = 1e-8, 1e4
N_FOLDS = 5
# Blocks of rows of so many numbers stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 16
_CLASSIFIER_PENALTIES = (1e4, 3e3, 1e3, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0)
# A classifier is used if it explains more than this share of the entropy of the labels of rows that it has not seen.
_LEAST_EXPLAINED = 0.01
# Of a label that no row has.
_LEAST_LOG = -20.0


@dataclass(frozen=True, slots=True)
class RidgeFit:
    """Weights of P logit arrays, float64 (P,), and biases, float64 (F, K), F = 1 for a constant alone."""

    weights: Floats
    biases: Floats


@dataclass(frozen=True, slots=True)
class _Point:
    """A fit with its objective and the rows' probabilities there, float (N, K)."""

    fit: RidgeFit
    value: float
    probabilities: Floats


class _Problem:
    """What is minimised. Arguments are those of fit_multinomial."""

    def __init__(self, sources: Sequence[Floats], labels: Ints, features: Floats | None, penalty: float) -> None:
        missing = np.isneginf(sources[0])
        self._missing = missing if missing.any() else None
        if self._missing is not None:
            sources = [np.where(np.isfinite(source), source, 0.0).astype(source.dtype) for source in sources]
        self.sources, self._labels, self._features = list(sources), labels, features
        self.n, self.k = sources[0].shape
        self.n_features = 1 if features is None else features.shape[1]
        self.strength = penalty / self.n
        rows = max(1, _BLOCK_ELEMENTS // self.k)
        self._blocks = [slice(start, start + rows) for start in range(0, self.n, rows)]
        columns = np.ones((1, self.n)) if features is None else features.T
        # What the labels say, which the gradient compares expectations with.
        self._of_labels = (
            np.array([of[np.arange(self.n), labels].sum(dtype=np.float64) for of in self.sources]),
            np.stack([np.bincount(labels, column, self.k) for column in columns]),
        )
        spreads = [float((of.max(axis=1) - of.mean(axis=1)).mean(dtype=np.float64)) for of in sources]
        units = 1.0 / np.array([spread if spread > 0 else 1.0 for spread in spreads])
        self.lowest, self.highest = _LOWEST * units, _HIGHEST * units

    def at(self, fit: RidgeFit) -> _Point:
        """Return the objective at a fit, and the probabilities there."""
        biases = fit.biases.astype(self.sources[0].dtype)
        probabilities = np.empty((self.n, self.k), dtype=biases.dtype)

        def nll(rows: slice) -> float:
            scores = probabilities[rows]
            scores[:] = biases[0] if self._features is None else self._features[rows] @ biases
            for weight, source in zip(fit.weights, self.sources, strict=True):
                scores += source.dtype.type(weight) * source[rows]
            if self._missing is not None:
                scores[self._missing[rows]] = -np.inf
            scores -= scores.max(axis=1, keepdims=True)
            of_labels = scores[np.arange(len(scores)), self._labels[rows]].astype(np.float64)
            np.exp(scores, out=scores)
            sums = scores.sum(axis=1)
            scores /= sums[:, None]
            return float((np.log(sums, dtype=np.float64) - of_labels).sum())

        prior = self.strength / 2 * float((fit.biases**2).sum())
        return _Point(fit, sum(in_threads(nll, self._blocks)) / self.n + prior, probabilities)

    def derivatives(self, point: _Point) -> tuple[Floats, Floats, _Curvature]:
        """Return the gradient in weights, (P,), and in biases, (F, K), and the curvature."""
        p = len(self.sources)

        def summed(rows: slice) -> tuple[Floats, Floats, Floats, Floats, Floats]:
            of, sources = point.probabilities[rows], [source[rows] for source in self.sources]
            left = np.ones((1, len(of)), dtype=of.dtype) if self._features is None else self._features[rows].T
            means = [np.vecdot(of, source) for source in sources]
            centred = [source - mean[:, None] for source, mean in zip(sources, means, strict=True)]
            weighted = [of * source for source in centred]
            within = np.array([[_inner(row, column) for column in centred] for row in weighted]).reshape(p, p)
            crossed = np.reshape([left @ one for one in weighted], (p, self.n_features, self.k)).astype(np.float64)
            of_weights = np.array([mean.sum(dtype=np.float64) for mean in means])
            return of_weights, (left @ of).astype(np.float64), within, crossed, (left**2 @ of).astype(np.float64)

        parts = zip(*in_threads(summed, self._blocks), strict=True)
        of_weights, of_biases, within, crossed, squares = (np.sum(part, axis=0) / self.n for part in parts)
        curvature = _Curvature(
            point.probabilities,
            self._features,
            within + 1e-12 * np.eye(p),
            crossed,
            squares + self.strength,
            self.strength,
        )
        of_weights = of_weights - self._of_labels[0] / self.n
        return of_weights, of_biases - self._of_labels[1] / self.n + self.strength * point.fit.biases, curvature


@dataclass(frozen=True, slots=True)
class _Curvature:
    """The second derivatives at a point.

    within: of the weights, (P, P).   crossed: of weights and biases, (P, F, K).   diagonal: of the biases, but for what
    probabilities take off it, (F, K): what conjugate gradients are preconditioned by.
    """

    probabilities: Floats
    features: Floats | None
    within: Floats
    crossed: Floats
    diagonal: Floats
    strength: float

    def product(self, weights: Floats, biases: Floats) -> tuple[Floats, Floats]:
        of, n = self.probabilities, len(self.probabilities)
        narrow = biases.astype(of.dtype)
        if self.features is None:
            taken = (of @ narrow[0]) @ of
            of_biases = self.diagonal * biases - np.asarray(taken, dtype=np.float64) / n
        else:
            along = self.features @ narrow
            along = of * (along - np.vecdot(of, along)[:, None])
            of_biases = np.asarray(self.features.T @ along, dtype=np.float64) / n + self.strength * biases
        of_weights = self.within @ weights + (self.crossed * biases).sum(axis=(1, 2))
        return of_weights, of_biases + (weights[:, None, None] * self.crossed).sum(axis=0)


def fit_multinomial(
    sources: Sequence[Floats],
    labels: Ints,
    features: Floats | None,
    penalty: float,
    start: RidgeFit,
    *,
    ends: float = FINE,
) -> RidgeFit:
    """Fit weights, at least 0, and biases by the likelihood and a normal prior of every bias.

    Args:
        sources: P arrays, float (N, K) of one dtype, -inf in the first where a row has no such option.
        labels: Index of the right option, int (N,).
        features: What biases are linear in, float (N, F), a constant among them; None for a constant alone.
        penalty: Precision of the prior, above 0.
        start: Where to begin.
        ends: Predicted decrease of the mean negative log likelihood at which to stop.
    """
    problem = _Problem(sources, labels, features, penalty)
    if sources[0].dtype == np.float32:
        ends = max(ends, _FLOAT32_ENDS)
    point = problem.at(RidgeFit(np.clip(start.weights, problem.lowest, problem.highest), start.biases))
    for _ in range(_MOST_STEPS):
        step, decrease = _newton_step(problem, point)
        if decrease < ends:
            return point.fit
        size, trial = 1.0, point
        for _ in range(_MOST_HALVINGS):
            weights = np.clip(point.fit.weights + size * step.weights, problem.lowest, problem.highest)
            trial = problem.at(RidgeFit(weights, point.fit.biases + size * step.biases))
            if trial.value <= point.value - 1e-4 * size * decrease + _rounding(point):
                break
            size /= 2
        if trial.value >= point.value:
            return point.fit
        point = trial
    return point.fit


def _rounding(point: _Point) -> float:
    return 1e-8 * abs(point.value) if point.probabilities.dtype == np.float32 else 0.0


def _newton_step(problem: _Problem, point: _Point) -> tuple[RidgeFit, float]:
    """Return a step by conjugate gradients, and by how much the gradient predicts that it lowers the objective."""
    of_weights, of_biases, curvature = problem.derivatives(point)
    held = (point.fit.weights <= problem.lowest) & (of_weights > 0)
    scales = np.maximum(np.diag(curvature.within), 1e-300), curvature.diagonal
    left = np.where(held, 0.0, -of_weights), -of_biases
    x = np.zeros_like(of_weights), np.zeros_like(of_biases)
    towards = left[0] / scales[0], left[1] / scales[1]
    size = first = _dot(left, towards)
    for _ in range(_MOST_PRODUCTS if first > 0 else 0):
        product = curvature.product(*towards)
        product = np.where(held, 0.0, product[0]), product[1]
        bend = _dot(towards, product)
        if bend <= 0:
            break
        along = size / bend
        x = x[0] + along * towards[0], x[1] + along * towards[1]
        left = left[0] - along * product[0], left[1] - along * product[1]
        scaled = left[0] / scales[0], left[1] / scales[1]
        size, before = _dot(left, scaled), size
        if size < min(0.01, first) * first:
            break
        towards = scaled[0] + size / before * towards[0], scaled[1] + size / before * towards[1]
    return RidgeFit(*x), -_dot((of_weights, of_biases), x)


def _dot(left: tuple[Floats, Floats], right: tuple[Floats, Floats]) -> float:
    return float(left[0] @ right[0]) + _inner(left[1], right[1])


def _inner(left: Floats, right: Floats) -> float:
    """Return the sum of products, row by row: BLAS starts threads for long vectors, which wait for each other."""
    return float(np.vecdot(left, right).sum(dtype=np.float64))


def folds_of(n: int, seed: int = 0) -> list[tuple[Ints, Ints]]:
    """Return the rows of random folds, each with all other rows; none for a single row."""
    if n < 2:
        return []
    order = np.random.default_rng(seed).permutation(n)
    folds = [np.sort(fold) for fold in np.array_split(order, min(N_FOLDS, n))]
    return [(fold, np.setdiff1d(order, fold)) for fold in folds]


def nll_of(scores: Floats, labels: Ints) -> float:
    """Return the negative log likelihood of labels under scores, float (n, K), summed over the rows."""
    highest = scores.max(axis=1)
    sums = np.exp(scores - highest[:, None]).sum(axis=1)
    of_labels = scores[np.arange(len(labels)), labels]
    return float((np.log(sums, dtype=np.float64) + highest - of_labels).sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class Classifier:
    """A classifier of features: softmax(x weights + offsets).

    Attributes:
        weights: Float64 (d, K).
        offsets: Float64 (K,).
        held_out: Scores of each row that it was fitted on, by a fit on the other folds, float64 (N, K).
        explained: Share of the labels' entropy that it explains on rows that it has not seen.
    """

    weights: Floats
    offsets: Floats
    held_out: Floats
    explained: float

    @property
    def explains(self) -> bool:
        """Return whether it says more of new rows than the shares of the labels do."""
        return self.explained > _LEAST_EXPLAINED


def fit_classifier(vectors: Floats, labels: Ints, n_options: int, seed: int = 0) -> Classifier:
    """Fit a multinomial ridge regression of labels, at the penalty of least cross-validated loss.

    Args:
        vectors: Features, float (N, d), which are centred and divided by one scale.
        labels: Int (N,).
        n_options: K.
        seed: Of the folds.
    """
    shares = np.bincount(labels, minlength=n_options) / len(labels)
    logs = np.log(np.maximum(shares, np.exp(_LEAST_LOG)))
    entropy = -float((shares * logs).sum())
    centre = vectors.mean(axis=0, dtype=np.float64)
    centred = vectors - centre
    scale = float(np.sqrt((centred**2).mean())) or 1.0
    features, folds = np.column_stack([np.ones(len(vectors)), centred / scale]), folds_of(len(labels), seed)
    if entropy == 0 or not folds:
        return Classifier(np.zeros((vectors.shape[1], n_options)), logs, np.tile(logs, (len(labels), 1)), 0.0)
    nothing = RidgeFit(np.zeros(0), np.zeros((features.shape[1], n_options)))
    starts, best, best_penalty, held_out = [nothing] * len(folds), np.inf, 0.0, features
    for penalty in _CLASSIFIER_PENALTIES:
        starts = [
            _classified(features, labels, rows, penalty, start) for (_, rows), start in zip(folds, starts, strict=True)
        ]
        scores = np.empty((len(labels), n_options))
        for (fold, _), fit in zip(folds, starts, strict=True):
            scores[fold] = features[fold] @ fit.biases
        loss = nll_of(scores, labels) / len(labels)
        if loss >= best:
            break
        best, best_penalty, held_out = loss, penalty, scores
    fit = _classified(features, labels, np.arange(len(labels)), best_penalty, nothing, FINE)
    weights = fit.biases[1:] / scale
    return Classifier(weights, fit.biases[0] - centre @ weights, held_out, 1 - best / entropy)


def _classified(
    features: Floats, labels: Ints, rows: Ints, penalty: float, start: RidgeFit, ends: float = ROUGH
) -> RidgeFit:
    constant = np.zeros((len(rows), start.biases.shape[1]))
    flat = RidgeFit(np.ones(1), start.biases)
    return fit_multinomial([constant], labels[rows], features[rows], penalty, flat, ends=ends)
