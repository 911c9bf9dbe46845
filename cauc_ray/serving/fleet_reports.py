"""What the edges of a fleet report to a service: each edge's latest report, and feedback, each batch once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from cauc_ray.errors import explain
from cauc_ray.models.fleet import EDGE_NAME
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.metrics import ServingMetrics
from cauc_ray.serving.policies_live import Store

# Edges whose reports one replica keeps, and batches that it remembers so that they are counted once.
MOST_EDGES, MOST_BATCHES = 10_000, 10_000

logger = logging.getLogger(__name__)

_Id = Annotated[str, Field(pattern=r"^[0-9a-z-]{1,64}$")]


class FeedbackBatch(BaseModel):
    """Messages that `POST …/feedback` took at the edge.   id: the same whenever they are sent again."""

    model_config = ConfigDict(strict=True)
    id: _Id
    messages: list[dict[str, Any]]


class FleetReport(BaseModel):
    """What an edge has seen; keys of later versions are ignored.

    edge: its name.   life: of its process.   sequence: of the report, rising in a life.   policy_id, issued_at,
    expires_at: of its active policy.   counters: since its life began, by name and label.   watch: what it answers to
    `GET …/watch`.
    """

    model_config = ConfigDict(allow_inf_nan=False, strict=True)
    edge: Annotated[str, Field(pattern=EDGE_NAME)]
    life: _Id
    sequence: int = Field(ge=0)
    policy_id: str = Field(max_length=100)
    issued_at: str | None = Field(default=None, max_length=100)
    expires_at: str | None = Field(default=None, max_length=100)
    counters: dict[str, dict[str, float | dict[str, float]]] = Field(default_factory=dict)
    watch: dict[str, Any] = Field(default_factory=dict)
    feedback: FeedbackBatch | None = None

    @classmethod
    def read(cls, body: bytes) -> FleetReport:
        """Read a request's body. Raises RequestError."""
        try:
            return cls.model_validate(from_json(body, allow_inf_nan=False))
        except ValidationError as error:
            raise RequestError(f"the report is invalid: {explain(error)}") from error
        except ValueError as error:
            raise RequestError("the body is not JSON") from error


@dataclass(frozen=True, slots=True)
class Seen:
    """An edge's report, without its feedback, and when it came."""

    report: FleetReport
    at: datetime

    def replaces(self, other: Seen | None) -> bool:
        """Return whether this is news: of another life of the edge, or later in the same one."""
        if other is None or other.report.life != self.report.life:
            return other is None or self.at >= other.at
        return self.report.sequence > other.report.sequence


class Edges:
    """What one replica has of a fleet's edges.   life: of the service, whose replicas share the store."""

    def __init__(self, metrics: ServingMetrics, store: Store, life: str) -> None:
        self._metrics, self._store, self._prefix = metrics, store, f"fleet:{life}:"
        self._seen: dict[str, Seen] = {}
        self._batches: deque[str] = deque()

    def here(self) -> dict[str, Seen]:
        """Return each edge's latest report that has come to this replica."""
        return dict(self._seen)

    async def take(self, body: bytes, count: Callable[[bytes], Awaitable[Mapping[str, Any]]]) -> dict[str, Any]:
        """Take a report. Raises RequestError where it makes no sense.

        count: takes a message of feedback, and returns how many rows are counted. Messages that it refuses are
        acknowledged all the same: they would be refused again.
        """
        report = FleetReport.read(body)
        seen = Seen(report.model_copy(update={"feedback": None}), datetime.now(UTC))
        if is_new := seen.replaces(self._seen.get(report.edge)):
            self._seen.pop(report.edge, None)
            self._seen[report.edge] = seen  # the last: the one that has not been heard of for longest comes first
            if len(self._seen) > MOST_EDGES:
                del self._seen[next(iter(self._seen))]
            self._metrics.edge(report.edge, seen.at.timestamp(), report.watch.get("holds"), report.counters)
        n_counted = None if report.feedback is None else await self._counted(report.edge, report.feedback, count)
        taken = {"edge": report.edge, "sequence": report.sequence, "new": is_new, "counted": n_counted}
        logger.info("%s", json.dumps({"event": "report", "policy_id": report.policy_id, **taken}))
        return taken

    async def _counted(
        self, edge: str, batch: FeedbackBatch, count: Callable[[bytes], Awaitable[Mapping[str, Any]]]
    ) -> int | None:
        """Return how many rows of a batch are counted, None if the batch was here before."""
        key, n_counted = f"{self._prefix}{edge}:{batch.id}", 0
        if await asyncio.to_thread(self._store.get, key) is not None:
            return None
        for message in batch.messages:
            try:
                n_counted += int((await count(json.dumps(message).encode()))["counted"])
            except RequestError as error:
                logger.warning(f"feedback of edge {edge} is refused: {error.message}")
        # Only now: what ends in the midst comes again, and each answer is counted once.
        await asyncio.to_thread(self._store.put, key, b"1")
        self._batches.append(key)
        if len(self._batches) > MOST_BATCHES:
            await asyncio.to_thread(self._store.delete, self._batches.popleft())
        return n_counted


def latest_of(found: Iterable[Mapping[str, Seen]]) -> dict[str, Any]:
    """Return the latest reports of all replicas as JSON, by edge."""
    latest: dict[str, Seen] = {}
    for each in found:
        latest |= {edge: seen for edge, seen in each.items() if seen.replaces(latest.get(edge))}
    edges = {
        edge: {"received_at": seen.at.isoformat(), **seen.report.model_dump(mode="json", exclude={"edge", "feedback"})}
        for edge, seen in sorted(latest.items())
    }
    return {"edges": edges}
