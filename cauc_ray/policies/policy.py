"""What a policy is: plain numbers in a file (cauc-policy/1), and one step from a stage's logits to a decision."""

from __future__ import annotations

import hashlib
import json
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cauc_ray.errors import CaucWarning, DataError, PolicyError, explain
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.costs import LARGEST
from cauc_ray.numbers.metrics import Share
from cauc_ray.numbers.temperature import FitStatus
from cauc_ray.numbers.types import Bools, Floats, Ints

FORMAT: Literal["cauc-policy/1"] = "cauc-policy/1"


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


class Stage(FrozenModel):
    """What a policy knows of one model: its name, the mean cost of a call, its temperature."""

    name: str
    cost: float = Field(ge=0, le=LARGEST)
    temperature: float = Field(ge=1 / LARGEST, le=LARGEST)
    diagnostics: TemperatureDiagnostics


class ThresholdChoice(FrozenModel):
    """How the threshold was chosen, and on which split (null where it was given)."""

    rule: Literal["reference-accuracy", "best", "budget", "given"]
    objective: Literal["accuracy", "macro-f1"] | None
    split: str | None


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


@dataclass(frozen=True, slots=True)
class Step:
    """What a policy decides after a stage, for n rows.

    predictions: int32 (n,), the answer if the row stops here.   confidences: float64 (n,), in that answer.
    accepted: bool (n,), which rows stop.   state: float64 (n, S), what a row that goes on takes along;
    -inf pads rows with fewer options.
    """

    predictions: Ints
    confidences: Floats
    accepted: Bools
    state: Floats


# By method; the classes enter themselves.
POLICY_CLASSES: dict[str, type[Policy]] = {}


class Policy(FrozenModel):
    """What to do with a chain of models: numbers from a file, and the step that uses them."""

    format: Literal["cauc-policy/1"] = FORMAT
    method: str
    cost_unit: str
    costs: Literal["per-model", "per-call"]
    threshold: float = Field(ge=0)
    budget: float | None
    threshold_choice: ThresholdChoice
    logit_kind: str
    calibration: FittedOn
    validation: FittedOn | None
    expected: Expectation
    stages: tuple[Stage, ...]

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        for model in self.models:
            if self.models.count(model) > 1:
                raise ValueError(f"two stages are named {model!r}")
        expected = tuple(stage.name for stage in self.expected.stages)
        if expected != self.models:
            raise ValueError(f"the stages are {', '.join(self.models)}, what is expected is of {', '.join(expected)}")
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """Return the chain's model names, cheapest first."""
        return tuple(stage.name for stage in self.stages)

    @property
    def id(self) -> str:
        """Return a short digest of everything that decides an answer: two policies that differ have two ids."""
        what_was_measured = {"expected", "calibration", "validation"}
        numbers = self.model_dump(mode="json", exclude=what_was_measured)
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Make the files of a method known by its name."""
        POLICY_CLASSES[cls.model_fields["method"].default] = cls

    def start(self, logits: Floats) -> Step:
        """Decide after the first stage.   logits: float (n, K), as the model gave them."""
        return self.step(0, logits, None)

    @abstractmethod
    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Decide after a stage, given the state that its rows brought along (None at stage 0).

        logits: float (n, K), as the stage's model gave them; -inf where a row has no such option.
        Raises DataError when a row has options at this stage that it did not have before, or the reverse.
        """

    def check_chain(self, chain: ChainLogits) -> None:
        """Raise PolicyError unless the chain is this policy's; warn when its logits are of another kind."""
        if chain.models != self.models:
            raise PolicyError(f"the policy is for {', '.join(self.models)}, not for {', '.join(chain.models)}")
        if chain.logit_kind != self.logit_kind:
            warnings.warn(
                f"{chain.source} holds logits of the kind {chain.logit_kind!r}; the policy was fitted on "
                f"{self.logit_kind!r}",
                CaucWarning,
                stacklevel=2,
            )

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a policy file.

        Called on Policy it returns a policy of the file's method. Raises PolicyError when the file is missing,
        no JSON, of another format or version, or holds a number or key that the format does not allow.
        """
        content = _read_policy_json(Path(path))
        method = content.get("method")
        if not isinstance(method, str) or method not in POLICY_CLASSES:
            raise PolicyError(f"{path}: method {method!r} is none of {', '.join(POLICY_CLASSES)}")
        try:
            # As JSON text, for strictness: a number in quotes is no number, yet a list may fill a tuple.
            policy = POLICY_CLASSES[method].model_validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise PolicyError(f"{path}: {explain(error)}") from error
        if not isinstance(policy, cls):
            raise PolicyError(f"{path} holds a policy of method {method!r}, not of {cls.__name__}")
        return policy

    def to_json(self) -> str:
        """Return the policy as the text of its file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def scaled(logits: Floats, temperature: float) -> Floats:
    """Return calibrated logits z / T (paper, eq. 3), float64 (n, K)."""
    return np.asarray(logits, dtype=np.float64) / temperature


def same_width(scores: Floats, state: Floats, names: tuple[str, str]) -> tuple[Floats, Floats]:
    """Pad the narrower of two (n, K) arrays with -inf; what the wider has beyond must be padding too.

    names: of the stages that they come from, for the message of the DataError that is raised otherwise.
    """
    width = scores.shape[1] - state.shape[1]
    if width == 0:
        return scores, state
    wide, narrow = (scores, state) if width > 0 else (state, scores)
    k = narrow.shape[1]
    more = np.flatnonzero(np.isfinite(wide[:, k:]).any(axis=1))
    if len(more):
        raise DataError(
            f"row {more[0]} of the batch has {k} options or fewer at one stage and up to {wide.shape[1]} at "
            f"another ({names[0]!r} and {names[1]!r}); models of one chain must answer over the same options"
        )
    padded = np.pad(narrow, ((0, 0), (0, abs(width))), constant_values=-np.inf)
    return (scores, padded) if width > 0 else (padded, state)


def _read_policy_json(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise PolicyError(f"there is no policy file {path}")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PolicyError(f"{path} is not a readable policy file: {error}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise PolicyError(f"{path}: its format is {found!r}; this version of cauc-ray reads {FORMAT!r}")
    assert isinstance(content, dict)
    return content
