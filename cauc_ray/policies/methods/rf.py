"""CAUC-RF (paper, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field

from cauc_ray.errors import OptionError
from cauc_ray.numbers.calibration import FitStatus, TemperatureFit, dtype_of, fit_pair, solve_temperatures
from cauc_ray.numbers.calibrators import Calibrator, CalibratorKind
from cauc_ray.numbers.chain import LARGEST, Chain, ChainLogits, ChainPart
from cauc_ray.numbers.logits import same_width, top_option
from cauc_ray.numbers.sweep import STOP_NONE
from cauc_ray.numbers.threads import in_threads
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.calibrated import ComputedRows, calibrator_of, parts_of, sum_answers
from cauc_ray.policies.evidence import FrozenModel
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting, calibrate, fusion_gains, model_entries, require_fit, split_entries
from cauc_ray.policies.method import Method
from cauc_ray.policies.methods.base import fit as base_policies
from cauc_ray.policies.policy import Policy, Stage, Step
from cauc_ray.policies.pools import Pool, SubChain
from cauc_ray.policies.stacking import PLAIN, Stacking
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold

# Alpha and beta of a stage, None for the first.
Pair: TypeAlias = tuple[float | None, float | None]


class PairDiagnostics(FrozenModel):
    """Diagnostics of a stage's pair fit on the calibration split; NLL in nats at alpha = beta = 1 and after the fit.

    Attributes:
        alpha_status: How the fit of alpha ended.
        beta_status: How the fit of beta ended.
        alpha_standard_error: Standard error of alpha; null without an estimate.
        beta_standard_error: Standard error of beta; null without an estimate.
        nll_before: Mean negative log likelihood at alpha = beta = 1.
        nll_after: The same after the fit.
    """

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

    @property
    def unfused(self) -> tuple[str, ...]:
        """Return the stages that are not fused with those before them."""
        return tuple(stage.name for stage in self.stages if not stage.fused)

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


def fit_rf(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
) -> RFPolicy:
    """Fit CAUC-RF on a chain of any length (paper, algorithm 2).

    Arguments and errors are those of fit_base; validation is needed unless the rule gives a threshold. A safe
    policy fuses a stage only if that is a significant gain over its own answers on validation. Where the rule compares
    gains, each stage but the last has a threshold of its own.
    """
    by_gain = rule.compare == "gain"
    if by_gain and (safe or not isinstance(calibration, ChainLogits)):
        raise OptionError(
            "gains are fitted on all logits in one process, of fused stages: leave {safe} and {shards} out"
        )
    policy = rf_of(calibration, validation, names, calibrator=calibrator, safe=safe)
    changes: dict[str, Any] = {"budget": rule.budget}
    if by_gain:
        assert isinstance(calibration, ChainLogits)
        scores = [stage.scores(logits) for stage, logits in zip(policy.stages, calibration.logits, strict=True)]
        stacking = Stacking(scores, calibration.labels)
        changes["gains"] = stacking.gains(stacking.chain(range(len(scores)), PLAIN), calibration.costs.means)
        changes["threshold"] = (STOP_NONE,) * (len(scores) - 1)
    return choose_threshold(policy.model_copy(update=changes), calibration, validation, rule)


def rf_of(
    calibration: Chain,
    validation: Chain | None,
    names: tuple[str, str],
    *,
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
) -> RFPolicy:
    """Return CAUC-RF at a threshold that no row reaches, not measured. Arguments are those of fit_rf."""
    require_fit(calibration)
    of_splits = split_entries(calibration, validation, names, BY_DEFAULT)
    stages: list[RFStage] = []
    for index in range(len(calibration.models)):
        fit = calibrate(calibration, index, calibrator)
        sums = sum_answers(calibration, {index: fit.calibrator})[index]
        pair = _pair_of(calibration, tuple(stages), fit.calibrator) if stages else None
        alpha, beta = pair.temperatures if pair else (None, None)
        stage = RFStage(
            **model_entries(calibration, index, fit, sums),
            alpha=alpha,
            beta=beta,
            pair_diagnostics=PairDiagnostics(**pair.diagnostics("alpha_", "beta_")) if pair else None,
        )
        stages.append(stage)
        if safe and index and validation is not None:
            so_far = RFPolicy(**of_splits, stages=tuple(stages))
            if not fusion_gains(so_far, validation.of_models(range(index + 1))):
                stages[index] = stage.model_copy(update={"fused": False})
    return RFPolicy(**of_splits, stages=tuple(stages))


def _pair_of(chain: Chain, before: tuple[RFStage, ...], calibrator: Calibrator) -> TemperatureFit:
    """Fit alpha and beta of a stage (paper, eq. 8-9).

    Args:
        chain: Labelled rows.
        before: Stages before it.
        calibrator: Calibrator of the stage.
    """
    return solve_temperatures(parts_of(chain, partial(_with_pair, before, calibrator)))


def _with_pair(before: tuple[RFStage, ...], calibrator: Calibrator, part: ChainPart) -> ChainPart:
    """Return a part with r of the stages before, and the next one's calibrated logits, in place of the logits."""

    def r(logits: list[Floats]) -> Floats:
        state: Floats | None = None
        for stage_logits, stage in zip(logits, before, strict=True):
            state = stage.fold(stage.calibrator.scores(stage_logits), state)
        assert state is not None
        return state

    n = len(before)
    scores = ComputedRows(part.logits[n : n + 1], lambda logits: calibrator.scores(logits[0]))
    return replace(part, logits=(ComputedRows(part.logits[:n], r), scores))


def sub_chains(pool: Pool) -> Iterator[SubChain]:
    """Fit RF to every sub-chain of a pool (paper, eq. 8-10): each prefix has its own pair and its own r."""
    calibration, validation = pool.calibration.chain, pool.validation.chain
    n_models = len(calibration.models)
    calibrators = [calibrator_of(calibration, index, pool.calibrator).calibrator for index in range(n_models)]
    dtype = dtype_of(*calibration.logits[0].shape)
    calibrated = (of.scores(logits) for of, logits in zip(calibrators, calibration.logits, strict=True))
    # The calibrated logits are not kept: rows of validation are answered in blocks.
    pairs = dict(_pairs([scores.astype(dtype, copy=False) for scores in calibrated], calibration.labels, (), None))

    def answers(rows: slice) -> list[tuple[Ints, Floats]]:
        scores = [of.scores(logits[rows]) for of, logits in zip(calibrators, validation.logits, strict=True)]
        states, answered = [*scores], list[tuple[Ints, Floats]]()
        for indices, (alpha, beta) in pairs.items():  # depth first: the last state of a length is of the prefix
            depth = len(indices) - 1
            states[depth] = fold(scores[indices[-1]], alpha, beta, states[depth - 1] if depth else None)
            answered.append(top_option(states[depth]))
        return answered

    of_blocks = zip(*in_threads(answers, list(validation.part.blocks())), strict=True)
    steps: dict[tuple[int, ...], tuple[Ints, Floats]] = {}
    for indices, blocks in zip(pairs, of_blocks, strict=True):
        predictions, confidences = (np.concatenate(of) for of in zip(*blocks, strict=True))
        steps[indices] = predictions, confidences
        prefixes = [steps[indices[: end + 1]] for end in range(len(indices))]
        yield SubChain.of_steps("rf", indices, prefixes, n_models)


def _pairs(
    scores: Sequence[Floats], labels: Ints, indices: tuple[int, ...], state: Floats | None
) -> Iterator[tuple[tuple[int, ...], Pair]]:
    """Yield all longer chains, depth first, with alpha and beta of their last stages.

    Args:
        scores: Calibrated logits of all models, float (N, K).
        labels: Int (N,).
        indices: The models so far.
        state: r after them; None without any.
    """
    for index in range(indices[-1] + 1 if indices else 0, len(scores)):
        longer = (*indices, index)
        alpha, beta = (None, None) if state is None else fit_pair(state, scores[index], labels).temperatures
        yield longer, (alpha, beta)
        if index + 1 < len(scores):
            yield from _pairs(scores, labels, longer, fold(scores[index], alpha, beta, state))


def fit(fitting: Fitting) -> Sequence[RFPolicy]:
    """Fit RF, whose threshold is the best on validation, within the budget if there is one (paper, eq. 11)."""
    return [rf_of(fitting.calibration.chain, fitting.validation.chain, fitting.names)]


def fit_shared(fitting: Fitting) -> Family:
    """Fit RF at Base's thresholds: the paper's two policies share a routing schedule."""
    base = Family(base_policies(fitting), fitting.validation)
    policies = [policy.model_copy(update={"threshold": base.default}) for policy in fit(fitting)]
    return Family(policies, fitting.validation, chooser=base)


METHOD = Method("rf", "ours", fit, policy=fit_rf, sub_chains=sub_chains, calibrators=("temperature", "offsets"))
SHARED = Method("rf-shared", "ours", fit_shared, unpublished="is rf at the threshold of base")
