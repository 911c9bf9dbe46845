"""The limit of a service's money in an hour, kept by all of its routers together.

Each router may spend a base, which together are half of the limit, and reserves more of the other half in a log that
all read. A router that dies takes what it had reserved along until the hour ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cauc_ray.cascade.allowance import Allowance
from cauc_ray.cascade.stage import Stage
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.stored import Log, StoreError

if TYPE_CHECKING:
    from cauc_ray.serving.request_state import RequestState

logger = logging.getLogger(__name__)


class SharedAllowance(Observer):
    """Reserves money for one router.

    Args:
        allowance: What the router may spend; its max_usd becomes the base.
        n_routers: The most that there may be.
        log: What is reserved, for all routers.
        stages: Returns the router's stages.
    """

    def __init__(self, allowance: Allowance, n_routers: int, log: Log, stages: Callable[[], Sequence[Stage]]) -> None:
        self._allowance, self._n_routers, self._log, self._stages = allowance, n_routers, log, stages
        self._shared = allowance.max_usd / 2
        self._base = allowance.max_usd = self._shared / n_routers
        self._registered_in: int | None = None
        self._reserving: asyncio.Task[None] | None = None

    def on_answer(self, request: RequestState) -> None:
        """Reserve more soon where little is left."""
        if self._is_low() and (self._reserving is None or self._reserving.done()):
            self._reserving = asyncio.create_task(self._settle_or_log())

    async def settle(self) -> None:
        """Reserve more where little is left, and once in each hour."""
        hour = self._allowance.hour
        if self._registered_in != hour or self._is_low():
            reserved = await asyncio.to_thread(self._reserved, hour)
            if hour == self._allowance.hour:
                self._allowance.left_usd(self._stages())  # what is left of the hour before is dropped
                self._allowance.reserved_usd += reserved

    async def _settle_or_log(self) -> None:
        try:
            await self.settle()
        except StoreError as error:
            logger.warning(f"no money could be reserved: {error}")

    def _is_low(self) -> bool:
        return self._allowance.left_usd(self._stages()) < self._base / 2

    def _reserved(self, hour: int) -> float:
        """Register the base of an hour, and return what is reserved in addition, in USD. Raises StoreError."""
        step = 0.0

        def changed(version: int, content: Any) -> dict[str, Any]:
            nonlocal step
            n_bases, used = (content["bases"], content["usd"]) if content and content["hour"] == hour else (0, 0.0)
            if self._registered_in != hour:
                is_extra = n_bases >= self._n_routers  # in place of one that has died
                n_bases, used = n_bases + 1, used + is_extra * self._base
            left = max(0.0, self._shared - used)
            step = min(left, max(left / (2 * self._n_routers), max(self._allowance.costs)))
            return {"hour": hour, "bases": n_bases, "usd": used + step}

        self._log.update(changed)
        self._registered_in = hour
        return step
