"""What a policy's file says of how its numbers came about: fits, choices, and what was measured."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cauc_ray.numbers.metrics import Share
from cauc_ray.numbers.temperature import FitStatus

MOST_CURVE_POINTS = 100


class FrozenModel(BaseModel):
    """A part of a file that refuses keys it does not know and numbers that JSON does not have."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class MeasuredShare(FrozenModel):
    """A share of n rows with its 95 % Wilson interval."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, share: Share) -> MeasuredShare | None:
        """Take over a computed share; None where there were no rows."""
        return cls(value=share.value, low=share.low, high=share.high, n=share.n) if share.n else None


class TemperatureDiagnostics(FrozenModel):
    """How a stage's temperature fit went, on the calibration split; NLL in nats, the standard error in T.

    Calibration errors are over 15 equal-width bins, before (T = 1) and after.
    """

    status: FitStatus
    standard_error: float | None
    nll_before: float
    nll_after: float
    calibration_error_before: float
    calibration_error_after: float
    accuracy: float
    logits_fingerprint: str


class RiskCertificate(FrozenModel):
    """What is certified of the answers given before the last stage: that their risk is at most so much.

    confidence: of saying so.   n_accepted: of the split's n rows, those answered early; n_wrong of these are.
    upper_bound: of the risk, exact, at that confidence, as if no other threshold had been tested.
    plug_in_threshold, plug_in_accepted: the threshold of most coverage that merely kept to the risk on these rows; what
    more it answers early is the price of the promise.
    """

    risk: float = Field(gt=0, lt=1)
    confidence: float = Field(gt=0, lt=1)
    n: int = Field(ge=1)
    n_accepted: int = Field(ge=1)
    n_wrong: int = Field(ge=0)
    upper_bound: float = Field(gt=0, lt=1)
    plug_in_threshold: float = Field(ge=0)
    plug_in_accepted: int = Field(ge=1)


class ThresholdChoice(FrozenModel):
    """How the threshold was chosen, and on which split (null where it was given).

    objective: what it maximises. Beside a given threshold it says what the curve's quality is, null for accuracy.
    certificate: of a certified threshold.
    """

    rule: Literal["reference-accuracy", "best", "budget", "given", "certified"]
    objective: Literal["accuracy", "macro-f1"] | None
    split: str | None
    certificate: RiskCertificate | None = None

    @model_validator(mode="after")
    def _certified_by_a_certificate(self) -> Self:
        if (self.rule == "certified") != (self.certificate is not None):
            raise ValueError("a certificate belongs to a certified threshold, and no other has one")
        return self


class FittedOn(FrozenModel):
    """A split that numbers were fitted or chosen on: its size and a digest of its ids and labels."""

    split: str
    n: int
    examples_fingerprint: str


class StageExpectation(FrozenModel):
    """How many examples reached and left a stage, and how often its accepted answers were right."""

    name: str
    reached: int
    answered: int
    coverage: MeasuredShare | None
    accepted_accuracy: MeasuredShare | None


class Expectation(FrozenModel):
    """What the policy did on a labelled split: mean cost per example, and relative to the last model alone."""

    split: str
    n: int = Field(ge=1)
    accuracy: MeasuredShare
    cost: float
    relative_cost: float | None
    stages: tuple[StageExpectation, ...]


class CurvePoint(FrozenModel):
    """A threshold with the mean cost per example and the quality that it had on the validation split."""

    threshold: float = Field(ge=0)
    cost: float = Field(ge=0)
    quality: float = Field(ge=0, le=1)


class FoundChain(FrozenModel):
    """A chain that a search measured on validation, at the threshold that its rule gives it.

    quality: of the objective.   cost: mean per example. Both null where no threshold was within the budget.
    """

    models: tuple[str, ...]
    quality: float | None
    cost: float | None


class ChosenChain(FoundChain):
    """The best of some chains, and what choosing among them is worth on examples that had no part in it.

    holdout_quality, holdout_cost: chain and threshold chosen on one half of validation and measured on the other, the
    mean over the halves; null where no half could be chosen on.
    """

    holdout_quality: float | None
    holdout_cost: float | None


class ChainSearch(FrozenModel):
    """How a policy's chain was found among all sub-chains of a pool, cheapest first.

    split: where the chain was chosen.   objective: what was maximised there.   budget: null without one.
    n_measured: of n_chains; the others were proven to be none of those named here.
    n_halves: on so many the choice was repeated.   n_same: of these, how many chose the same chain.
    chosen: the policy's.   full: all models of the pool.   pair, single: the best of so many models.
    runners_up: the next best after the chosen one.
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
