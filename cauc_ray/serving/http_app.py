"""The HTTP application: the Open Inference Protocol v2, who may ask, and errors as JSON of one sentence."""

from __future__ import annotations

import asyncio
import gzip
import hmac
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cauc_ray.errors import printable
from cauc_ray.protocol.messages import BINARY_DATA, decoded_body
from cauc_ray.protocol.tensors import INTERNAL_ERROR, RequestError
from cauc_ray.serving.bodies import CLIENT_GONE, read_as, read_body
from cauc_ray.serving.chat import model_card
from cauc_ray.serving.elsewhere import LONG_JSON
from cauc_ray.serving.inference import HttpMessage, Inference
from cauc_ray.serving.policies_live import PolicyChange

if TYPE_CHECKING:
    from cauc_ray.serving.service import Service

# Describes all addresses.
OPENAPI = Path(__file__).with_name("openapi.json")
PACKAGE_VERSION = version("cauc-ray")
TOKEN, POLICY_TOKEN = "CAUC_TOKEN", "CAUC_POLICY_TOKEN"
# No policy is larger, with all of its curve.
MAX_POLICY_BYTES = 1_000_000
# No prompt is longer; a row of feedback and what comes with all rows.
MAX_DECISION_BYTES, FEEDBACK_ROW_BYTES, FEEDBACK_BYTES = 4_000_000, 200, 10_000
# Shorter answers are not compressed; longer ones than the second are, in a thread.
GZIP_BYTES, LONG_GZIP = 1000, 50_000
# How Serve's handlers know a line of an access log; where that is off, so is ours. Its fields are those of `cauc`.
_ACCESS = {"serve_access_log": True, "log_to_stderr": False}

# A response and its fields for the log.
Answered: TypeAlias = tuple[Response, Mapping[str, Any]]

logger = logging.getLogger(__name__)


def http_app(service: Service, *routes_of_shell: Route) -> ASGIApp:
    """Return the application that answers a service's HTTP requests, with additional routes."""
    handlers = _Handlers(service)
    routes = [
        Route("/v2", handlers.server),
        Route("/v2/health/live", handlers.live),
        Route("/v2/health/ready", handlers.ready),
        Route("/v2/models/{name}/policy", handlers.policy, methods=["GET", "PUT"]),
        Route("/v2/models/{name}/watch", handlers.watch),
        Route("/v2/models/{name}/feedback", handlers.feedback, methods=["POST"]),
        Route("/v1/decisions", handlers.decide, methods=["POST"]),
        Route("/v1/chat/completions", handlers.chat, methods=["POST"]),
        Route("/v1/models", handlers.models),
        Route("/v1/models/{name}", handlers.models),
        Route("/openapi.json", handlers.openapi),
        *routes_of_shell,
    ]
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
        routes += [
            Route(model, handlers.metadata),
            Route(f"{model}/ready", handlers.ready),
            Route(f"{model}/infer", handlers.infer, methods=["POST"]),
        ]
    kinds = (RequestError, HTTPException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _refused))
    app.router.redirect_slashes = False  # a redirection would follow the client's Host header
    most_asked = f"/v2/models/{service.model}/infer"

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # Past Starlette's routing and its layers, which take longer than much of a request.
        to_infer = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == most_asked
        if to_infer and scope["method"] == "POST":
            response = await handlers.infer(Request(scope, receive))
            await response(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


class _Handlers:
    """What each address does."""

    def __init__(self, service: Service) -> None:
        self._service, self._inference, self._inflates = service, Inference(service), asyncio.Semaphore()
        self._tokens = Tokens()
        self._max_body = int(service.pool.serving.max_body_mb * 1e6)

    async def server(self, request: Request) -> Response:
        self._tokens.require_reader(request.headers)
        content = {"name": "cauc-ray", "version": PACKAGE_VERSION, "extensions": [BINARY_DATA]}
        return JSONResponse({**content, "models": [self._service.model]})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        self._require_model(request)
        ready = await self._service.ready()
        name = {"name": self._service.model} if "name" in request.path_params else {}
        return JSONResponse({**name, "ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        self._tokens.require_reader(request.headers)
        return JSONResponse(self._inference.metadata(self._require_model(request)))

    async def openapi(self, request: Request) -> Response:
        self._tokens.require_reader(request.headers)
        return FileResponse(OPENAPI, media_type="application/json")

    async def policy(self, request: Request) -> Response:
        self._require_model(request)
        if request.method == "PUT":
            return await self._set_policy(request)
        self._tokens.require(request.headers, TOKEN, POLICY_TOKEN)
        content, etag = await self._service.policies()
        return JSONResponse(content, headers={"ETag": etag})

    async def _set_policy(self, request: Request) -> Response:
        self._tokens.require_changer(request.headers)
        async with self._body(request, MAX_POLICY_BYTES) as body:
            change = await self._service.elsewhere.call_if(len(body) > LONG_JSON, read_as, PolicyChange, body, "change")
        answer, etag = await self._service.set_policy(change, request.headers.get("if-match"))
        return JSONResponse(answer, headers={"ETag": etag})

    async def watch(self, request: Request) -> Response:
        self._require_model(request)
        self._tokens.require(request.headers, TOKEN, POLICY_TOKEN)
        return JSONResponse(await self._service.watch())

    async def feedback(self, request: Request) -> Response:
        self._require_model(request)
        self._tokens.require(request.headers, TOKEN, changes=True)
        limit = FEEDBACK_BYTES + FEEDBACK_ROW_BYTES * self._service.pool.serving.max_request_rows
        async with self._body(request, limit) as body:
            return JSONResponse(await self._service.feedback(body))

    async def infer(self, request: Request) -> Response:
        """Answer a request for inference, also one for a model that is not there."""
        return await self._counted("infer", request, self._infer)

    async def decide(self, request: Request) -> Response:
        """Answer a request for decisions."""
        return await self._counted("decide", request, self._decide)

    async def chat(self, request: Request) -> Response:
        """Answer a message."""
        return await self._counted("chat", request, self._chat)

    async def models(self, request: Request) -> Response:
        """List the cascade, or return it by its name."""
        self._tokens.require_reader(request.headers)
        self._require_model(request)
        card = model_card(self._service.model)
        return JSONResponse(card if "name" in request.path_params else {"object": "list", "data": [card]})

    async def _counted(
        self, event: str, request: Request, answer: Callable[[Request], Awaitable[Answered]]
    ) -> Response:
        """Answer, count and log a request."""
        try:
            with counted(self._service, event, request.headers) as fields:
                self._require_model(request)
                response, of_answer = await answer(request)
                fields.update(of_answer)
                response = await _gzipped(response, request.headers.get("accept-encoding", ""))
        except Exception as error:  # whatever it is, this request is over and the others go on
            return _refusal(request, error)
        return response

    @asynccontextmanager
    async def _body(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """Yield a request's body, decoded; its bytes are counted to the end of the block."""
        limit = min(limit, self._max_body)
        with self._service.open_bytes.share() as take:
            body = await read_body(request.receive, limit, take)
            if (encoding := request.headers.get("content-encoding")) is not None:
                async with self._inflates:  # little may become much: one after another
                    body = await asyncio.to_thread(decoded_body, body, encoding, limit)
                take(len(body))
            yield body

    async def _decide(self, request: Request) -> Answered:
        """Return the response and its fields for the log."""
        self._tokens.require(request.headers, TOKEN)
        async with self._body(request, MAX_DECISION_BYTES) as body:
            content, fields = await self._inference.decide(body, request.headers)
        return JSONResponse(content), fields

    async def _chat(self, request: Request) -> Answered:
        """Return the response and its fields for the log."""
        self._tokens.require(request.headers, TOKEN)
        async with self._body(request, MAX_DECISION_BYTES) as body:
            content, is_streamed, fields = await self._inference.chat(body, request.headers)
        return Response(content, media_type="text/event-stream" if is_streamed else "application/json"), fields

    async def _infer(self, request: Request) -> Answered:
        """Return the response and its fields for the log."""
        headers = request.headers
        self._tokens.require(headers, TOKEN)
        length = headers.get("inference-header-content-length")
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 12):
            raise RequestError(f"Inference-Header-Content-Length must be a number of bytes, got {length!r:.40}")
        version = request.path_params.get("version")
        async with self._body(request, self._max_body) as body:
            message = HttpMessage(body, None if length is None else int(length))
            content, json_length, fields = await self._inference.answer(message, headers, version)
        if json_length is None:
            return Response(content, media_type="application/json"), fields
        length_of_json = {"Inference-Header-Content-Length": str(json_length)}
        return Response(content, headers=length_of_json, media_type="application/octet-stream"), fields

    def _require_model(self, request: Request) -> str | None:
        """Return the version in an address, None without one. Raises RequestError (404) where it is not active."""
        version: str | None = request.path_params.get("version")
        require_model(self._service, request.path_params.get("name", self._service.model), version)
        return version


@contextmanager
def counted(service: Service, event: str, headers: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Count and log a request that is answered in the block, which is given the fields of its line in the log."""
    started, status = time.perf_counter(), 500
    fields: dict[str, Any] = {}
    try:
        with service.one_more_request():
            yield fields
        status = 200
    except asyncio.CancelledError:
        status = CLIENT_GONE
        raise
    except RequestError as error:
        status, fields = error.status, {"error": error.message}
        raise
    finally:
        seconds = time.perf_counter() - started
        service.metrics.count("requests", str(status))
        service.metrics.note("request_seconds", seconds)
        if logger.isEnabledFor(logging.INFO):
            line: dict[str, Any] = {"event": event, "request_id": headers.get("x-request-id"), "model": service.model}
            line = {**line, **fields, "status": status, "seconds": round(seconds, 6)}
            line = {name: value for name, value in line.items() if value is not None}
            logger.info("%s", json.dumps(line), extra={**_ACCESS, "cauc": line})


def require_model(service: Service, name: str, version: str | None) -> None:
    """Raise RequestError (404) where a service has no such model, or not that version of it."""
    if name != service.model:
        raise RequestError(f"unknown model {name!r:.80}; this service has model {service.model!r}", 404)
    if version is not None:
        service.member(service.in_force, version)


class Tokens:
    """The bearer tokens of a service, from its environment.

    Surrounding white space, such as the line break of a file, is removed, since no header can carry it. A token of
    white space alone matches no request.
    """

    def __init__(self) -> None:
        values = {name: os.environ.get(name) for name in (TOKEN, POLICY_TOKEN)}
        self._tokens = {name: os.fsencode(value).strip() for name, value in values.items() if value}

    def require_reader(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError (401) where inference needs a token and a request bears neither of the two."""
        if TOKEN in self._tokens:
            self.require(headers, TOKEN, POLICY_TOKEN)

    def require_changer(self, headers: Mapping[str, str]) -> None:
        """Raise RequestError unless a request may change the policy: 401, or 403 where no request may."""
        if TOKEN in self._tokens and POLICY_TOKEN not in self._tokens:
            raise RequestError(f"changing the policy needs its own token: start the service with {POLICY_TOKEN}", 403)
        self.require(headers, POLICY_TOKEN, changes=True)

    def require(self, headers: Mapping[str, str], *names: str, changes: bool = False) -> None:
        """Raise RequestError (401) unless a request bears one of the tokens in these variables, where any is set.

        Where none is, a request that changes something must not come from a page in a browser (403): the page that
        somebody visits would reach services of this machine and its network, whatever name it gives them.
        """
        tokens = {name: self._tokens[name] for name in names if name in self._tokens}
        if not tokens:
            if changes and "origin" in headers:
                raise RequestError(f"a page in a browser may change nothing: start the service with {names[0]}", 403)
            return
        scheme, _, text = headers.get("authorization", "").partition(" ")
        # The header's bytes as they came; stripped as bytes: a letter of UTF-8 may end in what Latin-1 calls a space.
        bearer = text.encode("latin-1").strip()
        # All are compared, each in constant time, so that the duration reveals nothing.
        same = [hmac.compare_digest(bearer, token) for token in tokens.values()]
        if scheme.lower() != "bearer" or not bearer or not any(same):
            variables = " or ".join(tokens)
            raise RequestError(f"the header 'Authorization: Bearer …' with the service's {variables} is required", 401)


async def _gzipped(response: Response, accepted: str) -> Response:
    """Return a response compressed, where that is accepted and the body is long."""
    body = bytes(response.body)
    ways = {way.split(";")[0].strip().lower(): way.replace(" ", "") for way in accepted.split(",")}
    if len(body) < GZIP_BYTES or ways.get("gzip", ";q=0").lower().endswith((";q=0", ";q=0.0")):
        return response
    packed = gzip.compress(body, 1) if len(body) < LONG_GZIP else await asyncio.to_thread(gzip.compress, body, 1)
    headers = {name: value for name, value in response.headers.items() if name != "content-length"}
    return Response(packed, response.status_code, {**headers, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"})


async def _refused(request: Request, error: Exception) -> Response:
    return _refusal(request, error)


def _refusal(request: Request, error: Exception) -> Response:
    """Return the response to a request that raised; what is not its own fault is logged."""
    headers: dict[str, str] = {}
    if isinstance(error, RequestError):
        message, status = error.message, error.status
        if error.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    elif isinstance(error, HTTPException):
        message, status = f"{request.method} {request.url.path!r:.200}: {error.detail}", error.status_code
        headers |= error.headers or {}
    else:
        logger.error(f"internal error at {request.method} {request.url.path}", exc_info=error)
        message, status = INTERNAL_ERROR, 500
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    error_content: Any = printable(" ".join(message.split()))
    if "/v1/" in request.url.path:  # as OpenAI's client reads it
        error_content = {"message": error_content, "type": "invalid_request_error" if status < 500 else "server_error"}
    return JSONResponse({"error": error_content}, status, headers=headers)
