"""CAUC Base and CAUC-RF (paper, algorithms 1 and 2): the steps of the paper's two methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.errors import DataError
from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.chain import LARGEST
from cauc_ray.numbers.logits import top_option, widened
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.evidence import FrozenModel
from cauc_ray.policies.policy import Policy, Stage, Step

# The paper's epsilon, which only has to keep a model of constant logits from dividing by zero.
EPSILON = 1e-12


class BaseStage(Stage):
    """A stage of CAUC Base: mean and deviation of its calibrated logits, and whether it joins the fusion.

    The complementarity rate (paper, eq. 6) is with the last stage, whose own is null.   n_gain, n_loss: its counts,
    null if it is null.
    """

    # Not the rate: only fused, which is derived from it, decides.
    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"mean", "std", "fused"}

    mean: float = Field(ge=-LARGEST, le=LARGEST)
    std: float = Field(ge=0, le=LARGEST)
    complementarity_rate: float | None = Field(ge=-1, le=1)
    fused: bool
    n_gain: int | None = Field(ge=0)
    n_loss: int | None = Field(ge=0)


class BasePolicy(Policy):
    """CAUC Base.

    A row's state is the weight sum p_j of its fused stages so far, then their weighted sum of standardised
    logits over the K options: S = K + 1.
    """

    method: Literal["base"] = "base"
    threshold: float = Field(ge=0)
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
        return self.fuse(stage, self.unfused_step(stage, logits), state)

    def unfused_step(self, stage: int, logits: Floats) -> Step:
        """Return the stage's own answer, without fusion.   logits: as for step()."""
        numbers = self.stages[stage]
        scores = numbers.scores(logits)
        predictions, confidences = numbers.calibrator.answers(scores)
        return Step(predictions, confidences, confidences >= self.threshold, np.zeros_like(scores[:, :0]), scores)

    def fuse(self, stage: int, unfused: Step, state: Floats | None) -> Step:
        """Return a stage's step: its unfused answer with the new state; at the last stage, the fused answer.

        The confidence of a fused answer is its softmax probability on the last stage's calibrated scale, by that
        stage's isotonic map if it has one: its own confidence where nothing was fused with it. The paper gives none.
        """
        numbers = self.stages[stage]
        if state is None:
            # Missing options stay missing, also before any stage is fused.
            weight: Floats = np.zeros((len(unfused.scores), 1))
            total: Floats = np.where(unfused.scores == -np.inf, -np.inf, 0.0)
        else:
            weight, total = state[:, :1], state[:, 1:]
        scores, total = same_width(unfused.scores, total, (numbers.name, self.stages[max(stage - 1, 0)].name))
        unfused_mask = weight[:, 0] == 0
        if numbers.fused:
            p = unfused.confidences[:, None]
            standardised = scores - numbers.mean
            standardised /= numbers.std + EPSILON
            standardised *= p
            standardised += total
            weight, total = weight + p, standardised
        if stage < len(self.stages) - 1:
            rescaled = numbers.calibrator.rescaled(scores, unfused.predictions)
            return replace(unfused, state=np.concatenate([weight, total], axis=1), scores=rescaled)

        fused = total / weight
        on_last_scale = fused * (numbers.std + EPSILON) + numbers.mean
        scores = np.where(unfused_mask[:, None], scores, on_last_scale)
        confidences = numbers.calibrator.answers(scores)[1]
        # Without other fused models, standardising may still round two logits of a row into a tie.
        predictions = np.where(unfused_mask, unfused.predictions, fused.argmax(axis=1)).astype(np.int32)
        rescaled = numbers.calibrator.rescaled(scores, predictions)
        return Step(predictions, confidences, np.full(len(predictions), True), unfused.state, rescaled)


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

    Attributes:
        alpha: Temperature of r in the fusion; of the rejected fusion if fused is false.
        beta: Temperature of the stage's calibrated logits in the fusion; of the rejected fusion if fused is false.
        pair_diagnostics: Diagnostics of the fit of alpha and beta.
        fused: Whether the stage is fused with r (eq. 8); otherwise r restarts with its calibrated logits.
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
    """CAUC-RF. A row's state is the accumulated score vector r over the K options: S = K.

    Attributes:
        threshold: Threshold of all confidences, or those of the stages but the last if gains chose them.
    """

    method: Literal["rf"] = "rf"
    threshold: Annotated[float, Field(ge=0)] | tuple[float, ...]
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
        accepted = np.full(len(r), True) if last else confidences >= self.threshold_of(stage)
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


def same_width(scores: Floats, state: Floats, names: tuple[str, str]) -> tuple[Floats, Floats]:
    """Pad the narrower of two (n, K) arrays with -inf; what the wider has beyond must be padding too.

    names: of their stages, for the message of the DataError that is raised otherwise.
    """
    k, width = sorted((scores.shape[1], state.shape[1]))
    more = np.flatnonzero(np.isfinite((scores if scores.shape[1] > k else state)[:, k:]).any(axis=1))
    if len(more):
        raise DataError(
            f"row {more[0]} of the batch has {k} options or fewer at one stage and up to {width} at "
            f"another ({names[0]!r} and {names[1]!r}); all models of a chain must have the same options"
        )
    return widened(scores, width), widened(state, width)
