"""Policies of other cascades than CAUC's: models one after the other, until a score of their own is high enough.

Each stage answers with its model's own answer, whose confidence is calibrated as in every policy; what is compared with
the threshold is the method's. Where there is an embedding, an encoder is the first stage, and rows carry what it gives.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.numbers.answer_keys import own_answer
from cauc_ray.numbers.chain import LARGEST
from cauc_ray.numbers.logits import log_softmax, real_options, top_option
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.arrays import ArraysPolicy
from cauc_ray.policies.features import Scaler, answer_features
from cauc_ray.policies.policy import Stage, Step

# From this logarithm of what a margin lacks to 1 on, its order is by the logarithm, down to that of a masked option.
_SATURATED, _LEAST, _STEP = -27.0, -5000.0, 1e-6


class MethodPolicy(ArraysPolicy):
    """A policy of a method that CAUC is compared with."""

    scored: ClassVar[bool] = True
    fuses: ClassVar[bool] = False
    threshold: float = Field(ge=0)

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        if any(stage.offsets is not None or stage.isotonic is not None for stage in self.stages):
            yield f"method {self.method} supports neither offsets nor isotonic maps"

    def own_answer(self, stage: int, logits: Floats, **more: Any) -> Step:
        """Return a stage's own answer, which every row takes.   more: other fields of the step."""
        scores = self.stages[stage].scores(logits)
        confidences = top_option(scores)[1]
        predictions = own_answer(logits, self.stages[stage].logit_kind).astype(np.int32)
        n = len(scores)
        defaults = {"accepted": np.full(n, True), "state": np.zeros((n, 0)), "worth": np.full(n, np.inf)}
        return Step(predictions, confidences, scores=scores, **{**defaults, **more})


class ScoredStage(Stage):
    """A stage of a scored cascade.

    Attributes:
        n_options: Number of options that its scorer reads; null without a scorer.
        offset: Offset of its logistic scorer; null without one.
    """

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"n_options", "offset"}

    n_options: int | None = Field(default=None, ge=1)
    offset: float | None = Field(default=None, ge=-LARGEST, le=LARGEST)


class ScoredPolicy(MethodPolicy):
    """Models one after the other, each with its own answer. A row's state is its embedding, if there is one."""

    stages: tuple[ScoredStage, ...] = Field(min_length=1)

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Stop where the stage's score reaches the threshold, and at the last stage."""
        if stage == 0 and self.encoder is not None:
            return self.no_answer(np.asarray(logits, dtype=np.float64))
        carried = np.zeros((len(logits), 0)) if state is None else state
        if stage == len(self.stages) - 1:
            return self.own_answer(stage, logits, state=carried)
        worth = self.score(stage, real_options(logits), carried)
        return self.own_answer(stage, logits, state=carried, worth=worth, accepted=worth >= self.threshold)

    @abstractmethod
    def score(self, stage: int, logits: Floats, embeddings: Floats) -> Floats:
        """Return what is compared with the threshold, float64 (n,).   embeddings: float (n, e), e = 0 for none."""

    def read(self, stage: int, logits: Floats, embeddings: Floats, *, with_answer: bool) -> Floats:
        """Return the standardised features of a stage's answers, float32 (n, d)."""
        numbers = self.stages[stage]
        assert numbers.n_options is not None
        means, scales = (self.arrays[f"{numbers.name}/{name}"] for name in ("means", "scales"))
        width = len(means) - (2 * numbers.n_options + 2) - with_answer * numbers.n_options
        carried = embeddings[:, :width] if width else None  # rows of other policies in the call may be wider
        return Scaler(means, scales)(answer_features(logits, numbers.n_options, carried, with_answer=with_answer))


class RawPolicy(ScoredPolicy):
    """The cascades of raw probabilities, which train nothing, and a single model."""

    method: Literal["margin", "max-probability", "single"]

    def score(self, stage: int, logits: Floats, embeddings: Floats) -> Floats:
        """Return the raw probability of the answer, for margin less that of the next option."""
        return margins(logits) if self.method == "margin" else top_option(logits)[1]


def margins(logits: Floats) -> Floats:
    """Return p(1) - p(2), the two largest raw probabilities, float64 (N,); 1 where there is one option.

    Margins of several options that round to 1 are returned as slightly more than 1, ordered by the logarithm of their
    difference from 1, so that thresholds can separate them.
    """
    ranked = -np.sort(-log_softmax(logits), axis=1)
    if ranked.shape[1] == 1:
        return np.ones(len(logits))
    differences: Floats = np.exp(ranked[:, 0]) - np.exp(ranked[:, 1])
    # 1 - (p(1) - p(2)) = 2 p(2) + p(3) + ...
    lacking = np.logaddexp.reduce(np.column_stack([ranked[:, 1] + np.log(2), ranked[:, 2:]]), axis=1)
    beyond = 1.0 + _STEP * (_SATURATED - np.maximum(lacking, _LEAST))
    return np.where(lacking < _SATURATED, beyond, differences)
