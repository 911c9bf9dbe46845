"""A client of a server of the Open Inference Protocol v2, for the length of a stage's life."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import httpx2
import numpy as np

from cauc_ray.errors import CaucError, ConfigError
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, Wire, batch_size, choices_in, ragged
from cauc_ray.models.http_client import HttpClient, all_until_error, json_of, value_at
from cauc_ray.models.input_tensors import InputTensors, input_tensors
from cauc_ray.models.kind import IN_TIME, Placement
from cauc_ray.models.remote import RemoteSpec
from cauc_ray.numbers.logits import LOGIT_KINDS
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.protocol.messages import (
    BINARY_DATA,
    ModelMetadata,
    TensorMetadata,
    read_infer_response,
    read_model_metadata,
    write_infer_request,
)
from cauc_ray.protocol.tensors import RequestError

# Busy, down, or behind a proxy that says so; and statuses that reject the rows of a request.
TRANSIENT, REJECTED = frozenset({408, 425, 429, 502, 503, 504}), {400, 413, 422, 500}
# Rows rejected one by one before the server is at fault, while it has answered none.
MAX_REJECTIONS_BEFORE_FIRST_SUCCESS = 16
# The length of the JSON part of a body that ends in raw bytes.
JSON_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its server describes it.

    Attributes:
        inputs: Tensors by the columns that fill them.
        optional: Tensors that may be left out, by their columns.
        n_options: Options of each row, None if rows differ.
        outputs: Outputs to request.
        cost_unit: Unit of the output `cost`, None if there is none.
    """

    inputs: Mapping[str, TensorMetadata]
    optional: Mapping[str, TensorMetadata]
    n_options: int | None
    outputs: tuple[str, ...]
    cost_unit: str | None


@dataclass(slots=True)
class _Call:
    """The rows of a call, and what came of them.

    Attributes:
        served: The model.
        tensors: The rows as the server reads them.
        deadline: When the call ends, by the monotonic clock.
        logits: Logits by row, float32 (K,).
        costs: Reported costs, float64 (n,).
        failures: Why rows have no logits, by row.
    """

    served: ServedModel
    tensors: InputTensors
    deadline: float
    costs: Floats
    logits: dict[int, Floats] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


class RemoteModel(Model):
    """A model of another server.

    The server is asked about the model at the first call, since it may be away until then. Rows that it rejects are
    failed rows: a rejected request is halved until its rows are single, and if all of its rows are answered then, later
    requests have no more rows than those that were accepted. A call ends a moment before the stage abandons it.

    Other problems raise ConfigError (a token, certificate, model or setting that the server does not accept) or
    ExecutionError (a server that is away, late or fails on every row).
    """

    def __init__(self, spec: RemoteSpec, placement: Placement) -> None:
        """Connect to nothing yet. Raises ConfigError if the token or a certificate is missing."""
        self.facts = ModelFacts(spec.source, spec.answers_kind)
        self._spec, self._deadline_s = spec, min(spec.timeout_s, IN_TIME * placement.call_timeout_s)
        self._http = HttpClient(
            spec.server(), transient=TRANSIENT, retries=spec.retries, max_concurrency=spec.max_concurrency
        )
        self._served: ServedModel | None = None
        self._has_answered = self._takes_binary = False
        self._max_rows = spec.max_rows
        self._reported_bytes = (0, 0)

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch of rows, in requests of max_rows at most, max_concurrency at a time.

        Raises:
            DataError: A column is missing.
            ConfigError: As described for the class.
            ExecutionError: As described for the class.
        """
        began = time.perf_counter()
        call = self._http.run(self._answered(batch))
        served, n = call.served, batch_size(batch)
        n_choices = choices_in(batch) or [None] * n
        failures = dict(call.tensors.faults) | call.failures
        logits: dict[int, Floats] = {}
        for row, padded in call.logits.items():
            if np.isfinite(padded.max(initial=-np.inf)):
                logits[row] = padded[: served.n_options or _n_options(padded, n_choices[row])]
            else:
                failures[row] = "the server's logits for it are NaN or infinite"
        self._has_answered = self._has_answered or bool(logits)
        if not logits:
            self._served = None  # it may have become another model
        totals, before = (self._http.bytes_out, self._http.bytes_in), self._reported_bytes
        self._reported_bytes = totals
        return Answers(
            *ragged(n, logits),
            costs=None if served.cost_unit is None else call.costs,
            failures=failures,
            cost_unit=served.cost_unit,
            wire=Wire(totals[0] - before[0], totals[1] - before[1], time.perf_counter() - began),
        )

    async def _answered(self, batch: Batch) -> _Call:
        """Ask for all rows; after an error that concerns all of them, ask no more."""
        deadline = time.monotonic() + self._deadline_s
        try:
            if self._served is None:
                self._served = await self._described(deadline)
            tensors = input_tensors(batch, self._served.inputs, self._served.optional)
            call = _Call(self._served, tensors, deadline, np.zeros(batch_size(batch)))
            requests = [partial(self._ask, call, rows) for rows in tensors.requests(self._max_rows)]
            await all_until_error(requests, asyncio.Semaphore(self._spec.max_concurrency))
        except CaucError:
            self._served = None  # it may have become another model
            raise
        return call

    async def _ask(self, call: _Call, rows: Ints) -> None:
        """Ask for some rows, in halves if the server rejects them together."""
        if len(rows) > self._max_rows:  # another request has shown the server's limit
            return await self._ask_halves(call, rows)
        response = await self._infer(call, rows)
        if response.status_code not in REJECTED:
            return self._read(call, rows, self._require_ok(response))
        if len(rows) > 1:
            await self._ask_halves(call, rows)
            if call.failures.keys().isdisjoint(rows.tolist()):
                self._max_rows = min(self._max_rows, (len(rows) + 1) // 2)
            return None
        call.failures[int(rows[0])] = f"the server rejects it: {self._http.message(response)}"
        return self._require_answers(call, response)

    def _require_answers(self, call: _Call, rejection: httpx2.Response) -> None:
        """Raise the error that rejections are if they concern every row."""
        limit, fails = MAX_REJECTIONS_BEFORE_FIRST_SUCCESS, rejection.status_code >= 500
        if fails and not self._has_answered:
            limit = min(limit, len(call.tensors.elements))
        if call.logits or len(call.failures) < limit:
            return
        if fails:
            raise self._http.away(f"it fails on every row, {self._http.message(rejection)}")
        if not self._has_answered:
            raise self._http.refusal(rejection)

    async def _ask_halves(self, call: _Call, rows: Ints) -> None:
        for half in np.array_split(rows, 2):
            await self._ask(call, half)

    async def _infer(self, call: _Call, rows: Ints) -> httpx2.Response:
        """Make one request."""
        inputs = call.tensors.of(rows)

        def compose(left_s: float) -> tuple[dict[str, str], bytes]:
            timeout = {"timeout": max(1, int(left_s * 1e6))}
            try:
                body, length = write_infer_request(inputs, call.served.outputs, timeout, binary=self._takes_binary)
            except RequestError:  # only raw bytes can hold them
                body, length = write_infer_request(inputs, call.served.outputs, timeout, binary=True)
            headers = {"Content-Type": "application/json"}
            if length is not None:
                headers = {"Content-Type": "application/octet-stream", JSON_LENGTH: str(length)}
            if self._spec.compress:
                body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
            return headers, body

        return await self._http.request("POST", f"/v2/models/{self._spec.model}/infer", call.deadline, compose)

    def _read(self, call: _Call, rows: Ints, response: httpx2.Response) -> None:
        """Take the logits of rows, and their costs. Raises ExecutionError if the response is invalid."""
        length, n = response.headers.get(JSON_LENGTH, ""), len(rows)
        try:
            outputs, parameters = read_infer_response(response.content, int(length) if length.isdigit() else None)
        except RequestError as error:
            raise self._http.away(f"its answer cannot be read: {error.message}") from None
        self._takes_binary = self._takes_binary or bool(length)  # all outputs are requested as raw bytes
        if parameters.get("degraded") is True:
            raise self._http.away(f"its answer is degraded: {parameters.get('reason')}")
        for name in call.served.outputs:
            values: Floats = outputs[name].values if name in outputs else np.empty(())
            n_dims, shape = (2, "[rows, options]") if name == self._spec.output else (1, "[rows]")
            if values.ndim != n_dims or len(values) != n or values.dtype.kind != "f" or 0 in values.shape:
                got = f"{values.dtype} of shape {list(values.shape)}" if name in outputs else "no such output"
                raise self._http.away(f"it answers {n} rows with {got} as {name!r}; expected numbers of shape {shape}")
            if n_dims == 2:
                call.logits |= zip(rows.tolist(), values.astype(np.float32, copy=False), strict=True)
            elif not (np.isfinite(values) & (values >= 0)).all():
                raise self._http.away("it answers with costs that are negative, NaN or infinite")
            else:
                call.costs[rows] = values

    async def _described(self, deadline: float) -> ServedModel:
        """Ask the server about the model. Raises ConfigError if the model is not as the settings say."""
        paths = ("/v2", f"/v2/models/{self._spec.model}")
        server, about = [await self._http.request("GET", path, deadline) for path in paths]
        try:
            metadata = read_model_metadata(self._require_ok(about).content)
        except RequestError as error:
            raise self._http.away(f"the model's metadata cannot be read: {error.message}") from None
        extensions = value_at(json_of(server), "extensions")  # gateways may offer models only
        self._takes_binary = isinstance(extensions, list) and BINARY_DATA in extensions
        return self._checked(metadata)

    def _checked(self, model: ModelMetadata) -> ServedModel:
        """Return the model as its server describes it. Raises ConfigError if it is not as the settings say."""
        spec, parameters = self._spec, model.get("parameters") or {}
        outputs = {output["name"]: output for output in model["outputs"]}
        inputs = {tensor["name"]: tensor for tensor in model["inputs"]}
        names = str(parameters.get("optional_inputs") or "").split(",")
        optional = {name: TensorMetadata(name=name, datatype="BYTES", shape=[-1]) for name in names if name}
        if spec.output not in outputs:
            raise self._misfit(f"no output {spec.output!r}, only {', '.join(outputs)}", "output")
        datatype, shape = outputs[spec.output]["datatype"], outputs[spec.output]["shape"]
        if datatype not in ("FP16", "FP32", "FP64") or len(shape) != 2:
            raise self._misfit(f"the output {spec.output!r} as {datatype} of shape {shape}, no logits", "output")
        kind = parameters.get("logit_kind")
        if kind in LOGIT_KINDS and kind != spec.answers_kind and spec.output == "logits":
            raise self._misfit(f"logits of kind {kind}, not {spec.answers_kind}", "logit_kind")
        if unknown := [name for name in spec.inputs.values() if name not in inputs and name not in optional]:
            available = ", ".join([*inputs, *optional]) or "none"
            raise self._misfit(f"no input {unknown[0]!r}, only {available}", "inputs")
        if not inputs and not spec.inputs:
            raise self._misfit("no names of its inputs", "inputs")
        cost_unit = parameters.get("cost_unit") if "cost" in outputs and spec.output != "cost" else None
        return ServedModel(
            inputs={column: (inputs | optional)[name] for column, name in spec.inputs.items()} or inputs,
            optional={} if spec.inputs else optional,
            n_options=shape[1] if shape[1] > 0 else None,
            outputs=(spec.output,) if cost_unit is None else (spec.output, "cost"),
            cost_unit=None if cost_unit is None else str(cost_unit),
        )

    def _misfit(self, what: str, setting: str) -> ConfigError:
        return ConfigError(f"{self._spec.source} has {what}; check {setting} in the stage's model")

    def _require_ok(self, response: httpx2.Response) -> httpx2.Response:
        """Return a response of status 200. Raises the error that another one is."""
        if response.status_code == 200:
            return response
        if response.status_code in TRANSIENT or response.status_code >= 500:
            raise self._http.away(self._http.message(response))
        raise self._http.refusal(response)


def _n_options(logits: Floats, n_choices: int | None) -> int:
    """Return how many logits belong to a row: servers pad with -inf to the widest row."""
    n_last = int(np.flatnonzero(logits > -np.inf)[-1]) + 1
    return max(n_last, min(n_choices or 0, len(logits)))
