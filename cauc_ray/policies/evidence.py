"""The record in a policy's file of how its numbers were obtained: fits, choices and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.json_schema import SkipJsonSchema

from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.intervals import Share

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

    logits: the measured noise of each model, in units of its logits.   may_flip: of a split's n rows, those that get
    another answer, or theirs from another stage, where the noise is against it in every model.
    """

    logits: dict[str, float]
    may_flip: int = Field(ge=0)
    n: int = Field(ge=1)
    split: str


class RiskCertificate(FrozenModel):
    """The certificate of early answers (given before the last stage): their risk is at most `risk`.

    confidence: of the certificate.   n_accepted: of the split's n rows, those answered early; n_wrong of them are
    wrong. upper_bound: exact bound of the risk at that confidence, ignoring that other thresholds were tested.
    plug_in_threshold, plug_in_accepted: the threshold of most coverage with an observed risk within the limit; its
    additional early answers are the price of the guarantee.
    """

    risk: float = Field(gt=0, lt=1)
    confidence: float = Field(gt=0, lt=1)
    n: int = Field(ge=1)
    n_accepted: int = Field(ge=1)
    n_wrong: int = Field(ge=0)
    upper_bound: float = Field(gt=0, lt=1)
    plug_in_threshold: float
    plug_in_accepted: int = Field(ge=1)


class ThresholdChoice(FrozenModel):
    """How the threshold was chosen, and on which split (null if it was given).

    objective: what it maximises; with a given threshold, the quality of the curve, null for accuracy.
    certificate: of a certified threshold.   price: of a unit of cost, in errors, where that decided.
    """

    rule: Literal["reference-accuracy", "best", "budget", "given", "certified", "price"]
    objective: Literal["accuracy", "macro-f1"] | None
    split: str | None
    certificate: RiskCertificate | None = None
    price: float | None = None

    @model_validator(mode="after")
    def _certified_by_a_certificate(self) -> Self:
        if (self.rule == "certified") != (self.certificate is not None):
            raise ValueError("a certificate belongs to a certified threshold, and no other has one")
        return self


class FittedOn(FrozenModel):
    """A split on which numbers were fitted or chosen: its size and a digest of its ids and labels."""

    split: str
    n: int
    examples_fingerprint: str


class StageShare(FrozenModel):
    """How many examples reached a stage and stopped there, as shares too, and the accuracy of these answers.

    Shares of no examples are null.
    """

    name: str
    reached: int
    answered: int
    coverage: Share | None
    accepted_accuracy: Share | None


class Measures(FrozenModel):
    """A policy's results on a split: mean cost per example, and relative to the last model's, null if that is 0.

    accuracy, macro_f1: over the labelled examples, null without any; files have no macro_f1.   cost_deviation: standard
    deviation of the examples' costs.
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

    @property
    def answered(self) -> tuple[int, ...]:
        """Return how many examples each stage answered."""
        return tuple(stage.answered for stage in self.stages)

    @property
    def n_labelled(self) -> int:
        """Return how many of the examples have a label."""
        return self.accuracy.n if self.accuracy else 0


class OfflineAccuracy(FrozenModel):
    """What the first stages alone answer, where the others cannot be reached.

    stages: how many of them.   accuracy: over labelled examples, each answered by the last of these stages that it
    comes to; low to high is where the accuracy over as many other examples, or more, is to be expected (95 %).
    degraded: the share of the examples that would have gone on.
    """

    stages: int = Field(ge=1)
    accuracy: Share
    degraded: float = Field(ge=0, le=1)


class SafeChoice(FrozenModel):
    """What --safe changed in a policy (policies.fitting).

    models: the given chain.   unfused: its stages whose fusion was rejected.   limit: the largest allowed mean cost per
    example on validation.   says: a description in one line.
    """

    models: tuple[str, ...]
    unfused: tuple[str, ...]
    limit: float = Field(ge=0)
    says: str


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
        says: Description in one line.
        figures: Its numbers, by name.
    """

    name: str
    stage: str | None
    fired: bool
    says: str
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

    confidences: by equal-width bins of the answers' confidences.   right: right answers by bin.
    likeliest: by the three likeliest options of an answer in order, one digit each, options modulo eight.
    agreed: answers that equal those of the whole cascade.
    cost: mean over its answers.   calibration_error: over 15 equal-width bins. Both null if it answered nothing.
    """

    name: str
    confidences: tuple[int, ...]
    right: tuple[int, ...]
    likeliest: Mapping[Likeliest, int]
    agreed: int = Field(ge=0)
    cost: float | None = Field(ge=0)
    calibration_error: float | None = Field(ge=0, le=1)


class Reference(FrozenModel):
    """The reference for later answers: statistics of n validation rows, all labelled, at the policy's threshold."""

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
    """What chose the thresholds of the stages: a price of a unit of cost, in accuracy."""

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

    method: by which it was fitted.   quality: of the objective.   cost: mean per
    example. Both null if no threshold was within the budget.
    """

    method: str
    models: tuple[str, ...]
    quality: float | None
    cost: float | None


class ChosenChain(FoundChain):
    """The best of some chains, and an estimate of its quality on examples that were not used to choose it.

    holdout_quality, holdout_cost: chain and threshold chosen on one half of validation and measured on the other, the
    mean over the halves; null if the choice failed on both halves.
    """

    holdout_quality: float | None
    holdout_cost: float | None


class ChainSearch(FrozenModel):
    """How a policy's chain was chosen among all sub-chains of a pool, cheapest first.

    split: where the chain was chosen.   objective: what was maximised there.   budget: null without one.
    n_measured: of n_chains.
    n_halves: on how many halves the choice was repeated.   n_same: how many of these chose the same chain.
    chosen: the policy's.   full: all models of the pool.   pair, single: the best of two models, and of one.
    runners_up: the next best chains after the chosen one.
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
