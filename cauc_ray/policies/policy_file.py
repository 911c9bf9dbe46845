"""The policy file (cauc-policy/1): its keys, what must be true of them, and reading and writing it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from cauc_ray.errors import PolicyError, explain
from cauc_ray.files.documents import write_text
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.calibrators import Calibrator, Isotonic
from cauc_ray.numbers.costs import LARGEST
from cauc_ray.numbers.logits import LogitKind, joint_kind, kind_of, real_options
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.evidence import (
    MOST_CURVE_POINTS,
    ChainSearch,
    CurvePoint,
    FittedOn,
    FrozenModel,
    Guard,
    Measures,
    Reference,
    SafeChoice,
    TemperatureDiagnostics,
    ThresholdChoice,
)

FORMAT: Literal["cauc-policy/1"] = "cauc-policy/1"


class Stage(FrozenModel):
    """What a policy knows of one model: its name, the mean cost of a call, what it gives, its calibration.

    name: of the model.   cost: mean of a call.   temperature: what logits are divided by.   diagnostics: of the
    calibration.   logit_kind: what the model gives; null in files of earlier versions.   offsets: added to the scaled
    logits, one for each option; null for none.   isotonic: what becomes of confidences; null where they stay.
    """

    name: str
    cost: float = Field(ge=0, le=LARGEST)
    logit_kind: LogitKind | None = None
    temperature: float = Field(ge=1 / LARGEST, le=LARGEST)
    offsets: tuple[Annotated[float, Field(ge=-LARGEST, le=LARGEST)], ...] | None = None
    isotonic: Isotonic | None = None
    diagnostics: TemperatureDiagnostics

    # The fields that a policy's id is of: what step() reads, and which model it is.
    DECIDES: ClassVar[frozenset[str]] = frozenset({"name", "temperature", "offsets", "isotonic"})

    @property
    def calibrator(self) -> Calibrator:
        """Return what calibrates the model."""
        return Calibrator(self.temperature, self.offsets, self.isotonic)

    def scores(self, logits: Floats) -> Floats:
        """Return calibrated logits, float64 (n, K), of the model's own, float (n, K), which may hold masks.

        Raises as Calibrator does.
        """
        return self.calibrator.scores(real_options(logits), self.name)


# By method; the classes enter themselves.
POLICY_CLASSES: dict[str, type[PolicyFile]] = {}


class PolicyFile(FrozenModel):
    """What to do with a chain of models, as plain numbers.

    format: and its version.   method: base or rf.   cost_unit: of all costs.   costs: whether calls of a model cost the
    same or each has its own.   threshold: the confidence at which an answer is accepted.   budget: what the threshold
    was chosen for, null where there was none.   threshold_choice: how it was chosen.   logit_kind: what the models
    give.   calibration: what numbers were fitted on.   validation: what the threshold was chosen on.   stages: the
    chain.
    expected: what validation had; null where it was not measured at this threshold.   curve: what other thresholds
    had on validation, the best within every budget by rising cost, thinned as OperatingPoints.pareto does; quality is
    of the objective, else accuracy; empty where validation had no labels.   search: how the chain was found, null
    where it was given.   safe: what was changed to make it safe, null where that was not asked for, or not of this
    threshold.   guards: all checks, fired or not; empty at a threshold where nothing was measured.   reference: what
    answers at this threshold are compared with later; null where validation had not all labels.
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
    expected: Measures | None
    stages: tuple[Stage, ...]
    search: ChainSearch | None = None
    safe: SafeChoice | None = None
    guards: tuple[Guard, ...] = ()
    reference: Reference | None = None
    # Last: it is the longest part of the file.
    curve: tuple[CurvePoint, ...] = Field(default=(), max_length=MOST_CURVE_POINTS)

    @field_validator("curve")
    @classmethod
    def _curve_rises(cls, curve: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
        if any(one.cost >= other.cost or one.quality >= other.quality for one, other in pairwise(curve)):
            raise ValueError("each point must cost more and be better than the one before it")
        return curve

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for problem in self.contradictions():
            raise ValueError(problem)
        return self

    def contradictions(self) -> Iterator[str]:
        """Yield what in the policy contradicts something else in it."""
        for stage in self.stages:
            if stage.offsets is not None and stage.isotonic is not None:
                yield f"stage {stage.name!r} has both offsets and an isotonic map; one of them must be null"
            if self.models.count(stage.name) > 1:
                yield f"two stages are named {stage.name!r}"
        if len({stage.calibrator.kind for stage in self.stages}) > 1:
            yield "offsets, and isotonic maps, must be of all stages or of none"
        n_offsets = {len(stage.offsets) for stage in self.stages if stage.offsets is not None}
        if len(n_offsets) > 1:
            yield f"stages have different numbers of offsets, {', '.join(map(str, sorted(n_offsets)))}"
        kinds = [stage.logit_kind for stage in self.stages if stage.logit_kind is not None]
        if kinds and (len(kinds) < len(self.stages) or joint_kind(kinds) != self.logit_kind):
            yield f"logits of the kind {self.logit_kind!r} are not those of its stages, {', '.join(kinds)}"
        if self.expected is not None:
            if self.expected.accuracy is None:
                yield "what is expected needs an accuracy"
            expected = tuple(stage.name for stage in self.expected.stages)
            if expected != self.models:
                yield f"the stages are {', '.join(self.models)}, what is expected is of {', '.join(expected)}"
        if self.reference is not None:
            yield from self.reference.contradictions(self.models)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the chain's model names, cheapest first."""
        return tuple(stage.name for stage in self.stages)

    @property
    def logit_kinds(self) -> tuple[LogitKind | None, ...]:
        """Return what each model gave on calibration, None where the file does not tell the models apart."""
        return tuple(stage.logit_kind or kind_of(self.logit_kind) for stage in self.stages)

    @property
    def kinds_by_model(self) -> dict[str, LogitKind]:
        """Return what each model gave, by its name, where the file tells it."""
        return {name: kind for name, kind in zip(self.models, self.logit_kinds, strict=True) if kind is not None}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Make the files of a method known by its name."""
        method = cls.model_fields["method"].default
        if isinstance(method, str):
            POLICY_CLASSES[method] = cls

    @classmethod
    def load(cls, path: str | AnyPath) -> Self:
        """Read a policy file: a local path or a URI.

        Called on Policy it returns a policy of the file's method. Raises PolicyError when the file is missing,
        not JSON, of another format or version, or holds a number or key that the format does not allow.
        """
        file = path_of(path)
        try:
            if not file.is_file():
                raise PolicyError(f"there is no policy file {file}")
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PolicyError(f"{file} is not a readable policy file: {error}") from error
        return cls.of(content, str(path))

    @classmethod
    def of(cls, content: Mapping[str, Any], source: str = "the policy") -> Self:
        """Return the policy that a file's content is; source names it in messages. Raises PolicyError as load does."""
        if not isinstance(content, Mapping):
            raise PolicyError(f"{source}: a policy is a JSON object, got {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise PolicyError(
                f"{source}: its format is {content.get('format')!r}; this version of cauc-ray reads {FORMAT!r}"
            )
        method = content.get("method")
        if not isinstance(method, str) or method not in POLICY_CLASSES:
            raise PolicyError(f"{source}: method {method!r} is none of {', '.join(POLICY_CLASSES)}")
        try:
            # As JSON text, for strictness: a number in quotes is refused, yet a list may fill a tuple.
            policy = POLICY_CLASSES[method].model_validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise PolicyError(f"{source}: {explain(error)}") from error
        if not isinstance(policy, cls):
            raise PolicyError(f"{source} holds a policy of method {method!r}, not of {cls.__name__}")
        return policy

    def save(self, path: str | AnyPath) -> None:
        """Write the policy's file, whole or not at all: to a local path or a URI. Raises ConfigError if it cannot."""
        write_text(path_of(path), self.to_json())

    def to_json(self) -> str:
        """Return the policy as the text of its file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
