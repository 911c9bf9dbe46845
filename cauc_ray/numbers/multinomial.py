"""Multinomial ridge regression: weights of logit arrays, and biases that are linear in features, by one solver.

Minimise  -mean log softmax(w_1 S_1 + ... + w_P S_P + x B)_y + penalty / (2 N) |B|^2  over w >= 0 and B: it is convex.
Newton steps are solved by conjugate gradients: a product with the curvature takes N F K operations and no matrix of
its size, so that a thousand options, and embeddings as features, fit too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from cauc_ray.numbers.types import Floats, Ints

# A fit ends where a step would lower the mean negative log likelihood by less than this: where penalties are compared,
# and for what is published.
ROUGH, FINE = 1e-7, 1e-12
# Below it, differences of float32 likelihoods are rounding.
_FLOAT32_ENDS = 1e-7
_MOST_STEPS, _MOST_PRODUCTS, _MOST_HALVINGS = 60, 200, 30
# In units of 1 / the mean distance of a row's largest logit from its mean; see calibration.
_LOWEST, _HIGHEST = 1e-8, 1e4
N_FOLDS = 5
# Blocks of rows of so many numbers stay in a processor's cache; see likelihood.
_BLOCK_ELEMENTS = 1 << 18
# Newton steps converge quadratically: after one that lowers the objective by d nats, the next lowers it by some d^2.
_LAST_STEP = 0.1
# Of rows, to scale the bounds of weights.
_SAMPLED_ROWS = 1000
_NO_ROWS = slice(0, 0)
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
    """A fit, with the objective and its derivatives there.

    Attributes:
        fit: The fit.
        value: The objective.
        of_weights: Gradient in the weights, float64 (P,).
        of_biases: Gradient in the biases, float64 (F, K).
        within: Curvature of the weights, (P, P).
        crossed: Curvature between weights and biases, (P, F, K).
        expected: Curvature of the biases, but for what the spread within rows takes off it, (F, K).
        diagonal: Diagonal of the curvature of the biases, (F, K), by which conjugate gradients are preconditioned.
    """

    fit: RidgeFit
    value: float
    of_weights: Floats
    of_biases: Floats
    within: Floats
    crossed: Floats
    expected: Floats
    diagonal: Floats


class _Problem:
    """What is minimised. Arguments are those of fit_multinomial.

    It holds the softmax of the point that was computed last, which products with the curvature there read.
    """

    def __init__(
        self,
        sources: Sequence[Floats],
        labels: Ints,
        features: Floats | None,
        penalty: float,
        n_features: int,
        held_out: slice,
    ) -> None:
        self._sources, self._labels, self._features = sources, labels, features
        n_all, self.k = sources[0].shape
        self.n, self.n_features = n_all - (held_out.stop - held_out.start), n_features
        self.strength = penalty / self.n if n_features else 0.0
        self._dtype = sources[0].dtype
        self._is_ragged = bool(np.isneginf(sources[0].min()))
        spans = [slice(0, held_out.start), slice(held_out.stop, n_all)]
        size = max(1, _BLOCK_ELEMENTS // self.k)
        self._blocks = [
            slice(start, min(start + size, span.stop)) for span in spans for start in range(span.start, span.stop, size)
        ]
        self._terms, self._scales = np.empty((n_all, self.k), self._dtype), np.empty(n_all, self._dtype)
        self._of_labels = np.zeros((n_features, self.k))
        for span in spans:
            for feature, column in enumerate(self._columns(span)):
                self._of_labels[feature] += np.bincount(labels[span], column, self.k)
        some = [self._finite(source[:: max(1, n_all // _SAMPLED_ROWS)]) for source in sources]
        spreads = np.array([(one.max(axis=1) - one.mean(axis=1)).mean(dtype=np.float64) for one in some])
        units = 1.0 / np.where(spreads > 0, spreads, 1.0)
        self.lowest, self.highest = _LOWEST * units, _HIGHEST * units

    @property
    def rounding(self) -> float:
        """Return the relative error of the objective."""
        return 1e-8 if self._dtype == np.float32 else 0.0

    def _columns(self, rows: slice) -> Floats:
        """Return the features of some rows, (F, n)."""
        if self._features is None:
            return np.ones((self.n_features, rows.stop - rows.start), self._dtype)
        return self._features[rows].T

    def _finite(self, source: Floats) -> Floats:
        """Return a source with 0 for missing options, whose probability is 0."""
        return np.where(np.isfinite(source), source, self._dtype.type(0)) if self._is_ragged else source

    def _summed(self, work: Callable[[slice, Floats], tuple[Floats, ...]]) -> tuple[Floats, ...]:
        """Return the sums, over blocks of rows, of what the work makes of one and of a buffer of its shape."""
        # Allocating memory for each block would take as long as the computation.
        buffer = np.empty((max(rows.stop - rows.start for rows in self._blocks), self.k), self._dtype)
        return reduce(_added, (work(rows, buffer[: rows.stop - rows.start]) for rows in self._blocks))

    def at(self, fit: RidgeFit) -> _Point:
        """Return the objective at a fit, and its derivatives there."""
        p, shape = len(self._sources), (self.n_features, self.k)
        biases = fit.biases.astype(self._dtype)

        def work(rows: slice, buffer: Floats) -> tuple[Floats, ...]:
            sources, labels = [self._finite(source[rows]) for source in self._sources], self._labels[rows]
            nll = self._fill(rows, sources, fit.weights, biases, buffer)
            terms, scales, columns = self._terms[rows], self._scales[rows], self._columns(rows)
            means = np.array([np.vecdot(terms, source) * scales for source in sources])
            of_labels = np.array([source[np.arange(len(labels)), labels] for source in sources])
            left, within, crossed = columns * scales, np.empty((p, p)), np.empty((p, *shape))
            lefts = np.concatenate([left, *(left * mean for mean in means)])
            of_biases, *of_means = (lefts @ terms).astype(np.float64).reshape(p + 1, *shape)
            for i, source in enumerate(sources):
                weighted = np.multiply(terms, source, out=buffer)
                crossed[i] = left @ weighted - of_means[i]
                for j in range(i, p):
                    second = (np.vecdot(weighted, sources[j]) * scales).sum(dtype=np.float64)
                    within[i, j] = within[j, i] = second - np.vdot(means[i].astype(np.float64), means[j])
            expected = of_biases if self._features is None else ((columns * left) @ terms).astype(np.float64)
            spread = expected
            if len(left):
                spread = (left**2 @ np.multiply(terms, terms, out=buffer)).astype(np.float64)
            of_weights = (means - of_labels).sum(axis=1, dtype=np.float64)
            return np.array(nll), of_weights, within, crossed, of_biases, expected, spread

        nll, of_weights, within, crossed, of_biases, expected, spread = (part / self.n for part in self._summed(work))
        return _Point(
            fit,
            float(nll) + self.strength / 2 * float((fit.biases**2).sum()),
            of_weights,
            of_biases - self._of_labels / self.n + self.strength * fit.biases,
            within + 1e-12 * np.eye(p),
            crossed,
            expected + self.strength,
            expected - spread + self.strength,
        )

    def _fill(self, rows: slice, sources: list[Floats], weights: Floats, biases: Floats, buffer: Floats) -> float:
        """Compute the softmax of a block; return the negative log likelihood of its labels."""
        terms, labels = self._terms[rows], self._labels[rows]
        scores = np.multiply(sources[0], self._dtype.type(weights[0]), out=terms)
        for weight, source in zip(weights[1:], sources[1:], strict=True):
            scores += np.multiply(source, self._dtype.type(weight), out=buffer)
        if self.n_features:
            scores += biases[0] if self._features is None else np.matmul(self._features[rows], biases, out=buffer)
        if self._is_ragged:
            scores[np.isneginf(self._sources[0][rows])] = -np.inf
        scores -= scores.max(axis=1, keepdims=True)
        of_labels = scores[np.arange(len(labels)), labels].astype(np.float64)
        np.exp(scores, out=terms)
        sums = terms.sum(axis=1)
        self._scales[rows] = 1 / sums
        return float((np.log(sums, dtype=np.float64) - of_labels).sum())

    def product(self, point: _Point, weights: Floats, biases: Floats) -> tuple[Floats, Floats]:
        """Return the curvature at the point that was computed last, times a direction."""
        narrow, features = biases.astype(self._dtype), self._features

        def work(rows: slice, buffer: Floats) -> tuple[Floats]:
            terms, scales = self._terms[rows], self._scales[rows]
            if features is None:
                return (((terms @ narrow[0] * scales**2) @ terms).astype(np.float64),)
            of, along = np.multiply(terms, scales[:, None], out=buffer), features[rows] @ narrow
            along -= np.vecdot(of, along)[:, None]
            along *= of
            return ((features[rows].T @ along).astype(np.float64),)

        if not self.n_features:
            of_biases = biases
        elif features is None:
            of_biases = point.expected * biases - self._summed(work)[0] / self.n
        else:
            of_biases = self._summed(work)[0] / self.n + self.strength * biases
        of_weights = point.within @ weights + (point.crossed * biases).sum(axis=(1, 2))
        return of_weights, of_biases + (weights[:, None, None] * point.crossed).sum(axis=0)


def _added(left: tuple[Floats, ...], right: tuple[Floats, ...]) -> tuple[Floats, ...]:
    return tuple(first + second for first, second in zip(left, right, strict=True))


def fit_multinomial(
    sources: Sequence[Floats],
    labels: Ints,
    features: Floats | None,
    penalty: float,
    start: RidgeFit,
    *,
    ends: float = FINE,
    held_out: slice = _NO_ROWS,
) -> RidgeFit:
    """Fit weights, at least 0, and biases by the likelihood and a normal prior of every bias.

    Args:
        sources: P arrays, float (N, K) of one dtype, -inf in the first where a row has no such option.
        labels: Index of the right option, int (N,).
        features: What biases are linear in, float (N, F), a constant among them; None for a constant alone.
        penalty: Precision of the prior, above 0.
        start: Where to begin; with biases (0, K) there are none, and features are None.
        ends: Predicted decrease of the mean negative log likelihood at which to stop.
        held_out: Rows to leave out.
    """
    problem = _Problem(sources, labels, features, penalty, len(start.biases), held_out)
    if sources[0].dtype == np.float32:
        ends = max(ends, _FLOAT32_ENDS)
    point = problem.at(RidgeFit(np.clip(start.weights, problem.lowest, problem.highest), start.biases))
    for _ in range(_MOST_STEPS):
        step, decrease = _newton_step(problem, point)
        if decrease**2 < _LAST_STEP * ends:
            return _moved(problem, point.fit, step, 1.0)
        size, trial = 1.0, point
        for _ in range(_MOST_HALVINGS):
            trial = problem.at(_moved(problem, point.fit, step, size))
            if trial.value <= point.value - 1e-4 * size * decrease + problem.rounding * abs(point.value):
                break
            size /= 2
        if trial.value >= point.value:
            return point.fit
        point = trial
    return point.fit


def _moved(problem: _Problem, fit: RidgeFit, step: RidgeFit, size: float) -> RidgeFit:
    weights = np.clip(fit.weights + size * step.weights, problem.lowest, problem.highest)
    return RidgeFit(weights, fit.biases + size * step.biases)


def _newton_step(problem: _Problem, point: _Point) -> tuple[RidgeFit, float]:
    """Return a step by conjugate gradients, and by how much the gradient predicts that it lowers the objective."""
    of_weights, of_biases = point.of_weights, point.of_biases
    held = (point.fit.weights <= problem.lowest) & (of_weights > 0)
    scales = np.maximum(np.diag(point.within), 1e-300), point.diagonal
    left = np.where(held, 0.0, -of_weights), -of_biases
    x = np.zeros_like(of_weights), np.zeros_like(of_biases)
    towards = left[0] / scales[0], left[1] / scales[1]
    size = first = _dot(left, towards)
    for _ in range(_MOST_PRODUCTS if first > 0 else 0):
        product = problem.product(point, *towards)
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


def fit_classifier(vectors: Floats, labels: Ints, n_options: int) -> Classifier:
    """Fit a multinomial ridge regression of labels, at the penalty of least cross-validated loss.

    Args:
        vectors: Features, float (N, d), which are centred and divided by one scale.
        labels: Int (N,).
        n_options: K.
    """
    shares = np.bincount(labels, minlength=n_options) / len(labels)
    logs = np.log(np.maximum(shares, np.exp(_LEAST_LOG)))
    entropy = -float((shares * logs).sum())
    centre = vectors.mean(axis=0, dtype=np.float64)
    centred = vectors - centre
    scale = float(np.sqrt((centred**2).mean())) or 1.0
    features, folds = np.column_stack([np.ones(len(vectors)), centred / scale]), folds_of(len(labels))
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
