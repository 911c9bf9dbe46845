"""From the body of a request for inference to that of its response."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cauc_ray.cascade.rows import Vector
from cauc_ray.models.answers import TOKENS, Batch
from cauc_ray.numbers.chain import cost_text
from cauc_ray.numbers.logits import LogitKind, joint_kind, softmax
from cauc_ray.policies.policy import Policy
from cauc_ray.protocol.messages import (
    InferRequest,
    RequestParameters,
    read_infer_request,
    write_infer_response,
)
from cauc_ray.protocol.tensors import Datatype, RequestError, Tensor
from cauc_ray.serving.answer_ids import new_answer_id
from cauc_ray.serving.bodies import read_as
from cauc_ray.serving.chat import ChatRequest, completion, events
from cauc_ray.serving.decisions import DecisionRequest, columns_of, require_decisions, response
from cauc_ray.serving.elsewhere import LONG_JSON, LONG_OUTPUT
from cauc_ray.serving.inputs import Inputs
from cauc_ray.serving.policies_live import WHOLE
from cauc_ray.serving.request_state import Question, RequestState

if TYPE_CHECKING:
    from cauc_ray.protocol.grpc_messages import GrpcMessage  # of an extra
    from cauc_ray.serving.service import Service

# What a response may hold.
OUTPUTS: Mapping[str, Datatype] = {
    "prediction": "INT32",
    "prediction_label": "BYTES",
    "answer": "BYTES",
    "confidence": "FP32",
    "source": "BYTES",
    "probabilities": "FP32",
    "logits": "FP32",
    "stage": "INT8",
    "cost": "FP32",
    "degraded": "BOOL",
    "prompt_tokens": "INT32",
    "completion_tokens": "INT32",
}
# Those of models that answer in words.
_IN_WORDS = ("answer", *TOKENS)
# What the cascade is to keep for them, and their shapes.
VECTORS: Mapping[str, Vector] = {"probabilities": "scores", "logits": "logits"}
# Of requests without one, or with 0; 1 is the highest.
DEFAULT_PRIORITY = 2
# Other bodies that are longer are read in a thread.
LONG_BODY = 1_000_000


@dataclass(frozen=True, slots=True)
class HttpMessage:
    """A request over HTTP, readable in another process.

    Attributes:
        body: The body.
        json_length: Length of its JSON part, None if all of it is JSON.
    """

    body: bytes
    json_length: int | None

    write = staticmethod(write_infer_response)

    @property
    def n_slow(self) -> int:
        """Return how many bytes Python reads one by one, those of its JSON part."""
        return len(self.body) if self.json_length is None else self.json_length

    @property
    def has_texts(self) -> bool:
        """Return whether its JSON part names the datatype BYTES, whose raw bytes Python reads one by one, too."""
        return b'"BYTES"' in self.body[: max(0, self.n_slow)]

    def read(self) -> InferRequest:
        """Read it. Raises RequestError."""
        return read_infer_request(self.body, self.json_length)


def read_request(message: HttpMessage | GrpcMessage, inputs: Inputs) -> tuple[InferRequest, Batch, int]:
    """Read a request: all but its inputs, these as n rows of columns, each (n, ...), and n. Raises RequestError."""
    request = message.read()
    tensors = request.inputs if request.rows is None else inputs.tensors(request.rows)
    return replace(request, inputs={}, rows=None), *inputs.columns(tensors)


class Inference:
    """Answers requests for inference of one replica of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._inputs = Inputs(service.pool, service.specs)

    async def answer(
        self, message: HttpMessage | GrpcMessage, headers: Mapping[str, str], version: str | None = None
    ) -> tuple[bytes, int | None, Mapping[str, Any]]:
        """Answer one request.

        Args:
            message: The request.
            headers: Its headers.
            version: Id of the policy that answers, None for any.

        Returns:
            The response's body, the length of its JSON part (None: all of it), and fields to log.

        Raises:
            RequestError: The request is refused.
        """
        service, asked = self._service, (headers, time.time_ns())
        request, columns, n = await self._read(message)
        answered = await self._answered(columns, n, request.parameters, request.outputs, *asked, version)
        parameters = answered.parameters()
        outputs = [Tensor(name, OUTPUTS[name], self._values(name, answered)) for name in request.outputs]
        write = partial(message.write, request, service.model, parameters["policy_id"], outputs, parameters)
        n_values = sum(tensor.values.size for tensor in outputs if not request.outputs[tensor.name])
        written, length = await service.elsewhere.call_if(n_values > LONG_OUTPUT, write)
        return written, length, {"rows": n, **parameters}

    async def decide(self, body: bytes, headers: Mapping[str, str]) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """Answer a request for decisions: the response's content, and fields to log. Raises RequestError."""
        asked, texts = (headers, time.time_ns()), self._inputs.texts
        labels = None if self._service.pool.task == "multiple-choice" else self._service.labels
        require_decisions(labels, texts)
        request = await self._service.elsewhere.call_if(len(body) > LONG_JSON, read_as, DecisionRequest, body)
        self._require_model(request.model)
        columns, orders = columns_of(request, labels, texts)
        self._inputs.require_rows(n := len(request.questions))
        answered = await self._answered(columns, n, {}, ["probabilities"], *asked)
        parameters = answered.parameters()
        return response(request, answered, orders, parameters), {"rows": n, **parameters}

    async def chat(self, body: bytes, headers: Mapping[str, str]) -> tuple[bytes, bool, Mapping[str, Any]]:
        """Answer a message: the response's body, whether it is streamed, and fields to log. Raises RequestError."""
        asked = headers, time.time_ns()
        if self._service.pool.task != "generation":
            raise RequestError("the models of this service score options: ask it at /v1/decisions or /v2/models")
        request = await self._service.elsewhere.call_if(len(body) > LONG_JSON, read_as, ChatRequest, body)
        self._require_model(request.model)
        answered = await self._answered(request.columns(self._inputs), 1, {}, (), *asked)
        parameters = answered.parameters()
        fields = {"rows": 1, **parameters}
        if request.stream:
            return events(request, answered, parameters), True, fields
        return json.dumps(completion(request, answered, parameters)).encode(), False, fields

    def _require_model(self, model: str) -> None:
        if model != self._service.model:
            raise RequestError(f"unknown model {model!r:.80}; this service has {self._service.model!r}", 404)

    async def _answered(
        self,
        columns: Batch,
        n: int,
        limits: RequestParameters,
        outputs: Iterable[str],
        headers: Mapping[str, str],
        started_ns: int,
        version: str | None = None,
    ) -> RequestState:
        """Answer n rows of columns."""
        service = self._service
        in_force = await service.policy_for_request()  # once: a request has one policy to the end
        if version is not None and version != WHOLE:
            member = service.member(in_force, version)
        elif (session := limits.get("session")) is not None:
            member = in_force.drawn_for(session)
        else:
            member = in_force.drawn(random.random())
        policy, last = member.policy, last_stage(limits, member.policy)
        whole = last == len(policy.stages) - 1
        drawn = version in (None, WHOLE) and in_force.candidate is not None and whole
        sampled = policy.in_turn and whole and limits.get("log") is not False
        return await service.cascade.answer(
            policy,
            columns,
            n,
            last_stage=last,
            asks_for=frozenset(VECTORS[name] for name in outputs if name in VECTORS),
            timeout_s=(limits.get("timeout") or 0) / 1e6 or None,
            priority=limits.get("priority") or DEFAULT_PRIORITY,
            question=Question(
                in_force, member, new_answer_id(sampled=sampled, drawn=drawn), drawn, headers, started_ns
            ),
        )

    async def _read(self, message: HttpMessage | GrpcMessage) -> tuple[InferRequest, Batch, int]:
        """Read a request where it does not block others."""
        n = len(message.body)
        is_slow = n > LONG_JSON and (message.n_slow > LONG_JSON or (n > LONG_BODY and message.has_texts))
        if n > LONG_BODY and not is_slow:  # numbers as they are: numpy reads them without Python's lock
            return await asyncio.to_thread(read_request, message, self._inputs)
        return await self._service.elsewhere.call_if(is_slow, read_request, message, self._inputs)

    @cached_property
    def _logit_kind(self) -> str:
        """Return the kind of the output logits, of which some stages read a file."""
        kinds = [spec.model.answers_kind for spec in self._service.specs]
        return joint_kind([_as_output(kind) for kind in kinds if kind != "embedding"])

    def metadata(self, version: str | None = None) -> dict[str, Any]:
        """Return the model's metadata in the protocol's form.

        Args:
            version: Id of a policy, None for the incumbent.

        Raises:
            RequestError: 404 if no such policy is active.
        """
        in_force = self._service.in_force
        member = self._service.member(in_force, WHOLE if version is None else version)
        policy = member.policy
        return {
            "name": self._service.model,
            "versions": list(in_force.shares),
            "platform": "cauc-ray",
            "inputs": [
                {"name": name, "datatype": spec.datatype, "shape": [-1, *spec.shape]}
                for name, spec in self._inputs.declared.items()
            ],
            "outputs": [
                {"name": name, "datatype": datatype, "shape": [-1, -1] if name in VECTORS else [-1]}
                for name, datatype in OUTPUTS.items()
                if name not in _IN_WORDS or self._service.pool.rule is not None
            ],
            "parameters": {
                "policy_id": member.id,
                "method": policy.method,
                "stages": ",".join(policy.models),
                "cost_unit": policy.cost_unit,
                "logit_kind": self._logit_kind,
                "optional_inputs": ",".join(name for name in self._inputs.names if name not in self._inputs.declared),
            },
        }

    def _values(self, name: str, answered: RequestState) -> npt.NDArray[Any]:
        if name == "prediction":
            return answered.predictions
        if name == "prediction_label":
            return self._labels(answered)
        if name == "answer":
            if answered.texts is None:
                raise RequestError("the service's models score options and say nothing: ask for prediction_label")
            return np.array([(text or "").encode() for text in answered.texts], dtype=object)
        if name == "source":
            return np.array([*(answered.source(row).encode() for row in range(answered.n)), None], dtype=object)[:-1]
        if name == "probabilities":
            return softmax(answered.vectors["scores"]).astype(np.float32)
        if name == "logits":
            return answered.vectors["logits"].astype(np.float32)
        if name == "stage":
            return answered.stages
        if name == "degraded":
            return answered.degraded
        if name in TOKENS:
            return answered.tokens[:, TOKENS.index(name)].astype(np.int32)
        return (answered.confidences if name == "confidence" else answered.costs).astype(np.float32)

    def _labels(self, answered: RequestState) -> npt.NDArray[Any]:
        """Return what the options are called: the chosen text of a question, a class's name, else its number."""
        if answered.texts is not None:
            return self._values("answer", answered)
        texts = np.empty(answered.n, dtype=object)
        choices = answered.columns.get("choices")
        names = self._service.labels
        for row, option in enumerate(answered.predictions.tolist()):
            options = choices[row] if choices is not None else names
            text = options[option] if options is not None and option < len(options) else str(option)
            texts[row] = text.encode()
        return texts


def _as_output(kind: LogitKind) -> LogitKind:
    """Return the kind of the output logits of a stage; the worker has taken the logarithms of probabilities."""
    return "log-probabilities" if kind == "probabilities" else kind


def last_stage(parameters: RequestParameters, policy: Policy) -> int:
    """Return the deepest stage that a request allows.

    Args:
        parameters: Of the request: "max_stage" is a stage's number from 0 or its name, "max_cost" the highest cost of
            the calls for one row, in the policy's unit.
        policy: The policy that answers.

    Raises:
        RequestError: A parameter is invalid, or the first stage costs more than max_cost.
    """
    allowed = deepest = len(policy.stages) - 1
    if (max_stage := parameters.get("max_stage")) is not None:
        position = policy.models.index(max_stage) if max_stage in policy.models else max_stage
        if not isinstance(position, int) or not 0 <= position <= deepest:
            raise RequestError(
                f"max_stage must be 0 to {deepest} or one of {', '.join(policy.models)}, got {max_stage!r:.80}"
            )
        allowed = position
    if (cap := parameters.get("max_cost")) is not None:
        # Rounding must not exclude a sum of costs that equals the cap.
        affordable = np.cumsum([stage.cost for stage in policy.stages]) <= cap * (1 + 1e-9)
        if not affordable[0]:
            least = cost_text(policy.stages[0].cost, policy.cost_unit, 6)
            raise RequestError(f"max_cost {cap:g} is below the cost of the first stage, {least}")
        allowed = min(allowed, int(affordable.sum()) - 1)
    return allowed
