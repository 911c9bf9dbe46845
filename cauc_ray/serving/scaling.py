"""How many replicas a stage gets: what the routers together need of it.

A router knows what Serve does not: how many rows come, how many of them are deferred to a stage, how long it takes for
one, and how many wait. It sends the need along with every call.
"""

from __future__ import annotations

import math
import time
from typing import Any

from cachetools import TTLCache
from ray.serve.config import AutoscalingContext

# What Serve reads of a replica, and how long it is true that a router needs it.
NEEDED = "needed_replicas"
FRESH_S, MOST_ROUTERS = 5.0, 10_000


class Needs:
    """The replicas of a stage that routers have recently asked for."""

    def __init__(self) -> None:
        self._needs: TTLCache[str, float] = TTLCache(MOST_ROUTERS, FRESH_S, lambda: time.monotonic())

    def note(self, router: str, replicas: float) -> None:
        """Take what a router needs, in replicas that are busy all the time."""
        self._needs[router] = replicas

    def total(self) -> float:
        """Return what all routers need that have called lately."""
        return sum(self._needs.values())


def replicas_for(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return how many replicas a stage is to have, an autoscaling policy of Ray Serve.

    A replica hears of the routers that call it; the most that one has heard is the nearest to the truth.
    """
    needs = (context.aggregated_metrics or {}).get(NEEDED, {})
    return max(1, math.ceil(max(needs.values(), default=0.0))), {}
