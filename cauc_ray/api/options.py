"""What `fit`, `evaluate`, `sweep` and `compare` take: one definition of names, types, defaults and what each does.

Keyword arguments are checked by it; the command's flags are made from it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cauc_ray.api.flags import Flag, names, numbers, pairs, text_or_pairs
from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.certificates import RiskLimit
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.threshold import ThresholdRule


def _plain(value: Any) -> Any:
    """Return arrays and other sequences as tuples, which types are checked on; a text is not a sequence here."""
    return tuple(value) if isinstance(value, np.ndarray | list) else value


Cost: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_plain), Flag(names, "A,B,C")]
Numbers: TypeAlias = Annotated[
    dict[str, Cost] | tuple[Cost, ...], BeforeValidator(_plain), Flag(numbers, "X,Y,Z|A=X,…")
]
Kinds: TypeAlias = Annotated[str | dict[str, str], Flag(text_or_pairs, "KIND|A=KIND,…")]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
# A share of the calibration split; or arrays: (logits, labels), or (logits, labels, example_ids).
Cut: TypeAlias = (
    Annotated[float, Field(gt=0, lt=1), Flag(float, "SHARE")] | tuple[Any, Any] | tuple[Any, Any, Any] | None
)


class Options(BaseModel):
    """Options of a verb, checked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Take the verb's own options out of what is given, and check them. Raises ConfigError in one line."""
        try:
            return cls.model_validate(cls.chosen(given))
        except ValidationError as error:
            fault = error.errors()[0]
            name, got = fault["loc"][0], fault["input"]
            if len(fault["loc"]) > 1:  # within a sequence, or one of several types
                got = given[str(name)]
            shown = " ".join(reprlib.repr(got).split())
            raise ConfigError(f"{name}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {shown}") from error

    @classmethod
    def of_all(cls, given: Mapping[str, Any]) -> Self:
        """Take options that are all the verb's own. Raises ConfigError as of() does, and for other names."""
        unknown = next((name for name in given if name not in cls.model_fields), None)
        if unknown is not None:
            raise ConfigError(unknown_name("option", unknown, cls.model_fields))
        return cls.of(given)

    @classmethod
    def chosen(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the verb's own options out of what is given, unchecked."""
        return {name: given[name] for name in cls.model_fields if name in given}


class ChainOptions(Options):
    """Which models are read, at what costs, and which examples are for what."""

    models: Names | None = Field(default=None, description="the chain, cheapest first (default: all models)")
    costs: Numbers | None = Field(
        default=None, description="of a call of each model, by name or in their order (default: the table's)"
    )
    cost_unit: str | None = Field(default=None, description="of costs (default: the table's, else 'cost units')")
    calibration_split: str = Field(default="calibration", description="what is fitted on")
    validation_split: str = Field(default="validation", description="what thresholds are chosen on")
    validation: Cut = Field(
        default=None, description="share of the calibration split to choose on (default: the validation split)"
    )
    seed: Seed = Field(default=0, description="of everything drawn at random")
    logit_kind: Kinds | None = Field(
        default=None,
        description="what the logits are: raw, log-probabilities, probabilities, surrogate (default: as declared)",
    )

    @property
    def splits(self) -> tuple[str, str]:
        """Return the names of the calibration and validation split."""
        return self.calibration_split, self.validation_split

    @property
    def cuts(self) -> dict[str, Cut]:
        """Return by name the splits that are read, the first of which is calibration.

        None for a split of its own, else a share of the first, or arrays.
        """
        return {self.calibration_split: None, self.validation_split: self.validation}

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        if self.models == ():
            raise ConfigError("models: a chain needs at least one model")
        twice = next((model for model in self.models or () if (self.models or ()).count(model) > 1), None)
        if twice is not None:
            raise ConfigError(f"models: {twice!r} is a duplicate in the chain")
        if self.calibration_split == self.validation_split:
            raise ConfigError(f"calibration and validation must be two splits, both are {self.calibration_split!r}")
        if sum(cut for cut in self.cuts.values() if isinstance(cut, float)) >= 1:
            raise ConfigError(
                "the shares of validation and test leave no example to calibrate on; their sum must be below 1"
            )
        return self


class FitOptions(ChainOptions):
    """What a policy is fitted by."""

    method: Literal["base", "rf"] = Field(default="base", description="CAUC Base or CAUC-RF")
    budget: float | None = Field(default=None, description="mean cost per example to choose the threshold for")
    threshold: float | None = Field(default=None, description="a threshold to use as it is")
    objective: Objective = Field(default="accuracy", description="what a chosen threshold maximises")
    certify: str | None = Field(default=None, description="a limit of early answers' risk, as risk<=0.05@0.95")
    search: bool = Field(default=False, description="fit the best sub-chain of the models, at most 12, in any order")
    strict: bool = Field(default=False, description="make every warning about the policy an error")
    safe: bool = Field(
        default=False, description="fuse only where supported; fall back on a single model that is no worse"
    )
    calibrator: CalibratorKind = Field(
        default="temperature",
        description="of each model: its temperature, with an offset for each option, or with a map of confidences",
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        _ = self.rule
        if self.search and self.safe:
            raise ConfigError("a search measures chains without the guards of a safe policy; leave one of both out")
        if self.search and self.certify is not None:
            raise ConfigError(
                "a chain that was searched for on validation cannot be certified there; leave one of both out"
            )
        return self

    @property
    def rule(self) -> ThresholdRule:
        """Return what decides the threshold. Raises ConfigError where options contradict each other."""
        limit = None if self.certify is None else RiskLimit.parse(self.certify)
        return ThresholdRule(self.threshold, self.budget, self.objective, limit)


class MeasureOptions(ChainOptions):
    """What methods are fitted and measured on."""

    methods: Names = Field(default=("all",), description="by name, single for each model alone")
    split: str = Field(default="test", description="where final figures are measured")
    test: Cut = Field(
        default=None, description="share of the calibration split to measure on (default: the test split)"
    )
    embedding: str | None = Field(
        default=None,
        description="what routers look at: an encoder of the table, or a model, whose call they pay (default: the "
        "first model's outputs)",
    )

    @property
    def cuts(self) -> dict[str, Cut]:
        """Return by name the splits that are read, the last of which is measured on."""
        return {**super().cuts, self.split: self.test}

    @model_validator(mode="after")
    def _unseen(self) -> Self:
        if self.split in (self.calibration_split, self.validation_split):
            raise ConfigError(f"split {self.split!r} is what methods are fitted or chosen on; measure them on another")
        return self


class SweepOptions(MeasureOptions):
    """What is swept."""

    methods: Names = Field(default=("base", "rf", "margin"), description="by name")
    points: int | None = Field(
        default=None, ge=2, le=100_000, description="this many budgets (default: every operating point)"
    )


class CompareOptions(MeasureOptions):
    """What is compared."""

    budget: float | None = Field(
        default=None, allow_inf_nan=False, description="mean cost per example to match (default: base's on validation)"
    )
    texts: str | Path | None = Field(
        default=None, description="Parquet of the queries' texts, for methods that train on them"
    )
    text_column: str = Field(default="question", description="of texts")
    checkpoints: Annotated[dict[str, str], Flag(pairs, "METHOD=MODEL,…")] = Field(
        default={},
        description="what these methods train: a hub id or a folder each, as routellm-bert=bert-base-uncased",
    )


class EvaluateOptions(Options):
    """What a policy is replayed on."""

    split: str = Field(default="test", description="the split to replay")
    logit_kind: Kinds | None = Field(
        default=None, description="what the logits are (default: as declared, else what the policy was fitted on)"
    )


class CheckOptions(EvaluateOptions):
    """What a policy is checked on."""

    split: str = Field(default="test", description="the split to check")
    seed: Seed = Field(default=0, description="of the order in which examples come")
