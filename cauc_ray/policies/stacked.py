"""Stacked cascades: CAUC-RF's recursion with terms that recalibrate each model. Ours, beyond the paper.

With l_j = log softmax z_j of a stage's logits, q_j the vote 1[k = argmax z_j] or softmax(z_j), and
pi_j = softmax(z_j / T_j + o_j), a row's scores after the stage are, up to a constant of the row,

    r_j = a_j r_{j-1} + c_j l_j + d_j g_j(e) l_j + v_j q_j + b_j + pi_j A_j,    r_0 = s_0(e),

where an encoder has given an embedding e; without one there are neither g_j nor s_0. With a_j and c_j alone it is
CAUC-RF (paper, eq. 8): a_j = 1 / (2 alpha_j), c_j = 1 / (2 beta_j T_j).
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from cauc_ray.errors import DataError
from cauc_ray.numbers.chain import LARGEST
from cauc_ray.numbers.logits import log_softmax, softmax, top_option
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.arrays import ArraysPolicy
from cauc_ray.policies.cauc import same_width
from cauc_ray.policies.evidence import FrozenModel
from cauc_ray.policies.experts import Experts
from cauc_ray.policies.policy import Stage, Step

# What a stage adds of a model's own answer: nothing, 1 for the option that it chose, or its probabilities.
OwnAnswer: TypeAlias = Literal["none", "vote", "probability"]
Variant: TypeAlias = Literal["rf", "stacked", "stacked-gain"]

# Lower log probabilities say no more, where terms beyond RF's are fitted.
LOWEST_LOG = -20.0
# Standardised features of a confidence are clipped here: a polynomial means nothing far from its data.
_FURTHEST = 6.0
_NEAREST = 1e-12


class Gain(FrozenModel):
    """What going on from a stage is expected to gain in confidence, per unit of cost.

    u_k(p) = intercepts_k + weights_k x, where x are the standardised features p, p^2, p^3, sqrt(1 - p), logit p of the
    stage's confidence p, for each of the stages after it.

    centres, scales: of the features.   weights, intercepts: of the stages after this one.   costs: of their calls up to
    each of them, as shares of what the whole chain costs.
    """

    centres: tuple[float, ...] = Field(min_length=5, max_length=5)
    scales: tuple[float, ...] = Field(min_length=5, max_length=5)
    weights: tuple[tuple[float, ...], ...] = Field(min_length=1)
    intercepts: tuple[float, ...]
    costs: tuple[float, ...]

    @model_validator(mode="after")
    def _agrees(self) -> Gain:
        if len({len(self.weights), len(self.intercepts), len(self.costs)}) > 1 or {*map(len, self.weights)} != {5}:
            raise ValueError("weights, intercepts and costs must be of the same stages, with five weights each")
        if min(self.costs) <= 0 or min(self.scales) <= 0:
            raise ValueError("costs and scales must be above 0")
        return self

    def worth(self, confidences: Floats) -> Floats:
        """Return 1 / (1 + exp(max_k u_k(p) / cost_k)), float64 (n,): the less going on gains, the higher."""
        features = (features_of(confidences) - self.centres) / self.scales
        columns = np.clip(features, -_FURTHEST, _FURTHEST).T
        rates = []
        for weights, intercept, cost in zip(self.weights, self.intercepts, self.costs, strict=True):
            total = np.full(len(confidences), intercept)
            for weight, column in zip(weights, columns, strict=True):
                total += weight * column
            rates.append(total / cost)
        worth: Floats = 1.0 / (1.0 + np.exp(np.clip(np.max(rates, axis=0), -700, 700)))
        return worth


def features_of(confidences: Floats) -> Floats:
    """Return p, p^2, p^3, sqrt(1 - p), logit p, float64 (n, 5)."""
    p = np.clip(confidences, _NEAREST, 1 - _NEAREST)
    return np.column_stack([p, p**2, p**3, np.sqrt(1 - p), np.log(p) - np.log1p(-p)])


class StackedStage(Stage):
    """A stage of a stacked policy.

    state_weight: a, of the scores before it; null for the first.   logit_weight: c, of its log probabilities.
    answer: what q is.   answer_weight: v.   competence_weight: d, of g l; null without an expert.   prior_weight: w, of
    s_0, for the first model; null without one.   biases: b, one for each option; null for none.   matrix: A, a row for
    each option of pi; null for none.   gain: what going on is worth; null where the confidence decides, and for the
    last.
    """

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {
        "state_weight",
        "logit_weight",
        "answer",
        "answer_weight",
        "competence_weight",
        "prior_weight",
        "biases",
        "matrix",
        "gain",
    }

    state_weight: float | None = Field(default=None, gt=0, le=LARGEST)
    logit_weight: float = Field(gt=0, le=LARGEST)
    answer: OwnAnswer = "none"
    answer_weight: float = Field(default=0.0, ge=0, le=LARGEST)
    competence_weight: float | None = Field(default=None, ge=-LARGEST, le=LARGEST)
    prior_weight: float | None = Field(default=None, ge=0, le=LARGEST)
    biases: tuple[float, ...] | None = None
    matrix: tuple[tuple[float, ...], ...] | None = None
    gain: Gain | None = None

    @model_validator(mode="after")
    def _is_square(self) -> StackedStage:
        if self.matrix is not None and {*map(len, self.matrix)} != {len(self.matrix)}:
            raise ValueError("the matrix must have as many columns as rows")
        return self

    def scores_after(
        self, logits: Floats, state: Floats | None, competence: Floats | None = None, prior: Floats | None = None
    ) -> Floats:
        """Return r after the stage, float64 (n, K).

        logits: of its model, float (n, K).   state: r before it.   competence: g, float64 (n,).   prior: s_0, float64
        (n, K), which may have more columns.
        """
        logits = self.bounded(logits)
        terms = self.competence_weight, self.prior_weight, self.biases, self.matrix
        beyond = self.answer != "none" or any(term is not None for term in terms)
        logs = log_probabilities(logits, floored=beyond)
        if state is not None:
            logs, state = same_width(logs, state, (self.name, "the stages before"))
        scores: Floats = self.logit_weight * logs
        if state is not None and self.state_weight is not None:
            scores += self.state_weight * state
        if competence is not None and self.competence_weight is not None:
            scores += self.competence_weight * competent(logs, competence)
        if prior is not None and self.prior_weight is not None:
            known = prior[:, : scores.shape[1]]
            scores[:, : known.shape[1]] += self.prior_weight * np.where(np.isfinite(known), known, 0.0)
        if self.answer != "none":
            own = answer_of(logits, self.answer)
            scores[:, : own.shape[1]] += self.answer_weight * own
        if self.biases is not None:
            scores[:, : len(self.biases)] += self._known(logits, len(self.biases))
        if self.matrix is not None:
            self._known(logits, len(self.matrix))
            probabilities = softmax(self.scores(logits))
            # Row by row of A: a matrix product may round a row differently with other neighbours.
            for option, row in enumerate(self.matrix[: probabilities.shape[1]]):
                scores[:, : len(row)] += probabilities[:, option, None] * np.array(row)[: scores.shape[1]]
        scores -= scores.max(axis=1, keepdims=True)
        return scores

    def _known(self, logits: Floats, n_known: int) -> Floats:
        """Return the biases of the options that rows may have. Raises DataError for an option that was not fitted."""
        unknown = np.flatnonzero(np.isfinite(logits[:, n_known:]).any(axis=1))
        if len(unknown):
            raise DataError(
                f"row {unknown[0]} of the batch has more options than the {n_known} that the policy was fitted on for "
                f"{self.name!r}"
            )
        return np.array(self.biases or ())[: logits.shape[1]]


class StackedPolicy(ArraysPolicy):
    """A stacked cascade. A row's state is the score vector r over the K options: S = K; with an encoder after g: M + K.

    variant: rf, without terms beyond CAUC-RF's; stacked, with them; stacked-gain, where in addition the expected gain
    per cost decides who goes on, not the confidence. Arrays with an encoder: those of Experts.
    """

    method: Literal["stacked"] = "stacked"
    variant: Variant
    stages: tuple[StackedStage, ...] = Field(min_length=1)

    def worth(self, stage: int, confidences: Floats) -> Floats:
        """Return what is compared with the threshold."""
        gain = self.stages[stage].gain
        return confidences if gain is None else gain.worth(confidences)

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Add the stage's terms to the scores, and stop if that is worth more than the threshold."""
        if stage == 0 and self.encoder is not None:
            return self.no_answer(self.experts.tell(logits))
        if self.encoder is None:
            r = carried = self.stages[stage].scores_after(logits, state)
        else:
            assert state is not None
            told, before = np.split(state, [len(self.answering)], axis=1)
            rest = (None, before) if stage == 1 else (before, None)
            r = self.stages[stage].scores_after(logits, rest[0], told[:, stage - 1], rest[1])
            carried = np.column_stack([told, r])
        predictions, confidences = top_option(r)
        last = stage == len(self.stages) - 1
        accepted = np.full(len(r), True) if last else self.worth(stage, confidences) >= self.threshold
        return Step(predictions, confidences, accepted, state=carried, scores=r)

    @property
    def experts(self) -> Experts:
        """Return what the embedding tells."""
        return Experts(**self.arrays)


def log_probabilities(logits: Floats, *, floored: bool) -> Floats:
    """Return log softmax of logits, float64 (n, K); -inf stays.   floored: at LOWEST_LOG.

    Rounded to float32: the last bits of a logarithm may depend on a row's position in a batch.
    """
    logs = log_softmax(logits).astype(np.float32).astype(np.float64)
    if floored:
        logs = np.where(np.isneginf(logs), logs, np.maximum(logs, LOWEST_LOG))
    return logs


def competent(logs: Floats, competence: Floats) -> Floats:
    """Return g l, float64 (n, K), 0 where there is no option.   logs: l.   competence: g, float64 (n,)."""
    found: Floats = np.where(np.isfinite(logs), logs, 0.0) * competence[:, None]
    return found


def answer_of(logits: Floats, answer: OwnAnswer) -> Floats:
    """Return q, float64 (n, K).   answer: "vote" or "probability"."""
    if answer == "probability":
        return softmax(logits)
    votes = np.zeros(logits.shape)
    votes[np.arange(len(logits)), logits.argmax(axis=1)] = 1.0
    return votes
