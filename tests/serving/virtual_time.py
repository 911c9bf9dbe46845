"""An event loop whose clock jumps to whatever comes next, so that a test of minutes takes none."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


# What a turn of the loop takes at least: by a clock that stands still, rounding could make a timer come too soon.
TURN_S = 1e-6


class _Skipping(selectors.DefaultSelector):
    """Does not wait, but notes the time that it would have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "somebody waits, and nothing is left that could ever happen"
        self.now += max(timeout, TURN_S)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now

    def stand_still(self, seconds: float) -> None:
        self._skipping.now += seconds


def stand_still(seconds: float) -> None:
    """Have the loop do nothing for so long, as where the whole machine is suspended."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _VirtualLoop)
    loop.stand_still(seconds)


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time. It may use no thread and no socket."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(main)
