"""A stage behind Serve: a loaded model that answers rows of bundles, and how the router calls it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.worker import prepare_process
from cauc_ray.errors import printable
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.types import Floats
from cauc_ray.serving.faults import StageError
from cauc_ray.serving.packing import StageCall
from cauc_ray.serving.replica import Replica
from cauc_ray.serving.scaling import NEEDED, Needs

# Replicas that compute answer within this, too.
ASK_S = 2.0
# That a call has begun reaches its router within this, also where the call then ends the process.
SENT_S = 0.02
# A replica that is replaced answers so long that it is, so that calls on their way go elsewhere, and then ends.
LEAVES_S = 0.2

logger = logging.getLogger("ray.serve")

T = TypeVar("T")


class GoneError(Exception):
    """The replica that a call was for is there no more, and the call went to another."""


class StageServer:
    """A replica of a stage as Serve has it."""

    def __init__(self, spec: StageSpec, stage: int, import_paths: Sequence[str]) -> None:
        prepare_process(spec, import_paths)
        self._spec = spec
        self._needs = Needs()
        self._replica = Replica(spec, stage, serve.get_replica_context().replica_id.unique_id)
        self._facts = self._replica.facts.result()

    async def facts(self) -> tuple[str, ModelFacts]:
        """Return the replica's name and its model's facts."""
        return self._replica.name, self._facts

    async def answer(self, call: StageCall) -> tuple[CallResult, Floats | None]:
        """Answer a call's rows. A fault of the model is a result.

        Returns the result, and the states of the rows that go on.
        """
        self._require_meant(call)
        return await self._answer(call)

    async def answer_watched(self, call: StageCall) -> AsyncIterator[tuple[CallResult, Floats | None] | None]:
        """Yield None once the model begins, whatever it then does to the process, and what answer returns."""
        self._require_meant(call)
        loop, begins, sent = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def begin() -> None:
            loop.call_soon_threadsafe(begins.set)
            sent.wait(ASK_S)

        answering = asyncio.ensure_future(self._answer(call, begin))
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
        if replica == self._replica.name and not self._replica.leaves:
            self._replica.leaves = True
            logger.error("this replica fails on what others answer; it ends, and another is started")
            asyncio.get_running_loop().call_later(LEAVES_S, os._exit, 1)

    def _require_meant(self, call: StageCall) -> None:
        if call.replica not in ("", self._replica.name):
            raise GoneError(f"replica {call.replica} no longer exists")
        self._needs.note(call.router, call.needed_replicas)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to Serve how many replicas the routers need at the pool's target share of busy time."""
        return {NEEDED: self._needs.total() / self._spec.serving.target_busy}

    def check_health(self) -> None:
        """End the process where a call hangs, so that Serve replaces the replica."""
        if (longest_s := self._replica.hangs()) is not None:
            logger.error(f"a call has not ended for {longest_s:g} s; this replica ends, and another is started")
            os._exit(1)  # to ask it to stop would be to wait for the call

    async def _answer(
        self, call: StageCall, begin: Callable[[], None] = lambda: None
    ) -> tuple[CallResult, Floats | None]:
        try:
            return await self._replica.answer(call, begin)
        except StageError as error:
            logger.error(f"this replica ends, and another is started: {error.message}")
            os._exit(1)


class ServeClient:
    """Calls a stage through its handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._tasks: set[asyncio.Task[None]] = set()

    async def replicas(self) -> dict[str, ModelFacts] | None:
        """Return the model facts of the replicas that take calls, by name, None if some do not answer."""
        try:
            answers = await self._handle.broadcast("facts").results_async(timeout_s=ASK_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return {}
        except TimeoutError:
            return None
        return dict(one for one in answers if isinstance(one, tuple))

    async def answer(
        self, call: StageCall, on_begin: Callable[[], None] | None = None
    ) -> tuple[CallResult, Floats | None]:
        """Have the call's replica answer. Raises StageError; if the caller is cancelled, so is the call."""
        # Policies travel only where they are asked for: a replica has those of the calls before.
        slim = replace(call, policies={})
        result, states = await self._faulty(self._asked(slim, on_begin))
        if result.fault == "policy":
            result, states = await self._faulty(self._asked(call, on_begin))
        return result, states

    def _asked(
        self, call: StageCall, on_begin: Callable[[], None] | None
    ) -> Awaitable[tuple[CallResult, Floats | None]]:
        if on_begin is not None:
            return self._watched(call, on_begin)
        return self._awaited(self._handle.answer.remote(call))

    def replace(self, replica: str) -> None:
        """Have a replica ended, so that Serve starts another."""
        task = asyncio.ensure_future(self._leave(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _leave(self, replica: str) -> None:
        try:
            await self._handle.broadcast("leave", replica).results_async(timeout_s=ASK_S, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            logger.warning(f"replica {replica} could not be asked to end")

    async def _awaited(self, response: Awaitable[T]) -> T:
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[attr-defined]
            raise

    async def _watched(self, call: StageCall, on_begin: Callable[[], None]) -> tuple[CallResult, Floats | None]:
        """Have a replica answer that reports when its model begins."""
        response = self._handle.options(stream=True).answer_watched.remote(call)
        answer: tuple[CallResult, Floats | None] | None = None
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

    async def _faulty(self, answering: Awaitable[T]) -> T:
        """Await a call, whose failures become StageErrors."""
        try:
            return await answering
        except BackPressureError as error:
            raise StageError("overloaded", "it is overloaded") from error
        except DeploymentUnavailableError as error:
            raise StageError("down", "it could not be deployed") from error
        except ReplicaUnavailableError as error:
            raise StageError("died", "its replica ended") from error
        except RayError as error:
            raise StageError(*_fault(error)) from error


def _fault(error: RayError) -> tuple[Literal["died", "gone", "failed"], str]:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, GoneError):
        return "gone", str(cause)
    if isinstance(error, RayActorError) or isinstance(cause, RayActorError):
        return "died", "its replica ended"
    return "failed", printable(f"{type(cause).__name__}: {' '.join(str(cause).split())}")


class NamedReplica(RequestRouter):  # type: ignore[misc]  # Ray's classes have no types
    """Routes a call to the replica that it names. If that is gone, another one reports it."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that may take a call."""
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(call, StageCall):
            return [candidate_replicas]
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # else what cannot be routed is tried without a pause
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == call.replica]
        return [named or candidate_replicas]
