"""The pool file: models, their costs and their resources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, StrictFloat, ValidationError, field_validator, model_validator

from cauc_ray.errors import ConfigError, explain, unknown_name
from cauc_ray.files.documents import read_yaml
from cauc_ray.files.paths import AnyPath, path_from, path_of
from cauc_ray.models.answers import Model
from cauc_ray.models.kinds import ModelSpec, known_kinds
from cauc_ray.models.labels import Labels, read_labels
from cauc_ray.models.resources import Resources
from cauc_ray.models.section import Section
from cauc_ray.models.service import InputSpec, PoolServing, Replicas, StageServing

LONGEST_NAME = 200  # folder names are limited to 255 bytes
COST_UNITS = {
    "gflops": "GFLOPs",
    "kflops": "kFLOPs",
    "params_b": "B params",
    "seconds": "s",
    "usd": "USD",
    "usd_per_mtok": "USD per M tokens",
}


class CostSpec(Section):
    """What one call on one example costs: exactly one number, whose key is its unit.

    gflops and params_b may be "auto": as published with the model, else as measured.
    """

    gflops: StrictFloat | Literal["auto"] | None = None
    params_b: StrictFloat | Literal["auto"] | None = None
    kflops: StrictFloat | None = None
    seconds: StrictFloat | None = None
    usd: StrictFloat | None = None
    usd_per_mtok: StrictFloat | None = None

    @field_validator("*")
    @classmethod
    def _not_negative(cls, value: Any) -> Any:
        if isinstance(value, float) and value < 0:
            raise ValueError(f"a cost must be at least 0, got {value:g}")
        return value

    @model_validator(mode="after")
    def _one_unit(self) -> CostSpec:
        if len(self.model_fields_set) != 1 or getattr(self, self._key) is None:
            raise ValueError(f"give a cost as exactly one of {', '.join(COST_UNITS)}")
        return self

    @property
    def _key(self) -> str:
        return next(iter(self.model_fields_set))

    @property
    def unit(self) -> str:
        """Return the unit as costs are reported in it."""
        return COST_UNITS[self._key]

    @property
    def value(self) -> float | None:
        """Return the number, None for "auto"."""
        value = getattr(self, self._key)
        return None if value == "auto" else float(value)


class StageSpec(Section):
    """One model of a pool as a stage.

    name: of the model, in tables and policies.   model: what it is; kind decides on the other keys.   cost: of one
    call on one row; without it counted or measured.   replicas: how many run.   resources: what each occupies.
    serving: how it is served.   batch_size: rows in a full batch.   batch_wait_s: how long a row waits for its batch
    to fill, in seconds.   call_timeout_s: a call that takes longer is given up, and with it the replica.
    down_after_s: a stage that has had no live replica for so long is down.
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
        return self.model.load_over_gpus() if self.resources.num_gpus > 1 else self.model.load()

    @model_validator(mode="after")
    def _uses_its_gpus(self) -> StageSpec:
        if self.resources.num_gpus > 1 and not self.model.SPANS_GPUS:
            raise ValueError(
                f"a model of kind {self.model.kind!r} runs on one GPU at most, not {self.resources.num_gpus:g}; "
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


class Pool(Section):
    """A set of models for one task.

    name: of the pool, and of the model in a service's URLs.
    task: what the rows are: images, questions with choices, or rows of columns that models read by their names.
    inputs: the tensors of a request by name, where the models do not declare them; a run reads columns of the same
    names.
    labels: names of the classes in their order, or in the file the path of a text that has one on each line.
    on_failure: what happens to rows whose next stage is down: "fail" ends the run with what is committed,
    "degrade" answers them as the stages before would have, and marks the rows.
    max_failed: the share of a run's rows that models may fail on before the run ends with an error.
    serving: how it is served.
    stages: its models, cheapest first.
    """

    name: str
    task: Literal["image-classification", "multiple-choice", "classification"]
    labels: Labels = None
    on_failure: Literal["fail", "degrade"] = "fail"
    max_failed: float = Field(default=0.01, ge=0, le=1)
    inputs: dict[str, InputSpec] = Field(default_factory=dict)
    serving: PoolServing = PoolServing()
    stages: tuple[StageSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _choices_name_themselves(self) -> Pool:
        if self.labels is not None and self.task == "multiple-choice":
            raise ValueError("labels are names of classes; in multiple-choice, choices name themselves")
        return self

    @model_validator(mode="after")
    def _distinct_names(self) -> Pool:
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two stages are named {name!r}")
        return self

    def stage(self, name: str) -> StageSpec:
        """Return a stage by its name. Raises ConfigError with the nearest name if there is no such stage."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise ConfigError(f"pool {self.name!r}: {unknown_name('stage', name, [s.name for s in self.stages])}")

    def columns_read(self, stages: Sequence[StageSpec]) -> frozenset[str] | None:
        """Return the columns of an input that a run over some stages reads; None for whatever there is.

        A model that does not tell itself reads the pool's inputs, where these are declared. What rows are called and
        labelled is read, too, and choices, which logits are held against.
        """
        read = {"example_id", "label", "choices"}
        for stage in stages:
            own = stage.model.READS if stage.model.READS is not None else frozenset(self.inputs)
            if stage.model.READS is None and not own:
                return None
            read |= own
        return frozenset(read)

    def chain(self, names: tuple[str, ...]) -> tuple[StageSpec, ...]:
        """Return the stages of a chain in its order."""
        return tuple(self.stage(name) for name in names)


def load_pool(path: str | AnyPath) -> Pool:
    """Read a pool file, a path or a URI. Relative paths of tables, weights and labels are taken from its own folder.

    Raises ConfigError in one line if the file is missing, not YAML, or has an unknown key, kind or value.
    """
    location = path_of(path)
    content = read_yaml(location, "pool file")
    return pool_of(content, location.parent, str(location))


def pool_of(content: object, folder: AnyPath, source: str = "the pool") -> Pool:
    """Read the content of a pool file. Relative paths are taken from folder; source names it in messages.

    Raises ConfigError in one line.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{source} is not a pool file: expected a mapping with name, task and stages")
    _refuse_unknown_kinds(source, content)
    if isinstance(content.get("labels"), str):
        content = {**content, "labels": read_labels(path_from(folder, content["labels"]), source)}
    try:
        pool = Pool.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error)}") from error
    located = [s.model_copy(update={"model": s.model.located(folder)}) for s in pool.stages]
    return pool.model_copy(update={"stages": tuple(located)})


def _refuse_unknown_kinds(source: str, content: dict[str, Any]) -> None:
    """Raise ConfigError for an unknown kind with the nearest one, which the schema's own message lacks."""
    stages = content.get("stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        model = stage.get("model") if isinstance(stage, dict) else None
        kind = model.get("kind") if isinstance(model, dict) else None
        if isinstance(kind, str) and kind not in known_kinds():
            raise ConfigError(f"{source}: stages.{index}.model: {unknown_name('kind', kind, known_kinds())}")
