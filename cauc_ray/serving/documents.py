"""What the HTTP application takes and gives, as types: the code is checked by them, openapi.json is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from cauc_ray.models.service import Datatype

# The description of all addresses, written by python -m cauc_ray.schemas.
OPENAPI = Path(__file__).with_name("openapi.json")

Output: TypeAlias = Literal[
    "prediction", "prediction_label", "confidence", "probabilities", "stage", "cost", "degraded"
]
# numpy has no arrays of more dimensions.
_Shape: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64, fail_fast=True)]
_Parameters: TypeAlias = dict[str, bool | float | str | None]


class Error(TypedDict):
    """What went wrong."""

    error: Annotated[str, Field(description="one sentence")]


class ServerMetadata(TypedDict):
    """What this server is."""

    name: str
    version: str
    extensions: list[str]
    models: list[str]


class Live(TypedDict):
    """Whether the server runs."""

    live: bool


class Ready(TypedDict):
    """Whether requests can be answered."""

    ready: bool


class ModelReady(TypedDict):
    """Whether a model can answer."""

    name: str
    ready: bool


class TensorMetadata(TypedDict):
    """A tensor that a model reads or answers; -1 in its shape is any size."""

    name: str
    datatype: Datatype
    shape: list[Annotated[int, Field(ge=-1)]]


class ModelMetadata(TypedDict):
    """What a model reads and answers."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: _Parameters


class InputParameters(TypedDict, total=False):
    """How the data of an input are sent."""

    binary_data_size: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="length of its raw bytes, which follow the JSON part in the order of the inputs"),
    ]
    shared_memory_region: Annotated[None, Field(description="not supported")]


class InputTensor(TypedDict):
    """Rows of one of the model's inputs."""

    name: Annotated[str, Field(min_length=1)]
    shape: Annotated[_Shape, Field(description="rows first")]
    datatype: Datatype
    parameters: NotRequired[InputParameters | None]
    data: NotRequired[Annotated[list[Any] | None, Field(description="flat, or nested by the shape")]]


class OutputParameters(TypedDict, total=False):
    """How an output is written."""

    binary_data: Annotated[bool | None, Field(description="as raw bytes")]
    shared_memory_region: Annotated[None, Field(description="not supported")]
    classification: Annotated[None, Field(description="not supported")]


class NamedOutput(TypedDict):
    """An output that a request names."""

    name: Output
    parameters: NotRequired[OutputParameters | None]


class RequestParameters(TypedDict, total=False):
    """What a request may ask for."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[misc]
    max_cost: Annotated[
        Annotated[float, Field(ge=0)] | None, Field(description="the most that the calls for one row may cost")
    ]
    max_stage: Annotated[
        int | str | None, Field(description="the deepest stage to call: its number from 0, or its name")
    ]
    binary_data_output: Annotated[bool | None, Field(description="write outputs that are not named as raw bytes")]


class InferenceRequest(TypedDict):
    """Rows to be answered. Null is the same as a missing key, and unknown keys are ignored."""

    __pydantic_config__ = ConfigDict(cache_strings="keys")  # type: ignore[misc]
    id: NotRequired[str | None]
    parameters: NotRequired[RequestParameters | None]
    inputs: Annotated[list[InputTensor], Field(min_length=1, fail_fast=True)]
    outputs: NotRequired[Annotated[list[NamedOutput], Field(fail_fast=True)] | None]


class OutputTensor(TypedDict):
    """One of the outputs, rows first."""

    name: Output
    shape: _Shape
    datatype: Datatype
    parameters: NotRequired[_Parameters]
    data: NotRequired[list[Any]]


class AnswerParameters(TypedDict):
    """How a request was answered."""

    policy_id: str
    answer_id: Annotated[str, Field(description="identifies this answer in feedback")]
    stage: Annotated[int, Field(description="the deepest stage that answered a row, from 0")]
    stages_called: Annotated[str, Field(description="names, separated by commas")]
    cost: Annotated[float, Field(description="of all calls for the request's rows")]
    cost_unit: str
    degraded: bool
    reason: NotRequired[Annotated[str, Field(description="why it is degraded")]]


class InferenceResponse(TypedDict):
    """The answers to a request's rows."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    parameters: AnswerParameters
    outputs: list[OutputTensor]


class PolicyInForce(TypedDict):
    """The active policy."""

    policy_id: str
    version: Annotated[int, Field(description="the number of changes before it")]
    policy: Annotated[dict[str, Any], Field(description="a policy file's content")]


class PolicyChanged(TypedDict):
    """A change of the policy, which is active on all replicas."""

    policy_id: str
    previous: str
    version: int
    replicas: Annotated[int | None, Field(description="replicas that have confirmed it; null if one does not answer")]
    says: str | None


class FeedbackTaken(TypedDict):
    """The result of feedback."""

    policy_id: str
    rows: int
    counted: int
    says: Annotated[str | None, Field(description="why not all rows are counted")]


class WatchReport(TypedDict):
    """Whether the active policy is still valid."""

    policy_id: str
    holds: Annotated[bool | None, Field(description="null if the policy has no reference to compare with")]
    says: Annotated[str, Field(description="the same in words, with the first feature that drifted")]
    routers: Annotated[int, Field(description="replicas that have reported")]
    n: NotRequired[Annotated[int, Field(description="answers")]]
    n_labelled: NotRequired[Annotated[int, Field(description="rows of feedback")]]
    n_compared: NotRequired[Annotated[int, Field(description="rows of the shadow sample")]]
    false_alarm_rate: NotRequired[float]
    needed: NotRequired[Annotated[float, Field(description="evidence at which the policy counts as drifted, log10")]]
    features: NotRequired[list[dict[str, Any]]]
    stages: NotRequired[list[dict[str, Any]]]
