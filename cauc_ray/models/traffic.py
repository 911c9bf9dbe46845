"""TCP connections that count their bytes, those of TLS included, for the HTTP client of remote models."""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import anyio
import httpcore2
from anyio.abc import ByteStream, SocketAttribute
from anyio.streams.tls import TLSAttribute, TLSStream


@dataclass(slots=True)
class Traffic:
    """Bytes that have been sent and received."""

    bytes_out: int = 0
    bytes_in: int = 0


class CountingBackend(httpcore2.AsyncNetworkBackend):
    """Connects over TCP, and counts what goes over all connections."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect. Raises httpcore2.ConnectError."""
        try:
            async with asyncio.timeout(timeout):
                return _Stream(_Counted(await anyio.connect_tcp(host, port), self._traffic))
        except OSError as error:
            raise httpcore2.ConnectError(str(error) or type(error).__name__) from error

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class _Counted(ByteStream):
    def __init__(self, stream: ByteStream, traffic: Traffic) -> None:
        self._stream, self._traffic = stream, traffic

    async def receive(self, max_bytes: int = 65536) -> bytes:
        chunk = await self._stream.receive(max_bytes)
        self._traffic.bytes_in += len(chunk)
        return chunk

    async def send(self, item: bytes) -> None:
        self._traffic.bytes_out += len(item)
        await self._stream.send(item)

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Any]:
        return self._stream.extra_attributes


class _Stream(httpcore2.AsyncNetworkStream):
    """A connection as httpcore takes it; timeouts are of each step."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._stream.receive(max_bytes)
        except anyio.EndOfStream:
            return b""
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise httpcore2.ReadError(str(error) or type(error).__name__) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._stream.send(buffer)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream) as error:
            raise httpcore2.WriteError(str(error) or type(error).__name__) from error

    async def aclose(self) -> None:
        # Without the farewell of TLS, for which a link that is cut would be waited.
        stream = self._stream.transport_stream if isinstance(self._stream, TLSStream) else self._stream
        await anyio.aclose_forcefully(stream)

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.AsyncNetworkStream:
        wrapped = None
        try:
            async with asyncio.timeout(timeout):
                wrapped = await TLSStream.wrap(
                    self._stream, hostname=server_hostname, ssl_context=ssl_context, standard_compatible=False
                )
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise httpcore2.ConnectError(str(error) or type(error).__name__) from error
        finally:
            if wrapped is None:  # also where the attempt is given up: nobody else has the connection yet
                await self.aclose()
        return _Stream(wrapped)

    def get_extra_info(self, info: str) -> Any:
        if info == "ssl_object":
            return self._stream.extra(TLSAttribute.ssl_object, None)
        if info == "is_readable":  # of an idle connection: the server has closed it
            socket = self._stream.extra(SocketAttribute.raw_socket)
            if socket.fileno() < 0:
                return True
            poll = select.poll()
            poll.register(socket.fileno(), select.POLLIN)
            return bool(poll.poll(0))
        return None
