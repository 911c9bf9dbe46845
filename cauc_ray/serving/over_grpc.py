"""The Open Inference Protocol v2 over gRPC: the same requests as over HTTP, in the shells' gRPC servers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.json_format import ParseDict

from cauc_ray.errors import printable
from cauc_ray.protocol.grpc_messages import CALLS, SERVICE, GrpcMessage, parsed
from cauc_ray.protocol.tensors import INTERNAL_ERROR, RequestError
from cauc_ray.serving.http_app import PACKAGE_VERSION, TOKEN, Tokens, counted, require_model
from cauc_ray.serving.inference import Inference

if TYPE_CHECKING:
    from cauc_ray.serving.service import Service

# By the HTTP status of the same refusal.
_CODES: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}

logger = logging.getLogger(__name__)


class GrpcCalls:
    """Answers a service's calls, whichever server they come through."""

    def __init__(self, service: Service) -> None:
        self._service, self._inference, self._tokens = service, Inference(service), Tokens()
        self._max_body = int(service.pool.serving.max_body_mb * 1e6)

    async def answer(self, name: str, body: bytes, context: Any) -> bytes:
        """Return the body of a call's response; a refusal goes to the call's context."""
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        try:
            if name == "ModelInfer":
                return await self._infer(body, metadata)
            if name.endswith("Metadata"):
                self._tokens.require_reader(metadata)
            request_type, response_type = CALLS[name]
            content = await self._told(name, parsed(request_type, body))
            response: bytes = ParseDict(content, response_type(), ignore_unknown_fields=True).SerializeToString()
            return response
        except RequestError as error:
            refusal = error
        except Exception:  # whatever it is, this call is over and the others go on
            logger.exception(f"internal error at {name}")
            refusal = RequestError(INTERNAL_ERROR, 500)
        # Raised, it would be logged as a fault of the service.
        context.set_code(grpc.StatusCode[_CODES.get(refusal.status, "INVALID_ARGUMENT")])
        context.set_details(printable(" ".join(refusal.message.split())))
        if (seconds := refusal.retry_after_s) is not None:
            context.set_trailing_metadata([("retry-after", str(max(1, round(seconds))))])
        return b""

    async def _told(self, name: str, message: Any) -> dict[str, Any]:
        """Return the content of the response to a call that asks about the service or its model."""
        if name.startswith("Model"):
            require_model(self._service, message.name, message.version or None)
        if name == "ServerLive":
            return {"live": True}
        if name == "ServerMetadata":
            return {"name": "cauc-ray", "version": PACKAGE_VERSION}
        if name == "ModelMetadata":
            return self._inference.metadata(message.version or None)
        return {"ready": await self._service.ready()}

    async def _infer(self, body: bytes, metadata: Mapping[str, Any]) -> bytes:
        with counted(self._service, "infer", metadata) as fields:
            self._tokens.require(metadata, TOKEN)
            if len(body) > self._max_body:
                raise RequestError(f"the message is longer than {self._max_body:,} bytes", 413)
            with self._service.open_bytes.share() as take:
                take(len(body))
                message = GrpcMessage(body)
                version = message.message.model_version or None
                require_model(self._service, message.message.model_name, version)
                content, _, of_answer = await self._inference.answer(message, metadata, version)
            fields.update(of_answer)
        return content


def handler_of(answer: Callable[[str, bytes, Any], Awaitable[bytes]]) -> grpc.GenericRpcHandler:
    """Return a gRPC server's handler of a function that takes a call's name, its body and its context."""

    def method(name: str) -> grpc.RpcMethodHandler:
        async def call(body: bytes, context: Any) -> bytes:
            return await answer(name, body, context)

        return grpc.unary_unary_rpc_method_handler(call)  # bytes in, bytes out

    return grpc.method_handlers_generic_handler(SERVICE, {name: method(name) for name in CALLS})


@asynccontextmanager
async def grpc_server(service: Service, host: str, port: int, grace_s: float) -> AsyncIterator[None]:
    """Answer a service's calls at a port for the length of the block. Raises RuntimeError where it is taken."""
    # A message beyond the limit is refused before it is read. Without the last option two servers may share a port.
    limit = int(service.pool.serving.max_body_mb * 1e6)
    sizes = {"grpc.max_receive_message_length": limit, "grpc.max_send_message_length": -1, "grpc.so_reuseport": 0}
    server = grpc.aio.server(options=list(sizes.items()))
    server.add_generic_rpc_handlers((handler_of(GrpcCalls(service).answer),))
    server.add_insecure_port(f"{f'[{host}]' if ':' in host else host}:{port}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(grace_s)


class ProxyResponse(bytes):
    """A response's body, as Serve asks for it."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Return it."""
        return bytes(self)


def add_to_proxy(_: object, server: Any) -> None:
    """Have one of Serve's proxies pass the protocol's calls to the router, whose methods are named as they are."""

    async def passed_on(name: str, body: bytes, context: Any) -> bytes:
        raise NotImplementedError(f"Serve's proxy answers {name} itself")

    server.add_generic_rpc_handlers((handler_of(passed_on),))
