"""A client of a server of the Open Inference Protocol v2, for the length of a stage's life."""

from __future__ import annotations

import gzip
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from cauc_ray.errors import CaucError, ConfigError, ExecutionError
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, Wire, batch_size, choices_in, ragged
from cauc_ray.models.http_client import HttpClient, NoAnswerError, Response, all_until_error, value_at
from cauc_ray.models.input_tensors import InputTensors, input_tensors
from cauc_ray.models.kind import IN_TIME, Placement
from cauc_ray.models.remote import RemoteSpec
from cauc_ray.numbers.logits import LOGIT_KINDS
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.protocol.messages import (
    BINARY_DATA,
    InferResponse,
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


def load(spec: RemoteSpec, placement: Placement) -> RemoteModel:
    """Return a model that asks the server; nothing is sent before the first call, since the server may be away.

    Its calls end a moment before the stage abandons them. Raises ConfigError if the token or a certificate is missing.
    """
    return RemoteModel(spec, *spec.proof(), min(spec.timeout_s, IN_TIME * placement.call_timeout_s))


class RemoteModel(Model):
    """A model of another server.

    The server is asked about the model at the first call. Rows that it rejects are failed rows: a rejected request is
    halved until its rows are single, and if all of its rows are answered then, later requests have no more rows than
    those that were accepted.

    Other problems raise ConfigError (a token, certificate, model or setting that the server does not accept) or
    ExecutionError (a server that is away, late or fails on every row).
    """

    def __init__(self, spec: RemoteSpec, token: str | None, tls: ssl.SSLContext | None, deadline_s: float) -> None:
        """Connect to nothing yet.

        Args:
            spec: Settings.
            token: Sent as a bearer token.
            tls: How the server is verified, None without TLS.
            deadline_s: Time of a call, in seconds.
        """
        self.facts = ModelFacts(spec.source, spec.answers_kind)
        self._spec, self._deadline_s = spec, deadline_s
        headers, secrets = spec.http_headers(f"model {spec.model!r}")
        self._http = HttpClient(
            spec.url,
            spec.source,
            token=token,
            headers=headers,
            secrets=secrets,
            transient=TRANSIENT,
            retries=spec.retries,
            max_concurrency=spec.max_concurrency,
            tls=tls,
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
        for row in [row for row, logits in call.logits.items() if not np.isfinite(logits.max(initial=-np.inf))]:
            failures[row] = "the server's logits for it are NaN or infinite"
            del call.logits[row]
        logits = {
            row: padded[: served.n_options or _n_options(padded, n_choices[row])] for row, padded in call.logits.items()
        }
        self._has_answered = self._has_answered or bool(logits)
        if not logits:
            self._served = None  # it may have become another model
        totals, before = (self._http.bytes_out, self._http.bytes_in), self._reported_bytes
        self._reported_bytes = totals
        return Answers(
            *ragged(n, logits),
            costs=None if served.cost_unit is None else np.array([call.costs.get(row, 0.0) for row in range(n)]),
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
            call = _Call(self._served, tensors, deadline)
            requests = [partial(self._ask, call, rows) for rows in tensors.requests(self._max_rows)]
            await all_until_error(requests, self._spec.max_concurrency)
        except CaucError:
            self._served = None  # it may have become another model
            raise
        return call

    async def _ask(self, call: _Call, rows: Ints) -> None:
        """Ask for some rows, in halves if the server rejects them together."""
        if len(rows) > self._max_rows:  # another request has shown the server's limit
            return await self._ask_halves(call, rows)
        response = await self._infer(call, rows)
        if response.status not in REJECTED:
            return call.add(rows, self._read(call.served, self._require_ok(response), len(rows)))
        if len(rows) > 1:
            await self._ask_halves(call, rows)
            if call.failures.keys().isdisjoint(rows.tolist()):
                self._max_rows = min(self._max_rows, (len(rows) + 1) // 2)
            return None
        call.failures[int(rows[0])] = f"the server rejects it: {self._http.message(response)}"
        return self._require_answers(call, response)

    def _require_answers(self, call: _Call, rejection: Response) -> None:
        """Raise the error that rejections are if they concern every row."""
        limit, fails = MAX_REJECTIONS_BEFORE_FIRST_SUCCESS, rejection.status >= 500
        if fails and not self._has_answered:
            limit = min(limit, len(call.tensors.elements))
        if call.logits or len(call.failures) < limit:
            return
        message = f"{rejection.status}: {self._http.message(rejection)}"
        if fails:
            raise ExecutionError(self._away(f"it fails on every row, {message}"))
        if not self._has_answered:
            raise ConfigError(self._misconfigured(f"rejects every row ({message})", "inputs"))

    async def _ask_halves(self, call: _Call, rows: Ints) -> None:
        for half in np.array_split(rows, 2):
            await self._ask(call, half)

    async def _infer(self, call: _Call, rows: Ints) -> Response:
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

        try:
            return await self._http.request("POST", f"/v2/models/{self._spec.model}/infer", call.deadline, compose)
        except NoAnswerError as error:
            raise ExecutionError(self._away(str(error))) from None

    def _read(self, served: ServedModel, response: Response, n: int) -> tuple[Floats, Floats]:
        """Return logits, float32 (n, K), and costs, float64 (n,). Raises ExecutionError if the response is invalid."""
        answer = self._parsed(response)
        if answer.parameters.get("degraded") is True:
            raise ExecutionError(self._away(f"its answer is degraded: {answer.parameters.get('reason')}"))
        values = []
        for name in served.outputs:
            tensor = answer.outputs.get(name)
            n_dims, shape = (2, "[rows, options]") if name == self._spec.output else (1, "[rows]")
            got = "no such output" if tensor is None else f"{tensor.datatype} of shape {list(tensor.values.shape)}"
            fits = tensor is not None and tensor.values.ndim == n_dims and len(tensor.values) == n
            if tensor is None or not fits or tensor.values.dtype.kind != "f" or 0 in tensor.values.shape:
                raise ExecutionError(
                    self._away(f"it answers {n} rows with {got} as {name!r}; expected numbers of shape {shape}")
                )
            values.append(tensor.values)
        costs = np.zeros(n) if served.cost_unit is None else values[1].astype(np.float64)
        if not (np.isfinite(costs) & (costs >= 0)).all():
            raise ExecutionError(self._away("it answers with costs that are negative, NaN or infinite"))
        return values[0].astype(np.float32, copy=False), costs

    def _parsed(self, response: Response) -> InferResponse:
        length = response.headers.get(JSON_LENGTH, "")
        try:
            answer = read_infer_response(response.content, int(length) if length.isdigit() else None)
        except RequestError as error:
            raise ExecutionError(self._away(f"its answer cannot be read: {error.message}")) from None
        self._takes_binary = self._takes_binary or bool(length)  # all outputs are requested as raw bytes
        return answer

    async def _described(self, deadline: float) -> ServedModel:
        """Ask the server about the model. Raises ConfigError if the model is not as the settings say."""
        model, paths = self._spec.model, ("/v2", f"/v2/models/{self._spec.model}")
        try:
            server, about = [await self._http.request("GET", path, deadline) for path in paths]
            metadata = read_model_metadata(self._require_ok(about).content)
            extensions = value_at(server.json(), "extensions")  # gateways may offer models only
            self._takes_binary = isinstance(extensions, list) and BINARY_DATA in extensions
        except NoAnswerError as error:
            raise ExecutionError(self._away(str(error))) from None
        except RequestError as error:
            raise ExecutionError(self._away(f"metadata of {model!r} cannot be read: {error.message}")) from None
        return self._checked(metadata)

    def _checked(self, model: ModelMetadata) -> ServedModel:
        spec, parameters = self._spec, model.get("parameters") or {}
        outputs = {output["name"]: output for output in model["outputs"]}
        logits = outputs.get(spec.output)
        if logits is None:
            raise ConfigError(
                self._misconfigured(f"has no output {spec.output!r}, only {', '.join(outputs)}", "output")
            )
        if logits["datatype"] not in ("FP16", "FP32", "FP64") or len(logits["shape"]) != 2:
            got = f"{logits['datatype']} of shape {logits['shape']}"
            what = f"has the output {spec.output!r} as {got}, which are not logits"
            raise ConfigError(self._misconfigured(what, "output"))
        kind = parameters.get("logit_kind")
        if kind in LOGIT_KINDS and kind != spec.answers_kind and spec.output == "logits":
            what = f"returns logits of kind {kind}, not {spec.answers_kind}"
            raise ConfigError(self._misconfigured(what, "logit_kind"))
        inputs = {tensor["name"]: tensor for tensor in model["inputs"]}
        names = str(parameters.get("optional_inputs") or "").split(",")
        optional = {name: TensorMetadata(name=name, datatype="BYTES", shape=[-1]) for name in names if name}
        if unknown := [name for name in spec.inputs.values() if name not in inputs and name not in optional]:
            available = ", ".join([*inputs, *optional]) or "none"
            raise ConfigError(self._misconfigured(f"has no input {unknown[0]!r}, only {available}", "inputs"))
        if not inputs and not spec.inputs:
            raise ConfigError(self._misconfigured("does not name its inputs", "inputs"))
        cost_unit = parameters.get("cost_unit") if "cost" in outputs and spec.output != "cost" else None
        return ServedModel(
            inputs={column: (inputs | optional)[name] for column, name in spec.inputs.items()} or inputs,
            optional={} if spec.inputs else optional,
            n_options=logits["shape"][1] if logits["shape"][1] > 0 else None,
            outputs=(spec.output,) if cost_unit is None else (spec.output, "cost"),
            cost_unit=None if cost_unit is None else str(cost_unit),
        )

    def _require_ok(self, response: Response) -> Response:
        """Return a response of status 200. Raises the error that another one is."""
        status, message = response.status, self._http.message(response)
        if status == 200:
            return response
        if status in (401, 403):
            raise ConfigError(self._misconfigured(f"rejects the token ({status}: {message})", "token_env and headers"))
        if status in TRANSIENT or status >= 500:
            raise ExecutionError(self._away(f"{status}: {message}, {response.n_attempts} attempts"))
        if 300 <= status < 400:
            message = f"see {response.headers.get('location', 'nowhere')}"
        what = f"does not answer such requests ({status}: {message})"
        raise ConfigError(self._misconfigured(what, "url, model and compress"))

    def _misconfigured(self, what: str, settings: str) -> str:
        return f"{self._spec.source} {what}; check {settings} in the stage's model"

    def _away(self, why: str) -> str:
        # Many servers hang up on a client whose certificate they refuse, without a reason.
        tls = self._spec.url.startswith("https:") and not self._has_answered
        hint = ", and check cert and key if it asks for them" if tls else ""
        return f"{self._spec.source} does not answer ({why}); continue when it does{hint}"


class _Call:
    """The rows of a call, and what came of them.

    Attributes:
        logits: Logits by row, float32 (K,).
        costs: Reported costs by row.
        failures: Why rows have no logits, by row.
    """

    def __init__(self, served: ServedModel, tensors: InputTensors, deadline: float) -> None:
        self.served, self.tensors, self.deadline = served, tensors, deadline
        self.logits: dict[int, Floats] = {}
        self.costs: dict[int, float] = {}
        self.failures: dict[int, str] = {}

    def add(self, rows: Ints, answers: tuple[Floats, Floats]) -> None:
        """Take the logits, (n, K), and costs, (n,), of rows."""
        self.logits |= zip(rows.tolist(), answers[0], strict=True)
        self.costs |= zip(rows.tolist(), answers[1].tolist(), strict=True)


def _n_options(logits: Floats, n_choices: int | None) -> int:
    """Return how many logits belong to a row: servers pad with -inf to the widest row."""
    n_last = int(np.flatnonzero(logits > -np.inf)[-1]) + 1
    return max(n_last, min(n_choices or 0, len(logits)))
