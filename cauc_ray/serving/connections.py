"""Connections of the local server, which end where a client does not send."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cauc_ray.serving.bodies import SLOW_S

# Files that a process may have open, if its hard limit allows: each connection is one.
MOST_FILES = 65_536


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # it is one of two classes
    """A connection that is closed where the headers of a request are not there within SLOW_S of their first byte.

    The server by itself waits for them indefinitely, also before the first byte of a connection.
    """

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Take bytes, which are headers, or the rest of a body, unless a request is being answered now."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._due is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait_for_headers(self) -> None:
        self._due = self.loop.call_later(SLOW_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


def raise_file_limit() -> None:
    """Let the process have as many open files as its hard limit allows, up to MOST_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
