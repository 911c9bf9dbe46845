"""Bodies of requests: read within bounds of time and bytes, which hold until a request's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from cauc_ray.errors import explain, printable
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.request_state import RETRY_AFTER_S

if TYPE_CHECKING:  # plain installs have no starlette
    from starlette.types import Receive

Content = TypeVar("Content", bound=BaseModel)

# Bytes of all requests that are open in one router; what is more is refused.
OPEN_BYTES = 1 << 30
# What is read and dropped of a body that is too long: most clients hear an answer only once they have sent all.
DROPPED_BYTES = 64_000_000
# Seconds for the headers of a request, and for each further part of its body of so many bytes.
SLOW_S, SLOW_BYTES = 10.0, 10_000
# How a request ends whose client went away: the number that proxies use in their logs. Nobody is sent it.
CLIENT_GONE = 499


class OpenBytes:
    """Counts the bytes of open requests, from their first byte to their end, at every endpoint."""

    def __init__(self) -> None:
        self._n = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Count one request for the length of the block; what it yields takes more of its bytes.

        Raises RequestError (429) where requests have too many together. One alone may have as many as its own limit.
        """
        n_own = 0

        def take(n_bytes: int) -> None:
            nonlocal n_own
            n_own += n_bytes
            self._n += n_bytes
            if n_own < self._n > OPEN_BYTES:
                raise RequestError("too many requests are being read; try again later", 429, RETRY_AFTER_S)

        try:
            yield take
        finally:
            self._n -= n_own


def read_as(kind: type[Content], body: bytes, what: str = "body") -> Content:
    """Read a body of JSON. Raises RequestError naming the key that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(printable(f"the {what} is invalid: {explain(error)}")) from error


async def read_body(receive: Receive, limit: int, take: Callable[[int], None]) -> bytes:
    """Read a request's body.

    Args:
        receive: Receives its parts.
        limit: Most bytes.
        take: Counts the bytes.

    Raises:
        RequestError: 413 where it is too long, 408 where it comes too slowly, as `take` does.
    """
    chunks, n_bytes, n_timely, more = [], 0, 0, True
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(SLOW_S) as timeout:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestError("the client went away before it had sent the whole body", CLIENT_GONE)
                chunk, more = message.get("body", b""), message.get("more_body", False)
                n_bytes += len(chunk)
                if n_bytes - n_timely >= SLOW_BYTES:
                    n_timely = n_bytes
                    timeout.reschedule(loop.time() + SLOW_S)
                if n_bytes <= limit:
                    chunks.append(chunk)
                    take(len(chunk))
                elif n_bytes > limit + DROPPED_BYTES:
                    break
    except TimeoutError as error:
        raise RequestError(f"less than {SLOW_BYTES:,} bytes of the body came within {SLOW_S:g} s", 408) from error
    if n_bytes > limit:
        raise RequestError(f"the body is longer than {limit:,} bytes", 413)
    return b"".join(chunks)
