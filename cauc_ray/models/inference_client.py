"""A client of a server of the Open Inference Protocol v2, for the length of a stage's life."""

from __future__ import annotations

import asyncio
import email.utils
import gzip
import json
import random
import ssl
import time
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import httpcore2
import numpy as np

from cauc_ray.errors import ConfigError, DataError, ExecutionError
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, Wire, batch_size, choices_in, ragged
from cauc_ray.models.background import Background
from cauc_ray.models.input_tensors import InputTensors, input_tensors
from cauc_ray.models.remote import RemoteSpec
from cauc_ray.models.traffic import CountingBackend, Traffic
from cauc_ray.numbers.logits import LOGIT_KINDS
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.protocol.messages import (
    BINARY_DATA,
    IDEMPOTENCY,
    ModelMetadata,
    TensorMetadata,
    decoded_body,
    read_infer_response,
    read_model_metadata,
    read_server_metadata,
    write_infer_request,
)
from cauc_ray.protocol.tensors import RequestError

# The server has too much to do, or is down, or what is in front of it is; and what refuses the rows of a request.
_RETRIED, _REFUSED = {408, 425, 429, 502, 503, 504}, {400, 413, 422}
# Pauses between attempts grow from the first to the longest, where the server does not ask for longer ones.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# An idle connection is kept for so long.
KEPT_S = 60.0
# Bodies are sent in pieces of so many bytes: a link is stuck once one of them does not get through.
PIECE_BYTES = 1 << 16
# So many times of answers are remembered.
MOST_TIMES = 9
# No answer is longer, unpacked.
MOST_BYTES = 1 << 28
# So many rows are refused one by one before all are, while the server has not answered any yet.
MOST_IN_VAIN = 16
_SAID_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Response:
    """What a server has answered.   headers: by their names in small letters."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def retry_after_s(self) -> float:
        """Return how long the server asks to wait, 0 where it does not."""
        text = self.headers.get("retry-after", "")
        try:
            return max(0.0, float(text))
        except ValueError:
            pass
        try:
            return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
        except (TypeError, ValueError):
            return 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """What a server tells of a model.

    inputs, optional: by the columns that they are filled from; optional ones may be left out.   n_options: of each
    row, None where they differ.   outputs: to ask for.   cost_unit: of its output cost, None where it has none.
    binary: whether it takes tensors as raw bytes.   joins: whether a request that is repeated is not computed again.
    """

    inputs: Mapping[str, TensorMetadata]
    optional: Mapping[str, TensorMetadata]
    n_options: int | None
    outputs: tuple[str, ...]
    cost_unit: str | None
    binary: bool
    joins: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a row.   logits: (K,).   failure: why there are none."""

    logits: Floats | None = None
    cost: float = 0.0
    failure: str | None = None


class RemoteModel(Model):
    """A model of another server.

    One client with a few connections serves all calls; it asks the server about the model at the first one. Rows that
    the server refuses are failed rows. Other problems raise: ConfigError for a token, certificate, model or setting
    that the server does not accept, ExecutionError for a server that is away or does not answer in time, DataError for
    one that fails on the rows.
    """

    def __init__(self, spec: RemoteSpec, token: str | None, trust: ssl.SSLContext | None, deadline_s: float) -> None:
        """Connect to nothing yet.   trust: how to use TLS.   deadline_s: of a call."""
        self.facts = ModelFacts(spec.source, spec.answers_kind)
        self._spec, self._token, self._deadline_s = spec, token, deadline_s
        self._url = spec.url.rstrip("/")
        self._served: Served | None = None
        self._has_answered = False
        self._took_s: deque[float] = deque(maxlen=MOST_TIMES)
        self._traffic, self._reported = Traffic(), Traffic()
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=trust,
            max_connections=spec.max_concurrency,
            keepalive_expiry=KEPT_S,
            network_backend=CountingBackend(self._traffic),
        )
        self._background = Background(f"{spec.model}: requests")
        weakref.finalize(self, self._background.end, self._pool.aclose)

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch of rows, in requests of max_rows at most, max_concurrency at a time.

        Raises DataError if a column is missing, and as described for the class.
        """
        began = time.perf_counter()
        served, tensors, replies = self._background.run(self._answered(batch))
        n, width = batch_size(batch), served.n_options
        faults = {**tensors.faults, **{row: one.failure for row, one in replies.items() if one.failure is not None}}
        n_choices = choices_in(batch) or [None] * n
        found: dict[int, Floats] = {}
        for row, reply in replies.items():
            if reply.logits is None:
                continue
            if np.isfinite(reply.logits.max(initial=-np.inf)):
                found[row] = reply.logits[: width or _n_options(reply.logits, n_choices[row])]
            else:
                faults[row] = "the server's logits for it are NaN or infinite"
        self._has_answered = self._has_answered or bool(found)
        if not found:
            self._served = None  # it may have become another model
        costs = np.array([replies[row].cost if row in replies else 0.0 for row in range(n)])
        now, before = Traffic(self._traffic.bytes_out, self._traffic.bytes_in), self._reported
        self._reported = now
        seconds = time.perf_counter() - began
        return Answers(
            *ragged(n, found),
            costs=None if served.cost_unit is None else costs,
            failures=faults,
            cost_unit=served.cost_unit,
            wire=Wire(now.bytes_out - before.bytes_out, now.bytes_in - before.bytes_in, seconds),
        )

    async def _answered(self, batch: Batch) -> tuple[Served, InputTensors, dict[int, Reply]]:
        """Ask for all rows; after an error that concerns all of them, ask no more."""
        until = asyncio.get_running_loop().time() + self._deadline_s
        if self._served is None:
            self._served = await self._described(until)
        served = self._served
        tensors = input_tensors(batch, served.inputs, served.optional)
        gate, replies = asyncio.Semaphore(self._spec.max_concurrency), dict[int, Reply]()
        try:
            async with asyncio.TaskGroup() as asking:
                for rows in tensors.requests(self._spec.max_rows):
                    asking.create_task(self._ask(served, tensors, rows, replies, until, gate))
        except BaseExceptionGroup as errors:
            self._served = None  # it may have become another model
            raise errors.exceptions[0] from None
        return served, tensors, replies

    async def _ask(
        self,
        served: Served,
        tensors: InputTensors,
        rows: Ints,
        replies: dict[int, Reply],
        until: float,
        gate: asyncio.Semaphore,
    ) -> None:
        """Ask for some rows. Of those that are refused, each half is asked for, until it is a single row."""
        try:
            async with gate:
                replies.update(await self._infer(served, tensors, rows, until))
            return
        except RequestError as error:
            refusal = error.message
        if len(rows) > 1:
            for half in np.array_split(rows, 2):
                await self._ask(served, tensors, half, replies, until, gate)
            return
        replies[int(rows[0])] = Reply(failure=f"the server refuses it: {refusal}")
        in_vain = not self._has_answered and all(reply.failure is not None for reply in replies.values())
        if in_vain and len(replies) >= MOST_IN_VAIN:
            raise ConfigError(self._wrong(f"refuses every row ({refusal})", "inputs"))

    async def _infer(self, served: Served, tensors: InputTensors, rows: Ints, until: float) -> dict[int, Reply]:
        """Make one request. Raises RequestError where its rows are refused."""
        spec = self._spec
        inputs, headers = tensors.of(rows), {"Idempotency-Key": uuid.uuid4().hex}

        def written(left_s: float) -> tuple[dict[str, str], bytes]:
            timeout = {"timeout": max(1, int(left_s * 1e6))}
            body, length = write_infer_request(inputs, served.outputs, timeout, binary=served.binary)
            own = {} if length is None else {"Inference-Header-Content-Length": str(length)}
            kind = "application/json" if length is None else "application/octet-stream"
            if spec.compress:
                body, own["Content-Encoding"] = gzip.compress(body, 1), "gzip"
            return {**headers, **own, "Content-Type": kind}, body

        response = await self._send("POST", f"/v2/models/{spec.model}/infer", until, written, may_repeat=served.joins)
        if response.status in _REFUSED:
            raise RequestError(self._told(response))
        self._require_ok(response)
        return dict(zip(rows.tolist(), self._read(served, response, len(rows)), strict=True))

    def _read(self, served: Served, response: Response, n: int) -> list[Reply]:
        """Return the replies in a response to n rows. Raises ExecutionError for one that is invalid."""
        length = response.headers.get("inference-header-content-length", "")
        try:
            answer = read_infer_response(response.content, int(length) if length.isdigit() else None)
        except RequestError as error:
            raise ExecutionError(self._away(f"its answer cannot be read: {error.message}")) from None
        if answer.parameters.get("degraded") is True:
            raise ExecutionError(self._away(f"its answer is degraded: {answer.parameters.get('reason')}"))
        values = []
        for name in served.outputs:
            tensor = answer.outputs.get(name)
            shape = None if tensor is None else tensor.values.shape
            wanted = "[rows, options]" if name == self._spec.output else "[rows]"
            fits = shape is not None and len(shape) == (2 if name == self._spec.output else 1) and shape[0] == n
            if tensor is None or not fits or tensor.values.dtype.kind != "f" or 0 in tensor.values.shape:
                got = "no such output" if tensor is None else f"{tensor.datatype} of shape {list(tensor.values.shape)}"
                raise ExecutionError(
                    self._away(f"it answers {n} rows with {got} as {name!r}; expected numbers of shape {wanted}")
                )
            values.append(tensor.values)
        logits = values[0].astype(np.float32, copy=False)
        costs = values[1].astype(np.float64) if served.cost_unit is not None else np.zeros(n)
        if not (np.isfinite(costs) & (costs >= 0)).all():
            raise ExecutionError(self._away("it answers with costs that are negative, NaN or infinite"))
        return [Reply(own, cost) for own, cost in zip(logits, costs.tolist(), strict=True)]

    async def _described(self, until: float) -> Served:
        """Ask the server about itself and the model. Raises ConfigError where the model is not as the settings say."""
        server = await self._send("GET", "/v2", until)
        model = await self._send("GET", f"/v2/models/{self._spec.model}", until)
        for response in (server, model):
            self._require_ok(response)
        try:
            extensions = read_server_metadata(server.content).get("extensions") or []
            metadata = read_model_metadata(model.content)
        except RequestError as error:
            raise ExecutionError(self._away(f"its metadata cannot be read: {error.message}")) from None
        return self._checked(metadata, BINARY_DATA in extensions, IDEMPOTENCY in extensions)

    def _checked(self, model: ModelMetadata, binary: bool, joins: bool) -> Served:
        spec, parameters = self._spec, model.get("parameters") or {}
        outputs = {one["name"]: one for one in model["outputs"]}
        found = outputs.get(spec.output)
        if found is None:
            raise ConfigError(self._wrong(f"has no output {spec.output!r}, only {', '.join(outputs)}", "output"))
        if found["datatype"] not in ("FP16", "FP32", "FP64") or len(found["shape"]) != 2:
            got = f"{found['datatype']} of shape {found['shape']}"
            raise ConfigError(self._wrong(f"has the output {spec.output!r} as {got}, which are not logits", "output"))
        kind = parameters.get("logit_kind")
        if kind in LOGIT_KINDS and kind != spec.answers_kind and spec.output == "logits":
            raise ConfigError(self._wrong(f"returns logits of kind {kind}, not {spec.answers_kind}", "logit_kind"))
        inputs = {one["name"]: one for one in model["inputs"]}
        names = str(parameters.get("optional_inputs") or "").split(",")
        optional = {name: TensorMetadata(name=name, datatype="BYTES", shape=[-1]) for name in names if name}
        if unknown := [name for name in spec.inputs.values() if name not in inputs and name not in optional]:
            known = ", ".join([*inputs, *optional])
            raise ConfigError(self._wrong(f"has no input {unknown[0]!r}, only {known or 'none'}", "inputs"))
        if not inputs and not spec.inputs:
            raise ConfigError(self._wrong("does not name its inputs", "inputs"))
        cost_unit = parameters.get("cost_unit") if "cost" in outputs and spec.output != "cost" else None
        return Served(
            inputs={column: (inputs | optional)[name] for column, name in spec.inputs.items()} or inputs,
            optional={} if spec.inputs else optional,
            n_options=found["shape"][1] if found["shape"][1] > 0 else None,
            outputs=(spec.output,) if cost_unit is None else (spec.output, "cost"),
            cost_unit=None if cost_unit is None else str(cost_unit),
            binary=binary,
            joins=joins,
        )

    async def _send(
        self, method: str, path: str, until: float, written: Any = lambda left_s: ({}, b""), *, may_repeat: bool = True
    ) -> Response:
        """Make a request, again after faults that pass. Returns any other answer.

        until: when the call ends.   written: returns headers and body for the seconds that are left.   may_repeat:
        whether an attempt that is stuck is given up for the next before that: the server does not compute it twice.
        Raises ConfigError for TLS that is refused, ExecutionError where there is no answer in time.
        """
        loop, spec = asyncio.get_running_loop(), self._spec
        for attempt in range(spec.retries + 1):
            left_s = until - loop.time()
            if left_s <= 0:
                break
            headers, body = written(left_s)
            # A link that is stuck looks like a model that computes: wait at least as long as answers usually take. Not
            # as the slowest did: after an outage, a single stuck connection would cost a call all of its time.
            share_s = left_s / (spec.retries + 1 - attempt)
            usual_s = median(self._took_s) if self._took_s else 0.0
            silent_s = min(left_s, max(share_s, 2 * usual_s)) if may_repeat else left_s
            began = loop.time()
            try:
                async with asyncio.timeout(left_s):
                    response = await self._exchange(method, path, headers, body, share_s, silent_s)
            except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
                self._require_tls(error)
                why, asked_s = _reason(error), 0.0
            else:
                if response.status not in _RETRIED:
                    self._took_s.append(loop.time() - began)
                    return response
                why, asked_s = f"{response.status}: {self._told(response)}", response.retry_after_s
            pause_s = max(asked_s, random.uniform(0.5, 1.0) * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt))
            if attempt == spec.retries or pause_s >= until - loop.time():
                raise ExecutionError(self._away(f"{why}, {attempt + 1} attempts"))
            await asyncio.sleep(pause_s)
        raise ExecutionError(self._away(f"no answer within {self._deadline_s:g} s"))

    async def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, connect_s: float, silent_s: float
    ) -> Response:
        """Make one attempt.   connect_s: for a connection.   silent_s: without a byte in either direction."""
        own = {**headers, "Accept-Encoding": "gzip"}
        if self._token is not None:
            own["Authorization"] = f"Bearer {self._token}"
        if body:
            own["Content-Length"] = str(len(body))
        timeouts = {"connect": connect_s, "read": silent_s, "write": silent_s, "pool": None}
        async with self._pool.stream(
            method,
            f"{self._url}{path}",
            headers=list(own.items()),
            content=_pieces(body) if body else None,
            extensions={"timeout": timeouts},
        ) as answer:
            chunks, n_bytes = [], 0
            async for chunk in answer.aiter_stream():
                chunks.append(chunk)
                n_bytes += len(chunk)
                if n_bytes > MOST_BYTES:
                    raise ExecutionError(self._away(f"its answer has more than {MOST_BYTES:,} bytes"))
        found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in answer.headers}
        try:
            content = decoded_body(b"".join(chunks), found.get("content-encoding"), MOST_BYTES)
        except RequestError as error:
            raise ExecutionError(self._away(f"its answer cannot be read: {error.message}")) from None
        return Response(answer.status, found, content)

    def _require_ok(self, response: Response) -> None:
        """Raise the error that an answer other than 200 is."""
        status = response.status
        if status == 200:
            return
        said = f"({status}: {self._told(response)})"
        if status in (401, 403):
            raise ConfigError(self._wrong(f"rejects the token {said}", "token_env"))
        if status >= 500:
            raise DataError(f"{self._spec.source} fails {said}")
        if 300 <= status < 400:
            said = f"({status}: see {response.headers.get('location', 'nowhere')})"
        raise ConfigError(self._wrong(f"does not answer such requests {said}", "url, model and compress"))

    def _require_tls(self, error: BaseException) -> None:
        """Raise ConfigError where an error is the end of a TLS handshake for good."""
        found: BaseException | None = error
        while found is not None and not isinstance(found, ssl.SSLError):
            found = found.__cause__ or found.__context__
        if isinstance(found, ssl.SSLCertVerificationError):
            raise ConfigError(self._wrong(f"is not trusted: {found.verify_message}", "ca")) from None
        if isinstance(found, ssl.SSLError) and any(word in (found.reason or "") for word in ("ALERT", "WRONG_VERSION")):
            why = str(found.reason).replace("_", " ").lower()
            raise ConfigError(self._wrong(f"refuses the TLS connection: {why}", "url, cert and key")) from None

    def _wrong(self, what: str, settings: str) -> str:
        return f"{self._spec.source} {what}; check {settings} in the stage's model"

    def _away(self, why: str) -> str:
        # Many servers hang up on a client whose certificate they refuse, and do not say why.
        tls = self._url.startswith("https:") and not self._has_answered
        hint = ", and check cert and key if it asks for them" if tls else ""
        return f"{self._spec.source} does not answer ({why}); continue when it does{hint}"

    def _told(self, response: Response) -> str:
        """Return a server's message in one short line, without the token, which it may repeat."""
        text = response.content.decode(errors="replace")
        try:
            content = json.loads(text)
            text = str(content["error"] if isinstance(content, dict) and "error" in content else content)
        except (ValueError, RecursionError):
            pass
        line = " ".join((text.replace(self._token, "…") if self._token else text).split()) or "no message"
        return line if len(line) <= _SAID_LENGTH else f"{line[:_SAID_LENGTH]}…"


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


def _n_options(logits: Floats, n_choices: int | None) -> int:
    """Return how many logits are a row's own: servers pad with -inf to the widest row."""
    own = int(np.flatnonzero(logits > -np.inf)[-1]) + 1
    return max(own, min(n_choices or 0, len(logits)))


def _reason(error: BaseException) -> str:
    kind = "no answer in time" if isinstance(error, httpcore2.TimeoutException | TimeoutError) else ""
    return kind or str(error) or type(error).__name__
