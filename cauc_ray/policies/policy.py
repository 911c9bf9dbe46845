"""What a policy is: plain numbers in a file (cauc-policy/1), and one step from a stage's logits to a decision."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, field_validator, model_validator

from cauc_ray.errors import CaucWarning, ConfigError, DataError, PolicyError, explain
from cauc_ray.numbers.calibrators import Calibrator, CalibratorKind
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.costs import LARGEST
from cauc_ray.numbers.softmax import likeliest
from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import (
    MOST_CURVE_POINTS,
    N_GROUPS,
    N_LIKELIEST,
    ChainSearch,
    CurvePoint,
    Expectation,
    FittedOn,
    FrozenModel,
    Guard,
    IsotonicMap,
    Reference,
    SafeChoice,
    TemperatureDiagnostics,
    ThresholdChoice,
    require_counts,
)

FORMAT: Literal["cauc-policy/1"] = "cauc-policy/1"


class Stage(FrozenModel):
    """What a policy knows of one model: its name, the mean cost of a call, its calibration.

    offsets: added to the scaled logits, one for each option; null for none.   isotonic: what becomes of confidences;
    null where they stay.
    """

    name: str
    cost: float = Field(ge=0, le=LARGEST)
    temperature: float = Field(ge=1 / LARGEST, le=LARGEST)
    offsets: tuple[Annotated[float, Field(ge=-LARGEST, le=LARGEST)], ...] | None = None
    isotonic: IsotonicMap | None = None
    diagnostics: TemperatureDiagnostics

    @property
    def beside_id(self) -> set[str]:
        """Return the fields that a policy's id leaves out: at their defaults it is what it was before them."""
        fields = type(self).model_fields.items()
        return {name for name, field in fields if not field.is_required() and getattr(self, name) == field.default}

    @property
    def calibrator(self) -> Calibrator:
        """Return what calibrates the model."""
        return Calibrator(self.temperature, self.offsets, None if self.isotonic is None else self.isotonic.numbers)

    def scores(self, logits: Floats) -> Floats:
        """Return calibrated logits, float64 (n, K), of the model's own, float (n, K). Raises as Calibrator does."""
        return self.calibrator.scores(logits, self.name)


@dataclass(frozen=True, slots=True)
class Step:
    """What a policy decides after a stage, for n rows.

    predictions: int32 (n,), the answer if the row stops here.   confidences: float64 (n,), in that answer.
    accepted: bool (n,), which rows stop.   state: float64 (n, S), what a row that goes on takes along.
    scores: float64 (n, K), calibrated logits of that answer: their softmax is each option's probability, that of the
    answer the confidence, and the largest unless an isotonic calibrator has lowered it below another's. They may be
    the state's own array. In both, -inf pads rows with fewer options.
    """

    predictions: Ints
    confidences: Floats
    accepted: Bools
    state: Floats
    scores: Floats

    def likeliest(self) -> Ints:
        """Return as one number which options each answer finds likeliest, in their order: int16 (n,).

        The N_LIKELIEST options, modulo N_GROUPS, are the number's digits to that base; see softmax.likeliest.
        """
        digits = likeliest(self.scores, N_LIKELIEST) % N_GROUPS
        codes: Ints = (digits @ (N_GROUPS ** np.arange(N_LIKELIEST)[::-1])).astype(np.int16)
        return codes


# By method; the classes enter themselves.
POLICY_CLASSES: dict[str, type[Policy]] = {}


class Policy(FrozenModel):
    """What to do with a chain of models: numbers from a file, and the step that uses them.

    expected: null where it was not measured at this threshold.   curve: what other thresholds had on validation, the
    best within every budget by rising cost, thinned as OperatingPoints.pareto does; quality is of the objective, else
    accuracy; empty where validation had no labels.   search: how the chain was found, null where it was given.
    safe: what was changed to make it safe, null where that was not asked for, or not of this threshold.
    guards: all that were looked at, fired or not; empty at a threshold where nothing was measured.
    reference: what answers at this threshold are compared with later; null where validation had not all labels.
    """

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
    expected: Expectation | None
    stages: tuple[Stage, ...]
    search: ChainSearch | None = None
    safe: SafeChoice | None = None
    guards: tuple[Guard, ...] = ()
    reference: Reference | None = None
    # Last, so that whoever reads the file has read all else before.
    curve: tuple[CurvePoint, ...] = Field(default=(), max_length=MOST_CURVE_POINTS)

    @field_validator("curve")
    @classmethod
    def _curve_rises(cls, curve: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
        if any(one.cost >= other.cost or one.quality >= other.quality for one, other in pairwise(curve)):
            raise ValueError("each point must cost more and be better than the one before it")
        return curve

    @model_validator(mode="after")
    def _calibrators_agree(self) -> Self:
        for stage in self.stages:
            if stage.offsets is not None and stage.isotonic is not None:
                raise ValueError(f"stage {stage.name!r} has both offsets and an isotonic map; one of them must be null")
        if len({stage.calibrator.kind for stage in self.stages}) > 1:
            raise ValueError("offsets, and isotonic maps, must be of all stages or of none")
        n_offsets = {len(stage.offsets) for stage in self.stages if stage.offsets is not None}
        if len(n_offsets) > 1:
            raise ValueError(f"stages have different numbers of offsets, {', '.join(map(str, sorted(n_offsets)))}")
        return self

    @model_validator(mode="after")
    def _names_agree(self) -> Self:
        for model in self.models:
            if self.models.count(model) > 1:
                raise ValueError(f"two stages are named {model!r}")
        if self.expected is None:
            return self
        expected = tuple(stage.name for stage in self.expected.stages)
        if expected != self.models:
            raise ValueError(f"the stages are {', '.join(self.models)}, what is expected is of {', '.join(expected)}")
        return self

    @model_validator(mode="after")
    def _reference_is_of_these_stages(self) -> Self:
        if self.reference is not None:
            require_counts(self.reference, self.models)
        return self

    @property
    def models(self) -> tuple[str, ...]:
        """Return the chain's model names, cheapest first."""
        return tuple(stage.name for stage in self.stages)

    @property
    def calibrator_kind(self) -> CalibratorKind:
        """Return what calibrates all of its models."""
        return self.stages[0].calibrator.kind

    @property
    def id(self) -> str:
        """Return a short digest of everything that decides an answer: two policies that differ have two ids."""
        whole = ("expected", "calibration", "validation", "search", "safe", "guards", "reference", "curve")
        measured: dict[str, Any] = {**dict.fromkeys(whole, True), "threshold_choice": {"certificate"}}
        measured["stages"] = {place: stage.beside_id for place, stage in enumerate(self.stages)}
        numbers = self.model_dump(mode="json", exclude=measured)
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

    def check_chain(self, chain: Chain) -> None:
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

    def with_threshold(self, threshold: float) -> Self:
        """Return the policy at another threshold, given as it is. Raises ConfigError unless it is at least 0."""
        check_threshold(threshold)
        objective = self.threshold_choice.objective
        still_said = None if objective == "accuracy" else objective
        choice = ThresholdChoice(rule="given", objective=still_said, split=None)
        return self._at(threshold, budget=None, choice=choice)

    def with_budget(self, budget: float) -> Self:
        """Return the policy at the best threshold of its curve within a budget, the mean cost per example.

        Raises BudgetError where no point is so cheap, PolicyError where the policy has no curve.
        """
        check_budget(budget)
        if not self.curve or self.validation is None:
            raise PolicyError(
                "the policy has no accuracy-cost curve to choose a threshold from; "
                "fit it again with a labelled validation split, or give a threshold"
            )
        thresholds, costs, quality = np.array([(at.threshold, at.cost, at.quality) for at in self.curve]).T
        best = OperatingPoints(thresholds, costs, quality, self.cost_unit).index_of_best(budget)
        objective = self.threshold_choice.objective or "accuracy"
        choice = ThresholdChoice(rule="budget", objective=objective, split=self.validation.split)
        return self._at(self.curve[best].threshold, budget=budget, choice=choice)

    def _at(self, threshold: float, budget: float | None, choice: ThresholdChoice) -> Self:
        """Return the policy at a threshold; what was measured at another one is no longer expected."""
        changes = {
            "threshold": float(threshold),
            "budget": None if budget is None else float(budget),
            "threshold_choice": choice,
            "expected": self.expected if threshold == self.threshold else None,
            "safe": self.safe if threshold == self.threshold else None,
            "guards": self.guards if threshold == self.threshold else (),
            "reference": self.reference if threshold == self.threshold else None,
        }
        return self.model_copy(update=changes)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a policy file.

        Called on Policy it returns a policy of the file's method. Raises PolicyError when the file is missing,
        no JSON, of another format or version, or holds a number or key that the format does not allow.
        """
        return cls.of(_read_policy_json(Path(path)), str(path))

    @classmethod
    def of(cls, content: Mapping[str, Any], source: str = "the policy") -> Self:
        """Return the policy that a file's content is; source names it in messages. Raises PolicyError as load does."""
        if content.get("format") != FORMAT:
            raise PolicyError(
                f"{source}: its format is {content.get('format')!r}; this version of cauc-ray reads {FORMAT!r}"
            )
        method = content.get("method")
        if not isinstance(method, str) or method not in POLICY_CLASSES:
            raise PolicyError(f"{source}: method {method!r} is none of {', '.join(POLICY_CLASSES)}")
        try:
            # As JSON text, for strictness: a number in quotes is no number, yet a list may fill a tuple.
            policy = POLICY_CLASSES[method].model_validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise PolicyError(f"{source}: {explain(error)}") from error
        if not isinstance(policy, cls):
            raise PolicyError(f"{source} holds a policy of method {method!r}, not of {cls.__name__}")
        return policy

    def to_json(self) -> str:
        """Return the policy as the text of its file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def check_threshold(threshold: float) -> None:
    """Raise ConfigError unless a threshold is a number that a confidence can be compared with."""
    if not (math.isfinite(threshold) and threshold >= 0):
        raise ConfigError(f"a threshold must be a number of at least 0, got {threshold}")


def check_budget(budget: float) -> None:
    """Raise ConfigError unless a budget is a number."""
    if not math.isfinite(budget):
        raise ConfigError(f"a budget must be a finite number, got {budget}")


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
    if not isinstance(content, dict):
        raise PolicyError(f"{path}: its format is None; this version of cauc-ray reads {FORMAT!r}")
    return content
