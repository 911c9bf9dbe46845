"""The pool file: models, their costs and their resources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PositiveInt, StrictFloat, ValidationError, field_validator, model_validator

from cauc_ray.errors import ConfigError, explain, unknown_name
from cauc_ray.files.documents import read_yaml
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.models.answers import Model
from cauc_ray.models.kind import Location, Placement, Section
from cauc_ray.models.kinds import ModelSpec, built_in_specs, prompt_fields
from cauc_ray.models.prompts import LanguageSpec, PromptSettings
from cauc_ray.models.resources import Resources, amounts_text
from cauc_ray.protocol.tensors import Datatype


class Replicas(Section):
    """How many copies of a stage may run.

    Attributes:
        min: From the start.
        max: Under load; by default min.
    """

    min: int = Field(default=1, ge=1)
    max: int = Field(default_factory=lambda fields: int(fields.get("min", 1)), ge=1)

    @model_validator(mode="after")
    def _ordered(self) -> Replicas:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class StageServing(Section):
    """How a stage is served.

    Attributes:
        batch_size: Most rows in a call, by default the stage's own.
        batch_wait_s: How long a request's rows wait for others to share a call, less if no others are expected.
        timeout_s: Rows that take longer, waiting included, are abandoned; a replica whose call takes twice as long is
            replaced.
        target_busy: Target share of time in which replicas compute; above it, another is started.
        upscale_delay_s: How long the load must stay above the target before replicas are added.
        downscale_delay_s: How long the load must stay below the target before replicas are removed.
    """

    batch_size: int | None = Field(default=None, ge=1)
    batch_wait_s: float = Field(default=0.005, ge=0)
    timeout_s: float = Field(default=10.0, gt=0)
    target_busy: float = Field(default=0.8, gt=0, le=1)
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=120.0, ge=0)


class InputSpec(Section):
    """A tensor of a request.

    Attributes:
        datatype: In the Open Inference Protocol.
        shape: Of one row; -1 is any size.
    """

    datatype: Datatype
    shape: tuple[Literal[-1] | PositiveInt, ...] = ()


class RouterSpec(Section):
    """The deployment that takes requests and holds the policy.

    Attributes:
        replicas: How many run.
        resources: Of each replica.
    """

    replicas: Replicas = Replicas()
    resources: Resources = Resources()


class LogSpec(Section):
    """Where the shadow sample is written, as a logit table that can be fitted.

    Attributes:
        to: A folder or a URI.
        split: The split of its rows.
        keep_days: Age at which files are deleted; by default they are kept.
        flush_rows: Rows in a file.
        flush_s: Longest wait of a row before its file is written, in seconds.
    """

    to: Location
    split: str = Field(default="calibration", pattern=r"^[^/=]+$")
    keep_days: float | None = Field(default=None, gt=0)
    flush_rows: int = Field(default=1000, ge=1)
    flush_s: float = Field(default=60.0, gt=0)


class CandidateSpec(Section):
    """A policy that begins as a candidate.

    Attributes:
        file: A path or a URI.
        share: Of the requests.
    """

    file: Location
    share: float = Field(gt=0, lt=1)


class CanarySpec(Section):
    """When the candidate replaces the policy in force, or ends.

    Attributes:
        evidence: What accuracy is measured by: labels from feedback, or (shadow) agreement with the whole cascade on
            the shadow sample.
        error_rate: Probability that a decision on a candidate is wrong.
        accuracy_margin: How much less accurate a candidate may be; if negative, how much more it must be.
        cost_margin: The same of mean costs per row, as a share.
        min_rows: Rows of a candidate with a known label before it is promoted.
        decide: By itself (auto) or by-hand.
    """

    evidence: Literal["feedback", "shadow"] = "feedback"
    error_rate: float = Field(default=0.05, gt=0, lt=0.5)
    accuracy_margin: float = Field(default=0.01, gt=-1, lt=1)
    cost_margin: float = Field(default=0.05, gt=-1)
    min_rows: int = Field(default=200, ge=1)
    decide: Literal["auto", "by-hand"] = "auto"


class PoolServing(Section):
    """How a pool is served.

    Attributes:
        max_request_rows: Most rows in one request.
        max_body_mb: Largest body of a request, in 10^6 bytes, decompressed.
        max_queued_rows: Most rows that may wait for a stage in one router.
        keep_alive_s: Seconds after which a connection without requests is closed; more than those of a proxy before it.
        shadow: Share of answers of stages before the last that are compared with the whole cascade's, when its stages
            are idle; with log, of all answers.
        log: Writes the shadow sample with every model's logits as a logit table.
        candidate: Policy that begins with a share of the requests, next to the one in force.
        canary: When the candidate replaces the policy in force, or ends.
        tracing: "module:function", called once in each router, that configures OpenTelemetry.
        router: The deployment that takes requests.
        policy_every_s: Seconds after which a local service reads its policy file again; null for never.
    """

    max_request_rows: int = Field(default=4096, ge=1)
    max_body_mb: float = Field(default=64.0, gt=0)
    max_queued_rows: int = Field(default=8192, ge=1)
    keep_alive_s: float = Field(default=75.0, ge=1)
    shadow: float = Field(default=0.0, ge=0, le=1)
    log: LogSpec | None = None
    candidate: CandidateSpec | None = None
    canary: CanarySpec = CanarySpec()
    router: RouterSpec = RouterSpec()
    tracing: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    policy_every_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_its_sample(self) -> PoolServing:
        if not self.shadow and (self.log is not None or self.canary.evidence == "shadow"):
            reader = "canary: evidence from" if self.log is None else "log writes"
            raise ValueError(f"{reader} the shadow sample: set shadow to a share of answers, 0.01 for example")
        return self


LONGEST_NAME = 200  # folder names are limited to 255 bytes
COST_UNITS = {
    "gflops": "GFLOPs",
    "kflops": "kFLOPs",
    "params_b": "B params",
    "seconds": "s",
    "usd": "USD",
    "usd_per_mtok": "USD per M tokens",
}


Amount: TypeAlias = Annotated[StrictFloat, Field(ge=0)]


class CostSpec(Section):
    """The cost of one call on one example: exactly one number, whose key is its unit.

    Attributes:
        gflops: 10^9 multiply-adds; auto is as published with the model, else as measured.
        params_b: 10^9 parameters; auto is as published with the model.
        kflops: 10^3 multiply-adds.
        seconds: Seconds; auto, of a remote stage, is the measured round trip of each call, divided by its rows.
        usd: USD.
        usd_per_mtok: USD per 10^6 tokens.
    """

    gflops: Amount | Literal["auto"] | None = None
    params_b: Amount | Literal["auto"] | None = None
    kflops: Amount | None = None
    seconds: Amount | Literal["auto"] | None = None
    usd: Amount | None = None
    usd_per_mtok: Amount | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> CostSpec:
        if len(self.model_fields_set) != 1 or self._amount is None:
            raise ValueError(f"give a cost as exactly one of {', '.join(COST_UNITS)}")
        return self

    @property
    def _amount(self) -> float | Literal["auto"] | None:
        amount: float | Literal["auto"] | None = getattr(self, *self.model_fields_set)
        return amount

    @property
    def unit(self) -> str:
        """Return the unit as costs are reported in it."""
        return COST_UNITS[next(iter(self.model_fields_set))]

    @property
    def is_round_trip(self) -> bool:
        """Return whether each call costs the seconds that it takes."""
        return self.seconds == "auto"

    @property
    def value(self) -> float | None:
        """Return the number, None for "auto"."""
        return None if self._amount == "auto" else self._amount


class StageSpec(PromptSettings):
    """One model of a pool as a stage.

    Attributes:
        name: Of the model, in tables and policies.
        model: What it is; kind decides on the other keys.
        cost: Of one call on one row; by default counted or measured.
        replicas: How many run.
        resources: What each replica occupies.
        serving: How it is served.
        batch_size: Rows in a full batch.
        batch_wait_s: How long a row waits for its batch to fill, in seconds.
        call_timeout_s: Seconds after which a call is abandoned, and with it the replica.
        down_after_s: Seconds without a live replica after which a stage is down; also the longest that a model of a run
            may take to load.
        prompt: Of its language model, instead of the pool's.
        labels: Of its language model, instead of the pool's.
        examples: Of its language model, instead of the pool's.
        options: Of its language model, instead of the pool's.
    """

    name: str
    model: ModelSpec
    cost: CostSpec | None = None
    batch_size: int = Field(default=256, ge=1)
    batch_wait_s: float = Field(default=1.0, ge=0)
    call_timeout_s: float = Field(default=600.0, gt=0)
    down_after_s: float = Field(default=600.0, gt=0)
    replicas: Replicas = Replicas()
    resources: Resources = Resources()
    serving: StageServing = StageServing()

    def load(self) -> Model:
        """Load the model, over several GPUs if the stage has them. Raises CaucError as its kind does."""
        return self.model.load(Placement(self.resources.num_gpus, self.call_timeout_s))

    def served(self) -> StageSpec:
        """Return the stage as a service has it: calls of a remote model end before their rows are abandoned."""
        longest_s = min(self.call_timeout_s, self.serving.timeout_s)
        return self.model_copy(update={"call_timeout_s": longest_s}) if self.model.REMOTE else self

    @model_validator(mode="after")
    def _suits_its_model(self) -> StageSpec:
        kind, n, least = self.model.kind, self.resources.num_gpus, self.model.least_gpus
        if self.cost is not None and self.cost.is_round_trip and not self.model.REMOTE:
            raise ValueError(
                f"seconds: auto is the round trip of a remote stage; a model of kind {kind!r} needs a number"
            )
        if math.ceil(n) < least:
            raise ValueError(f"its model needs {amounts_text({'GPU': least})}, not {n:g}: set num_gpus under resources")
        if n > 1 and not self.model.SPANS_GPUS:
            raise ValueError(
                f"a model of kind {kind!r} runs on one GPU at most, not {n:g}; "
                "to use more, give the stage num_gpus: 1 and more replicas"
            )
        return self

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        """Restrict names to those that are valid in a folder's name and in --models a,b."""
        if not name or name != name.strip() or not name.isprintable() or set(name) & set("/=,"):
            raise ValueError(f"a stage's name must be printable text without '/', '=' and ',', got {name!r}")
        if len(name.encode(errors="replace")) > LONGEST_NAME:
            raise ValueError(f"a stage's name may have up to {LONGEST_NAME} bytes, got {len(name.encode())}")
        return name


Period: TypeAlias = Literal["hour", "run"]


class Limits(Section):
    """What the stages after a row's first may take; beyond it rows keep their best answer so far, or fail.

    Attributes:
        max_usd: Most money in a period, for policies with costs in USD. Calls of a row's first stage count, but are
            always made.
        max_deferral_rate: Largest share of a period's rows that are deferred to a second stage.
        per: A clock hour, or a whole run.
    """

    max_usd: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_deferral_rate: float | None = Field(default=None, ge=0, le=1)
    per: Period = "hour"

    @model_validator(mode="after")
    def _limits_something(self) -> Limits:
        if self.max_usd is None and self.max_deferral_rate is None:
            raise ValueError("limits need max_usd or max_deferral_rate")
        return self


class Pool(PromptSettings):
    """A set of models for one task.

    Attributes:
        name: Of the pool, and of the model in a service's URLs.
        task: What the rows are: images, questions with choices, or rows of columns that models read by their names,
            of which they choose a class or, in generation, say something.
        inputs: Tensors of a request by name, for models that do not declare them; a run reads columns of the same
            names.
        prompt: How its language models are asked.
        labels: Names of the classes, of language models and others.
        examples: Few-shot examples of its language models.
        options: What its language models answer with.
        on_failure: What happens to rows whose next stage is down: "fail" ends the run with what is committed,
            "degrade" answers them as the stages before would have, and marks the rows.
        limits: Money and deferrals in an hour or a run, beyond which rows are treated as if the next stage was down.
        max_failed: Share of a run's rows that models may fail on before the run ends with an error.
        serving: How it is served.
        stages: Its models, cheapest first.
    """

    name: str
    task: Literal["image-classification", "multiple-choice", "classification", "generation"]
    on_failure: Literal["fail", "degrade"] = "fail"
    limits: Limits | None = None
    max_failed: float = Field(default=0.01, ge=0, le=1)
    inputs: dict[str, InputSpec] = Field(default_factory=dict)
    serving: PoolServing = PoolServing()
    stages: tuple[StageSpec, ...] = Field(min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _prompts_reach_their_models(cls, content: Any) -> Any:
        """Move how language models are asked to the models: a stage's own settings, else the pool's."""

        def moved(stage: Any) -> Any:
            match stage:
                case {"model": {"kind": kind} as model} if keys := prompt_fields(kind):
                    settings = {key: at[key] for at in (content, stage) for key in keys if at.get(key) is not None}
                    return {k: v for k, v in stage.items() if k not in keys} | {"model": {**settings, **model}}
            return stage

        match content:
            case {"stages": [*stages]}:
                return {**content, "stages": [moved(stage) for stage in stages]}
        return content

    @model_validator(mode="after")
    def _suits_its_stages(self) -> Pool:
        names = [stage.name for stage in self.stages]
        if repeated := sorted(name for name in names if names.count(name) > 1):
            raise ValueError(f"two stages are named {repeated[0]!r}")
        for stage in self.stages:
            spec = stage.model
            if (
                isinstance(spec, LanguageSpec)
                and self.task != "multiple-choice"
                and not (spec.labels or spec.answer_format)
            ):
                raise ValueError(f"stage {stage.name!r} is a language model: it needs labels to choose from")
            if unused := stage.model_fields_set & PromptSettings.model_fields.keys():
                raise ValueError(f"stage {stage.name!r}: a model of kind {spec.kind!r} takes no {min(unused)}")
        used = frozenset({"labels"}).union(*(prompt_fields(stage.model.kind) for stage in self.stages))
        if unused := self.model_fields_set & PromptSettings.model_fields.keys() - used:
            kinds = sorted(kind for kind in built_in_specs() if min(unused) in prompt_fields(kind))
            raise ValueError(f"{min(unused)} is for models of kind {', '.join(kinds)}")
        if self.labels is not None and self.task == "multiple-choice":
            raise ValueError("labels are names of classes; in multiple-choice, choices name themselves")
        if len({len(labels) for labels in self._all_labels}) > 1:
            raise ValueError("stages differ in their number of labels")
        silent = [
            stage.name for stage in self.stages if (stage.model.answer_format is None) == (self.task == "generation")
        ]
        if silent:
            verb = "scores options" if self.task == "generation" else "answers in words"
            raise ValueError(f"stage {silent[0]!r} {verb}: task generation is for stages that all answer in words")
        if self.task == "generation" and self.serving.log is not None:
            raise ValueError("serving: log writes logits, which models that answer in words do not have: leave it out")
        if len({stage.model.answer_format.rule for stage in self.stages if stage.model.answer_format is not None}) > 1:
            raise ValueError("stages differ in the rule by which answers are the same")
        return self

    @property
    def rule(self) -> str | None:
        """Return the rule by which its models' answers in words are the same; None where they score options."""
        answer_format = self.stages[0].model.answer_format
        return None if answer_format is None else answer_format.rule

    @property
    def _all_labels(self) -> list[tuple[str, ...]]:
        """Return the names of the classes as the pool has them and as its models have them, where they do."""
        return [*filter(None, [super().label_names, *(stage.model.label_names for stage in self.stages)])]

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes in their order, None where they are unknown."""
        return next(iter(self._all_labels), None)

    def stage(self, name: str) -> StageSpec:
        """Return a stage by its name. Raises ConfigError with the nearest name if there is no such stage."""
        stages = {stage.name: stage for stage in self.stages}
        if name not in stages:
            raise ConfigError(f"pool {self.name!r}: {unknown_name('stage', name, stages)}")
        return stages[name]

    def columns_read(self, stages: Sequence[StageSpec]) -> frozenset[str] | None:
        """Return the columns of an input that a run over some stages reads; None for all columns.

        A model that declares no columns reads the pool's `inputs`, if there are any. `example_id`, `label` and
        `choices`, with which the number of logits must agree, are always read.
        """
        names = {"example_id", "label", "choices"}
        for stage in stages:
            columns = stage.model.columns_read.names
            if columns is None and not self.inputs:
                return None
            names |= self.inputs.keys() if columns is None else columns
        return frozenset(names)

    def chain(self, names: tuple[str, ...]) -> tuple[StageSpec, ...]:
        """Return the stages of a chain in its order."""
        return tuple(self.stage(name) for name in names)


def load_pool(path: str | AnyPath) -> Pool:
    """Read a pool file, a path or a URI. Relative paths of tables, weights and labels are taken from its own folder.

    Raises ConfigError in one line if the file is missing, not YAML, or has an unknown key, kind or value.
    """
    location = path_of(path)
    return pool_of(read_yaml(location, "pool file"), location.parent, str(location))


def pool_of(content: object, folder: AnyPath, source: str = "the pool") -> Pool:
    """Read the content of a pool file. Relative paths are taken from folder; source names it in messages.

    Raises ConfigError in one line.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source} is not a pool file: a mapping with name, task and stages was expected")
    try:
        return Pool.model_validate(content, context={"folder": folder})
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error)}") from error
