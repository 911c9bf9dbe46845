"""A request on its way through the cascade: its rows, and what is known of their answers so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from cauc_ray.cascade.results import CallResult
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Early:
    """Answers of a stage before the last that were chosen to be asked on.

    rows: int (m,), places in the request.   state: float64 (m, S), what they would have brought along.
    """

    stage: int
    rows: Ints
    state: Floats


@dataclass(slots=True, eq=False)
class Flight:
    """A request of n rows. Its policy is the one that was in force when it came, to the end.

    key: what stages know the policy by.
    columns: the input, each (n, ...).   kind_of_columns: rows of requests where it is the same may share a batch.
    last_stage: none of its rows goes beyond.   predictions: int32 (n,),
    confidences: float64 (n,), stages: int8 (n,), the best answers so far and the stages that gave them.
    costs: float64 (n,), of all calls so far.   degraded: bool (n,), rows that a stage should have had but could
    not.   scores: float64 (n, K), of the best answers, kept only where they are wanted.   called: bool (M,).
    likeliest: int16 (n,), the likeliest options of the best answers so far, as Step.likeliest has them, kept only where
    the policy has a reference.   digest: of the columns, once it is asked for.
    shadow: whether nobody waits for it, and it is counted apart.   early: rows of others that shall have such a one.
    reason: why rows are degraded, as of the first one.   spans_ns: by stage, when rows were first ready for it and
    when they were last answered, since the epoch.
    """

    policy: Policy
    key: str
    columns: Batch
    n: int
    last_stage: int
    wants_scores: bool = False
    shadow: bool = False
    kind_of_columns: frozenset[tuple[str, str, tuple[int, ...]]] = field(init=False)
    predictions: Ints = field(init=False)
    likeliest: Ints = field(init=False)
    confidences: Floats = field(init=False)
    stages: Ints = field(init=False)
    costs: Floats = field(init=False)
    degraded: Bools = field(init=False)
    called: Bools = field(init=False)
    scores: Floats | None = None
    reason: str | None = None
    early: list[Early] = field(default_factory=list)
    spans_ns: dict[int, tuple[int, int]] = field(default_factory=dict)
    digest: bytes | None = None
    n_open: int = field(init=False)
    groups: set[Group] = field(default_factory=set)
    done: asyncio.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        # Joined arrays of two types would become one type, and of two shapes a column of objects: a model may read
        # them differently, or not at all, and a row's answer would depend on its neighbours.
        self.kind_of_columns = frozenset(
            (name, column.dtype.str, column.shape[1:]) for name, column in self.columns.items()
        )
        self.predictions = np.full(self.n, -1, dtype=np.int32)
        self.likeliest = np.full(self.n, -1, dtype=np.int16)
        self.confidences = np.full(self.n, np.nan)
        self.stages = np.full(self.n, -1, dtype=np.int8)
        self.costs = np.zeros(self.n)
        self.degraded = np.zeros(self.n, dtype=bool)
        self.called = np.zeros(len(self.policy.stages), dtype=bool)
        self.n_open = self.n
        self.done = asyncio.get_running_loop().create_future()

    @property
    def capped(self) -> bool:
        """Return whether some of the policy's stages are not to be called."""
        return self.last_stage < len(self.policy.stages) - 1

    def note(self, stage: int, rows: Ints, result: CallResult, taken: Ints, waited_s: float) -> None:
        """Take a call's answers for some rows as the best so far.

        rows: int (m,), positions in the request.   taken: int (m,), theirs in the call.   waited_s: since they were
        ready for the stage.
        """
        now = time.time_ns()
        first, _ = self.spans_ns.get(stage, (now - int(waited_s * 1e9), now))
        self.spans_ns[stage] = first, now
        self.called[stage] = True
        self.costs[rows] += result.costs[taken]
        self.predictions[rows] = result.predictions[taken]
        self.confidences[rows] = result.confidences[taken]
        self.stages[rows] = stage
        if result.likeliest is not None and self.policy.reference is not None:
            self.likeliest[rows] = result.likeliest[taken]
        if self.wants_scores and result.scores is not None:
            self._keep_scores(rows, result.scores[taken])

    def _keep_scores(self, rows: Ints, scores: Floats) -> None:
        k = scores.shape[1]
        if self.scores is None:
            self.scores = np.full((self.n, k), -np.inf)
        elif self.scores.shape[1] < k:
            self.scores = np.pad(self.scores, ((0, 0), (0, k - self.scores.shape[1])), constant_values=-np.inf)
        self.scores[rows] = -np.inf
        self.scores[rows, :k] = scores

    def fingerprint(self) -> bytes:
        """Return a digest of the input: the same for two requests that hold the same."""
        if self.digest is None:
            digest = blake2b(digest_size=16)
            for name, column in sorted(self.columns.items()):
                digest.update(repr((name, column.dtype.str, column.shape)).encode())
                digest.update(repr(column.tolist()).encode() if column.dtype == object else column.tobytes())
            self.digest = digest.digest()
        return self.digest

    def finish(self, n_rows: int) -> None:
        """Count rows that need nothing more; the last ones end the request."""
        self.n_open -= n_rows
        if self.n_open == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the request without an answer."""
        if not self.done.done():
            self.done.set_exception(error)


@dataclass(slots=True, eq=False)
class Payload:
    """Columns of rows where they lie: in this process, or in the object store for every stage to read.

    columns: each (n, ...), None where they are shared.   ref: what a stage reads them by, None where they are not.
    """

    columns: Batch | None
    ref: Any = None


@dataclass(slots=True, eq=False)
class Group:
    """Rows of one request that wait for a stage together, or are at one.

    stage: which one.   rows: int (m,), places in the request.   payload, places: what holds their columns, and
    where in it, int (m,).   state: float64 (m, S), None before the first stage.   ready_at, expires_at: seconds
    on the loop's clock.   attempt: 1, or more after a call could not be made.   failed_at: replicas that could not
    answer them.   suspected_at: when a replica ended, or did not answer, in a call that had them; since then no other
    rows share their call.   live: False once nobody waits for them here.
    """

    flight: Flight
    stage: int
    rows: Ints
    payload: Payload
    places: Ints
    state: Floats | None
    ready_at: float
    expires_at: float
    attempt: int = 1
    failed_at: frozenset[str] = frozenset()
    suspected_at: float | None = None
    live: bool = True

    def __len__(self) -> int:
        return len(self.rows)

    def split(self, n: int) -> tuple[Group, Group]:
        """Return the first n rows and the others as groups of their own; this one ends."""
        parts = self.part(slice(None, n)), self.part(slice(n, None))
        self.end()
        self.flight.groups.update(parts)
        return parts

    def part(self, chosen: slice | Ints) -> Group:
        """Return some of the rows as a group that the request does not know of."""
        return replace(
            self,
            rows=self.rows[chosen],
            places=self.places[chosen],
            state=None if self.state is None else self.state[chosen],
        )

    def end(self) -> None:
        """Leave the stage."""
        self.live = False
        self.flight.groups.discard(self)
