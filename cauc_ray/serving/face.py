"""The HTTP face: the Open Inference Protocol v2, errors as JSON of one sentence, and the OpenAPI page."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

from fastapi import FastAPI, Request, Security
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from pydantic_core import from_json
from ray.exceptions import RayError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cauc_ray.errors import printable
from cauc_ray.serving.access import authorize, log_request, token_of
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.inference import OUTPUTS, Inference
from cauc_ray.serving.messages import decoded_body
from cauc_ray.serving.openapi import DESCRIPTION, Pages
from cauc_ray.serving.schemas import example_request, request_schema

if TYPE_CHECKING:
    from cauc_ray.serving.router import Router

VERSION = "1"
PACKAGE_VERSION = version("cauc-ray")
TOKEN, POLICY_TOKEN = "CAUC_TOKEN", "CAUC_POLICY_TOKEN"
# No policy is larger, with all of its curve.
MAX_POLICY_BYTES = 1_000_000
# How a request ends whose client went away: the number that proxies use in their logs. Nobody is sent it.
CLIENT_GONE = 499

Handler: TypeAlias = Callable[..., Awaitable[Response]]
logger = logging.getLogger("ray.serve")


def build_face(router: Router) -> ASGIApp:
    """Return the application that answers a router's HTTP requests."""
    from fastapi_offline import FastAPIOffline

    app: FastAPI = FastAPIOffline(
        title=f"cauc-ray: {router.model}",
        version=PACKAGE_VERSION,
        description=DESCRIPTION,
        redoc_url=None,
        redirect_slashes=False,  # a redirection would go where the client's own Host header says
    )
    face = _Face(router)
    pages = face.pages()
    model, versioned = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
    app.get("/v2", **pages.server())(face.server)
    app.get("/v2/health/live", **pages.live())(face.live)
    app.get("/v2/health/ready", **pages.ready())(face.ready)
    for path, has in ((model, False), (versioned, True)):
        app.get(path, **pages.metadata(versioned=has))(face.metadata)
        app.get(f"{path}/ready", **pages.model_ready(versioned=has))(face.model_ready)
        app.post(f"{path}/infer", dependencies=_bearer(pages.infer_asks), **pages.infer(versioned=has))(face.infer)
    app.get(f"{model}/policy", dependencies=_bearer(pages.policy_asks), **pages.policy())(face.policy)
    app.put(f"{model}/policy", dependencies=_bearer(pages.change_asks), **pages.set_policy())(face.set_policy)
    app.get(f"{model}/watch", dependencies=_bearer(pages.policy_asks), **pages.watch())(face.watch)
    app.post(f"{model}/feedback", dependencies=_bearer(pages.infer_asks), **pages.feedback())(face.feedback)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _broken)
    return _Shortcut(app, face)


def _bearer(asked: bool) -> list[Any]:
    """Return the dependency that makes the OpenAPI page ask for a token; it checks none."""
    return [Security(HTTPBearer(auto_error=False))] if asked else []


class _Shortcut:
    """Takes requests for inference past FastAPI's routing and its layers, which take longer than all that we do."""

    _PATH = re.compile("/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")

    def __init__(self, app: FastAPI, face: _Face) -> None:
        self._app, self._face = app, face

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and scope["method"] == "POST":
            found = self._PATH.fullmatch(scope["path"].removeprefix(scope.get("root_path", "")))
        if found is None:
            return await self._app(scope, receive, send)
        scope["path_params"] = {name: value for name, value in found.groupdict().items() if value is not None}
        request = Request(scope, receive)
        try:
            with self._face.router.one_more_request():
                response = await self._face.infer(request)
        except RequestError as error:
            response = await _refused(request, error)
        except Exception as error:
            response = await _broken(request, error)
        return await response(scope, receive, send)


class _Face:
    """What each address does."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._inference = Inference(router)
        self._token, self._policy_token = token_of(TOKEN), token_of(POLICY_TOKEN)
        self._max_body = int(router.pool.serving.max_body_mb * 1e6)

    def pages(self) -> Pages:
        """Return what the OpenAPI page says of the addresses."""
        inputs = self._inference.inputs
        return Pages(
            model=self.router.model,
            version=VERSION,
            request=request_schema(inputs.names, OUTPUTS, any_input=inputs.takes_any),
            example=example_request(inputs.declared, pixels=inputs.any_pixels),
            infer_asks=self._token is not None,
            policy_asks=self._token is not None or self._policy_token is not None,
            change_asks=self._policy_token is not None,
        )

    async def server(self) -> Response:
        extensions = ["binary_tensor_data"]
        told = {
            "name": "cauc-ray",
            "version": PACKAGE_VERSION,
            "extensions": extensions,
            "models": [self.router.model],
        }
        return JSONResponse(told)

    async def live(self) -> Response:
        return JSONResponse({"live": True})

    async def ready(self) -> Response:
        ready = await self.router.ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metadata(self, request: Request) -> Response:
        self._require_model(request)
        return JSONResponse(self._inference.metadata(VERSION))

    async def model_ready(self, request: Request) -> Response:
        self._require_model(request)
        ready = await self.router.ready()
        return JSONResponse({"name": self.router.model, "ready": ready}, 200 if ready else 503)

    async def policy(self, request: Request) -> Response:
        self._require_model(request)
        authorize(request.headers, self._token, self._policy_token)
        in_force = await self.router.current_policy()
        content = {"policy_id": in_force.id, "version": in_force.version, "refused": in_force.kept.refused}
        policy = in_force.policy.model_dump(mode="json")
        return JSONResponse({**content, "policy": policy}, headers={"ETag": self.router.etag(in_force)})

    async def set_policy(self, request: Request) -> Response:
        self._require_model(request)
        if self._token is not None and self._policy_token is None:
            raise RequestError(
                f"changing the policy needs a token of its own: start the service with {POLICY_TOKEN}", 403
            )
        authorize(request.headers, self._policy_token)
        body = await _body(request, MAX_POLICY_BYTES)
        try:
            content = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise RequestError("the body is not JSON") from error
        if isinstance(content, dict) and isinstance(content.get("policy"), str):
            raise RequestError("'policy' is the content of a policy file; paths on the server are not read")
        told = await self.router.set_policy(content, request.headers.get("if-match"))
        return JSONResponse(told, headers={"ETag": told.pop("etag")})

    async def watch(self, request: Request) -> Response:
        self._require_model(request)
        authorize(request.headers, self._token, self._policy_token)
        return JSONResponse(await self.router.watch())

    async def feedback(self, request: Request) -> Response:
        self._require_model(request)
        authorize(request.headers, self._token)
        body = await _body(request, self._max_body)
        return JSONResponse(await self.router.feedback(body))

    async def infer(self, request: Request) -> Response:
        started = time.perf_counter()
        told: dict[str, Any] = {"request_id": request.headers.get("x-request-id"), "model": self.router.model}
        status = 500
        try:
            self._require_model(request)
            authorize(request.headers, self._token)
            body = await _body(request, self._max_body)
            encoding = request.headers.get("content-encoding")
            if encoding is not None:  # in a thread: little may become much, and others would wait for it
                body = await asyncio.to_thread(decoded_body, body, encoding, self._max_body)
            reply = await self._inference.answer(body, _json_length(request), VERSION, request.headers)
            told |= reply.told
            status = 200
            headers = {} if reply.json_length is None else {"Inference-Header-Content-Length": str(reply.json_length)}
            kind = "application/json" if reply.json_length is None else "application/octet-stream"
            return Response(reply.body, headers=headers, media_type=kind)
        except RequestError as error:
            status = error.status
            told["error"] = error.message
            raise
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        finally:
            seconds = time.perf_counter() - started
            self.router.metrics.request(status, seconds)
            log_request(logger, {**told, "status": status, "seconds": round(seconds, 6)})

    def _require_model(self, request: Request) -> None:
        name = request.path_params["name"]
        version = request.path_params.get("version", VERSION)
        if name != self.router.model:
            raise RequestError(f"there is no model {name!r:.80}; this service has {self.router.model!r}", 404)
        if version != VERSION:
            raise RequestError(f"model {name!r} has no version {version!r:.80}; it has {VERSION!r}", 404)


async def _body(request: Request, limit: int) -> bytes:
    """Read a request's body. Raises RequestError (413) where it is too long.

    Of what is too long as much again is read and dropped: most clients hear an answer only once they have sent all.
    """
    body, n_bytes = bytearray(), 0
    try:
        async for chunk in request.stream():
            n_bytes += len(chunk)
            if n_bytes <= limit:
                body += chunk
            elif n_bytes > 2 * limit:
                break
    except (ClientDisconnect, RayError) as error:  # the latter where Serve's proxy heard of it first
        raise RequestError("the client went away in the midst of the body", CLIENT_GONE) from error
    if n_bytes > limit:
        raise RequestError(f"the body is longer than {limit:,} bytes", 413)
    return bytes(body)


def _json_length(request: Request) -> int | None:
    text = request.headers.get("inference-header-content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise RequestError(f"Inference-Header-Content-Length is a count of bytes, not {text!r:.40}")
    return int(text)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        status, message, retry_after_s = error.status, error.message, error.retry_after_s
    else:
        assert isinstance(error, HTTPException)
        status, retry_after_s = error.status_code, None
        message = f"{request.method} {request.url.path!r:.200}: {error.detail}"
    headers = {} if retry_after_s is None else {"Retry-After": str(max(1, round(retry_after_s)))}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status == 405:
        headers["Allow"] = _allowed(request)
    return JSONResponse({"error": printable(" ".join(message.split()))}, status, headers=headers)


def _allowed(request: Request) -> str:
    """Return the methods that a request's address takes, of all of its routes: Starlette tells those of the first."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    path = request.scope["path"]
    return ", ".join(sorted({m for route in routes if route.path_regex.match(path) for m in route.methods or ()}))


async def _broken(request: Request, error: Exception) -> Response:
    logger.error(f"a fault of cauc-ray at {request.method} {request.url.path}", exc_info=error)
    return JSONResponse({"error": "an internal error; the service's log has it"}, 500)
