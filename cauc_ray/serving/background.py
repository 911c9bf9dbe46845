"""Work that a replica does again and again next to its requests, whatever happens to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

# What fails again and again is tried at longer and longer intervals, up to this one.
LONGEST_PAUSE_S = 10.0

logger = logging.getLogger(__name__)


async def repeat(do: Callable[[], Awaitable[object]], period_s: float) -> None:
    """Do something until cancelled, every so many seconds; what it raises is logged, and it is tried again."""
    pause_s = period_s
    while True:
        try:
            await do()
            pause_s = period_s
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise  # this task is to end; otherwise only a call within it was cancelled
            pause_s = max(period_s, min(2 * pause_s, LONGEST_PAUSE_S))
            logger.exception(f"{getattr(do, '__name__', do)} failed; trying again in {pause_s:g} s")
        await asyncio.sleep(pause_s)
