"""The record in a policy's file of how its numbers were obtained: fits, choices and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.json_schema import SkipJsonSchema

from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.guarantees import CertifiedSegment
from cauc_ray.numbers.intervals import Share, share_to_come

MOST_CURVE_POINTS = 100
# In a reference: bins of confidence, groups of options, and the number of an answer's likeliest options that count.
N_BINS = 10
N_GROUPS = 8
N_LIKELIEST = 3


class FrozenModel(BaseModel):
    """A part of a file; unknown keys and numbers that JSON does not have are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TemperatureDiagnostics(FrozenModel):
    """Diagnostics of a stage's calibration on the calibration split; NLL in nats, the standard error in T.

    Calibration errors are over 15 equal-width bins, before (at T = 1) and after all that calibrates the stage.

    Attributes:
        status: How the fit of the temperature ended.
        standard_error: Standard error of the temperature; null without an estimate.
        nll_before: Mean negative log likelihood at T = 1.
        nll_after: The same after the fit.
        calibration_error_before: Expected calibration error at T = 1.
        calibration_error_after: The same after calibration.
        accuracy: Accuracy of the model alone.
        logits_fingerprint: Digest of the logits that were fitted.
    """

    status: FitStatus
    standard_error: float | None
    nll_before: float
    nll_after: float
    calibration_error_before: float
    calibration_error_after: float
    accuracy: float
    logits_fingerprint: str


class Noise(FrozenModel):
    """How far other rows of a call move a row's logits, and what that does to answers.

    Attributes:
        logits: Measured noise of each model, in units of its logits.
        may_flip: Rows that get another answer, or the same from another stage, if the noise of all models is against
            it.
        n: Rows of the split.
        split: Name of the split.
    """

    logits: dict[str, float]
    may_flip: int = Field(ge=0)
    n: int = Field(ge=1)
    split: str


class RiskCertificate(FrozenModel):
    """The certificate of early answers (given before the last stage): their risk is at most `risk`.

    Attributes:
        risk: Highest allowed share of wrong answers among the early ones.
        confidence: Confidence of the certificate.
        n: Rows of the split.
        n_accepted: Rows answered early.
        n_wrong: Rows answered early and wrong.
        upper_bound: Exact bound of the risk at that confidence, without a correction for the other tested thresholds.
        plug_in_threshold: Threshold of most coverage with an observed risk within the limit.
        plug_in_accepted: Rows answered early at the plug-in threshold; those beyond n_accepted are the price of the
            guarantee.
        least_deferred: Share of the rows that any rule defers at this risk; null where it was not measured.
        by: Column whose segments the certificate holds in; null without segments.
        segments: Counts of each of them; the confidence is that of all of them together.
    """

    risk: float = Field(gt=0, lt=1)
    confidence: float = Field(gt=0, lt=1)
    n: int = Field(ge=1)
    n_accepted: int = Field(ge=1)
    n_wrong: int = Field(ge=0)
    upper_bound: float = Field(gt=0, lt=1)
    plug_in_threshold: float
    plug_in_accepted: int = Field(ge=1)
    least_deferred: float | None = Field(default=None, ge=0, le=1)
    by: str | None = None
    segments: tuple[CertifiedSegment, ...] = ()


class ThresholdChoice(FrozenModel):
    """How the threshold was chosen.

    Attributes:
        rule: Rule that chose it.
        objective: What it maximises; for a threshold that the user set, the quality of the curve, null for accuracy.
        split: Split on which it was chosen; null for a threshold that the user set.
        certificate: Certificate of a certified threshold.
        price: Price of a unit of cost, in errors; null under other rules.
        confidence: Confidence that new inputs keep the budget; null where it is kept on the split alone.
    """

    rule: Literal["reference-accuracy", "best", "budget", "given", "certified", "price"]
    objective: Literal["accuracy", "macro-f1"] | None
    split: str | None
    certificate: RiskCertificate | None = None
    price: float | None = None
    confidence: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _certified_by_a_certificate(self) -> Self:
        if (self.rule == "certified") != (self.certificate is not None):
            raise ValueError("a certificate belongs to a certified threshold, and no other has one")
        return self


class FittedOn(FrozenModel):
    """A split on which numbers were fitted or chosen: its size and a digest of its ids and labels.

    Attributes:
        split: Name of the split.
        n: Number of its examples.
        examples_fingerprint: Digest of their ids and labels.
    """

    split: str
    n: int
    examples_fingerprint: str


class StageShare(FrozenModel):
    """How many examples reached a stage and stopped at it, as shares too, and the accuracy of these answers.

    Shares of no examples are null.

    Attributes:
        name: Name of the stage.
        reached: Examples that reached it.
        answered: Examples that stopped at it.
        coverage: Share of these in all examples.
        accepted_accuracy: Accuracy of their answers.
    """

    name: str
    reached: int
    answered: int
    coverage: Share | None
    accepted_accuracy: Share | None


class Measures(FrozenModel):
    """A policy's results on a split.

    Attributes:
        split: Name of the split.
        n: Examples.
        accuracy: Accuracy over the labelled examples, with its 95 % confidence interval; where it is what a policy
            expects, the 95 % prediction interval for as many new examples. Null without labels.
        macro_f1: Macro F1 over the labelled examples, None for answers in words; not in files.
        cost: Mean cost per example.
        relative_cost: The cost divided by the last model's; null if that is 0.
        stages: Coverage and accuracy of each stage.
        cost_deviation: Standard deviation of the examples' costs.
    """

    split: str
    n: int = Field(ge=1)
    accuracy: Share | None
    macro_f1: SkipJsonSchema[float | None] = Field(default=None, exclude=True)
    cost: float
    relative_cost: float | None
    stages: tuple[StageShare, ...]
    cost_deviation: float = Field(ge=0)

    @property
    def cost_interval(self) -> tuple[float, float]:
        """Return the 95 % interval of the mean cost, by its normal limit."""
        half = 1.96 * self.cost_deviation / self.n**0.5
        return max(0.0, self.cost - half), self.cost + half

    def to_come(self, n_later: int | None = None, held_out: float | None = None) -> Share | None:
        """Return the accuracy with its 95 % prediction interval for new examples; None without labels.

        Rows that chose something look better than new examples, and held-out ones worse, since only some of the rows
        have chosen: the interval then reaches from the lower end for these to the upper end for those.

        Args:
            n_later: Number of new labelled examples; None for as many as here.
            held_out: Accuracy of what was chosen without each row, where these rows chose something.
        """
        if self.accuracy is None:
            return None
        value, n = self.accuracy.value, self.accuracy.n
        in_sample = share_to_come(round(value * n), n, n_later)
        if held_out is None:
            return in_sample
        later = share_to_come(round(held_out * n), n, n_later)
        return Share(later.value, later.low, max(later.high, in_sample.high), n)

    @property
    def answered(self) -> tuple[int, ...]:
        """Return how many examples each stage answered."""
        return tuple(stage.answered for stage in self.stages)

    @property
    def n_labelled(self) -> int:
        """Return how many of the examples have a label."""
        return self.accuracy.n if self.accuracy else 0


class OfflineAccuracy(FrozenModel):
    """Results of the first stages alone, if the later ones cannot be reached.

    Attributes:
        stages: Number of first stages.
        accuracy: Accuracy over labelled examples, each answered by the last of these stages that it reaches; low to
            high is a 95 % prediction interval for at least as many new examples.
        degraded: Share of the examples that would have escalated to a later stage.
    """

    stages: int = Field(ge=1)
    accuracy: Share
    degraded: float = Field(ge=0, le=1)


# Files of earlier versions have it under another key.
Message: TypeAlias = Annotated[str, Field(validation_alias=AliasChoices("message", "says"))]


class SafeChoice(FrozenModel):
    """What --safe changed in a policy (policies.fitting).

    Attributes:
        models: The chain before the changes.
        unfused: Stages of the chain whose fusion was rejected.
        limit: Largest allowed mean cost per example on validation.
        message: Description in one line.
    """

    models: tuple[str, ...]
    unfused: tuple[str, ...]
    limit: float = Field(ge=0)
    message: Message


GuardName: TypeAlias = Literal[
    "cost-above-largest",
    "below-single-model",
    "few-examples",
    "separable",
    "calibration-worse",
    "data-shift",
]


class Guard(FrozenModel):
    """A check of a policy for a common problem, and its result.

    Attributes:
        name: Name of the check (docs/how-to/guards.md); files of earlier versions have others.
        stage: Stage that it concerns, null for the policy.
        fired: Whether it warns.
        message: Description in one line.
        figures: Its numbers, by name.
    """

    name: str
    stage: str | None
    fired: bool
    message: Message
    figures: dict[str, float]


class StageFigures(FrozenModel):
    """What the models of a policy do on the split that its guards are measured on.

    Attributes:
        name: Model that answers.
        n_fixed: Examples that reach it, whose answer is right by fusion only.
        n_broken: Examples that reach it, whose answer is wrong by fusion only.
        ranking: Area under the ROC curve of its confidence against right answers; null where all are right, or none.
    """

    name: str
    n_fixed: int = Field(ge=0)
    n_broken: int = Field(ge=0)
    ranking: float | None = Field(ge=0, le=1)


Likeliest = Annotated[str, StringConstraints(pattern=f"^[0-{N_GROUPS - 1}]{{{N_LIKELIEST}}}$")]


class StageReference(FrozenModel):
    """Statistics of a stage's answers on the validation split; counts are rows.

    Attributes:
        name: Name of the stage.
        confidences: Answers by equal-width bin of their confidence.
        right: Right answers by bin.
        likeliest: Answers by their three likeliest options in order, one digit each, options modulo eight.
        agreed: Answers that equal those of the full cascade.
        cost: Mean cost of its answers; null without any.
        calibration_error: Error over 15 equal-width bins; null without any answers.
    """

    name: str
    confidences: tuple[int, ...]
    right: tuple[int, ...]
    likeliest: Mapping[Likeliest, int]
    agreed: int = Field(ge=0)
    cost: float | None = Field(ge=0)
    calibration_error: float | None = Field(ge=0, le=1)


class Reference(FrozenModel):
    """The reference for later answers: statistics of n validation rows, all labelled, at the policy's threshold.

    Attributes:
        split: Name of the split.
        n: Number of its rows.
        stages: Statistics of each stage.
    """

    split: str
    n: int = Field(ge=1)
    stages: tuple[StageReference, ...]

    def contradictions(self, models: Sequence[str]) -> Iterator[str]:
        """Yield contradictions among the counts and with the models."""
        names = [stage.name for stage in self.stages]
        if names != list(models):
            yield f"the stages are {', '.join(models)}, but the reference has {', '.join(names)}"
        for stage in self.stages:
            if not len(stage.confidences) == len(stage.right) == N_BINS:
                yield f"the reference of {stage.name!r} must have {N_BINS} bins"
            n = sum(stage.confidences)
            rows = [*stage.confidences, *stage.right, *stage.likeliest.values()]
            exceeding = any(right > of for right, of in zip(stage.right, stage.confidences, strict=True))
            if min(rows) < 0 or exceeding or stage.agreed > n or sum(stage.likeliest.values()) != n:
                yield f"the counts in the reference of {stage.name!r} contradict each other"


class Decision(FrozenModel):
    """What chose the thresholds of the stages: a price of a unit of cost, in accuracy.

    Attributes:
        compare: What gains in accuracy are compared with.
        at: The price.
    """

    compare: Literal["price"] = "price"
    at: float


class CurvePoint(FrozenModel):
    """A threshold, or one for each stage, with mean cost per example and quality on the validation split.

    Attributes:
        threshold: The threshold, or those of the stages but the last.
        price: Which chose them; null for one threshold.
        cost: Mean per example.
        quality: Of the objective.
    """

    threshold: float | tuple[float, ...]
    price: float | None = None
    cost: float = Field(ge=0)
    quality: float = Field(ge=0, le=1)


class FoundChain(FrozenModel):
    """A chain that a search measured on validation, at the threshold that the rule chooses for it.

    Attributes:
        method: Method of its fit.
        models: Its models.
        quality: Value of the objective; null if no threshold was within the budget.
        cost: Mean cost per example; null if no threshold was within the budget.
    """

    method: str
    models: tuple[str, ...]
    quality: float | None
    cost: float | None


class ChosenChain(FoundChain):
    """The best of some chains, and an estimate of its quality on examples that were not used to choose it.

    Attributes:
        holdout_quality: Quality of the chain and threshold chosen on one half of validation, measured on the other;
            the mean over the halves, null if the choice failed on both.
        holdout_cost: Their mean cost, measured in the same way.
        holdout_accuracy: Their accuracy, measured in the same way; null in files of earlier versions.
    """

    holdout_quality: float | None
    holdout_cost: float | None
    holdout_accuracy: float | None = None


class ChainSearch(FrozenModel):
    """How a policy's chain was chosen among all sub-chains of a pool, cheapest first.

    Attributes:
        pool: Models of the pool.
        split: Split on which the chain was chosen.
        objective: Quality that the choice maximised.
        budget: Largest allowed mean cost per example; null without one.
        n_chains: Sub-chains of the pool.
        n_measured: Sub-chains that were measured.
        n_halves: Halves of the split on which the choice was repeated.
        n_same: Halves that chose the same chain.
        chosen: The policy's chain.
        full: All models of the pool.
        pair: The best chain of two models.
        single: The best single model.
        runners_up: The next best chains after the chosen one.
    """

    pool: tuple[str, ...]
    split: str
    objective: Literal["accuracy", "macro-f1"]
    budget: float | None
    n_chains: int
    n_measured: int
    n_halves: int
    n_same: int
    chosen: ChosenChain
    full: ChosenChain
    pair: ChosenChain | None
    single: ChosenChain
    runners_up: tuple[FoundChain, ...]
