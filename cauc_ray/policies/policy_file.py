"""The policy file (cauc-policy/1): its keys, their validation, and reading and writing."""

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
    """A policy's entry for one model: its name, the mean cost of a call, its kind of logits, its calibration.

    name: of the model.   cost: mean of a call.   temperature: what logits are divided by.   diagnostics: of the
    calibration.   logit_kind: what the model gives; null in files of earlier versions.   offsets: added to the scaled
    logits, one for each option; null for none.   isotonic: a map of confidences; null for none.
    """

    name: str
    cost: float = Field(ge=0, le=LARGEST)
    logit_kind: LogitKind | None = None
    temperature: float = Field(ge=1 / LARGEST, le=LARGEST)
    offsets: tuple[Annotated[float, Field(ge=-LARGEST, le=LARGEST)], ...] | None = None
    isotonic: Isotonic | None = None
    diagnostics: TemperatureDiagnostics

    # The fields that enter a policy's id: what step() reads, and the model's name.
    DECIDES: ClassVar[frozenset[str]] = frozenset({"name", "temperature", "offsets", "isotonic"})

    @property
    def calibrator(self) -> Calibrator:
        """Return the model's calibrator."""
        return Calibrator(self.temperature, self.offsets, self.isotonic)

    def scores(self, logits: Floats) -> Floats:
        """Return calibrated logits, float64 (n, K), from the model's logits, float (n, K), which may have masks.

        Raises as Calibrator does.
        """
        return self.calibrator.scores(real_options(logits), self.name)


# By method; classes register themselves.
POLICY_CLASSES: dict[str, type[PolicyFile]] = {}


class PolicyFile(FrozenModel):
    """A policy as plain numbers.

    format: name, version.   method: base or rf.   cost_unit: of all costs.   costs: whether calls of a model cost the
    same or each has its own.   threshold: the confidence at which an answer is accepted.   budget: what the threshold
    was chosen for, null where there was none.   threshold_choice: how it was chosen.   logit_kind: what the models
    give.   calibration: what numbers were fitted on.   validation: what the threshold was chosen on.   stages: the
    chain.
    expected: results on validation; null if they were not measured at this threshold.   curve: operating points on
    validation, the best within every budget by rising cost, thinned as OperatingPoints.pareto does; quality is that of
    the objective, else accuracy; empty if validation had no labels.   search: how the chain was found, null if it was
    given.   safe: the changes made by --safe, null without it, or at another threshold.   guards: all checks, whether
    they warn or not; empty at a threshold without measurements.   reference: the reference for later answers at this
    threshold; null if validation had missing labels.
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
        """Yield the contradictions in the policy."""
        for stage in self.stages:
            if stage.offsets is not None and stage.isotonic is not None:
                yield f"stage {stage.name!r} has both offsets and an isotonic map; one of them must be null"
            if self.models.count(stage.name) > 1:
                yield f"two stages are named {stage.name!r}"
        if len({stage.calibrator.kind for stage in self.stages}) > 1:
            yield "offsets, and isotonic maps, must be given for all stages or for none"
        n_offsets = {len(stage.offsets) for stage in self.stages if stage.offsets is not None}
        if len(n_offsets) > 1:
            yield f"stages have different numbers of offsets, {', '.join(map(str, sorted(n_offsets)))}"
        kinds = [stage.logit_kind for stage in self.stages if stage.logit_kind is not None]
        if kinds and (len(kinds) < len(self.stages) or joint_kind(kinds) != self.logit_kind):
            yield f"the policy's logit_kind {self.logit_kind!r} contradicts its stages', {', '.join(kinds)}"
        if self.expected is not None:
            if self.expected.accuracy is None:
                yield "expected needs an accuracy"
            expected = tuple(stage.name for stage in self.expected.stages)
            if expected != self.models:
                yield f"the stages are {', '.join(self.models)}, but expected has {', '.join(expected)}"
        if self.reference is not None:
            yield from self.reference.contradictions(self.models)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the chain's model names, cheapest first."""
        return tuple(stage.name for stage in self.stages)

    @property
    def logit_kinds(self) -> tuple[LogitKind | None, ...]:
        """Return each model's kind of logits on calibration, None if the file does not record them by model."""
        return tuple(stage.logit_kind or kind_of(self.logit_kind) for stage in self.stages)

    @property
    def kinds_by_model(self) -> dict[str, LogitKind]:
        """Return the models' kinds of logits by name, as far as the file records them."""
        return {name: kind for name, kind in zip(self.models, self.logit_kinds, strict=True) if kind is not None}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Register the class for its method's files."""
        method = cls.model_fields["method"].default
        if isinstance(method, str):
            POLICY_CLASSES[method] = cls

    @classmethod
    def load(cls, path: str | AnyPath) -> Self:
        """Read a policy file: a local path or a URI.

        Called on Policy it returns a policy of the file's method. Raises PolicyError if the file is missing,
        not JSON, of another format or version, or has an invalid value or key.
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
        """Return the policy of a file's content; source names it in messages. Raises PolicyError as load does."""
        if not isinstance(content, Mapping):
            raise PolicyError(f"{source}: a policy is a JSON object, got {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise PolicyError(
                f"{source}: its format is {content.get('format')!r}; this version of cauc-ray reads {FORMAT!r}"
            )
        method = content.get("method")
        if not isinstance(method, str) or method not in POLICY_CLASSES:
            raise PolicyError(f"{source}: unknown method {method!r}; expected one of {', '.join(POLICY_CLASSES)}")
        try:
            # As JSON text, for strict validation: a number in quotes is an error, yet a list is accepted for a tuple.
            policy = POLICY_CLASSES[method].model_validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise PolicyError(f"{source}: {explain(error)}") from error
        if not isinstance(policy, cls):
            raise PolicyError(f"{source} is a policy of method {method!r}, which {cls.__name__} cannot load")
        return policy

    def save(self, path: str | AnyPath) -> None:
        """Write the policy's file atomically, to a local path or a URI. Raises ConfigError if that fails."""
        write_text(path_of(path), self.to_json())

    def to_json(self) -> str:
        """Return the policy as the text of its file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"
