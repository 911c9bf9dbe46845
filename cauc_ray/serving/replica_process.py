"""A replica of a local service: a process of its own, which can be ended whatever its model does."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, BinaryIO

from cauc_ray.cascade.isolation import reason_of
from cauc_ray.cascade.worker import prepare_process
from cauc_ray.errors import ExecutionError
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.serving.elsewhere import pipes, python_process
from cauc_ray.serving.replica import CLOSE_S, Replica, hanging_s
from cauc_ray.serving.request_state import Answer, StageCall, StageError

# Of Linux's prctl: the signal that a process gets when the one that has started it ends.
_PARENT_DEATH_SIGNAL = 1


@dataclass(slots=True)
class _OpenCall:
    """A call that the process has.

    Attributes:
        begin: Called when its model begins.
        answer: Its answer.
        began_at: When its model began.
    """

    begin: Callable[[], None]
    answer: Future[Answer] = field(default_factory=Future)
    began_at: float | None = None


class ReplicaProcess:
    """Answers calls as Replica does.

    Attributes:
        name: Name for people.
        facts: Facts of the model, once it is loaded.
        load_s: How long it took to load.
        has_ended: Whether the process has ended.
    """

    def __init__(self, spec: StageSpec, stage: int, name: str) -> None:
        self.name, self.load_s, self.has_ended = name, 0.0, False
        self.facts: Future[ModelFacts] = Future()
        self._spec, self._numbers = spec, count()
        self._open: dict[int, _OpenCall] = {}
        self._messages: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._messages.put((spec, stage, name))
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self._write, args=(started,), name=name, daemon=True).start()
        self._process = started.result()
        threading.Thread(target=self._read, name=name, daemon=True).start()

    async def answer(self, call: StageCall, begin: Callable[[], None] = lambda: None) -> Answer:
        """Answer a call's rows, as Replica.answer does. Raises StageError where the process ends."""
        number = next(self._numbers)
        opened = self._open[number] = _OpenCall(begin)
        self._messages.put(("answer", number, call))
        if self.has_ended:
            self._fail("its process has ended")
        try:
            return await asyncio.wrap_future(opened.answer)
        except asyncio.CancelledError:
            self._messages.put(("cancel", number))
            raise

    def load_again(self) -> None:
        """Have the model loaded again in the same process, which has its packages, after that has failed."""
        self.facts = Future()
        self._messages.put(("load", -1))
        if self.has_ended:
            self._fail("its process has ended")

    def hangs(self) -> float | None:
        """Return the seconds that a call may take, where one has taken longer; else None."""
        began = [call.began_at for call in list(self._open.values()) if call.began_at is not None]
        return hanging_s(self._spec, min(began, default=None))

    def end(self, reason: str) -> None:
        """End the process, whatever it does, and all calls."""
        self.has_ended = True
        self._messages.put(None)
        self._process.kill()
        self._fail(reason)

    def close(self, reason: str) -> None:
        """Have the model closed if no call holds it, and end the process."""
        self._messages.put(("close",))
        with suppress(Exception):  # of any kind: it is ended in any case
            self._process.wait(CLOSE_S if self.hangs() is None and self.facts.done() else 0)
        self.end(reason)

    def _write(self, started: Future[subprocess.Popen[bytes]]) -> None:
        """Start the process and write to it. It ends with the thread that starts it: this one lives as long."""
        try:
            process = python_process(__name__)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        pipe = process.stdin
        assert pipe is not None
        with suppress(OSError), pipe:
            while (message := self._messages.get()) is not None:
                pickle.dump(message, pipe, protocol=5)
                pipe.flush()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with suppress(OSError, EOFError, pickle.UnpicklingError), pipe:
            while True:
                self._take(*pickle.load(pipe))
        self._process.wait()
        self.has_ended = True
        self._fail("its process has ended")

    def _take(self, what: str, *content: Any) -> None:
        """Take a message of the process."""
        if what == "loaded":
            facts, self.load_s = content
            self.facts.set_result(facts)
        elif what == "failed":
            self.facts.set_exception(ExecutionError(*content))
        elif what == "begin" and (call := self._open.get(content[0])) is not None:
            call.began_at = call.began_at or time.monotonic()
            call.begin()
        elif what == "done" and (call := self._open.pop(content[0], None)) is not None:
            with suppress(InvalidStateError):  # the caller has gone away
                call.answer.set_result(content[1])

    def _fail(self, reason: str) -> None:
        with suppress(InvalidStateError):
            self.facts.set_exception(ExecutionError(reason))
        while self._open:
            with suppress(KeyError, InvalidStateError):
                self._open.popitem()[1].answer.set_exception(StageError("died", reason))


class _Served:
    """The process's side: a replica, and what it is asked."""

    def __init__(self, replica: Replica, results: BinaryIO) -> None:
        self.replica, self._results, self._lock = replica, results, threading.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self, calls: BinaryIO) -> None:
        """Answer calls until the other process wants no more, or is gone."""
        self.replica.facts.add_done_callback(self._report)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            with suppress(EOFError, OSError):
                while (message := pickle.load(calls))[0] != "close":
                    loop.call_soon_threadsafe(self._take, *message)
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()

    def _report(self, facts: Future[ModelFacts]) -> None:
        failed = facts.exception()
        if failed is None:
            self._send("loaded", facts.result(), self.replica.load_s)
        else:
            self._send("failed", reason_of(failed))

    def _take(self, what: str, number: int, *content: Any) -> None:
        if what == "answer":
            self._tasks[number] = asyncio.ensure_future(self._answer(number, *content))
        elif what == "load":
            self.replica.load()
            self.replica.facts.add_done_callback(self._report)
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, call: StageCall) -> None:
        answer: Answer | None = None
        try:
            answer = await self.replica.answer(call, lambda: self._send("begin", number))
        except Exception as error:  # of any kind: another process may do it
            print(f"this replica ends, and another is started: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        finally:
            del self._tasks[number]
            self._send("done", number, answer)

    def _send(self, *message: Any) -> None:
        with self._lock, suppress(OSError):
            pickle.dump(message, self._results, protocol=5)
            self._results.flush()


def main() -> None:
    """Be a replica, until the other process is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    calls, results = pipes()
    spec, stage, name = pickle.load(calls)
    prepare_process(spec)
    served = _Served(Replica(spec, stage, name), results)
    asyncio.run(served.serve(calls))
    served.replica.close()
    os._exit(0)  # a model that hangs does not keep the process


if __name__ == "__main__":
    main()
