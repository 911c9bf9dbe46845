"""Limits of deferral and of money: how many more rows may go on to a later stage in an hour, or a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np

from cauc_ray.cascade.rows import Rows, Trouble
from cauc_ray.cascade.stage import Stage
from cauc_ray.errors import PolicyError
from cauc_ray.models.pool import Period, Pool
from cauc_ray.numbers.types import Bools
from cauc_ray.policies.policy import Policy

HOUR_S = 3600
# Rows of an hour on which the deferral rate holds, at least: the first rows of a service may be deferred, too.
FEWEST_ROWS = 100
# Sums of costs are rounded.
_ROUNDING = 1e-9


@dataclass(slots=True)
class Allowance:
    """Decides which deferred rows may go on.

    Attributes:
        costs: Cost of a call of each stage on one row, in USD.
        max_usd: What may be spent in a period, calls of the first stage included; inf without a limit.
        max_deferral_rate: Share of a period's rows that may be deferred.
        period: A clock hour, or the whole run.
        trouble: What it does to others: degraded rows are "limited", rows without an answer an "error".
        fewest_rows: Rows of a period on which the deferral rate holds, at least.
        clock: Returns seconds since the epoch.
        n_rows: Rows of this period that the first of their stages has answered.
        n_deferred: Of these, rows that went on.
        spent_before: Spent in this period by earlier attempts at a run.
        reserved_usd: What may be spent in this hour in addition to max_usd.
    """

    costs: Sequence[float]
    max_usd: float = inf
    max_deferral_rate: float = 1.0
    period: Period = "hour"
    trouble: Trouble = "limited"
    fewest_rows: float = 0.0
    clock: Callable[[], float] = time.time
    n_rows: int = 0
    n_deferred: int = 0
    spent_before: float = 0.0
    reserved_usd: float = 0.0
    _spent_at_start: float = field(default=0.0, init=False)
    _hour: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._hour = self.hour

    @classmethod
    def of(cls, pool: Pool, policy: Policy, **fields: Any) -> Allowance | None:
        """Return the allowance of a pool, None without limits.   fields: others.

        Raises PolicyError where money is limited and the policy has costs in another unit.
        """
        limits = pool.limits
        if limits is None:
            return None
        if limits.max_usd is not None and policy.cost_unit != "USD":
            raise PolicyError(
                f"max_usd in the pool's limits needs a policy with costs in USD; it has costs in {policy.cost_unit}"
            )
        return cls(
            [stage.cost for stage in policy.stages],
            max_usd=inf if limits.max_usd is None else limits.max_usd,
            max_deferral_rate=1.0 if limits.max_deferral_rate is None else limits.max_deferral_rate,
            period=limits.per,
            trouble="limited" if pool.on_failure == "degrade" else "error",
            **fields,
        )

    @property
    def hour(self) -> int:
        """Return the number of the clock hour, 0 in a run's period."""
        return int(self.clock() // HOUR_S) if self.period == "hour" else 0

    def left_usd(self, stages: Sequence[Stage]) -> float:
        """Return what may still be spent, calls that are waiting or under way excluded."""
        self._turn(stages)
        open_usd = sum(cost * at.n_open for cost, at in zip(self.costs, stages, strict=True))
        return self.max_usd + self.reserved_usd - self.spent_before - (_spent(stages) - self._spent_at_start) - open_usd

    def admitted(self, rows: Rows, to: int, stages: Sequence[Stage]) -> Bools:
        """Return which rows that a stage defers may go to another, bool (n,), the first ones; and count them.

        Args:
            rows: The rows, which their stage has answered.
            to: The other stage.
            stages: All stages.
        """
        affordable = len(rows)
        if self.max_usd < inf and self.costs[to] > 0:
            left = self.left_usd(stages) * (1 + _ROUNDING)
            affordable = min(affordable, max(0, int(left / self.costs[to] * (1 + _ROUNDING))))
        is_first = np.bitwise_count(rows.owner.visited[rows.indices]) == 1
        rows_left = self.max_deferral_rate * max(self.n_rows, self.fewest_rows) * (1 + _ROUNDING) - self.n_deferred
        admitted: Bools = ~is_first | (np.cumsum(is_first) <= rows_left)
        admitted &= np.cumsum(admitted) <= affordable
        self.n_deferred += int(np.count_nonzero(admitted & is_first))
        return admitted

    def note(self, n_rows: int, stages: Sequence[Stage]) -> None:
        """Count rows that the first of their stages has answered."""
        self._turn(stages)
        self.n_rows += n_rows

    def _turn(self, stages: Sequence[Stage]) -> None:
        """Begin a new hour where one has begun."""
        if self._hour != (hour := self.hour):
            self._hour, self._spent_at_start = hour, _spent(stages)
            self.n_rows, self.n_deferred, self.spent_before, self.reserved_usd = 0, 0, 0.0, 0.0


def _spent(stages: Sequence[Stage]) -> float:
    return sum(at.cost for at in stages)
