"""FrugalGPT (Chen et al., TMLR 2024): models called in a searched order until an answer is rated reliable enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.baselines.confidence import answers_of
from cauc_ray.policies.baselines.features import Scaling, option_features
from cauc_ray.policies.baselines.frugalgpt_search import Solution, search
from cauc_ray.policies.method import Curve, Fitted, Fitting, measured
from cauc_ray.policies.trace import Answers, Examples

# Inverse regularisations tried, as scikit-learn counts them: from features that hardly count to ones that count fully.
INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_MOST_ITERATIONS = 2000

# Solutions nearer to each other in cost are one to a budget, whose own rounding is let pass.
_COST_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model's reliability: the probability that its answer is right, by logistic regression.

    model: its place.   n_options: what its features were fitted with.   weights: float64 (d,).
    """

    model: int
    n_options: int
    scaling: Scaling
    weights: Floats
    intercept: float

    def distances(self, examples: Examples) -> Floats:
        """Return 1 less the probability, float64 (N,), to full precision where that is near 1."""
        log_odds = self.scaling(_vectors(examples, self.model, self.n_options)) @ self.weights + self.intercept
        distances: Floats = np.exp(-np.logaddexp(0.0, log_odds))
        return distances


@dataclass(frozen=True, slots=True)
class Searched:
    """FrugalGPT fitted: the best solutions by their cost on validation. Its setting is a budget, in that cost.

    scorers: of the M models.   solutions: P, by rising cost.   points: of the solutions; settings are their costs.
    """

    scorers: tuple[Scorer, ...]
    solutions: tuple[Solution, ...]
    points: OperatingPoints
    note: str

    @property
    def default(self) -> float:
        """Return the cost of the solution that is best without a budget."""
        return float(self.points.settings[self.points.index_of_best()])

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Replay the best solution within a budget. Raises BudgetError where none costs so little."""
        solution = self.solutions[self.points.index_of_best(setting)]
        return _replayed(solution, _own_answers(examples), _distances(self.scorers, examples))

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure budgets on labelled examples: one replay for each solution that any of them chooses.

        Raises BudgetError where no solution costs so little.
        """
        chosen, places = np.unique([self.points.index_of_best(setting) for setting in settings], return_inverse=True)
        curve = _measured([self.solutions[p] for p in chosen], examples, _distances(self.scorers, examples))
        of_settings = (values[places] for values in (curve.cost, curve.accuracy, curve.macro_f1, curve.last_share))
        return Curve(np.asarray(settings, dtype=np.float64), *of_settings)


def fit_frugalgpt(fitting: Fitting) -> Fitted:
    """Fit a scorer for each model on calibration, and search orders and thresholds on validation.

    The published scorers are language models that read query and answer; here they see the answering model's log
    probabilities, its answer and the query's embedding where there is one. Published thresholds are searched on the
    rows that the scorers were trained on; here on others.
    """
    validation = fitting.validation
    scorers = tuple(_fit_scorer(fitting, model) for model in range(len(validation.chain.models)))
    distances, correct = _distances(scorers, validation), validation.correct()
    solutions = search(distances, correct, np.broadcast_to(validation.chain.costs.per_call, correct.shape))
    curve = _measured(solutions, validation, distances)
    told_apart = np.append(np.diff(curve.cost) > _COST_TOLERANCE * curve.cost[1:], True)
    cost, quality = curve.cost[told_apart], curve.accuracy[told_apart]
    kept = tuple(solution for solution, keep in zip(solutions, told_apart, strict=True) if keep)
    points = OperatingPoints(cost, cost, quality, validation.chain.costs.unit)
    return Searched(scorers, kept, points, note="logistic scorers in place of DistilBERT")


def _fit_scorer(fitting: Fitting, model: int) -> Scorer:
    """Fit under the penalty that gives validation the highest likelihood."""
    calibration, validation = fitting.calibration, fitting.validation
    n_options = calibration.chain.logits[model].shape[1]
    right = calibration.correct()[:, model]
    vectors = _vectors(calibration, model, n_options)
    scaling = Scaling.of(vectors)
    if right.all() or not right.any():  # nothing to learn but the rate, with half a row more of each kind
        log_odds = np.log((right.sum() + 0.5) / ((~right).sum() + 0.5))
        return Scorer(model, n_options, scaling, np.zeros(vectors.shape[1]), float(log_odds))
    # In float64: the solver's line search gives up early in float32.
    inputs, unseen = (scaling(rows).astype(np.float64) for rows in (vectors, _vectors(validation, model, n_options)))
    signs = np.where(validation.correct()[:, model], 1.0, -1.0)
    with threadpool_limits(1):  # on fits so small several threads only wait for each other
        fits = [LogisticRegression(C=c, max_iter=_MOST_ITERATIONS).fit(inputs, right) for c in INVERSE_PENALTIES]
    best = min(fits, key=lambda fit: np.logaddexp(0.0, -signs * fit.decision_function(unseen)).mean())
    return Scorer(model, n_options, scaling, best.coef_[0], float(best.intercept_[0]))


def _vectors(examples: Examples, model: int, n_options: int) -> Floats:
    """Return what is known once a model has answered, float32 (N, d): the query, its outputs and its answer."""
    logits = examples.chain.logits[model]
    answers = answers_of(logits)[:, None] == np.arange(n_options)
    query = [] if examples.embeddings is None else [np.asarray(examples.embeddings, dtype=np.float32)]
    return np.column_stack([*query, option_features(logits, n_options), answers.astype(np.float32)])


def _distances(scorers: tuple[Scorer, ...], examples: Examples) -> Floats:
    return np.stack([scorer.distances(examples) for scorer in scorers], axis=1)


def _own_answers(examples: Examples) -> Ints:
    return np.stack([answers_of(logits) for logits in examples.chain.logits], axis=1)


def _replayed(solution: Solution, own_answers: Ints, distances: Floats) -> Answers:
    takers, calls = solution.replay(distances)
    return Answers(own_answers[np.arange(len(takers)), takers], calls)


def _measured(solutions: Sequence[Solution], examples: Examples, distances: Floats) -> Curve:
    """Measure each solution on labelled examples; the settings are their costs there."""
    own_answers = _own_answers(examples)
    curves = [measured(_replayed(solution, own_answers, distances), examples, np.nan) for solution in solutions]
    cost = np.concatenate([curve.cost for curve in curves])
    accuracy = np.concatenate([curve.accuracy for curve in curves])
    f1 = np.concatenate([curve.macro_f1 for curve in curves])
    return Curve(cost, cost, accuracy, f1, np.concatenate([curve.last_share for curve in curves]))
