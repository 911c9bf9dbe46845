"""A replica of a stage in this process: one thread prepares calls, another has the model answer them.

A model whose calls overlap has two threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from cauc_ray.cascade.isolation import reason_of
from cauc_ray.cascade.rows import CallResult
from cauc_ray.cascade.worker import Prepared, Worker
from cauc_ray.errors import ConfigError, ExecutionError
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.serving.request_state import Answer, StageCall, StageError

T = TypeVar("T")

# Seconds in which a model may close.
CLOSE_S = 5.0
# Calls that a model answers at a time where they overlap.
CALLS_THAT_OVERLAP = 2


def hanging_s(spec: StageSpec, busy_since: float | None) -> float | None:
    """Return the seconds that a call of a stage may take, where one that began then has taken longer; else None."""
    longest_s = spec.call_timeout_s
    if not spec.model.ENFORCES_OWN_TIMEOUT:
        longest_s = min(longest_s, 2 * spec.serving.timeout_s)
    return longest_s if busy_since is not None and time.monotonic() - busy_since > longest_s else None


class Replica:
    """A loaded model and its threads.

    Attributes:
        name: Name for people.
        facts: Facts of the model, once it is loaded.
        load_s: How long it took to load.
        leaves: Whether it is being replaced, and answers no more.
    """

    def __init__(self, spec: StageSpec, stage: int, name: str) -> None:
        self.name, self.load_s, self.leaves = name, 0.0, False
        self._spec, self._is_closed = spec, False
        self._worker = Worker(spec.served(), stage, {})
        self._model, self._host = ThreadPoolExecutor(1, f"{name}: model"), ThreadPoolExecutor(1, f"{name}: host")
        self.load()

    def load(self) -> None:
        """Load the model, once more where that has failed before."""
        self.facts: Future[ModelFacts] = self._model.submit(_contained, self._loaded)

    def _loaded(self) -> ModelFacts:
        started = time.monotonic()
        facts = self._worker.load()
        if facts.overlaps:  # as in runs: requests of the next call go out while the last answers of one are awaited
            self._model = ThreadPoolExecutor(CALLS_THAT_OVERLAP, f"{self.name}: model")
        self.load_s = time.monotonic() - started
        return facts

    async def answer(self, call: StageCall, begin: Callable[[], None] = lambda: None) -> Answer:
        """Answer a call's rows; what has not begun when the caller is cancelled is not done.

        A fault of the model is a result.

        Args:
            call: The call.
            begin: Called in each thread before it works.

        Returns:
            The result, and the states of deferred rows.

        Raises:
            StageError: The model ends its thread.
        """
        ahead = None
        if self._worker.prepares:
            ahead = await self._done_in(self._host, partial(self._prepare, call, begin))
        return await self._done_in(self._model, partial(self._decide, call, begin, ahead))

    def hangs(self) -> float | None:
        """Return the seconds that a call may take, where one has taken longer; else None."""
        return hanging_s(self._spec, self._worker.busy_since)

    def close(self) -> None:
        """Close the model, at once if no call holds it; calls that come later are not answered.

        Again it does nothing: a collector may ask for it in a thread that holds locks which this takes.
        """
        if self._is_closed:
            return
        self._is_closed = self.leaves = True
        is_idle = self.facts.done() and self._worker.busy_since is None
        with suppress(TimeoutError, RuntimeError):  # the interpreter may be ending
            self._model.submit(self._worker.close).result(CLOSE_S if is_idle else 0.0)

    async def _done_in(self, threads: ThreadPoolExecutor, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run work in a thread; it is notified if the caller goes away."""
        stopped = threading.Event()
        future = threads.submit(_contained, partial(work, stopped.is_set))
        try:
            return await asyncio.wrap_future(future)
        finally:
            stopped.set()
            if future.running():  # a replica is not free while its thread is busy
                await asyncio.wait([asyncio.wrap_future(future)])

    def _prepare(self, call: StageCall, begin: Callable[[], None], stopped: Callable[[], bool]) -> Prepared | None:
        begin()
        return None if stopped() else self._worker.prepare(call.parts, call.bundles)

    def _decide(
        self,
        call: StageCall,
        begin: Callable[[], None],
        ahead: Prepared | None,
        stopped: Callable[[], bool],
    ) -> Answer:
        begin()
        started_at = time.time()
        if self.leaves:
            return CallResult.broken(started_at, "", "it is being replaced", "replica"), None
        try:
            result, goes_on = self._worker.decide(
                call.parts,
                call.bundles,
                policies=call.policies,
                keeps=call.keeps,
                wants=call.wants,
                carries_columns=False,
                good_row=call.good_row,
                stopped=stopped,
                ahead=ahead,
            )
        except (ConfigError, ExecutionError) as error:
            return CallResult.broken(started_at, "", reason_of(error), "stage"), None
        return result, goes_on.state


def _contained(work: Callable[[], T]) -> T:
    """Do some work of a model, whose end of the process does not end the event loop. Raises StageError for that."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise StageError("died", f"its model raised {type(error).__name__}") from error
