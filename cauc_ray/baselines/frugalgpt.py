"""FrugalGPT (Chen et al., TMLR 2024): models called in a searched order until an answer is rated reliable enough.

A solution calls the models of an order one after the other. Each answer has a distance, 1 less its reliability; the
first whose distance is below the threshold of its stage is taken, and the last model's always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Literal, Self

import numpy as np

from cauc_ray.baselines.texts import text_method
from cauc_ray.numbers.logits import joint_kind, real_options
from cauc_ray.numbers.products import products
from cauc_ray.numbers.sweep import pareto
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.features import Scaler, answer_features
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.scored import ScoredPolicy
from cauc_ray.policies.solved import SolvedPolicy
from cauc_ray.policies.trace import Examples, costs_to_come

# Inverse regularisations tried, as scikit-learn counts them: from features that hardly count to ones that count fully.
INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_MOST_ITERATIONS = 2000

LONGEST = 3
N_QUANTILES = 40

# The most solutions retained: of the best by rising cost, evenly spaced ranks, including the first and the last.
MOST_SOLUTIONS = 1000


class FrugalGPTPolicy(ScoredPolicy, SolvedPolicy):
    """FrugalGPT: an answer is taken if its distance, 1 less its predicted reliability, is below its stage's threshold.

    Arrays of each model: weights, (d,). A solution's numbers are thresholds of the distance, of all stages but the
    last; at 0 none is taken, at 2 all are.
    """

    method: Literal["frugalgpt"] = "frugalgpt"

    def of_models(self, order: Sequence[int]) -> Self:
        """Return a policy of some of the models, by index, in an order."""
        n_encoders = len(self.stages) - len(self.answering)
        models = tuple(self.answering[model] for model in order)
        kind = joint_kind([stage.logit_kind for stage in models])
        return self.model_copy(update={"stages": (*self.stages[:n_encoders], *models), "logit_kind": kind})

    def score(self, stage: int, logits: Floats, embeddings: Floats) -> Floats:
        """Return inf for answers that are taken, -inf for others."""
        threshold = self.solution[stage - (self.encoder is not None)]
        return np.where(taken(self.distances(stage, logits, embeddings), threshold), np.inf, -np.inf)

    def readings(self, logits: Sequence[Floats]) -> Floats:
        """Return the distances of all models but the last, float64 (n, M - 1)."""
        n_encoders = len(self.stages) - len(self.answering)
        n = len(logits[0])
        embeddings = np.asarray(logits[0], dtype=np.float64) if n_encoders else np.zeros((n, 0))
        distances = [
            self.distances(stage, real_options(logits[stage]), embeddings)
            for stage in range(n_encoders, len(self.stages) - 1)
        ]
        return np.stack(distances, axis=1) if distances else np.zeros((n, 0))

    def stops(self, readings: Floats, numbers: tuple[float, ...]) -> Ints:
        """Return the first model whose answer is taken, int (n,)."""
        return first_taken(readings, numbers)

    def distances(self, stage: int, logits: Floats, embeddings: Floats) -> Floats:
        """Return 1 less the probability that the stage's answer is right, float64 (n,)."""
        numbers = self.stages[stage]
        inputs = self.read(stage, logits, embeddings, with_answer=True)
        logits = products(inputs, self.arrays[f"{numbers.name}/weights"][None])[:, 0] + (numbers.offset or 0.0)
        distances: Floats = np.exp(-np.logaddexp(0.0, logits))
        return distances


@dataclass(frozen=True, slots=True)
class Solution:
    """An order of models by their indices, and the thresholds of all of them but the last."""

    order: tuple[int, ...]
    thresholds: tuple[float, ...]

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return the thresholds as a policy has them: at 2 all are taken."""
        return tuple(np.clip(self.thresholds, 0.0, 2.0).tolist())

    def centred(self, distances: Floats) -> Solution:
        """Return what does the same to these rows, its thresholds midway between those it takes and leaves."""
        thresholds, asked = [], np.ones(len(distances), dtype=bool)
        for model, threshold in zip(self.order, self.thresholds, strict=False):
            answers = distances[:, model]
            accepted = asked & taken(answers, threshold)
            asked &= ~accepted
            thresholds.append(_midway(answers[accepted].max(initial=-np.inf), answers[asked].min(initial=np.inf)))
        return Solution(self.order, tuple(thresholds))


def taken(distances: Floats, thresholds: float | Floats) -> Bools:
    """Return which answers are taken where they are given."""
    below: Bools = distances < thresholds
    return below


def first_taken(distances: Floats, thresholds: Sequence[float]) -> Ints:
    """Return the first stage whose answer is taken, the last at the latest, int (n,).

    Args:
        distances: Of all stages but the last, float64 (n, S - 1).
        thresholds: Of the same stages.
    """
    stops: Ints = np.pad(taken(distances, np.array(thresholds)), ((0, 0), (0, 1)), constant_values=True).argmax(axis=1)
    return stops


def fit(fitting: Fitting) -> Sequence[FrugalGPTPolicy]:
    """Fit a scorer for each model on calibration, and search orders and thresholds on validation.

    The published scorers are language models that read query and answer; here they see the answering model's log
    probabilities, its answer and the query's embedding where there is one. Published thresholds are searched on the
    rows that the scorers were trained on; here on others.
    """
    validation = fitting.validation
    scorers = fit_scorers(fitting)
    distances, correct = distances_of(scorers, validation), validation.correct()
    costs = np.broadcast_to(costs_to_come(validation).per_call, distances.shape)
    return [
        scorers.of_models(order).model_copy(update={"solutions": solutions})
        for order, solutions in by_order(search(distances, correct, costs)).items()
    ]


def by_order(solutions: Sequence[Solution]) -> dict[tuple[int, ...], tuple[tuple[float, ...], ...]]:
    """Return the thresholds of all solutions of each order, in their order."""
    orders: dict[tuple[int, ...], tuple[tuple[float, ...], ...]] = {}
    for solution in solutions:
        orders[solution.order] = (*orders.get(solution.order, ()), solution.numbers)
    return orders


def _note(fitting: Fitting) -> str:
    return "; ".join(filter(None, ("logistic scorers in place of DistilBERT", fitting.validation.embedding_note)))


def fit_scorers(fitting: Fitting) -> FrugalGPTPolicy:
    """Fit each model's reliability, the probability that its answer is right, by logistic regression.

    The penalty is the one that gives validation the highest likelihood.
    """
    splits = fitting.calibration, fitting.validation
    arrays, of_stages = dict[str, Floats](), list[dict[str, Any]]()
    for model, name in enumerate(fitting.calibration.chain.models):
        n_options = fitting.calibration.chain.logits[model].shape[1]
        features = [
            answer_features(split.chain.logits[model], n_options, split.embeddings, with_answer=True)
            for split in splits
        ]
        scaler = Scaler.of(features[0])
        # In float64: the solver's line search gives up early in float32.
        inputs, unseen = (scaler(values).astype(np.float64) for values in features)
        right, unseen_right = (split.correct()[:, model] for split in splits)
        weights, offset = _best_logistic(inputs, right, unseen, unseen_right)
        arrays |= {f"{name}/means": scaler.means, f"{name}/scales": scaler.scales, f"{name}/weights": weights}
        of_stages.append({"n_options": n_options, "offset": offset})
    encoded = fitting.calibration.embeddings is not None
    policy = fitting.policy(FrugalGPTPolicy, encoded=encoded, of_stages=of_stages, solutions=())
    return policy.with_arrays(arrays)


def _best_logistic(inputs: Floats, right: Bools, unseen: Floats, unseen_right: Bools) -> tuple[Floats, float]:
    """Return the weights, float64 (d,), and the offset of highest likelihood on validation.

    Args:
        inputs: Features of the calibration rows, float64 (n, d), standardised.
        right: Which of their answers are right, bool (n,).
        unseen: The same features of the validation rows.
        unseen_right: Which of their answers are right.
    """
    signs = np.where(unseen_right, 1.0, -1.0)
    fits = [logistic(inputs, right, penalty) for penalty in INVERSE_PENALTIES]
    return min(fits, key=lambda fit: np.logaddexp(0.0, -signs * (unseen @ fit[0] + fit[1])).mean())


def logistic(inputs: Floats, right: Bools, inverse_penalty: float = 1.0) -> tuple[Floats, float]:
    """Return a logistic regression's weights, float64 (d,), and its offset.

    Args:
        inputs: Features of the rows, float64 (n, d), standardised.
        right: The labels, bool (n,).
        inverse_penalty: The inverse regularisation, as scikit-learn's C.
    """
    if right.all() or not right.any() or not inputs.shape[1]:
        # Nothing to learn but the rate, with half a row more of each kind.
        return np.zeros(inputs.shape[1]), float(np.log((right.sum() + 0.5) / ((~right).sum() + 0.5)))
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):  # on fits so small several threads only wait for each other
        fit = LogisticRegression(C=inverse_penalty, max_iter=_MOST_ITERATIONS).fit(inputs, right)
    return fit.coef_[0], float(fit.intercept_[0])


def distances_of(scorers: FrugalGPTPolicy, examples: Examples) -> Floats:
    """Return each model's distances on examples, float64 (N, M)."""
    embeddings = np.zeros((len(examples), 0)) if examples.embeddings is None else examples.embeddings
    first = len(scorers.stages) - len(scorers.answering)
    distances = [
        scorers.distances(first + model, logits, embeddings) for model, logits in enumerate(examples.chain.logits)
    ]
    return np.stack(distances, axis=1)


def _midway(low: float, high: float) -> float:
    """Return a threshold that takes all up to low and none from high on."""
    if np.isinf(low) or np.isinf(high):  # none are taken, or none left
        return high if np.isinf(high) else low
    middle = low + (high - low) / 2
    return float(middle if middle > low else high)  # between adjacent floats there is none


def search(distances: Floats, correct: Bools, costs: Floats) -> list[Solution]:
    """Return the best solutions by rising cost: each has more right than all that cost no more.

    The orders are all permutations of min(M, LONGEST) models. Of three stages, the first has its threshold at each
    of N_QUANTILES evenly spaced quantiles of its distances, or beyond all; the one before the last has its best
    threshold exactly, as one sort and cumulative sums over the rows that reach it evaluate every threshold. The
    published search polishes a grid in both, under the constraint that later stages pass on no smaller shares.

    Args:
        distances: Of each model's answers, float64 (N, M).
        correct: Which answers are right, bool (N, M).
        costs: Of the calls, float64 (N, M).
    """
    m = distances.shape[1]
    ranks = [np.argsort(column, kind="stable") for column in distances.T]
    parts = []
    for order in permutations(range(m), min(m, LONGEST)):
        solutions = _of_order(order, ranks, distances, correct, costs)
        best = pareto(solutions[0], solutions[1])
        parts.append((*(of[best] for of in solutions), np.tile(order, (len(best), 1))))
    cost, n_right, thresholds, orders = (np.concatenate(of) for of in zip(*parts, strict=True))
    best = pareto(cost, n_right)
    if len(best) > MOST_SOLUTIONS:
        best = best[np.linspace(0, len(best) - 1, MOST_SOLUTIONS).round().astype(np.int64)]
    return [
        Solution(tuple(order), tuple(cuts)).centred(distances)
        for order, cuts in zip(orders[best].tolist(), thresholds[best].tolist(), strict=True)
    ]


def _of_order(
    order: tuple[int, ...], all_ranks: Sequence[Ints], distances: Floats, correct: Bools, costs: Floats
) -> tuple[Floats, Ints, Floats]:
    """Search an order's solutions: for each of T thresholds before, the best of the stage before the last.

    Args:
        order: The models by index.
        all_ranks: The rows by rising distance, int (N,), of each model.
        distances: Of each model's answers, float64 (N, M).
        correct: Which answers are right, bool (N, M).
        costs: Of the calls, float64 (N, M).

    Returns:
        Cost and number right of R solutions, summed over rows, and their thresholds, float64 (R, stages - 1).
    """
    *first, last = order
    if not first:
        return costs.sum(axis=0), correct.sum(axis=0), np.zeros((1, 0))
    inner = first.pop()
    before, reached, n_right, cost = _entrances(first, distances, correct, costs)
    ranks = all_ranks[inner]
    # The rows of lowest distance stop at the inner model, the rest go on: from none that stop to all, (T, N + 1).
    in_rank = reached[:, ranks]
    stop_gain = correct[ranks, inner].astype(np.int64) - correct[ranks, last]
    n_right = (n_right + (reached & correct[:, last]).sum(axis=1))[:, None] + _sums(in_rank * stop_gain)
    cost = (cost + reached @ costs[:, inner])[:, None] + _sums((in_rank * costs[ranks, last])[:, ::-1])[:, ::-1]

    ordered = distances[ranks, inner]
    cuts = np.flatnonzero(np.r_[True, ordered[1:] > ordered[:-1], True])  # equal distances stop together
    n_right, cost, thresholds = n_right[:, cuts], cost[:, cuts], np.append(ordered, np.inf)[cuts]
    at, cut = np.nonzero(_rises_from_the_right(n_right))
    return cost[at, cut], n_right[at, cut], np.column_stack([before[at], thresholds[cut]])


def _entrances(
    first: list[int], distances: Floats, correct: Bools, costs: Floats
) -> tuple[Floats, Bools, Ints, Floats]:
    """Find the rows that reach the stage before the last, for each of T thresholds of the stage before it.

    Args:
        first: The model of that stage; empty without such a stage.
        distances: Of each model's answers, float64 (N, M).
        correct: Which answers are right, bool (N, M).
        costs: Of the calls, float64 (N, M).

    Returns:
        The thresholds, float64 (T, 0 or 1), the rows that reach the stage, bool (T, N), how many of the others are
        right, int (T,), and the cost of the first calls, float64 (T,).
    """
    if not first:
        return np.zeros((1, 0)), np.ones((1, len(distances)), dtype=bool), np.zeros(1, dtype=np.int64), np.zeros(1)
    (model,) = first
    thresholds = quantiles(distances[:, model])
    reached = distances[:, model] >= thresholds[:, None]
    n_right = (correct[:, model] & ~reached).sum(axis=1)
    return thresholds[:, None], reached, n_right, np.full(len(thresholds), costs[:, model].sum())


def quantiles(distances: Floats) -> Floats:
    """Return thresholds that leave evenly spaced shares of the rows below them, from none to all, float64 (T,)."""
    n = len(distances)
    ranks = np.linspace(0, n, N_QUANTILES + 1).round().astype(np.int64)
    return np.unique(np.append(np.sort(distances), np.inf)[ranks])


def _sums(terms: np.ndarray) -> np.ndarray:
    """Return the sums of the first 0, 1, ..., N terms of each row, (T, N) -> (T, N + 1)."""
    return np.pad(np.cumsum(terms, axis=1), ((0, 0), (1, 0)))


def _rises_from_the_right(values: Ints) -> Bools:
    """Return which entries are larger than all to their right, bool (same shape).

    To the right fewer rows go on to the last model: solutions there cost no more.
    """
    best = np.maximum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
    rises = np.ones(values.shape, dtype=bool)
    rises[:, :-1] = values[:, :-1] > best[:, 1:]
    return rises


METHOD = Method("frugalgpt", "cascade", fit, packages=("sklearn",), extra="baselines", note=_note)
BERT = text_method("frugalgpt-bert", "cascade", "Fine-tune a scorer of query and answer for each model (DistilBERT).")
