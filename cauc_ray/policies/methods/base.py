"""CAUC Base (paper, algorithm 1)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.errors import CaucWarning, ConfigError
from cauc_ray.numbers.calibrators import KINDS, CalibratorKind
from cauc_ray.numbers.chain import LARGEST, Chain
from cauc_ray.numbers.intervals import signs
from cauc_ray.numbers.logits import same_width
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.calibrated import CalibratorFit, calibrator_of, sum_answers
from cauc_ray.policies.evidence import ThresholdChoice
from cauc_ray.policies.fitting import Fitting, calibrate, fusion_gains, model_entries, require_fit, split_entries
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy, Stage, Step
from cauc_ray.policies.pools import Pool, SubChain
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold

# The paper's epsilon, which only has to keep a model of constant logits from dividing by zero.
EPSILON = 1e-12


class BaseStage(Stage):
    """A stage of CAUC Base: mean and deviation of its calibrated logits, and whether it joins the fusion.

    Attributes:
        mean: Mean of its calibrated logits on the calibration split.
        std: Their standard deviation.
        fused: Whether it joins the fusion; of the last stage always true.
        complementarity_rate: That with the last stage (paper, eq. 6), whose own is null.
        n_gain: Examples that count as gains in that rate; null if it is null.
        n_loss: Examples that count as losses in it; null if it is null.
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

    @property
    def unfused(self) -> tuple[str, ...]:
        """Return the stages that are not fused although their complementarity rate is positive."""
        return tuple(stage.name for stage in self.stages if not stage.fused and (stage.complementarity_rate or 0) > 0)

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
        return Step(predictions, confidences, confidences >= self.threshold, np.empty((len(scores), 0)), scores)

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
            state = np.concatenate([weight, total], axis=1)
            return Step(unfused.predictions, unfused.confidences, unfused.accepted, state, rescaled)

        fused = total / weight
        on_last_scale = fused * (numbers.std + EPSILON) + numbers.mean
        scores = np.where(unfused_mask[:, None], scores, on_last_scale)
        confidences = numbers.calibrator.answers(scores)[1]
        # Without other fused models, standardising may still round two logits of a row into a tie.
        predictions = np.where(unfused_mask, unfused.predictions, fused.argmax(axis=1)).astype(np.int32)
        rescaled = numbers.calibrator.rescaled(scores, predictions)
        return Step(predictions, confidences, np.full(len(predictions), True), unfused.state, rescaled)


def fit_base(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
    fits: Sequence[CalibratorFit] | None = None,
) -> BasePolicy:
    """Fit CAUC Base on a chain of any length (paper, algorithm 1).

    Args:
        calibration: Labelled examples.
        validation: Required if the rule has a budget or a risk to certify. Otherwise it only gives the expected
            results, and those at other budgets, if all of its examples have labels.
        rule: How to choose the threshold.
        names: Names of the two splits.
        calibrator: Kind of calibrator of every model.
        safe: Fuse models only if validation, with all of its labels, supports it.
        fits: Calibrators of the models, fitted on calibration; None to fit them.

    Raises:
        DataError: Labels are missing.
        BudgetError: No operating point is within the budget.
        RiskError: No threshold is certified.
        ConfigError: The method does not support the rule.
    """
    _require_rule(rule)
    policy = base_of(calibration, validation, names, calibrator=calibrator, safe=safe, fits=fits)
    policy = policy.model_copy(update={"budget": rule.budget})
    return choose_threshold(policy, calibration, validation, rule, reference=policy.threshold)


def base_of(
    calibration: Chain,
    validation: Chain | None,
    names: tuple[str, str],
    *,
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
    fits: Sequence[CalibratorFit] | None = None,
) -> BasePolicy:
    """Return CAUC Base at the last model's calibration accuracy, not measured. Arguments are those of fit_base."""
    require_fit(calibration)
    if fits is None:
        fits = [calibrate(calibration, index, calibrator) for index in range(len(calibration.models))]
    sums = sum_answers(calibration, {index: fit.calibrator for index, fit in enumerate(fits)})
    stages = []
    for index, fit in enumerate(fits):
        stage_sums, last = sums[index], index == len(fits) - 1
        rate = None if last else stage_sums.complementarity_rate
        stages.append(
            BaseStage(
                **model_entries(calibration, index, fit, stage_sums),
                mean=stage_sums.logits.mean,
                std=stage_sums.logits.std,
                complementarity_rate=rate,
                fused=rate is None or rate > 0,
                n_gain=None if last else stage_sums.n_gain,
                n_loss=None if last else stage_sums.n_loss,
            )
        )
    common = split_entries(calibration, validation, names, BY_DEFAULT)
    common["threshold"] = sums[len(fits) - 1].accuracy
    common["threshold_choice"] = ThresholdChoice(rule="reference-accuracy", objective=None, split=names[0])
    policy = BasePolicy(**common, stages=tuple(stages))
    return _admitted(policy, validation) if safe else policy


def _admitted(policy: BasePolicy, validation: Chain | None) -> BasePolicy:
    """Return a policy without unsupported fusions.

    A model stays fused if its gain on calibration is significant. With a validation split, which must have all labels,
    the models stay only if fusion is a significant gain over the last stage's unfused answers on it.
    """
    n, early_stages = policy.calibration.n, policy.stages[:-1]
    admitted = [stage for stage in early_stages if signs(stage.n_gain or 0, stage.n_loss or 0, n).gains]
    candidate = _fusing(policy, admitted)
    if validation is None or not admitted:
        return candidate
    return candidate if fusion_gains(candidate, validation) else _fusing(policy, [])


def _fusing(policy: BasePolicy, fused: Sequence[BaseStage]) -> BasePolicy:
    *early_stages, last = policy.stages
    stages = (stage.model_copy(update={"fused": stage in fused}) for stage in early_stages)
    return policy.model_copy(update={"stages": (*stages, last)})


def _require_rule(rule: ThresholdRule) -> None:
    """Raise ConfigError unless Base can choose a threshold by the rule."""
    if rule.objective != "accuracy" and rule.budget is None:
        raise ConfigError("method base uses an objective only with a budget; its default is the reference accuracy")


def sub_chains(pool: Pool) -> Iterator[SubChain]:
    """Fit Base to every sub-chain of a pool (paper, algorithm 1): fusion depends only on the last model.

    One fit for each last model serves all chains that end there. Stages before it answer by themselves, independently
    of other stages, and only fused stages change the last answer.
    """
    _require_rule(pool.rule)
    calibration, validation, names = pool.calibration.chain, pool.validation.chain, ("calibration", "validation")
    fits = [calibrator_of(calibration, index, pool.calibrator) for index in range(len(calibration.models))]
    for last in range(len(calibration.models)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaucWarning)  # the final fit of the chosen chain issues the warnings
            policy = base_of(calibration.of_models(range(last + 1)), None, names, fits=fits[: last + 1])
        unfused = [policy.unfused_step(index, logits) for index, logits in enumerate(validation.logits[: last + 1])]
        yield from _ending(policy, unfused, (), None, policy.fuse(last, unfused[last], None), len(calibration.models))


def _ending(
    policy: BasePolicy, unfused: list[Step], indices: tuple[int, ...], state: Floats | None, end: Step, n_models: int
) -> Iterator[SubChain]:
    """Return all chains that start with these indices and end with the policy's last stage.

    Args:
        policy: A fit of all models of the pool up to its last stage.
        unfused: Unfused step of each stage.
        indices: Indices of the chain's models so far.
        state: State after these models.
        end: The last stage's step from that state.
        n_models: Number of models in the pool.
    """
    last = len(policy.stages) - 1
    steps = [(step.predictions, step.confidences) for step in (*(unfused[index] for index in indices), end)]
    yield SubChain.of_steps("base", (*indices, last), steps, n_models, policy.threshold)
    for index in range(indices[-1] + 1 if indices else 0, last):
        after = state, end
        if policy.stages[index].fused:
            longer = policy.fuse(index, unfused[index], state).state
            after = longer, policy.fuse(last, unfused[last], longer)
        yield from _ending(policy, unfused, (*indices, index), *after, n_models)


def fit(fitting: Fitting) -> Sequence[BasePolicy]:
    """Fit Base, whose threshold without a budget is the last model's calibration accuracy (paper, eq. 5)."""
    return [base_of(fitting.calibration.chain, fitting.validation.chain, fitting.names)]


METHOD = Method("base", "ours", fit, policy=fit_base, sub_chains=sub_chains, calibrators=KINDS)
