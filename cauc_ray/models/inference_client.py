"""A client of a server of the Open Inference Protocol v2, for the length of a stage's life."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import httpx2
import numpy as np

from cauc_ray.errors import CaucError, ConfigError
from cauc_ray.models.answers import TOKENS, Answers, Batch, Model, ModelFacts, Wire, batch_size, choices_in, ragged
from cauc_ray.models.http_client import HttpClient, all_until_error, json_of, value_at
from cauc_ray.models.input_tensors import InputTensors, input_tensors
from cauc_ray.models.kind import IN_TIME, Placement
from cauc_ray.models.remote import RemoteSpec
from cauc_ray.models.words import in_words
from cauc_ray.numbers.answer_arrays import COST
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


class OutputForm(NamedTuple):
    """What an output holds.

    Attributes:
        kind: The letter of its dtype's kind.
        n_dims: Its number of dimensions, that of rows included.
        text: Both in words.
    """

    kind: str
    n_dims: int
    text: str


_LOGITS, _NUMBERS = (
    OutputForm("f", 2, "numbers of shape [rows, options]"),
    OutputForm("f", 1, "numbers of shape [rows]"),
)
_TEXTS, _COUNTS = OutputForm("O", 1, "texts of shape [rows]"), OutputForm("i", 1, "counts of shape [rows]")
_FLOATS = ("FP16", "FP32", "FP64")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as its server describes it.

    Attributes:
        inputs: Tensors by the columns that fill them.
        optional: Tensors that may be left out, by their columns.
        n_options: Options of each row, None if rows differ.
        outputs: Outputs to request, and what they hold.
        cost_unit: Unit of the output `cost`, None if there is none.
    """

    inputs: Mapping[str, TensorMetadata]
    optional: Mapping[str, TensorMetadata]
    n_options: int | None
    outputs: Mapping[str, OutputForm]
    cost_unit: str | None


@dataclass(slots=True)
class _Call:
    """The rows of a call, and what came of them.

    Attributes:
        served: The model.
        tensors: The rows as the server reads them.
        deadline: When the call ends, by the monotonic clock.
        numbers: Outputs with one number for each row by name, float64 (n,): costs, confidences and tokens.
        answers: Logits by row, float32 (K,), or answers in words, bytes.
        failures: Why rows have no answer, by row.
    """

    served: ServedModel
    tensors: InputTensors
    deadline: float
    numbers: Mapping[str, Floats]
    answers: dict[int, Any] = field(default_factory=dict)
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
        answers = self._logits(call, batch) if self._spec.answer_format is None else self._words(call, batch)
        is_answered = len(answers.failures) < len(answers.logits)
        self._has_answered = self._has_answered or is_answered
        if not is_answered:
            self._served = None  # it may have become another model
        totals, before = (self._http.bytes_out, self._http.bytes_in), self._reported_bytes
        self._reported_bytes = totals
        unit = call.served.cost_unit
        return replace(
            answers,
            costs=None if unit is None else call.numbers[COST],
            cost_unit=unit,
            wire=Wire(totals[0] - before[0], totals[1] - before[1], time.perf_counter() - began),
        )

    def _logits(self, call: _Call, batch: Batch) -> Answers:
        """Return the logits of a call's rows."""
        n, n_options = batch_size(batch), call.served.n_options
        n_choices = choices_in(batch) or [None] * n
        failures, logits = dict(call.tensors.faults) | call.failures, dict[int, Floats]()
        for row, padded in call.answers.items():
            if np.isfinite(padded.max(initial=-np.inf)):
                logits[row] = padded[: n_options or _n_options(padded, n_choices[row])]
            else:
                failures[row] = "the server's logits for it are NaN or infinite"
        return Answers(*ragged(n, logits), failures=failures)

    def _words(self, call: _Call, batch: Batch) -> Answers:
        """Return the answers in words to a call's rows; an empty one is none."""
        assert self._spec.answer_format is not None
        texts = [(call.answers.get(row) or b"").decode(errors="replace") or None for row in range(batch_size(batch))]
        confidences = {name: call.numbers[name] for name in self._spec.answer_format.confidences}
        faults = dict(call.tensors.faults) | call.failures
        counts = [call.numbers[name] for name in TOKENS if name in call.numbers]
        tokens = np.column_stack(counts).astype(np.int64) if counts else None
        return in_words(texts, confidences, self._spec.answer_format, faults, tokens=tokens)

    async def _answered(self, batch: Batch) -> _Call:
        """Ask for all rows; after an error that concerns all of them, ask no more."""
        deadline = time.monotonic() + self._deadline_s
        try:
            if self._served is None:
                self._served = await self._described(deadline)
            tensors = input_tensors(batch, self._served.inputs, self._served.optional)
            numbers = {name: np.zeros(batch_size(batch)) for name in self._served.outputs}
            call = _Call(self._served, tensors, deadline, numbers)
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
        if call.answers or len(call.failures) < limit:
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
        inputs, names = call.tensors.of(rows), tuple(call.served.outputs)

        def compose(left_s: float) -> tuple[dict[str, str], bytes]:
            timeout = {"timeout": max(1, int(left_s * 1e6))}
            try:
                body, length = write_infer_request(inputs, names, timeout, binary=self._takes_binary)
            except RequestError:  # only raw bytes can hold them
                body, length = write_infer_request(inputs, names, timeout, binary=True)
            headers = {"Content-Type": "application/json"}
            if length is not None:
                headers = {"Content-Type": "application/octet-stream", JSON_LENGTH: str(length)}
            if self._spec.compress:
                body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
            return headers, body

        return await self._http.request("POST", f"/v2/models/{self._spec.model}/infer", call.deadline, compose)

    def _read(self, call: _Call, rows: Ints, response: httpx2.Response) -> None:
        """Take the outputs of rows. Raises ExecutionError if the response is invalid."""
        length, n = response.headers.get(JSON_LENGTH, ""), len(rows)
        try:
            outputs, parameters = read_infer_response(response.content, int(length) if length.isdigit() else None)
        except RequestError as error:
            raise self._http.away(f"its answer cannot be read: {error.message}") from None
        self._takes_binary = self._takes_binary or bool(length)  # all outputs are requested as raw bytes
        if parameters.get("degraded") is True:
            raise self._http.away(f"its answer is degraded: {parameters.get('reason')}")
        for name, form in call.served.outputs.items():
            values: Any = outputs[name].values if name in outputs else np.empty(())
            if values.dtype == object and form.kind == "f" and outputs[name].datatype in _FLOATS:
                values = values.astype(np.float64)  # JSON has null for NaN
            if values.ndim != form.n_dims or len(values) != n or values.dtype.kind != form.kind or 0 in values.shape:
                got = f"{values.dtype} of shape {list(values.shape)}" if name in outputs else "no such output"
                raise self._http.away(f"it answers {n} rows with {got} as {name!r}; expected {form.text}")
            if name == self._spec.answer_output:
                answers = values if form is _TEXTS else values.astype(np.float32, copy=False)
                call.answers |= zip(rows.tolist(), answers, strict=True)
            elif np.isinf(values).any() or (name == COST and not (values >= 0).all()):
                raise self._http.away(f"it answers with values of {name!r} that are negative, NaN or infinite")
            else:
                call.numbers[name][rows] = values

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
        words = spec.answer_format
        forms = {spec.answer_output: _LOGITS if words is None else _TEXTS}
        forms |= dict.fromkeys(() if words is None else words.confidences, _NUMBERS)
        for name, form in forms.items():
            setting = "output" if name == spec.answer_output else "confidences"
            if name not in outputs:
                raise self._misfit(f"no output {name!r}, only {', '.join(outputs)}", setting)
            datatype, shape = outputs[name]["datatype"], outputs[name]["shape"]
            if datatype not in (_FLOATS if form.kind == "f" else ("BYTES",)) or len(shape) != form.n_dims:
                raise self._misfit(f"the output {name!r} as {datatype} of shape {shape}, no {form.text}", setting)
        kind = parameters.get("logit_kind")
        if kind in LOGIT_KINDS and kind != spec.answers_kind and spec.answer_output == "logits":
            raise self._misfit(f"logits of kind {kind}, not {spec.answers_kind}", "logit_kind")
        if unknown := [name for name in spec.inputs.values() if name not in inputs and name not in optional]:
            available = ", ".join([*inputs, *optional]) or "none"
            raise self._misfit(f"no input {unknown[0]!r}, only {available}", "inputs")
        if not inputs and not spec.inputs:
            raise self._misfit("no names of its inputs", "inputs")
        cost_unit = parameters.get("cost_unit") if COST in outputs and COST not in forms else None
        options = outputs[spec.answer_output]["shape"][-1]
        if words is not None and outputs.keys() >= {*TOKENS}:
            forms |= dict.fromkeys(TOKENS, _COUNTS)
        return ServedModel(
            inputs={column: (inputs | optional)[name] for column, name in spec.inputs.items()} or inputs,
            optional={} if spec.inputs else optional,
            n_options=options if options > 0 else None,
            outputs=forms | ({} if cost_unit is None else {COST: _NUMBERS}),
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
