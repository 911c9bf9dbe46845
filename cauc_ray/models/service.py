"""How a pool is served: settings of its stages and its router, and the tensors of a request."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from cauc_ray.models.resources import Resources
from cauc_ray.models.section import Section

# Of tensors, in the Open Inference Protocol.
Datatype: TypeAlias = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"
]


class Replicas(Section):
    """How many copies of a stage may run.   min: from the start.   max: under load; min without it."""

    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _max_follows_min(cls, value: Any) -> Any:
        if isinstance(value, dict) and "max" not in value and "min" in value:
            return {**value, "max": value["min"]}
        return value

    @model_validator(mode="after")
    def _ordered(self) -> Replicas:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}")
        return self


class StageServing(Section):
    """How a stage is served.

    batch_size: most rows in a call, by default the stage's own.   batch_wait_s: how long a request's rows wait for
    others to share a call, less if no others are expected.   timeout_s: rows that take longer, waiting included, are
    abandoned; a replica whose call takes twice as long is replaced.   target_busy: the target share of time in which
    replicas compute; above it, another is started.   upscale_delay_s and downscale_delay_s: how long the load must
    stay above, or below, before replicas are added, or removed.
    """

    batch_size: int | None = Field(default=None, ge=1)
    batch_wait_s: float = Field(default=0.005, ge=0)
    timeout_s: float = Field(default=10.0, gt=0)
    target_busy: float = Field(default=0.8, gt=0, le=1)
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=120.0, ge=0)


class InputSpec(Section):
    """A tensor of a request.   datatype: in the Open Inference Protocol.   shape: of one row; -1 is any size."""

    datatype: Datatype
    shape: tuple[int, ...] = ()

    @field_validator("shape")
    @classmethod
    def _sizes(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if any(size < 1 and size != -1 for size in shape):
            raise ValueError(f"sizes must be at least 1, or -1 for any, got {list(shape)}")
        return shape


class RouterSpec(Section):
    """The deployment that takes requests and holds the policy.   replicas: how many.   resources: of each."""

    replicas: Replicas = Replicas()
    resources: Resources = Resources()


class PoolServing(Section):
    """How a pool is served.

    max_request_rows: in one request.   max_body_mb: of a request, in 10^6 bytes, unpacked.   max_queued_rows: that
    may wait for a stage in one router.   shadow: the share of answers of stages before the last that are compared with
    the whole cascade's, when its stages are idle.   tracing: "module:function", called once in each router, that
    configures OpenTelemetry.   router: the deployment that takes requests.
    """

    max_request_rows: int = Field(default=4096, ge=1)
    max_body_mb: float = Field(default=64.0, gt=0)
    max_queued_rows: int = Field(default=8192, ge=1)
    shadow: float = Field(default=0.0, ge=0, le=1)
    router: RouterSpec = RouterSpec()
    tracing: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
