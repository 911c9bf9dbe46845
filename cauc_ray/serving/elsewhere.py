"""What would keep a service's event loop, or Python's lock, for long is done in another process: JSON of megabytes."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from cauc_ray.protocol.tensors import INTERNAL_ERROR, RequestError
from cauc_ray.serving.processes import EndedError, OtherProcess

# What takes longer than this to be done is given up, with the process.
DEADLINE_S = 60.0

# Longer JSON, and more output values in JSON, are read and written elsewhere; here that would take some 5 ms, for which
# all other requests would wait.
LONG_JSON, LONG_OUTPUT = 250_000, 50_000

T = TypeVar("T")


class Elsewhere:
    """Calls functions in another Python process, one after another; it starts with the first call."""

    def __init__(self) -> None:
        self._process: OtherProcess | None = None

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns of arguments; all of them can be pickled.

        Raises RequestError as the function does, and one of 503 where the process ends or takes too long.
        """
        with _refusing():
            return await asyncio.wrap_future(self._called(function, args))

    async def call_if(self, is_long: bool, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns, called there where that takes long, else here."""
        return await self.call(function, *args) if is_long else function(*args)

    def wait(self, timeout_s: float, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns, as call does, in a thread that waits for it. Raises TimeoutError."""
        with _refusing():
            return self._called(function, args).result(timeout_s)

    def close(self) -> None:
        """End the process; a call under way ends, too."""
        if self._process is not None:
            self._process.end("the service ends")

    def _called(self, function: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
        if self._process is None or self._process.has_ended:
            self._process = OtherProcess(_Functions)
        timer = threading.Timer(DEADLINE_S, partial(self._process.end, "it takes too long"))
        answer = self._process.call("call", function, args, on_begin=timer.start)
        answer.add_done_callback(lambda _: timer.cancel())
        return answer


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except EndedError as error:
        raise RequestError("the process that does this has ended; try again", 503, 1.0) from error


class _Functions:
    """The process's side."""

    async def call(self, function: Callable[..., T], args: tuple[Any, ...], begin: Callable[[], None]) -> T:
        """Return what a function returns. Raises RequestError."""
        begin()
        try:
            return function(*args)
        except RequestError:
            raise
        except Exception as error:
            print(f"{function!r} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            raise RequestError(INTERNAL_ERROR, 500) from None

    def close(self) -> None:
        """Hold nothing to be closed."""
