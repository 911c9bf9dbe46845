"""An event loop in its own thread, for models whose calls wait for a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Runs coroutines for threads that wait for them."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name=name, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns. Raises what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def end(self, close: Callable[[], Awaitable[object]]) -> None:
        """Close what the coroutines used, then end the thread; wait for neither."""
        self._loop.call_soon_threadsafe(_end, close)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped."""
    loop.run_forever()
    loop.close()


def _end(close: Callable[[], Awaitable[object]]) -> None:
    loop = asyncio.get_running_loop()

    async def closed() -> None:
        await close()
        await asyncio.sleep(0)  # sockets are closed in the loop's next turn

    asyncio.ensure_future(closed()).add_done_callback(lambda _: loop.stop())
