"""The HTTP application: the Open Inference Protocol v2, and errors as JSON of one sentence."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cauc_ray.errors import PolicyError, printable
from cauc_ray.serving import documents
from cauc_ray.serving.access import authorize, log_request, token_of
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.inference import Inference
from cauc_ray.serving.messages import decoded_body
from cauc_ray.serving.policies_live import PolicyChange
from cauc_ray.serving.request_state import RETRY_AFTER_S

if TYPE_CHECKING:
    from cauc_ray.serving.service import Service

VERSION = "1"
PACKAGE_VERSION = version("cauc-ray")
TOKEN, POLICY_TOKEN = "CAUC_TOKEN", "CAUC_POLICY_TOKEN"
# No policy is larger, with all of its curve.
MAX_POLICY_BYTES = 1_000_000
# What may be read at once of all requests' bodies; what is more is refused.
READING_BYTES = 1 << 30
# A client has so long to send its body: one that dribbles does not keep its place.
BODY_S = 300.0
# How a request ends whose client went away: the number that proxies use in their logs. Nobody is sent it.
CLIENT_GONE = 499

logger = logging.getLogger(__name__)


def http_app(service: Service, *more: Route) -> ASGIApp:
    """Return the application that answers a service's HTTP requests.   more: addresses of the shell's own."""
    inference, bodies = Inference(service), Bodies()
    handlers, infer = _Handlers(service, inference, bodies), _Infer(service, inference, bodies)
    model = "/v2/models/{name}"
    app = Starlette(
        routes=[
            Route(f"{model}/infer", infer, methods=["POST"]),
            Route(f"{model}/versions/{{version}}/infer", infer, methods=["POST"]),
            Route("/v2", handlers.server),
            Route("/v2/health/live", handlers.live),
            Route("/v2/health/ready", handlers.ready),
            Route(model, handlers.metadata),
            Route(f"{model}/versions/{{version}}", handlers.metadata),
            Route(f"{model}/ready", handlers.model_ready),
            Route(f"{model}/versions/{{version}}/ready", handlers.model_ready),
            Route(f"{model}/policy", handlers.policy, methods=["GET", "PUT"]),
            Route(f"{model}/watch", handlers.watch),
            Route(f"{model}/feedback", handlers.feedback, methods=["POST"]),
            Route("/openapi.json", handlers.openapi),
            *more,
        ],
        exception_handlers={RequestError: _refused, HTTPException: _not_there, Exception: _broken},
    )
    app.router.redirect_slashes = False  # a redirection would follow the client's Host header
    most_asked = f"/v2/models/{service.model}/infer"

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        # Past Starlette's routing and its layers, which take longer than much of a request.
        to_infer = scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == most_asked
        await (infer if to_infer and scope["method"] == "POST" else app)(scope, receive, send)

    return answer


class _Handlers:
    """What each address does."""

    def __init__(self, service: Service, inference: Inference, bodies: Bodies) -> None:
        self._service, self._inference, self._bodies = service, inference, bodies
        self._token, self._policy_token = token_of(TOKEN), token_of(POLICY_TOKEN)
        self._max_body = max_body(service)

    async def server(self, request: Request) -> Response:
        document = documents.ServerMetadata(
            name="cauc-ray",
            version=PACKAGE_VERSION,
            extensions=["binary_tensor_data"],
            models=[self._service.model],
        )
        return JSONResponse(document)

    async def live(self, request: Request) -> Response:
        return JSONResponse(documents.Live(live=True))

    async def ready(self, request: Request) -> Response:
        ready = await self._service.ready()
        return JSONResponse(documents.Ready(ready=ready), 200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        self._require_model(request)
        return JSONResponse(self._inference.metadata(VERSION))

    async def model_ready(self, request: Request) -> Response:
        self._require_model(request)
        ready = await self._service.ready()
        return JSONResponse(documents.ModelReady(name=self._service.model, ready=ready), 200 if ready else 503)

    async def openapi(self, request: Request) -> Response:
        return FileResponse(documents.OPENAPI, media_type="application/json")

    async def policy(self, request: Request) -> Response:
        self._require_model(request)
        if request.method == "PUT":
            return await self._set_policy(request)
        authorize(request.headers, self._token, self._policy_token)
        in_force = await self._service.current_policy()
        policy = in_force.policy.model_dump(mode="json")
        document = documents.PolicyInForce(policy_id=in_force.id, version=in_force.version, policy=policy)
        return JSONResponse(document, headers={"ETag": self._service.etag(in_force)})

    async def _set_policy(self, request: Request) -> Response:
        if self._token is not None and self._policy_token is None:
            raise RequestError(f"changing the policy needs its own token: start the service with {POLICY_TOKEN}", 403)
        authorize(request.headers, self._policy_token)
        body = await self._bodies.read(request.receive, MAX_POLICY_BYTES)
        try:
            change = PolicyChange.of(from_json(body, allow_inf_nan=False))
        except PolicyError as error:
            raise RequestError(str(error)) from error
        except ValueError as error:
            raise RequestError("the body is not JSON") from error
        answer, etag = await self._service.set_policy(change, request.headers.get("if-match"))
        return JSONResponse(answer, headers={"ETag": etag})

    async def watch(self, request: Request) -> Response:
        self._require_model(request)
        authorize(request.headers, self._token, self._policy_token)
        return JSONResponse(await self._service.watch())

    async def feedback(self, request: Request) -> Response:
        self._require_model(request)
        authorize(request.headers, self._token)
        return JSONResponse(await self._service.feedback(await self._bodies.read(request.receive, self._max_body)))

    def _require_model(self, request: Request) -> None:
        require_model(request.path_params, self._service.model)


class _Infer:
    """Answers requests for inference: an ASGI application, also for addresses of models that are not there."""

    def __init__(self, service: Service, inference: Inference, bodies: Bodies) -> None:
        self._service, self._inference, self._bodies = service, inference, bodies
        self._token, self._max_body = token_of(TOKEN), max_body(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        fields: dict[str, Any] = {"request_id": headers.get("x-request-id"), "model": self._service.model}
        status = 500
        try:
            with self._service.one_more_request():
                require_model(scope.get("path_params", {}), self._service.model)
                response, more = await self._infer(headers, receive)
            status = 200
            fields |= more
        except RequestError as error:
            status = error.status
            fields["error"] = error.message
            response = refusal(error)
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        except Exception:
            response = internal_error(scope)
        finally:
            seconds = time.perf_counter() - started
            self._service.metrics.request(status, seconds)
            log_request(logger, {**fields, "status": status, "seconds": round(seconds, 6)})
        await response(scope, receive, send)

    async def _infer(self, headers: Mapping[str, str], receive: Receive) -> tuple[Response, Mapping[str, Any]]:
        """Return the response and its fields for the log."""
        authorize(headers, self._token)
        body = await self._bodies.read(receive, self._max_body)
        encoding = headers.get("content-encoding")
        if encoding is not None:  # in a thread: little may become much, and others would wait for it
            body = await asyncio.to_thread(decoded_body, body, encoding, self._max_body)
        json_length = headers.get("inference-header-content-length")
        reply = await self._inference.answer(body, _json_length(json_length), VERSION, headers)
        if reply.json_length is None:
            return Response(reply.body, media_type="application/json"), reply.log_fields
        own = {"Inference-Header-Content-Length": str(reply.json_length)}
        return Response(reply.body, headers=own, media_type="application/octet-stream"), reply.log_fields


def max_body(service: Service) -> int:
    """Return how long a request's body may be, in bytes."""
    return int(service.pool.serving.max_body_mb * 1e6)


def require_model(given: Mapping[str, str], model: str) -> None:
    """Raise RequestError (404) where the parts of an address are not of a model."""
    name, version = given.get("name", model), given.get("version", VERSION)
    if name != model:
        raise RequestError(f"there is no model {name!r:.80}; this service has model {model!r}", 404)
    if version != VERSION:
        raise RequestError(f"model {name!r} has no version {version!r:.80}; it has {VERSION!r}", 404)


class Bodies:
    """Reads requests' bodies, not too many bytes at once."""

    def __init__(self) -> None:
        self._n_reading = 0

    async def read(self, receive: Receive, limit: int) -> bytes:
        """Read a request's body.

        Raises RequestError: 413 where it is too long, 408 where it takes too long to come, 429 where too much is being
        read. Of what is too long as much again is read and dropped: most clients hear an answer only once they have
        sent all.
        """
        chunks, n_bytes, n_kept, more = [], 0, 0, True
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError("the client went away before it had sent the whole body", CLIENT_GONE)
                    chunk, more = message.get("body", b""), message.get("more_body", False)
                    n_bytes += len(chunk)
                    if n_bytes <= limit:
                        chunks.append(chunk)
                        n_kept += len(chunk)
                        self._n_reading += len(chunk)
                    elif n_bytes > 2 * limit:
                        break
                    if n_kept < self._n_reading > READING_BYTES:
                        raise RequestError("too many requests are being read; try again later", 429, RETRY_AFTER_S)
        except TimeoutError as error:
            raise RequestError(f"the body did not arrive within {BODY_S:g} s", 408) from error
        finally:
            self._n_reading -= n_kept
        if n_bytes > limit:
            raise RequestError(f"the body is longer than {limit:,} bytes", 413)
        return b"".join(chunks)


def _json_length(text: str | None) -> int | None:
    """Return what the header Inference-Header-Content-Length holds."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise RequestError(f"Inference-Header-Content-Length must be a number of bytes, got {text!r:.40}")
    return int(text)


def refusal(error: RequestError) -> Response:
    """Return the response for a request that cannot be answered."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(max(1, round(error.retry_after_s)))}
    return _error(error.message, error.status, headers)


def internal_error(scope: Scope) -> Response:
    """Return the response for an unexpected exception."""
    logger.exception(f"internal error at {scope['method']} {scope['path']}")
    return _error("an internal error; the service's log has it", 500, {})


def _error(message: str, status: int, headers: dict[str, str]) -> Response:
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(documents.Error(error=printable(" ".join(message.split()))), status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return refusal(error)


async def _not_there(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path!r:.200}: {error.detail}"
    return _error(message, error.status_code, dict(error.headers or {}))


async def _broken(request: Request, error: Exception) -> Response:
    return internal_error(request.scope)
