"""A replica of a local service: a process of its own, which can be ended whatever its model does."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future

from cauc_ray.cascade.isolation import reason_of
from cauc_ray.cascade.worker import prepare_process
from cauc_ray.errors import ExecutionError
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.serving.processes import EndedError, OtherProcess
from cauc_ray.serving.replica import CLOSE_S, Replica, hanging_s
from cauc_ray.serving.request_state import Answer, StageCall, StageError

# Of Linux's prctl: the signal that a process gets when the one that has started it ends.
_PARENT_DEATH_SIGNAL = 1


class ReplicaProcess(OtherProcess):
    """Answers calls as Replica does.

    Attributes:
        name: Name for people.
        facts: Facts of the model, once it is loaded.
        load_s: How long it took to load.
    """

    def __init__(self, spec: StageSpec, stage: int, name: str) -> None:
        super().__init__(_Served, spec, stage, name)
        self.name, self.load_s, self._spec = name, 0.0, spec
        self._follow("facts")

    def load(self) -> None:
        """Load the model once more in the same process, which has its packages, where that has failed before."""
        self._follow("load")

    def _follow(self, loading: str) -> None:
        self._began_at = time.monotonic()
        self.facts: Future[ModelFacts] = self.call(loading)
        self.facts.add_done_callback(self._note_loaded)

    def _note_loaded(self, facts: Future[ModelFacts]) -> None:
        self.load_s = time.monotonic() - self._began_at

    async def answer(self, call: StageCall, begin: Callable[[], None] = lambda: None) -> Answer:
        """Answer a call's rows, as Replica.answer does. Raises StageError where the process ends."""
        try:
            answer: Answer = await asyncio.wrap_future(self.call("answer", call, on_begin=begin))
        except EndedError as error:
            raise StageError("died", str(error)) from error
        return answer

    def hangs(self) -> float | None:
        """Return the seconds that a call may take, where one has taken longer; else None."""
        return hanging_s(self._spec, self.busy_since)

    def close(self, reason: str) -> None:
        """Have the model closed if no call holds it, and end the process."""
        self.end(reason, CLOSE_S if self.hangs() is None and self.facts.done() else 0.0)


class _Served:
    """The process's side."""

    def __init__(self, spec: StageSpec, stage: int, name: str) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        prepare_process(spec)
        self._replica = Replica(spec, stage, name)

    async def load(self, begin: Callable[[], None]) -> ModelFacts:
        """Load the model once more; return its facts as facts does."""
        self._replica.load()
        return await self.facts(begin)

    async def facts(self, begin: Callable[[], None]) -> ModelFacts:
        """Return the model's facts once it is loaded. Raises ExecutionError."""
        try:
            return await asyncio.wrap_future(self._replica.facts)
        except Exception as error:
            raise ExecutionError(reason_of(error)) from None

    async def answer(self, call: StageCall, begin: Callable[[], None]) -> Answer:
        """Answer as Replica does; end the process where its model has ended its thread."""
        try:
            return await self._replica.answer(call, begin)
        except Exception as error:  # of any kind: another process may do it
            print(f"this replica ends, and another is started: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def close(self) -> None:
        """Close the model."""
        self._replica.close()
