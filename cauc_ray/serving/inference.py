"""From the body of a request for inference to that of its response."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cauc_ray.models.answers import Batch
from cauc_ray.models.service import Datatype
from cauc_ray.numbers.softmax import softmax
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.documents import AnswerParameters, ModelMetadata, RequestParameters, TensorMetadata
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.inputs import Inputs
from cauc_ray.serving.messages import InferRequest, read_infer_request, write_infer_response
from cauc_ray.serving.request_state import RequestState
from cauc_ray.serving.tensors import Tensor
from cauc_ray.serving.tracing import Spans

if TYPE_CHECKING:
    from cauc_ray.serving.service import Service

# What a response may hold.
OUTPUTS: Mapping[str, Datatype] = {
    "prediction": "INT32",
    "prediction_label": "BYTES",
    "confidence": "FP32",
    "probabilities": "FP32",
    "stage": "INT8",
    "cost": "FP32",
    "degraded": "BOOL",
}
# Longer JSON, and more output values in JSON, are read and written in another process; in this one that would take
# some 5 ms, for which all other requests would wait. Other bodies that are longer are read in a thread.
LONG_JSON, LONG_OUTPUT, LONG_BODY = 250_000, 50_000, 1_000_000


@dataclass(frozen=True, slots=True)
class Reply:
    """body and json_length: of the response (None: it is JSON alone).   log_fields: for the access log."""

    body: bytes
    json_length: int | None
    log_fields: Mapping[str, Any]


def read_request(body: bytes, json_length: int | None, inputs: Inputs) -> tuple[InferRequest, Batch, int]:
    """Read a request: it, its inputs as n rows of columns, each (n, ...), and n. Raises RequestError."""
    request = read_infer_request(body, json_length)
    return request, *inputs.columns(request.inputs)


def read_elsewhere(body: bytes, json_length: int | None, inputs: Inputs) -> tuple[InferRequest, Batch, int]:
    """Read a request as read_request does, for another process: it comes without its inputs, which are the columns."""
    request, columns, n = read_request(body, json_length, inputs)
    return replace(request, inputs={}), columns, n


class Inference:
    """Answers requests for inference of one replica of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.inputs = Inputs(service.pool, service.specs)
        self._spans = Spans.configured(service.pool.serving.tracing)

    async def answer(self, body: bytes, json_length: int | None, version: str, headers: Mapping[str, str]) -> Reply:
        """Answer one request. Raises RequestError."""
        started_ns = time.time_ns()
        in_force = await self._service.policy_for_request()  # once: a request has one policy to the end
        request, columns, n = await self._read(body, json_length)
        answered = await self._service.cascade.answer(
            in_force.policy,
            columns,
            n,
            last_stage=last_stage(request.parameters, in_force.policy),
            wants_scores="probabilities" in request.outputs,
        )
        self._service.watching.answered(answered, in_force.id)
        if answered.early:
            self._service.cascade.compare(answered, partial(self._service.watching.agreements, in_force.id))
        parameters = self._parameters(answered, in_force.id)
        outputs = [Tensor(name, OUTPUTS[name], self._values(name, answered)) for name in request.outputs]
        binary = frozenset(name for name, is_binary in request.outputs.items() if is_binary)
        write = partial(
            write_infer_response,
            model=self._service.model,
            version=version,
            id=request.id,
            outputs=outputs,
            binary=binary,
            parameters=parameters,
        )
        n_values = sum(tensor.values.size for tensor in outputs if tensor.name not in binary)
        written, length = await self._service.elsewhere.call(write) if n_values > LONG_OUTPUT else write()
        log_fields = {"rows": n, **parameters}
        self._spans.report(headers, started_ns, answered, log_fields)
        return Reply(written, length, log_fields)

    async def _read(self, body: bytes, json_length: int | None) -> tuple[InferRequest, Batch, int]:
        """Read a request where it does not block others."""
        n_json = len(body) if json_length is None else json_length
        if n_json > LONG_JSON or (len(body) > LONG_BODY and b'"BYTES"' in body[: max(0, n_json)]):
            return await self._service.elsewhere.call(read_elsewhere, body, json_length, self.inputs)
        if len(body) > LONG_BODY:  # numbers as they are: numpy reads them without Python's lock
            return await asyncio.to_thread(read_request, body, json_length, self.inputs)
        return read_request(body, json_length, self.inputs)

    def metadata(self, version: str) -> ModelMetadata:
        """Return the model's metadata as the protocol has it."""
        in_force = self._service.in_force
        return ModelMetadata(
            name=self._service.model,
            versions=[version],
            platform="cauc-ray",
            inputs=[
                TensorMetadata(name=name, datatype=spec.datatype, shape=[-1, *spec.shape])
                for name, spec in self.inputs.declared.items()
            ],
            outputs=[
                TensorMetadata(name=name, datatype=datatype, shape=[-1, -1] if name == "probabilities" else [-1])
                for name, datatype in OUTPUTS.items()
            ],
            parameters={
                "policy_id": in_force.id,
                "method": in_force.policy.method,
                "stages": ",".join(in_force.policy.models),
                "cost_unit": in_force.policy.cost_unit,
            },
        )

    def _parameters(self, answered: RequestState, policy_id: str) -> AnswerParameters:
        called = [name for stage, name in enumerate(answered.policy.models) if stage in answered.called]
        answer = AnswerParameters(
            policy_id=policy_id,
            answer_id=secrets.token_hex(16),
            stage=max(answered.stages.tolist()),
            stages_called=",".join(called),
            cost=math.fsum(answered.costs.tolist()),
            cost_unit=answered.policy.cost_unit,
            degraded=answered.reason is not None,
        )
        if answered.reason is not None:
            answer["reason"] = answered.reason
        return answer

    def _values(self, name: str, answered: RequestState) -> npt.NDArray[Any]:
        if name == "prediction":
            return answered.predictions
        if name == "prediction_label":
            return self._labels(answered)
        if name == "probabilities":
            assert answered.scores is not None
            return softmax(answered.scores).astype(np.float32)
        if name == "stage":
            return answered.stages
        if name == "degraded":
            return answered.degraded
        return (answered.confidences if name == "confidence" else answered.costs).astype(np.float32)

    def _labels(self, answered: RequestState) -> npt.NDArray[Any]:
        """Return what the options are called: the chosen text of a question, a class's name, else its number."""
        texts = np.empty(answered.n, dtype=object)
        choices = answered.columns.get("choices")
        names = self._service.labels
        for row, option in enumerate(answered.predictions.tolist()):
            known = choices[row] if choices is not None else names
            text = known[option] if known is not None and option < len(known) else str(option)
            texts[row] = text.encode()
        return texts


def last_stage(parameters: RequestParameters, policy: Policy) -> int | None:
    """Return the deepest stage that a request allows, None for the last.

    max_stage: its number from 0, or its name.   max_cost: what the calls for one row may cost, in the policy's unit.
    Raises RequestError.
    """
    allowed = deepest = len(policy.stages) - 1
    if (wanted := parameters.get("max_stage")) is not None:
        position = policy.models.index(wanted) if wanted in policy.models else wanted
        if not isinstance(position, int) or not 0 <= position <= deepest:
            raise RequestError(
                f"max_stage must be 0 to {deepest} or one of {', '.join(policy.models)}, got {wanted!r:.80}"
            )
        allowed = position
    if (cap := parameters.get("max_cost")) is not None:
        # Rounding must not exclude a sum of costs that equals the cap.
        affordable = np.cumsum([stage.cost for stage in policy.stages]) <= cap * (1 + 1e-9)
        if not affordable[0]:
            raise RequestError(
                f"max_cost {cap:g} is below the cost of the first stage, {policy.stages[0].cost:g} {policy.cost_unit}"
            )
        allowed = min(allowed, int(affordable.sum()) - 1)
    return allowed
