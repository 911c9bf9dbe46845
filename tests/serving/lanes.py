"""A cascade without Ray: stages are coroutines of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cauc_ray.execution.stage import Parcel, gathered
from cauc_ray.models.answers import Answers
from cauc_ray.models.pool import Pool, pool_of
from cauc_ray.serving.cascade import Cascade
from cauc_ray.serving.lane import StageAnswer

# What stages have put where all of them can read it.
SHARED: list[Any] = []


@dataclass
class Stage:
    """Answers rows from their column `logits<stage>`, and remembers each call's rows.

    before: awaited with the number of the call, it may sleep or raise.   alter: changes answers.
    """

    column: str
    before: Callable[[int, dict[str, Any]], Any] | None = None
    alter: Callable[[Answers, dict[str, Any]], Answers] = lambda answers, batch: answers
    batches: list[list[int]] = field(default_factory=list)
    shares: bool = False

    async def answer(self, parts, parcels) -> StageAnswer:
        columns = [SHARED[parcel] if isinstance(parcel, int) else parcel for parcel in parcels]
        batch = dict(gathered(parts, [Parcel(one) for one in columns]))
        self.batches.append(batch["row"].tolist())
        started = asyncio.get_running_loop().time()
        if self.before is not None:
            await self.before(len(self.batches), batch)
        logits = np.asarray(batch[self.column], dtype=np.float32)
        return StageAnswer(self.alter(Answers(logits), batch), asyncio.get_running_loop().time() - started)

    def share(self, columns):
        if not self.shares:
            return None
        SHARED.append(columns)
        return len(SHARED) - 1


@dataclass
class Counts:
    """Counts what an observer is told."""

    outcomes: dict[tuple[int, str], int] = field(default_factory=dict)
    troubles: dict[tuple[int, str], int] = field(default_factory=dict)
    calls: list[tuple[int, int]] = field(default_factory=list)
    cost: float = 0.0
    shadow_cost: dict[int, float] = field(default_factory=dict)
    shadows: dict[str, int] = field(default_factory=dict)

    def rows(self, stage, outcome, n):
        self.outcomes[stage, outcome] = self.outcomes.get((stage, outcome), 0) + n

    def answered(self, stage, confidences, costs, waits_s):
        assert len(confidences) == len(costs)
        self.cost += float(costs.sum())

    def called(self, stage, n_rows, call_s):
        self.calls.append((stage, n_rows))

    def degraded(self, stage, trouble, n):
        self.troubles[stage, trouble] = self.troubles.get((stage, trouble), 0) + n

    def shadowed(self, stage, costs):
        self.shadow_cost[stage] = self.shadow_cost.get(stage, 0.0) + float(costs.sum())

    def shadow_rows(self, outcome, n):
        self.shadows[outcome] = self.shadows.get(outcome, 0) + n


def a_pool(names: Sequence[str], on_failure: str = "fail", **serving: Any) -> Pool:
    """Return a pool of models that nobody loads; serving: of each stage, `max_queued_rows` and `shadow` of the pool."""
    of_pool = {"max_queued_rows": serving.pop("max_queued_rows", 8192), "shadow": serving.pop("shadow", 0.0)}
    stages = [
        {"name": name, "model": {"kind": "python", "factory": "a:b"}, "batch_size": 8, "serving": serving}
        for name in names
    ]
    content = {"name": "p", "task": "image-classification", "on_failure": on_failure, "stages": stages}
    return pool_of({**content, "serving": of_pool}, None)


def cascade_of(pool: Pool, stages: Sequence[Stage]) -> tuple[Cascade, Counts]:
    """Return a cascade of the test's stages and what is counted of it."""
    counts = Counts()
    return Cascade(pool.stages, pool, stages, counts), counts


def columns_of(logits: Sequence[np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows' columns: their number and each stage's logits for them."""
    return {"row": rows, **{f"logits{stage}": own[rows] for stage, own in enumerate(logits)}}


async def together(*coroutines: Any) -> list[Any]:
    """Await all, with what they raise in the place of what they return."""
    return await asyncio.gather(*coroutines, return_exceptions=True)
