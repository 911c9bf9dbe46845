"""FrugalGPT (Chen et al., TMLR 2024): models called in a searched order until an answer is rated reliable enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.baselines.features import AnswerVectors
from cauc_ray.policies.baselines.frugalgpt_search import Solution, search
from cauc_ray.policies.baselines.simple import own_answers
from cauc_ray.policies.method import Curve, Fitted, Fitting, measured
from cauc_ray.policies.trace import Answers, Examples, with_embedding_paid

# Inverse regularisations tried, as scikit-learn counts them: from features that hardly count to ones that count fully.
INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_MOST_ITERATIONS = 2000

# Solutions whose costs differ by less are one to a budget, which is kept but for rounding.
_COST_TOLERANCE = 1e-8


@dataclass(frozen=True, slots=True)
class Scorer:
    """A model's reliability: the probability that its answer is right, by logistic regression.

    vectors: what is known once it has answered.   weights: float64 (d,).
    """

    vectors: AnswerVectors
    weights: Floats
    intercept: float

    def distances(self, examples: Examples) -> Floats:
        """Return 1 less the probability, float64 (N,), to full precision where that is near 1."""
        log_odds = self.vectors(examples) @ self.weights + self.intercept
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
        return _replayed(solution, examples, own_answers(examples.chain), _distances(self.scorers, examples))

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure budgets on labelled examples: one replay for each solution that any of them chooses.

        Raises BudgetError where no solution costs so little.
        """
        chosen, which = np.unique([self.points.index_of_best(setting) for setting in settings], return_inverse=True)
        curve = _measured([self.solutions[p] for p in chosen], examples, _distances(self.scorers, examples))
        of_settings = (values[which] for values in (curve.cost, curve.accuracy, curve.macro_f1, curve.last_share))
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
    solutions = search(distances, correct, _costs_to_come(validation))
    curve = _measured(solutions, validation, distances)
    distinct = np.append(np.diff(curve.cost) > _COST_TOLERANCE * curve.cost[1:], True)
    cost, quality = curve.cost[distinct], curve.accuracy[distinct]
    kept = tuple(solution for solution, keep in zip(solutions, distinct, strict=True) if keep)
    points = OperatingPoints(cost, cost, quality, validation.chain.costs.unit)
    notes = "logistic scorers in place of DistilBERT", validation.embedding_note
    return Searched(scorers, kept, points, note="; ".join(filter(None, notes)))


def _costs_to_come(examples: Examples) -> Floats:
    """Return what calls cost beyond those made anyway, float64 (N, M): a model called for its embedding is free."""
    costs = np.array(np.broadcast_to(examples.chain.costs.per_call, (len(examples), len(examples.chain.models))))
    call = examples.embedding_call
    if call is not None and call.place is not None:
        costs[:, call.place] = 0.0
    return costs


def _fit_scorer(fitting: Fitting, model: int) -> Scorer:
    """Fit under the penalty that gives validation the highest likelihood."""
    vectors = AnswerVectors.of(fitting.calibration, model, with_answer=True)
    right = fitting.calibration.correct()[:, model]
    # In float64: the solver's line search gives up early in float32.
    inputs, unseen = (vectors(split).astype(np.float64) for split in (fitting.calibration, fitting.validation))
    if right.all() or not right.any():  # nothing to learn but the rate, with half a row more of each kind
        log_odds = np.log((right.sum() + 0.5) / ((~right).sum() + 0.5))
        return Scorer(vectors, np.zeros(inputs.shape[1]), float(log_odds))
    signs = np.where(fitting.validation.correct()[:, model], 1.0, -1.0)
    with threadpool_limits(1):  # on fits so small several threads only wait for each other
        fits = [LogisticRegression(C=c, max_iter=_MOST_ITERATIONS).fit(inputs, right) for c in INVERSE_PENALTIES]
    best = min(fits, key=lambda fit: np.logaddexp(0.0, -signs * fit.decision_function(unseen)).mean())
    return Scorer(vectors, best.coef_[0], float(best.intercept_[0]))


def _distances(scorers: tuple[Scorer, ...], examples: Examples) -> Floats:
    return np.stack([scorer.distances(examples) for scorer in scorers], axis=1)


def _replayed(solution: Solution, examples: Examples, answers: Ints, distances: Floats) -> Answers:
    takers, calls = solution.replay(distances)
    return with_embedding_paid(Answers(answers[np.arange(len(takers)), takers], calls), examples)


def _measured(solutions: Sequence[Solution], examples: Examples, distances: Floats) -> Curve:
    """Measure each solution on labelled examples; the settings are their costs there."""
    answers = own_answers(examples.chain)
    replayed = (_replayed(solution, examples, answers, distances) for solution in solutions)
    curves = [measured(own, examples, np.nan) for own in replayed]
    rows = [(own.cost[0], own.accuracy[0], own.macro_f1[0], own.last_share[0]) for own in curves]
    cost, accuracy, f1, last_share = (np.array(column) for column in zip(*rows, strict=True))
    return Curve(cost, cost, accuracy, f1, last_share)
