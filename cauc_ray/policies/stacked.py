"""Stacked cascades: CAUC-RF's recursion with biases that recalibrate each model. Ours, beyond the paper.

With l_j = log softmax z_j of a stage's logits and f_j = max(l_j, -20), a row's scores after the stage are, up to a
constant of the row,

    r_j = a_j r_{j-1} + c_j l_j + b_j + f_j W_j,

where r_0 is what a classifier of an embedding says, if an encoder is the first stage. With a_j and c_j alone it is
CAUC-RF (paper, eq. 8): a_j = 1 / (2 alpha_j), c_j = 1 / (2 beta_j T_j).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cauc_ray.errors import DataError, PolicyError
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.chain import LARGEST
from cauc_ray.numbers.logits import log_softmax, top_option
from cauc_ray.numbers.products import products
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.arrays import ArraysPolicy
from cauc_ray.policies.cauc import same_width
from cauc_ray.policies.policy import Stage, Step

# Lower log probabilities say no more, where there are biases; also that of options that a row does not have.
LOWEST_LOG = -20.0


class StackedStage(Stage):
    """A stage of a stacked policy.

    Attributes:
        state_weight: a, of the scores before it; null for the first without an encoder.
        logit_weight: c, of its log probabilities.
        penalty: Of biases and matrix in their fit, chosen by cross-validation; null for a stage without them.
        biases: b, one for each option; null for none.
        matrix: W, a row for each option whose log probability it weighs; null for none.
    """

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"state_weight", "logit_weight", "biases", "matrix"}

    state_weight: float | None = Field(default=None, gt=0, le=LARGEST)
    logit_weight: float = Field(gt=0, le=LARGEST)
    penalty: float | None = Field(default=None, gt=0)
    biases: tuple[float, ...] | None = None
    matrix: tuple[tuple[float, ...], ...] | None = None

    @model_validator(mode="after")
    def _is_square(self) -> StackedStage:
        if self.matrix is not None and {len(self.biases or ()), *map(len, self.matrix)} != {len(self.matrix)}:
            raise ValueError("the matrix must have as many rows and columns as there are biases")
        return self

    def scores_after(self, logits: Floats, state: Floats | None) -> Floats:
        """Return r after the stage, float64 (n, K).

        Args:
            logits: Of its model, float (n, K).
            state: r before it, float64 (n, K).
        """
        logits = self.bounded(logits)
        logs = plain_scores(logits) if self.biases is None else floored_logs(logits)
        if state is not None:
            logs, state = same_width(logs, state, (self.name, "the stages before"))
        scores: Floats = self.logit_weight * logs
        if state is not None and self.state_weight is not None:
            scores += self.state_weight * state
        if self.biases is not None:
            self._add_biases(scores, logs, np.array(self.biases))
        scores -= scores.max(axis=1, keepdims=True)
        return scores

    def _add_biases(self, scores: Floats, logs: Floats, biases: Floats) -> None:
        n_known, width = len(biases), scores.shape[1]
        unknown = np.flatnonzero(np.isfinite(logs[:, n_known:]).any(axis=1))
        if len(unknown):
            raise DataError(
                f"row {unknown[0]} of the batch has more options than the {n_known} that the policy was fitted on for "
                f"{self.name!r}"
            )
        scores[:, :n_known] += biases[:width]
        # Row by row of W: a matrix product may round a row differently with other neighbours.
        for option, weights in enumerate(self.matrix or ()):
            values = logs[:, option] if option < width else np.full(len(logs), -np.inf)
            values = np.where(np.isfinite(values), values, LOWEST_LOG)
            scores[:, :n_known] += values[:, None] * np.array(weights)[:width]


class StackedPolicy(ArraysPolicy):
    """A stacked cascade. A row's state is the score vector r over the K options: S = K.

    Arrays with an encoder: weights, (K, d), and offsets, (K,), of the classifier of its embeddings.
    """

    method: Literal["stacked"] = "stacked"
    threshold: tuple[float, ...]
    stages: tuple[StackedStage, ...] = Field(min_length=1)

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        if any((stage.state_weight is None) != (index == 0) for index, stage in enumerate(self.stages)):
            yield "state_weight must be null for the first stage and a number for the others"

    @classmethod
    def parsed(cls, content: Mapping[str, Any], source: str, file: AnyPath | None) -> Self:
        """Return a policy. Raises PolicyError for one of an earlier edition of the method."""
        if "variant" in content:
            raise PolicyError(
                f"{source}: a stacked policy of an earlier version, which decided otherwise; fit it again"
            )
        return super().parsed(content, source, file)

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Add the stage's terms to the scores, and stop if their confidence reaches the stage's threshold."""
        if stage == 0 and self.encoder is not None:
            scores = products(np.asarray(logits, dtype=np.float64), self.arrays["weights"]) + self.arrays["offsets"]
            return self.no_answer(scores - scores.max(axis=1, keepdims=True))
        if stage == 1 and self.encoder is not None and state is not None:
            state = state[:, : logits.shape[1]]  # rows may have fewer options than the classifier
        r = self.stages[stage].scores_after(logits, state)
        predictions, confidences = top_option(r)
        last = stage == len(self.stages) - 1
        accepted = np.full(len(r), True) if last else confidences >= self.threshold_of(stage)
        return Step(predictions, confidences, accepted, state=r, scores=r)


def plain_scores(logits: Floats) -> Floats:
    """Return logits less their row's largest, float64 (n, K): log probabilities up to a constant of the row."""
    scores: Floats = np.array(logits, dtype=np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    return scores


def floored_logs(logits: Floats) -> Floats:
    """Return log softmax of logits, of at least LOWEST_LOG, float64 (n, K); -inf stays.

    Rounded to float32: the last bits of a logarithm may depend on a row's position in a batch.
    """
    logs = log_softmax(logits).astype(np.float32).astype(np.float64)
    return np.where(np.isneginf(logs), logs, np.maximum(logs, LOWEST_LOG))
