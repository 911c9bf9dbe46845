"""A replica of a stage in this process: its worker answers in one thread, and prepares the next call in another."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from cauc_ray.cascade.bundles import Bundle
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


def hanging_s(spec: StageSpec, busy_since: float | None) -> float | None:
    """Return the seconds that a call of a stage may take, where one that began then has taken longer; else None."""
    longest_s = spec.call_timeout_s
    if not spec.model.ENFORCES_OWN_TIMEOUT:
        longest_s = min(longest_s, 2 * spec.serving.timeout_s)
    return longest_s if busy_since is not None and time.monotonic() - busy_since > longest_s else None


class Replica:
    """A loaded model and its threads.

    name: as people know it.   facts: of the model, once it is loaded.   leaves: whether it is being
    replaced, and answers no more.
    """

    def __init__(self, spec: StageSpec, stage: int, name: str) -> None:
        self.name = name
        self.leaves = False
        self._spec = spec
        self._worker = Worker(spec.served(), stage, {}, replica=name)
        self._model = _Thread(f"{name}: model", at_end=self._worker.close)
        self._host = _Thread(f"{name}: host")
        started = time.monotonic()
        self.load_s = 0.0
        self.facts: Future[ModelFacts] = self._model.submit(lambda: self._loaded(started))

    def _loaded(self, started: float) -> ModelFacts:
        facts = self._worker.load()
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

    def end(self, reason: str) -> None:
        """End all calls, and the threads once they do nothing; what they are at goes nowhere."""
        self.leaves = True
        self._model.end(reason)
        self._host.end(reason)

    def close(self, reason: str) -> None:
        """End the replica, and wait until its model is closed if no call holds it."""
        self.end(reason)
        if self.facts.done() and self._worker.busy_since is None:
            self._model.join(CLOSE_S)

    async def _done_in(self, thread: _Thread, work: Callable[[Callable[[], bool]], T]) -> T:
        """Run work in a thread; it is notified if the caller goes away."""
        stopped = threading.Event()
        future = thread.submit(partial(work, stopped.is_set))
        try:
            return await asyncio.wrap_future(future)
        finally:
            stopped.set()
            if future.running():  # a replica is not free while its thread is busy
                await asyncio.wait([asyncio.wrap_future(future)])

    def _prepare(self, call: StageCall, begin: Callable[[], None], stopped: Callable[[], bool]) -> Prepared | None:
        begin()
        return None if stopped() else self._worker.prepare(call.parts, [Bundle(call.columns)])

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
            return CallResult.broken(started_at, "", "it is being replaced", "replica", replica=self.name), None
        try:
            result, goes_on = self._worker.decide(
                call.parts,
                [Bundle(call.columns)],
                policies=call.policies,
                carries_columns=False,
                good_row=call.good_row,
                stopped=stopped,
                ahead=ahead,
            )
        except (ConfigError, ExecutionError) as error:
            return CallResult.broken(started_at, "", reason_of(error), "stage", replica=self.name), None
        return result, goes_on.state


class _Thread:
    """Does one thing after the other, from the first on. One that hangs does not keep the process from ending."""

    def __init__(self, name: str, at_end: Callable[[], None] = lambda: None) -> None:
        self._at_end = at_end
        self._open: set[Future[Any]] = set()
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, do: Callable[[], T]) -> Future[T]:
        """Have something done when its turn comes."""
        future: Future[T] = Future()
        if self._thread.ident is None:
            self._thread.start()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        self._asked.put((future, do))
        return future

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def end(self, reason: str) -> None:
        """End with all that is not done."""
        self._asked.put(None)
        for future in list(self._open):
            with suppress(InvalidStateError):  # it has just ended
                future.set_exception(StageError("died", reason))

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            future, do = asked
            with suppress(InvalidStateError):  # it was ended
                if not future.done() and future.set_running_or_notify_cancel():
                    try:
                        future.set_result(do())
                    except Exception as error:
                        future.set_exception(error)
                    except BaseException as error:  # it must not end the event loop
                        future.set_exception(StageError("died", f"its model raised {type(error).__name__}"))
        self._at_end()
