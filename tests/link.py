"""A wide-area link for tests: a TCP proxy with delay, bandwidth, stalls, resets and cuts, in a thread of its own."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import struct
import threading
from contextlib import suppress
from typing import Literal

_CHUNK_BYTES = 8192
_MOST_CHUNKS = 64
# A faulty connection works for up to so many bytes, in both directions together.
_FIRST_BYTES = 4000
_RESETS = struct.pack("ii", 1, 0)


class Link:
    """Passes on what comes for a port of this machine, at `port` or `url`; use it in a `with` block.

    Args:
        target_port: The port behind, which takes plain connections.
        delay_s: Delay of each byte, each way.
        bytes_per_s: Bandwidth each way, of all connections together.
        stall_share: Share of connections, chosen at random, that stall at some moment.
        reset_share: Share of connections that are reset at some moment.
        tls: How clients must connect.
        seed: The random seed.
        records: Whether `sent` is kept.

    Attributes:
        n_connections: Connections so far.
        bytes_out: Bytes that came from clients, without TLS.
        bytes_in: Bytes that went to them, without TLS.
        sent: What came through from clients, of each connection.
    """

    def __init__(
        self,
        target_port: int,
        *,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        stall_share: float = 0.0,
        reset_share: float = 0.0,
        tls: ssl.SSLContext | None = None,
        seed: int = 0,
        records: bool = False,
    ) -> None:
        self.target_port, self.delay_s, self.bytes_per_s = target_port, delay_s, bytes_per_s
        self.stall_share, self.reset_share = stall_share, reset_share
        self.n_connections = self.bytes_out = self.bytes_in = 0
        self.sent: list[bytearray] = []
        self._records = records
        self._tls, self._random = tls, random.Random(seed)
        self._free_at = {"out": 0.0, "in": 0.0}
        self._open_connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._loop = asyncio.new_event_loop()
        self._passes, self._ends = asyncio.Event(), asyncio.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def __enter__(self) -> Link:
        self._passes.set()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(10)

    def cut(self) -> None:
        """Let nothing through, in either direction, on open and new connections; nobody is notified."""
        self._do(self._passes.clear)

    def restore(self) -> None:
        """Let everything through again, what has waited first."""
        self._do(self._passes.set)

    def reset(self) -> None:
        """Reset all open connections."""
        self._do(self._reset_all)

    def _do(self, act: object) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (act(), done.set()))
        assert done.wait(10)

    def _reset_all(self) -> None:
        for task, writer in self._open_connections.items():
            _reset(writer)
            task.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener, ssl=self._tls)
        await self._ends.wait()
        server.close()
        self._reset_all()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._open_connections[task] = writer
        self.n_connections += 1
        drawn, fate = self._random.random(), None
        if drawn < self.stall_share + self.reset_share:
            fate = "stall" if drawn < self.stall_share else "reset"
        if self._records:
            self.sent.append(bytearray())
        sent = self.sent[-1] if self._records else None
        connection = _Connection(fate, self._random.randrange(_FIRST_BYTES), sent)
        behind = None
        try:
            await self._passes.wait()
            answers, behind = await asyncio.open_connection("127.0.0.1", self.target_port)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass(reader, behind, "out", connection))
                ways.create_task(self._pass(answers, writer, "in", connection))
        except (OSError, _ResetError, ExceptionGroup, asyncio.CancelledError):
            _reset(writer)
        finally:
            for one in (writer, behind):
                if one is not None:
                    one.close()
            self._open_connections.pop(task, None)

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way: Literal["out", "in"],
        connection: _Connection,
    ) -> None:
        """Pass on one way of a connection until its end."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_CHUNKS)

        async def take() -> None:
            chunk = b"none yet"
            while chunk:
                chunk = await reader.read(_CHUNK_BYTES)
                if way == "out":
                    self.bytes_out += len(chunk)
                await under_way.put((self._loop.time() + self.delay_s, chunk))

        async with asyncio.TaskGroup() as taking:
            taking.create_task(take())
            chunk = b"none yet"
            while chunk:
                due, chunk = await under_way.get()
                await asyncio.sleep(due - self._loop.time())
                if self.bytes_per_s is not None:
                    self._free_at[way] = max(self._free_at[way], self._loop.time()) + len(chunk) / self.bytes_per_s
                    await asyncio.sleep(self._free_at[way] - self._loop.time())
                await connection.fail_at(len(chunk))
                await self._passes.wait()
                if way == "in":
                    self.bytes_in += len(chunk)
                elif connection.sent is not None:
                    connection.sent += chunk
                writer.write(chunk)
                await writer.drain()
            with suppress(OSError, NotImplementedError):  # TLS has no end of one way
                writer.write_eof() if writer.can_write_eof() else writer.close()


class _ResetError(Exception):
    pass


class _Connection:
    """What becomes of a connection after some bytes.   sent: what came through from the client, if that is kept."""

    def __init__(self, fate: Literal["stall", "reset"] | None, after: int, sent: bytearray | None) -> None:
        self._fate, self._left, self.sent = fate, after, sent

    async def fail_at(self, n_bytes: int) -> None:
        self._left -= n_bytes
        if self._fate is not None and self._left < 0:
            if self._fate == "reset":
                raise _ResetError
            await asyncio.Event().wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    raw = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
    writer.transport.abort()
