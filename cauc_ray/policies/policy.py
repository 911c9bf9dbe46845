"""A policy: its file (cauc-policy/1), and its decision, one step from a stage's logits to an answer."""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

import numpy as np
from pydantic import Field, InstanceOf, ValidationError, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from cauc_ray.display import Sheet, Shown
from cauc_ray.errors import ConfigError, PolicyError, explain, warn
from cauc_ray.files.documents import write_text
from cauc_ray.files.entry_points import loaded, registered
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.answer_keys import AnswerFormat, said_keys
from cauc_ray.numbers.calibrators import Calibrator, CalibratorKind, Isotonic
from cauc_ray.numbers.chain import LARGEST, Chain
from cauc_ray.numbers.gains import Gains
from cauc_ray.numbers.intervals import Share
from cauc_ray.numbers.logits import (
    ANSWERS,
    LogitKind,
    bounded_below,
    joint_kind,
    likeliest,
    real_options,
    stacked,
    top_option,
)
from cauc_ray.numbers.rows import row_argmax
from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import (
    MOST_CURVE_POINTS,
    N_GROUPS,
    N_LIKELIEST,
    ChainSearch,
    CurvePoint,
    Decision,
    FittedOn,
    FrozenModel,
    Guard,
    Measures,
    Noise,
    OfflineAccuracy,
    Reference,
    SafeChoice,
    StageFigures,
    TemperatureDiagnostics,
    ThresholdChoice,
)

if TYPE_CHECKING:
    from cauc_ray.policies.predictions import Predictions

FORMAT: Literal["cauc-policy/1"] = "cauc-policy/1"
# The entry points of methods, whose modules have the classes of their policies.
METHOD_GROUP = "cauc_ray.methods"


class Stage(FrozenModel):
    """A policy's entry for one model: its name, the mean cost of a call, its kind of logits, its calibration.

    Attributes:
        name: Name of the model.
        cost: Mean cost of a call.
        logit_kind: Kind of its logits, "embedding" for an encoder.
        floor: Probability that lower declared probabilities count as, zeros among them; null if calibration needs none.
        temperature: Divides the logits.
        offsets: Added to the scaled logits, one for each option; null for none.
        isotonic: Map of confidences; null for none.
        prompt: Prompt of a language model; null for other models.
        diagnostics: Diagnostics of the calibration; null for an encoder.
    """

    name: str
    cost: float = Field(ge=0, le=LARGEST)
    logit_kind: LogitKind
    floor: float | None = Field(default=None, gt=0, lt=1)
    temperature: float = Field(ge=1 / LARGEST, le=LARGEST)
    offsets: tuple[Annotated[float, Field(ge=-LARGEST, le=LARGEST)], ...] | None = None
    isotonic: Isotonic | None = None
    prompt: str | None = None
    diagnostics: TemperatureDiagnostics | None

    @property
    def has_answers(self) -> bool:
        """Return whether its model ever answers."""
        return True

    # The fields that enter a policy's id: what step() reads, and the model's name.
    DECIDES: ClassVar[frozenset[str]] = frozenset({"name", "logit_kind", "floor", "temperature", "offsets", "isotonic"})

    @property
    def calibrator(self) -> Calibrator:
        """Return the model's calibrator."""
        return Calibrator(self.temperature, self.offsets, self.isotonic, self.floor)

    def decides(self) -> dict[str, Any]:
        """Return what affects answers."""
        return self.model_dump(mode="json", include=set(self.DECIDES))

    def best_option(self, logits: Floats) -> Ints:
        """Return the model's answers by itself, int (n,), the lowest index among equals.   logits: float (n, K)."""
        if self.logit_kind == ANSWERS:
            return said_keys(logits)
        # A temperature neither reorders options nor, of float32 logits, makes two of them equal.
        plain = self.offsets is None and self.floor is None and logits.dtype == np.float32
        return row_argmax(real_options(logits, self.logit_kind) if plain else self.scores(logits))[0]

    @property
    def source(self) -> str:
        """Return what its confidences are based on, next to its name."""
        return self.name if self.logit_kind == ANSWERS else f"{self.name}: logits"

    def require_format(self, answer_format: AnswerFormat | None) -> None:
        """Raise PolicyError where a model answers in words by another rule, or with other confidences."""

    def by_itself(self, logits: Floats) -> tuple[Ints, Floats, Floats]:
        """Return the model's own answers, int32 (n,), and the confidences in them, calibrated and raw, float64 (n,)."""
        predictions, confidences = self.calibrator.answers(self.scores(logits))
        if self.logit_kind == ANSWERS:
            return said_keys(logits), confidences, confidences
        options, places = real_options(logits, self.logit_kind), np.arange(len(predictions))
        raw_predictions, raw = top_option(options)
        return predictions, confidences, raw * np.exp(options[places, predictions] - options[places, raw_predictions])

    def bounded(self, logits: Floats) -> Floats:
        """Return the model's logits, float (n, K), with -inf for masks and no real option below the floor."""
        return bounded_below(real_options(logits, self.logit_kind), self.floor)

    def scores(self, logits: Floats) -> Floats:
        """Return calibrated logits, float64 (n, K), from the model's logits, float (n, K), which may have masks.

        Of answers in words, whose confidence a plain stage does not know, 0 for a single option.

        Raises:
            DataError: A row has an option without an offset.
        """
        if self.logit_kind == ANSWERS:
            return np.zeros((len(logits), 1))
        return self.calibrator.scores(real_options(logits, self.logit_kind), self.name)


@dataclass(frozen=True, slots=True)
class Step:
    """A policy's decision after a stage, for n rows.

    Attributes:
        predictions: Int32 (n,), the answer if the row stops here.
        confidences: Float64 (n,), in that answer.
        accepted: Bool (n,), which rows stop.
        state: Float64 (n, S), of rows that continue.
        scores: Float64 (n, K), calibrated logits of that answer: their softmax gives the options' probabilities; the
            answer's is the confidence, and the largest unless an isotonic calibrator has lowered it below another's.
            May be the same array as the state. In both, -inf pads rows with fewer options.
        next: Int8 (n,), the stage that each row goes to if it does not stop, any that it has not visited; None for the
            next one. After a stage without answers, such as an encoder, a row that goes on has the prediction -1.
        worth: Float64 (n,), what was compared with the threshold; None for the confidences.
    """

    predictions: Ints
    confidences: Floats
    accepted: Bools
    state: Floats
    scores: Floats
    next: Ints | None = None
    worth: Floats | None = None

    def likeliest(self) -> Ints:
        """Return each answer's likeliest options in order, encoded as one number: int16 (n,).

        The N_LIKELIEST options, modulo N_GROUPS, are the number's digits to that base; see softmax.likeliest.
        """
        if not self.scores.shape[1]:  # no answer
            return np.full(len(self.scores), -1, dtype=np.int16)
        digits = likeliest(self.scores, N_LIKELIEST) % N_GROUPS
        codes: Ints = (digits @ (N_GROUPS ** np.arange(N_LIKELIEST)[::-1])).astype(np.int16)
        return codes


# By method; classes register themselves.
POLICY_CLASSES: dict[str, type[Policy]] = {}


class Policy(Shown, FrozenModel):
    """A decision rule for a chain of models: the plain numbers of its file, and the step that uses them.

    Attributes:
        scored: Whether `Step.worth`, not the confidence, is compared with the threshold.
        fuses: Whether answers may be others than those of its models.
        by_id: Whether a row's first stage depends on its id.
        spends_budget: Whether a budget is for the most expensive point within it, not the best.
        searched: Whether validation chose more of it than a threshold.
        format: Name, version.
        method: Method that fitted it.
        cost_unit: Unit of all costs.
        costs: Whether calls of a model cost the same or each has its own.
        threshold: The confidence at which an answer is accepted, or those of all stages but the last.
        decision: The price that chose them; null without one.
        budget: What the threshold was chosen for, null where there was none.
        threshold_choice: How it was chosen.
        logit_kind: What the models give.
        calibration: What numbers were fitted on.
        validation: What the threshold was chosen on.
        stages: The chain.
        expected: Results on validation; where validation chose the threshold, the accuracy of each half at the
            threshold of the other; null if they were not measured at this threshold.
        on_selection: Results on the rows that chose the threshold, whose accuracy is too good; null where none have.
        curve: Operating points on validation, the best within every budget by rising cost, thinned as
            OperatingPoints.pareto does; quality is that of the objective, else accuracy; empty if validation had no
            labels.
        search: How the chain was found, null if it was given.
        safe: The changes made by --safe, null without it, or at another threshold.
        guards: All checks, whether they warn or not; empty at a threshold without measurements.
        figures: Figures of the models, measured with the guards.
        reference: The reference for later answers at this threshold; null if validation had missing labels.
        noise: Noise of the models' own numbers; null if it was not measured.
        offline: Expected accuracy when only the first 1, 2, … stages are reachable; null as expected.
        gains: Gains by which a price chooses the thresholds of the stages, until they are chosen; not in the file.
    """

    scored: ClassVar[bool] = False
    fuses: ClassVar[bool] = True
    by_id: ClassVar[bool] = False
    lowest_threshold: ClassVar[float] = 0.0
    spends_budget: ClassVar[bool] = False
    searched: ClassVar[bool] = False

    format: Literal["cauc-policy/1"] = FORMAT
    method: str
    cost_unit: str
    costs: Literal["per-model", "per-call"]
    threshold: float | tuple[float, ...]
    decision: Decision | None = None
    budget: float | None
    threshold_choice: ThresholdChoice
    logit_kind: str
    calibration: FittedOn
    validation: FittedOn | None
    expected: Measures | None
    on_selection: Measures | None = None
    stages: tuple[Stage, ...]
    search: ChainSearch | None = None
    safe: SafeChoice | None = None
    guards: tuple[Guard, ...] = ()
    figures: tuple[StageFigures, ...] = ()
    reference: Reference | None = None
    noise: Noise | None = None
    offline: tuple[OfflineAccuracy, ...] | None = None
    # Last: it is the longest part of the file.
    curve: tuple[CurvePoint, ...] = Field(default=(), max_length=MOST_CURVE_POINTS)
    gains: SkipJsonSchema[InstanceOf[Gains] | None] = Field(default=None, exclude=True, repr=False)

    @field_validator("curve")
    @classmethod
    def _curve_rises(cls, curve: tuple[CurvePoint, ...]) -> tuple[CurvePoint, ...]:
        if any(one.cost >= following.cost or one.quality >= following.quality for one, following in pairwise(curve)):
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
            if stage.floor is not None and stage.logit_kind not in ("probabilities", "log-probabilities"):
                yield f"stage {stage.name!r} has a floor, which only probabilities have; its kind is {stage.logit_kind}"
            if self.models.count(stage.name) > 1:
                yield f"two stages are named {stage.name!r}"
        if len({stage.calibrator.kind for stage in self.answering}) > 1:
            yield "offsets, and isotonic maps, must be given for all stages or for none"
        n_offsets = {len(stage.offsets) for stage in self.stages if stage.offsets is not None}
        if len(n_offsets) > 1:
            yield f"stages have different numbers of offsets, {', '.join(map(str, sorted(n_offsets)))}"
        kinds = [stage.logit_kind for stage in self.answering]
        if joint_kind(kinds) != self.logit_kind:
            yield f"the policy's logit_kind {self.logit_kind!r} contradicts its stages', {', '.join(kinds)}"
        if isinstance(self.threshold, tuple) and len(self.threshold) != len(self.answering) - 1:
            yield f"threshold must have a number for each model but the last, it has {len(self.threshold)}"
        if self.lowest_threshold > np.min(self.threshold, initial=np.inf):
            yield f"threshold: a number of at least {self.lowest_threshold:g} is needed, got {self.threshold}"
        if self.expected is not None:
            if self.expected.accuracy is None:
                yield "expected needs an accuracy"
            expected = tuple(stage.name for stage in self.expected.stages)
            if expected != self.models:
                yield f"the stages are {', '.join(self.models)}, but expected has {', '.join(expected)}"
        if self.offline is not None and [one.stages for one in self.offline] != list(range(1, len(self.stages))):
            yield f"offline must have the first stage, the first two, … of {len(self.stages)}, without the last"
        if self.reference is not None:
            yield from self.reference.contradictions(self.models)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the chain's model names, cheapest first."""
        return tuple(stage.name for stage in self.stages)

    @property
    def unfused(self) -> tuple[str, ...]:
        """Return the stages whose fusion a safe fit rejected."""
        return ()

    @property
    def encoder(self) -> str | None:
        """Return the name of the first stage if that is an encoder, whose embedding the others read."""
        return self.stages[0].name if self.stages[0].logit_kind == "embedding" else None

    @property
    def answering(self) -> tuple[Stage, ...]:
        """Return the stages that give answers."""
        return self.stages if self.encoder is None else self.stages[1:]

    @property
    def in_turn(self) -> bool:
        """Return whether rows start at the first model and go from each stage to the next until they stop."""
        return self.encoder is None

    @property
    def logit_kinds(self) -> tuple[LogitKind, ...]:
        """Return each model's kind of logits on calibration."""
        return tuple(stage.logit_kind for stage in self.stages)

    @property
    def kinds_by_model(self) -> dict[str, LogitKind]:
        """Return the models' kinds of logits by name."""
        return {stage.name: stage.logit_kind for stage in self.stages}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Register the class for its method's files."""
        for method in get_args(cls.model_fields["method"].annotation):
            POLICY_CLASSES[method] = cls

    @classmethod
    def load(cls, path: str | AnyPath) -> Self:
        """Read a policy file: a local path or a URI.

        Called on Policy it returns a policy of the file's method. Raises PolicyError if the file is missing,
        not JSON, of another format or version, or has an invalid value or key.
        """
        try:
            file = path_of(path)
        except TypeError:
            raise PolicyError(f"a policy, or the path of its file, was expected, got {path!r}") from None
        try:
            if not file.is_file():
                raise PolicyError(f"policy file {file} does not exist")
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PolicyError(f"{file} is not a readable policy file: {error}") from error
        return cls.of(content, str(path), file)

    @classmethod
    def of(cls, content: Mapping[str, Any], source: str = "the policy", file: AnyPath | None = None) -> Self:
        """Return the policy of a file's content, or of what packed() has returned. Raises PolicyError as load does.

        source: names it in messages.   file: next to which its arrays are, if it has any.
        """
        if not isinstance(content, Mapping):
            raise PolicyError(f"{source}: a policy is a JSON object, got {type(content).__name__}")
        if content.get("format") != FORMAT:
            raise PolicyError(
                f"{source}: its format is {content.get('format')!r}; this version of cauc-ray reads {FORMAT!r}"
            )
        method = content.get("method")
        try:
            policy = _class_of(method, source).parsed(content, source, file)
        except ValidationError as error:
            raise PolicyError(f"{source}: {explain(error)}") from error
        if not isinstance(policy, cls):
            raise PolicyError(f"{source} is a policy of method {method!r}, which {cls.__name__} cannot load")
        return policy

    @classmethod
    def parsed(cls, content: Mapping[str, Any], source: str, file: AnyPath | None) -> Self:
        """Return a policy of the class; arguments are those of of(). Raises ValidationError and PolicyError."""
        # As JSON text, for strict validation: a number in quotes is an error, yet a list is accepted for a tuple.
        return cls.model_validate_json(json.dumps(content), strict=True)

    def save(self, path: str | AnyPath) -> None:
        """Write the policy's file atomically, to a local path or a URI. Raises ConfigError if that fails."""
        write_text(path_of(path), self.to_json())

    def packed(self) -> dict[str, Any]:
        """Return the whole policy as JSON has it, for where no file is next to another."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Return the policy as the text of its file."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"

    @property
    def calibrator_kind(self) -> CalibratorKind:
        """Return the calibrator of its models."""
        return self.answering[0].calibrator.kind

    @property
    def id(self) -> str:
        """Return a short digest of everything that affects answers, and of nothing else.

        That is the method, the threshold, and for each stage in order its model and the numbers that a step uses. Two
        policies with one id give every input the same answer, regardless of costs, budgets, fits and measurements.
        """
        return hashlib.sha256(json.dumps(self.decides(), sort_keys=True).encode()).hexdigest()[:12]

    def decides(self) -> dict[str, Any]:
        """Return what affects answers."""
        return {
            "method": self.method,
            "threshold": self.threshold,
            "stages": [stage.decides() for stage in self.stages],
        }

    def first(self, n: int, ids: Sequence[str] | None) -> Ints | None:
        """Decide before any call: return the first stage of each of n rows, int8 (n,); None for stage 0.

        Args:
            n: Number of rows.
            ids: Ids of the rows, if the policy is by_id.
        """
        return None

    def start(self, logits: Floats) -> Step:
        """Decide after the first stage.   logits: float (n, K), from the model."""
        return self.step(0, logits, None)

    @abstractmethod
    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Decide after a stage, given the state (n, S) that its rows carry; None if no row carries any.

        -inf pads rows with a narrower state, and fills rows without state.
        logits: float (n, K), from the stage's model, with probabilities converted to logarithms
        (numbers.logits.as_logits); -inf, or a mask, where a row has no such option.
        Raises DataError if a row's options differ from those at earlier stages.
        """

    def threshold_of(self, stage: int) -> float:
        """Return the confidence at which a stage but the last accepts its answer."""
        if isinstance(self.threshold, tuple):
            return self.threshold[stage - len(self.stages) + len(self.answering)]
        return self.threshold

    @property
    def schedule(self) -> Floats | None:
        """Return the thresholds of the stages at every price of the curve, float64 (P, S - 1), rising in each column.

        None with one threshold for all stages.
        """
        if not isinstance(self.threshold, tuple):
            return None
        return np.unique(np.array([self.threshold, *(point.threshold for point in self.curve)]), axis=0)

    @property
    def setting(self) -> float:
        """Return what a trace's `compared` reaches where a row stops: the threshold, or the place in the schedule."""
        if isinstance(self.threshold, float) or self.schedule is None:
            return float(np.asarray(self.threshold))
        return float(np.flatnonzero((self.schedule == self.threshold).all(axis=1))[0])

    def every_step(self, logits: Sequence[Floats], ids: Sequence[str] | None) -> list[Step]:
        """Return all S steps at which rows may stop, each as if it were the last; a threshold chooses among them.

        logits: of every stage, (n, K) each.   ids: as for first().
        """
        steps: list[Step] = []
        for stage, logits_of_stage in enumerate(logits):
            steps.append(self.step(stage, logits_of_stage, steps[-1].state if steps else None))
        return steps[self.ends[0] :]

    @property
    def ends(self) -> Ints:
        """Return the stage that answers at each step of every_step(), int (S,)."""
        return np.arange(len(self.stages) - len(self.answering), len(self.stages))

    @property
    def calls(self) -> Bools:
        """Return the stages that are called for a row that stops at each step of every_step(), bool (S, M)."""
        return np.tri(len(self.stages), dtype=bool)[self.ends]

    def require_threshold(self, threshold: float) -> None:
        """Raise ConfigError unless a threshold is a finite number that the method can take."""
        check_number("threshold", threshold)
        if isinstance(self.threshold, tuple) and len(self.threshold) > 1:
            raise ConfigError(
                f"this policy of method {self.method} has {len(self.threshold)} thresholds, one for each model but the "
                f"last, which a price or a budget chooses: give one of these in place of the threshold {threshold:g}"
            )
        if threshold < self.lowest_threshold:
            raise ConfigError(f"a threshold must be a number of at least {self.lowest_threshold:g}, got {threshold}")

    def check_chain(self, chain: Chain) -> None:
        """Raise PolicyError unless the chain is this policy's; warn if its logits are of another kind."""
        if chain.models != self.models:
            raise PolicyError(f"the policy is for {', '.join(self.models)}, not for {', '.join(chain.models)}")
        for model, held, fitted in zip(self.models, chain.logit_kinds, self.logit_kinds, strict=True):
            if fitted != held:
                warn(
                    f"{chain.source} has logits of kind {held!r} for model {model!r}; the policy was fitted on "
                    f"{fitted!r}",
                )

    def expected_accuracy(self, n: int) -> Share | None:
        """Return the accuracy to expect on n new labelled examples, with its 95 % prediction interval.

        None where nothing was measured.
        """
        if self.expected is None or self.expected.accuracy is None:
            return None
        if self.on_selection is None:
            return self.expected.to_come(n)
        return self.on_selection.to_come(n, self.expected.accuracy.value)

    def with_threshold(self, threshold: float) -> Self:
        """Return the policy at the given threshold. Raises ConfigError unless the method takes it."""
        self.require_threshold(threshold)
        objective = self.threshold_choice.objective
        still_said = None if objective == "accuracy" else objective
        choice = ThresholdChoice(rule="given", objective=still_said, split=None)
        return self._at(self.each_stage(threshold), budget=None, choice=choice)

    def each_stage(self, threshold: float) -> float | tuple[float, ...]:
        """Return a threshold of all stages as the policy's file has it."""
        threshold = float(threshold)
        return (threshold,) * len(self.threshold) if isinstance(self.threshold, tuple) else threshold

    def with_budget(self, budget: float) -> Self:
        """Return the policy at the best threshold of its curve within a budget, the mean cost per example.

        Raises BudgetError if no point is within the budget, PolicyError if the policy has no curve.
        """
        check_number("budget", budget)
        if not self.curve or self.validation is None:
            raise PolicyError(
                "the policy has no accuracy-cost curve to choose a threshold from; "
                "fit it again with a labelled validation split, or give a threshold"
            )
        costs, quality = np.array([(at.cost, at.quality) for at in self.curve]).T
        points = OperatingPoints(np.arange(float(len(costs))), costs, quality, self.cost_unit)
        best = points.index_of_best(budget)
        objective = self.threshold_choice.objective or "accuracy"
        choice = ThresholdChoice(rule="budget", objective=objective, split=self.validation.split)
        return self._at(self.curve[best].threshold, budget, choice, self.curve[best].price)

    def _at(
        self,
        threshold: float | tuple[float, ...],
        budget: float | None,
        choice: ThresholdChoice,
        price: float | None = None,
    ) -> Self:
        """Return the policy at a threshold, without measurements of another threshold."""
        changes: dict[str, Any] = {
            "threshold": threshold,
            "decision": None if price is None else Decision(at=price),
            "budget": None if budget is None else float(budget),
            "threshold_choice": choice,
        }
        if threshold != self.threshold:
            changes |= dict.fromkeys(("expected", "on_selection", "safe", "reference", "noise", "offline"))
            changes["guards"] = changes["figures"] = ()
        return self.model_copy(update=changes)

    def require_formats(self, formats: Mapping[str, AnswerFormat]) -> None:
        """Raise PolicyError where models answer in words otherwise than the policy was fitted on; formats by model."""
        for stage in self.answering:
            stage.require_format(formats.get(stage.name))

    def predict(self, logits: Mapping[str, Any], *, example_ids: Any = None) -> Predictions:
        """Answer examples from all models' logits, exactly as a run and a service do.

        logits: by model, (N, K): numpy arrays, lists or frames with a column for each option; of the kind that the
        policy was fitted on; or columns of answers in words, as for fit(). Row i of each is example i. Costs are the
        models' own.   example_ids: (N,), unique;
        without them row numbers as str.
        Raises ConfigError if a model is missing, DataError naming the example for invalid logits.
        """
        from cauc_ray.policies.predictions import predict

        return predict(self, logits, example_ids)

    def threshold_text(self, digits: int = 4) -> str:
        """Return the threshold, or those of the stages and the price that chose them, as people read it."""
        text = ", ".join(f"{one:.{digits}g}" for one in np.atleast_1d(self.threshold))
        price = "" if self.decision is None else f" (price {self.decision.at + 0.0:.{digits}g} per {self.cost_unit})"
        return f"{text or 'none'}{price}"

    def sheet(self) -> Sheet:
        """Return a display of the expected results, the threshold, the warnings and the fit."""
        from cauc_ray.policies.policy_sheet import policy_sheet

        return policy_sheet(self)

    def as_json(self) -> dict[str, Any]:
        """Return the content of the policy's file, with its id."""
        return {"policy_id": self.id, **self.model_dump(mode="json")}


def _class_of(method: object, source: str) -> type[Policy]:
    """Return the class of a method's policies. Raises PolicyError if there is none."""
    entries = registered(METHOD_GROUP)
    if method not in POLICY_CLASSES and method in entries:
        try:
            loaded(entries[method], "method")
        except ConfigError as error:
            raise PolicyError(f"{source}: {error}") from error
    if method not in POLICY_CLASSES:
        raise PolicyError(f"{source}: unknown method {method!r}; expected one of {', '.join(entries)}")
    return POLICY_CLASSES[method]


def policy_of(policy: str | AnyPath | Policy) -> Policy:
    """Return a policy, read from its file where that is given. Raises PolicyError as Policy.load does."""
    return policy if isinstance(policy, Policy) else Policy.load(policy)


def check_number(name: str, value: float) -> None:
    """Raise ConfigError unless a threshold, or a budget, is a finite number.   name: which of them."""
    try:
        is_finite = math.isfinite(value)
    except TypeError:
        is_finite = False
    if not is_finite:
        raise ConfigError(f"a {name} must be a finite number, got {value!r}")


def joined_states(states: Sequence[tuple[int, Floats | None]]) -> Floats | None:
    """Return the states of several sets of rows as one array (n, S); None if no row has one.   states: rows, state."""
    if len(states) == 1:
        return states[0][1]
    if all(state is None for _, state in states):
        return None
    return stacked([np.zeros((n, 0)) if state is None else state for n, state in states])
