"""A stage behind Serve: a loaded model that answers rows of parcels, and how the router calls it."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle

from cauc_ray.errors import printable
from cauc_ray.execution.stage import Parcel, Part, gathered, packed
from cauc_ray.models.answers import Answers, AsDeclared, Batch, Model, ModelFacts, choices_in, matched
from cauc_ray.models.pool import StageSpec
from cauc_ray.serving.faults import StageError
from cauc_ray.serving.isolation import StageAnswer, answer_apart, row_of

# Smaller columns travel with the call: to put them into the object store and fetch them takes longer.
SHARED_BYTES = 100_000
# Replicas that compute answer within this, too.
ASK_S = 2.0
# That a call has begun reaches its router within this, also where the call then ends the process.
SENT_S = 0.02
# A replica that is replaced answers so long that it is, so that calls on their way go elsewhere, and then ends.
LEAVES_S = 0.2
# So many replicas are looked at for one that a call may go to.
MOST_LOOKS = 4

logger = logging.getLogger("ray.serve")


class StageServer:
    """A replica of a stage: it loads the model and lets it answer in a thread of its own, one call at a time."""

    def __init__(self, spec: StageSpec, import_paths: Sequence[str]) -> None:
        sys.path[:0] = [path for path in import_paths if path not in sys.path]
        if not spec.resources.num_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a stage that asked for none shall not fill one's memory
        self._spec = spec
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._busy_since: float | None = None
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._leaves = False
        self._good_row: Batch | None = None
        self._model: Model = self._thread.submit(spec.model.load).result()
        self._as_declared = AsDeclared(self._model.facts)

    async def facts(self) -> ModelFacts:
        """Return what the model says of itself."""
        return self._model.facts

    async def answer(self, parts: Sequence[Part], parcels: Sequence[Any], good_row: Batch | None) -> StageAnswer:
        """Answer rows of parcels: columns by name, or references to some. A fault of the model is an answer.

        good_row: one that this stage has answered, to tell a bad input from a broken replica; the replica's own
        without one.
        """
        columns = [await _fetched(parcel) for parcel in parcels]
        return await self._in_thread(partial(self._answer, parts, [Parcel(one) for one in columns], good_row))

    async def answer_watched(
        self, parts: Sequence[Part], parcels: Sequence[Any], good_row: Batch | None
    ) -> AsyncIterator[StageAnswer | None]:
        """Yield None once the model begins, whatever it then does to the process, and its answer."""
        columns = [await _fetched(parcel) for parcel in parcels]
        loop, begins, sent = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def answer(stopped: Callable[[], bool]) -> StageAnswer:
            loop.call_soon_threadsafe(begins.set)
            sent.wait(ASK_S)
            return self._answer(parts, [Parcel(one) for one in columns], good_row, stopped)

        answering = asyncio.ensure_future(self._in_thread(answer))
        try:
            await begins.wait()
            yield None
            await asyncio.sleep(SENT_S)
            sent.set()
            yield await answering
        finally:
            sent.set()
            answering.cancel()

    async def leave(self, replica: str) -> None:
        """End this replica if it is the one meant: it is broken, and Serve starts another."""
        if replica == self._replica and not self._leaves:
            self._leaves = True
            logger.error("this replica fails on what others answer; it ends, and another is started")
            asyncio.get_running_loop().call_later(LEAVES_S, os._exit, 1)

    def check_health(self) -> None:
        """End the process where a call hangs, so that Serve replaces the replica."""
        longest = self._spec.call_timeout_s
        if not self._spec.model.GIVES_UP:
            longest = min(longest, 2 * self._spec.serving.timeout_s)
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > longest:
            logger.error(f"a call has not ended for {longest:g} s; this replica ends, and another is started")
            os._exit(1)  # to ask it to stop would be to wait for the call

    async def _in_thread(self, answer: Callable[[Callable[[], bool]], StageAnswer]) -> StageAnswer:
        """Let the model's thread answer; it is told where the caller goes away."""
        stopped = threading.Event()
        future = self._thread.submit(answer, stopped.is_set)
        try:
            return await asyncio.wrap_future(future)
        finally:
            stopped.set()
            if future.running():  # Serve shall not take a replica for free whose thread is not
                await asyncio.wait([asyncio.wrap_future(future)])

    def _answer(
        self,
        parts: Sequence[Part],
        parcels: Sequence[Parcel],
        good_row: Batch | None,
        stopped: Callable[[], bool],
    ) -> StageAnswer:
        if self._leaves:
            return StageAnswer(None, 0.0, "the replica is being replaced", "replica", replica=self._replica)
        started = time.monotonic()
        batch = partial(gathered, parts, parcels)
        good_row = self._good_row if self._good_row is not None else good_row
        answer = answer_apart(self._asked, batch, good_row, stopped)
        if self._good_row is None and answer.answers is not None:
            good = next((row for row in range(len(answer.answers.logits)) if row not in answer.answers.failures), None)
            self._good_row = None if good is None else row_of(batch(), good)
        return replace(answer, compute_s=time.monotonic() - started, replica=self._replica)

    def _asked(self, batch: Batch) -> Answers:
        n_choices = choices_in(batch)  # asked before: the model may do with its batch what it likes
        self._busy_since = time.monotonic()
        try:
            return self._as_declared(matched(self._model(batch), n_choices))
        finally:
            self._busy_since = None


async def _fetched(parcel: Any) -> Any:
    return await parcel if isinstance(parcel, ray.ObjectRef) else parcel


class ServeClient:
    """Calls a stage through its handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()

    async def replicas(self) -> list[ModelFacts] | None:
        """Return what the replicas that take calls say of their models, None where some do not answer."""
        try:
            told = await self._handle.broadcast("facts").results_async(timeout_s=ASK_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        except TimeoutError:
            return None
        return [facts for facts in told if isinstance(facts, ModelFacts)]

    async def answer(
        self,
        parts: Sequence[Part],
        parcels: Sequence[Any],
        *,
        good_row: Batch | None = None,
        avoid: Collection[str] = (),
        on_begin: Callable[[], None] | None = None,
    ) -> StageAnswer:
        """Have a replica answer. Raises StageError; if the caller is cancelled, so is the call."""
        asked = list(parts), list(parcels), good_row
        if on_begin is not None:
            return await self._faulty(self._watched(asked, on_begin))
        if avoid:
            return await self._faulty(self._elsewhere(asked, avoid))
        return await self._faulty(self._awaited(self._handle.answer.remote(*asked)))

    def replace(self, replica: str) -> None:
        """Have a replica ended, so that Serve starts another."""
        task = asyncio.ensure_future(self._leave(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def share(self, columns: Batch) -> Any:
        """Put columns into the object store if they are large; None for what is not."""
        return ray.put(packed(columns)) if _n_bytes(columns) >= SHARED_BYTES else None

    async def _leave(self, replica: str) -> None:
        try:
            await self._handle.broadcast("leave", replica).results_async(timeout_s=ASK_S, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            logger.warning(f"replica {replica} could not be asked to end")

    async def _awaited(self, response: Awaitable[StageAnswer]) -> StageAnswer:
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[attr-defined]
            raise

    async def _elsewhere(self, asked: tuple[Any, ...], avoid: Collection[str]) -> StageAnswer:
        """Have a replica answer that is none of those to avoid, if there is one."""
        handle = self._handle.answer
        async with AsyncExitStack() as looked_at:  # as long as these are held, others are less busy
            for _ in range(MOST_LOOKS):
                chosen = await looked_at.enter_async_context(handle.choose_replica())
                if chosen.replica_id not in avoid:
                    break
            return await self._awaited(handle.dispatch(chosen, *asked))

    async def _watched(self, asked: tuple[Any, ...], on_begin: Callable[[], None]) -> StageAnswer:
        """Have a replica answer that reports when its model begins."""
        response = self._handle.options(stream=True).answer_watched.remote(*asked)
        answer: StageAnswer | None = None
        try:
            async for answer in response:
                if answer is None:
                    on_begin()
        except asyncio.CancelledError:
            response.cancel()
            raise
        if answer is None:
            raise StageError("failed", "the replica gave no answer")
        return answer

    async def _faulty(self, answering: Awaitable[StageAnswer]) -> StageAnswer:
        """Await a call, whose failures become StageErrors."""
        try:
            return await answering
        except BackPressureError as error:
            raise StageError("overloaded", "it has too much to do") from error
        except DeploymentUnavailableError as error:
            raise StageError("down", "it could not be deployed") from error
        except ReplicaUnavailableError as error:
            raise StageError("died", "its replica ended") from error
        except RayError as error:
            raise StageError(*_fault(error)) from error


def _fault(error: RayError) -> tuple[Literal["died", "failed"], str]:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(error, RayActorError) or isinstance(cause, RayActorError):
        return "died", "its replica ended"
    return "failed", printable(f"{type(cause).__name__}: {' '.join(str(cause).split())}")


def _n_bytes(columns: Batch) -> int:
    """Return about how many bytes columns take."""
    return sum(_column_bytes(column) for column in columns.values())


def _column_bytes(column: Any) -> int:
    if column.dtype != object:
        return int(column.nbytes)
    return sum(
        value.nbytes if isinstance(value, np.ndarray) else len(value) if value is not None else 0 for value in column
    )
