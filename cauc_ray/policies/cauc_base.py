"""CAUC Base (paper, algorithm 1): accept at a reference accuracy, fuse complementary models at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.numbers.costs import LARGEST
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.policy import Policy, Step, same_width
from cauc_ray.policies.policy_file import Stage

# The paper's epsilon, which only has to keep a model of constant logits from dividing by zero.
EPSILON = 1e-12


class BaseStage(Stage):
    """A stage of CAUC Base: mean and deviation of its calibrated logits, and whether it joins the fusion.

    The complementarity rate (paper, eq. 6) is with the last stage, whose own is null.   n_gain, n_loss: its counts,
    null if it is null and in files of earlier versions.
    """

    # Not the rate: only fused, which is derived from it, decides.
    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"mean", "std", "fused"}

    mean: float = Field(ge=-LARGEST, le=LARGEST)
    std: float = Field(ge=0, le=LARGEST)
    complementarity_rate: float | None = Field(ge=-1, le=1)
    fused: bool
    n_gain: int | None = Field(default=None, ge=0)
    n_loss: int | None = Field(default=None, ge=0)


class BasePolicy(Policy):
    """CAUC Base.

    A row's state is the weight sum p_j of its fused stages so far, then their weighted sum of standardised
    logits over the K options: S = K + 1.
    """

    method: Literal["base"] = "base"
    stages: tuple[BaseStage, ...] = Field(min_length=1)

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        if not self.stages[-1].fused:
            yield "the last stage must be fused"
        if self.calibrator_kind == "isotonic" and len(self.stages) > 2:
            yield f"isotonic maps are for one or two stages, not for {len(self.stages)}"

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Accept the stage's own answer if its confidence reaches the threshold; at the last stage, fuse."""
        return self.fuse(stage, self.own(stage, logits), state)

    def own(self, stage: int, logits: Floats) -> Step:
        """Return the stage's own answer, without fusion.   logits: as for step()."""
        numbers = self.stages[stage]
        scores = numbers.scores(logits)
        predictions, confidences = numbers.calibrator.answers(scores)
        return Step(predictions, confidences, confidences >= self.threshold, np.zeros_like(scores[:, :0]), scores)

    def fuse(self, stage: int, own: Step, state: Floats | None) -> Step:
        """Return the step of a stage with an own answer: that answer, and what goes on; at the end, the fused answer.

        The confidence of a fused answer is its softmax probability on the last stage's calibrated scale, by that
        stage's isotonic map if it has one: its own confidence where nothing was fused with it. The paper gives none.
        """
        numbers = self.stages[stage]
        if state is None:
            state = np.zeros((len(own.scores), 1 + own.scores.shape[1]))
        weight, total = state[:, :1], state[:, 1:]
        scores, total = same_width(own.scores, total, (numbers.name, self.stages[max(stage - 1, 0)].name))
        unfused = weight[:, 0] == 0
        if numbers.fused:
            p = own.confidences[:, None]
            weight, total = weight + p, total + p * ((scores - numbers.mean) / (numbers.std + EPSILON))
        if stage < len(self.stages) - 1:
            rescaled = numbers.calibrator.rescaled(scores, own.predictions)
            return replace(own, state=np.concatenate([weight, total], axis=1), scores=rescaled)

        fused = total / weight
        on_last_scale = fused * (numbers.std + EPSILON) + numbers.mean
        scores = np.where(unfused[:, None], scores, on_last_scale)
        confidences = numbers.calibrator.answers(scores)[1]
        # Without other fused models, standardising may still round two logits of a row into a tie.
        predictions = np.where(unfused, own.predictions, fused.argmax(axis=1)).astype(np.int32)
        rescaled = numbers.calibrator.rescaled(scores, predictions)
        return Step(predictions, confidences, np.full(len(predictions), True), own.state, rescaled)
