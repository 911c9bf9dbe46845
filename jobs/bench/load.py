"""A light load on an HTTP service: prepared bodies that clients post in turn, or that are posted when they are due."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import aiohttp
import numpy as np
import numpy.typing as npt

from cauc_ray.errors import ExecutionError
from cauc_ray.numbers.types import Bools, Floats, Ints

OK = 200
# The status of a request that got no answer, and what such a request met.
NO_ANSWER = 0
REFUSED, RESET, TIMEOUT = "refused", "reset", "timeout"
# How long a client waits after it: a port that nobody listens on would be asked thousands of times a second.
PAUSE_S = 0.02

# Takes the index of the body that was posted, the status and the answer's body; returns what kind of answer that is.
Judge: TypeAlias = Callable[[int, int, bytes], str]


def by_status(row: int, status: int, body: bytes) -> str:
    """Tell answers from errors."""
    return "answered" if status == OK else "error"


@dataclass(frozen=True, slots=True)
class Load:
    """What is posted, by how many clients or when, for how long.

    bodies: taken in turn by all clients together, again from the first after the last.   n_clients: that post, and
    wait for the answer before the next.   due_s: in place of clients, when requests are posted, whatever has become of
    others, in seconds since the load began, float (n,), rising; latencies count from there.   timeout_s: of a request.
    seconds: how long after the warm-up is measured; requests that are under way at its end are waited for.
    """

    url: str
    bodies: Sequence[bytes]
    seconds: float
    n_clients: int = 1
    due_s: Floats | None = None
    warm_up_s: float = 1.0
    timeout_s: float = 30.0
    judge: Judge = by_status


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What became of every request, those of the warm-up included; arrays (n,), in the order of the ends.

    began: when the load did, by time.perf_counter().   started_s: since then.   latency_s: until the whole answer was
    read, or until it was given up.   statuses: 0 without an answer.   kinds: as judged, without an answer what was met.
    """

    warm_up_s: float
    seconds: float
    began: float
    started_s: Floats
    latency_s: Floats
    statuses: Ints
    kinds: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.statuses)

    @property
    def ended_s(self) -> Floats:
        """Return when each request ended, in seconds since the load began."""
        return self.started_s + self.latency_s

    @property
    def measured_mask(self) -> Bools:
        """Return which requests were answered with 200 between the warm-up's end and the measurement's."""
        within = (self.ended_s >= self.warm_up_s) & (self.ended_s < self.warm_up_s + self.seconds)
        mask: Bools = within & (self.statuses == OK)
        return mask

    @property
    def per_s(self) -> float:
        """Return the measured answers per second."""
        return float(self.measured_mask.sum()) / self.seconds

    @property
    def measured_s(self) -> Floats:
        """Return the seconds of the measured answers. Raises ExecutionError when there were none."""
        measured = self.latency_s[self.measured_mask]
        if not len(measured):
            raise ExecutionError(f"no request was answered in {self.seconds:g} s: {self.counts()}")
        return measured

    def counts(self) -> dict[tuple[int, str], int]:
        """Return how many requests ended with each status and kind, the warm-up's included."""
        return dict(Counter(zip(self.statuses.tolist(), self.kinds.tolist(), strict=True)))


def body_of(columns: Mapping[str, Any], outputs: Sequence[str] = ("prediction",)) -> bytes:
    """Return rows as the body of an inference request.   columns: texts or numbers of the rows, (n,) or (n, …)."""
    inputs = [
        {
            "name": name,
            "shape": np.shape(values),
            "datatype": "BYTES" if isinstance(values[0], str) else "FP32",
            "data": np.ravel(values).tolist(),
        }
        for name, values in columns.items()
    ]
    return json.dumps({"inputs": inputs, "outputs": [{"name": name} for name in outputs]}).encode()


def run_load(load: Load) -> LoadResult:
    """Make the load from this thread, and return when all its requests have ended."""
    return asyncio.run(_drive(load))


async def _drive(load: Load) -> LoadResult:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=load.timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Content-Type": "application/json"},
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
    ) as session:
        clients = _Clients(load, session)
        await clients.run()
    started, ended, statuses, kinds = zip(*clients.records, strict=True)
    return LoadResult(
        warm_up_s=load.warm_up_s,
        seconds=load.seconds,
        began=clients.began,
        started_s=np.array(started) - clients.began,
        latency_s=np.array(ended) - np.array(started),
        statuses=np.array(statuses),
        kinds=np.array(kinds),
    )


class _Clients:
    """What makes a load, and its records: start, end, status and kind."""

    def __init__(self, load: Load, session: aiohttp.ClientSession) -> None:
        self.records: list[tuple[float, float, int, str]] = []
        self.began = time.perf_counter()
        self._until = self.began + load.warm_up_s + load.seconds
        self._load, self._session = load, session
        self._rows = itertools.count()

    async def run(self) -> None:
        """Make the load, and wait for the last answer."""
        async with asyncio.TaskGroup() as clients:
            if self._load.due_s is None:
                for _ in range(self._load.n_clients):
                    clients.create_task(self._ask_in_turn())
                return
            for due in (self.began + self._load.due_s).tolist():
                await asyncio.sleep(due - time.perf_counter())
                clients.create_task(self._ask(due))

    async def _ask_in_turn(self) -> None:
        while (now := time.perf_counter()) < self._until:
            if await self._ask(now) == NO_ANSWER:
                await asyncio.sleep(PAUSE_S)

    async def _ask(self, started: float) -> int:
        """Post the next body, record what came of it and return the status."""
        row = next(self._rows) % len(self._load.bodies)
        status, met = await self._post(self._load.bodies[row])
        ended = time.perf_counter()
        kind = met if isinstance(met, str) else self._load.judge(row, status, met)
        self.records.append((started, ended, status, kind))
        return status

    async def _post(self, body: bytes) -> tuple[int, bytes | str]:
        """Return the status and the answer's body; 0 and what was met instead."""
        try:
            async with self._session.post(self._load.url, data=body) as response:
                return response.status, await response.read()
        except TimeoutError:
            return NO_ANSWER, TIMEOUT
        except aiohttp.ClientConnectorError as error:
            return NO_ANSWER, REFUSED if isinstance(error.os_error, ConnectionRefusedError) else RESET
        except aiohttp.ClientError:  # the connection ended before the answer did
            return NO_ANSWER, RESET
