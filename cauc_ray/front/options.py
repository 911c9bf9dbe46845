"""What `fit` and `evaluate` can be asked for: one definition of names, types, defaults and what each option does.

Keyword arguments are checked by it, and the command line passes its flags on by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.certificates import RiskLimit
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.threshold import ThresholdRule


def _plain(value: Any) -> Any:
    """Return arrays and other sequences as tuples, which types are checked on; a text is not a sequence here."""
    return tuple(value) if isinstance(value, np.ndarray | list) else value


Names: TypeAlias = Annotated[tuple[str, ...], BeforeValidator(_plain)]
Numbers: TypeAlias = Annotated[dict[str, float] | tuple[float, ...], BeforeValidator(_plain)]
Kinds: TypeAlias = str | dict[str, str]


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
            raise ConfigError(f"{name}: {fault['msg'][0].lower()}{fault['msg'][1:]}, got {got!r}") from error

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


class FitOptions(Options):
    """What a policy is fitted by."""

    models: Names | None = Field(default=None, description="the chain, cheapest first (default: all models)")
    method: Literal["base", "rf"] = Field(default="base", description="CAUC Base or CAUC-RF")
    costs: Numbers | None = Field(
        default=None, description="of a call of each model, by name or in their order (default: the table's)"
    )
    cost_unit: str | None = Field(default=None, description="of costs (default: the table's, else 'cost units')")
    calibration_split: str = Field(default="calibration", description="what the policy is fitted on")
    validation_split: str = Field(default="validation", description="what its threshold is chosen on")
    validation: float | None = Field(
        default=None, gt=0, lt=1, description="share of the calibration split to choose on (default: a split)"
    )
    seed: int = Field(default=0, ge=0, description="of what is drawn at random: that share")
    budget: float | None = Field(default=None, description="mean cost per example to choose the threshold for")
    threshold: float | None = Field(default=None, description="a threshold to use as it is")
    objective: Objective = Field(default="accuracy", description="what a chosen threshold maximises")
    certify: str | None = Field(default=None, description="a limit of early answers' risk, as risk<=0.05@0.95")
    search: bool = Field(default=False, description="fit the best sub-chain of the models, at most 12, in any order")
    strict: bool = Field(default=False, description="make every warning about the policy an error")
    safe: bool = Field(
        default=False, description="fuse only where supported; fall back on a single model that is no worse"
    )
    calibrator: CalibratorKind = Field(default="temperature", description="of each model")
    logit_kind: Kinds | None = Field(default=None, description="what the logits are (default: as declared, else raw)")

    @model_validator(mode="after")
    def _agree(self) -> Self:
        _ = self.rule
        if self.calibration_split == self.validation_split:
            raise ConfigError(f"calibration and validation must be two splits, both are {self.calibration_split!r}")
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

    @property
    def splits(self) -> tuple[str, str]:
        """Return the names of the calibration and validation split."""
        return self.calibration_split, self.validation_split


class EvaluateOptions(Options):
    """What a policy is replayed on."""

    split: str = Field(default="test", description="the split to replay")
    logit_kind: Kinds | None = Field(
        default=None, description="what the logits are (default: as declared, else what the policy was fitted on)"
    )
