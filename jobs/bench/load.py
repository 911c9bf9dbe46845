"""A light load on an HTTP service: clients that post prepared bodies in turn."""

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
# The status of a request without an answer, and its kinds.
NO_ANSWER = 0
REFUSED, RESET, TIMEOUT = "refused", "reset", "timeout"
# How long a client waits after it: a port that nobody listens on would be asked thousands of times a second.
PAUSE_S = 0.02

# Takes the index of the body that was posted, the status and the answer's body; returns what kind of answer that is.
Judge: TypeAlias = Callable[[int, int, bytes], str]


def by_status(row: int, status: int, body: bytes) -> str:
    """Return answered or error."""
    return "answered" if status == OK else "error"


@dataclass(frozen=True, slots=True)
class Load:
    """A load of closed-loop clients.

    Attributes:
        url: Address that bodies are posted to.
        bodies: Taken in turn by all clients together, again from the first after the last.
        seconds: Seconds that are measured after the warm-up; requests under way at the end are waited for.
        n_clients: Clients that post and wait for the answer before the next.
        warm_up_s: Seconds before the measurement.
        timeout_s: Seconds until a request is given up.
        judge: Names the kind of an answer.
    """

    url: str
    bodies: Sequence[bytes]
    seconds: float
    n_clients: int = 1
    warm_up_s: float = 1.0
    timeout_s: float = 30.0
    judge: Judge = by_status


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of a load, the warm-up's included, in the order of their ends.

    Attributes:
        warm_up_s: As of the load.
        seconds: As of the load.
        started_s: Start of each request in seconds since the load began, shape (n,).
        latency_s: Seconds until its answer was read, or it was given up, shape (n,).
        statuses: Its status, 0 without an answer, shape (n,).
        kinds: Its kind, shape (n,).
    """

    warm_up_s: float
    seconds: float
    started_s: Floats
    latency_s: Floats
    statuses: Ints
    kinds: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.statuses)

    @property
    def measured_mask(self) -> Bools:
        """Return which requests were answered with 200 between the warm-up's end and the measurement's."""
        ended_s = self.started_s + self.latency_s
        within = (ended_s >= self.warm_up_s) & (ended_s < self.warm_up_s + self.seconds)
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
    """Return rows as the body of an inference request, from columns of texts or numbers, shape (n,) or (n, …)."""
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
            for _ in range(self._load.n_clients):
                clients.create_task(self._ask_in_turn())

    async def _ask_in_turn(self) -> None:
        """Post bodies one after the other, and record the end of each request."""
        while (started := time.perf_counter()) < self._until:
            row = next(self._rows) % len(self._load.bodies)
            status, body = await self._post(self._load.bodies[row])
            ended = time.perf_counter()
            kind = body if isinstance(body, str) else self._load.judge(row, status, body)
            self.records.append((started, ended, status, kind))
            if status == NO_ANSWER:
                await asyncio.sleep(PAUSE_S)

    async def _post(self, body: bytes) -> tuple[int, bytes | str]:
        """Return the status and the answer's body; 0 and a kind without an answer."""
        try:
            async with self._session.post(self._load.url, data=body) as response:
                return response.status, await response.read()
        except TimeoutError:
            return NO_ANSWER, TIMEOUT
        except aiohttp.ClientConnectorError as error:
            return NO_ANSWER, REFUSED if isinstance(error.os_error, ConnectionRefusedError) else RESET
        except aiohttp.ClientError:  # the connection ended before the answer did
            return NO_ANSWER, RESET
