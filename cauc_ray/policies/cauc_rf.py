"""CAUC-RF (paper, algorithm 2): recursive fusion of every stage, one threshold chosen for a budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.costs import LARGEST
from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.evidence import FrozenModel
from cauc_ray.policies.policy import Policy, Step, same_width
from cauc_ray.policies.policy_file import Stage


class PairDiagnostics(FrozenModel):
    """Diagnostics of a stage's pair fit on the calibration split; NLL in nats at alpha = beta = 1 and after the fit."""

    alpha_status: FitStatus
    beta_status: FitStatus
    alpha_standard_error: float | None
    beta_standard_error: float | None
    nll_before: float
    nll_after: float


class RFStage(Stage):
    """A stage of CAUC-RF: the pair temperatures of eq. 8, null for the first.

    fused: whether the stage is fused with r (eq. 8). Else it answers by itself: r restarts with its calibrated logits,
    and alpha and beta are those of the rejected fusion.
    """

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"alpha", "beta", "fused"}

    alpha: float | None = Field(ge=1 / LARGEST, le=LARGEST)
    beta: float | None = Field(ge=1 / LARGEST, le=LARGEST)
    pair_diagnostics: PairDiagnostics | None
    fused: bool = True

    def fold(self, scores: Floats, state: Floats | None) -> Floats:
        """Return r after the stage, float64 (n, K) (paper, eq. 8).   scores: its calibrated logits."""
        return fold(scores, *((self.alpha, self.beta) if self.fused else (None, None)), state, self.name)


class RFPolicy(Policy):
    """CAUC-RF. A row's state is the accumulated score vector r over the K options: S = K."""

    method: Literal["rf"] = "rf"
    stages: tuple[RFStage, ...] = Field(min_length=1)

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        for index, stage in enumerate(self.stages):
            if (index == 0) != (stage.alpha is None) or (index == 0) != (stage.beta is None):
                yield "alpha and beta must be null for the first stage and numbers for the others"
            if stage.isotonic is not None:
                yield "method rf does not support isotonic maps"

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Fuse the stage's logits with r (eq. 8) and stop if r's confidence (eq. 10) reaches the threshold."""
        numbers = self.stages[stage]
        r = numbers.fold(numbers.scores(logits), state)
        predictions, confidences = top_option(r)
        last = stage == len(self.stages) - 1
        accepted = np.full(len(r), True) if last else confidences >= self.threshold
        return Step(predictions, confidences, accepted, state=r, scores=r)


def fold(scores: Floats, alpha: float | None, beta: float | None, state: Floats | None, name: str = "") -> Floats:
    """Return (state / alpha + scores / beta) / 2 (paper, eq. 8).

    Without a state, or without alpha and beta, it starts with the scores.
    """
    if state is None:
        return scores
    scores, state = same_width(scores, state, (name, "the stages before"))
    if alpha is None or beta is None:
        return scores
    return (state / alpha + scores / beta) / 2.0
