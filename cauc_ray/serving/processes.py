"""Other Python processes of a service: each makes an object, and answers calls of its methods."""

from __future__ import annotations

import asyncio
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
from functools import partial
from itertools import count
from typing import Any, BinaryIO

from cauc_ray.errors import ExecutionError

_ENDED = "its process has ended"


class EndedError(ExecutionError):
    """A process has ended, and with it its calls."""


@dataclass(slots=True)
class _OpenCall:
    """A call that the process has.

    Attributes:
        begin: Called when it begins.
        answer: Its answer.
        began_at: When it began.
    """

    begin: Callable[[], None]
    answer: Future[Any] = field(default_factory=Future)
    began_at: float | None = None


class OtherProcess:
    """A process that makes an object and calls its methods, as many at a time as these allow.

    A method is a coroutine function, whose last argument is to be called once what is asked begins. At an orderly end
    the object's `close` is called. What it makes, takes and returns can be pickled.

    Not a ProcessPoolExecutor: that would import the program's main module again, whatever it does.

    Attributes:
        has_ended: Whether the process has ended.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        self.has_ended = False
        self._numbers, self._open = count(), dict[int, _OpenCall]()
        self._messages: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._messages.put((make, args))
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self._write, args=(started,), name="to a process", daemon=True).start()
        self._process = started.result()
        threading.Thread(target=self._read, name="of a process", daemon=True).start()

    @property
    def busy_since(self) -> float | None:
        """Return when the call began that has taken the longest so far, on the monotonic clock; None if none has."""
        began = [call.began_at for call in list(self._open.values()) if call.began_at is not None]
        return min(began, default=None)

    def call(self, method: str, *args: Any, on_begin: Callable[[], None] = lambda: None) -> Future[Any]:
        """Call a method; if its future is cancelled, so is the call.

        Returns:
            Its answer, what it raises, or EndedError.
        """
        number, opened = next(self._numbers), _OpenCall(on_begin)
        self._open[number] = opened
        self._messages.put(("call", number, method, args))
        opened.answer.add_done_callback(
            lambda answer: self._messages.put(("cancel", number)) if answer.cancelled() else None
        )
        if self.has_ended:
            self._fail(_ENDED)
        return opened.answer

    def end(self, reason: str, wait_s: float = 0.0) -> None:
        """End the process and all calls: by itself if that takes no longer, then whatever it does."""
        self._messages.put(None)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self.has_ended = True
        self._process.kill()
        self._fail(reason)

    def _write(self, started: Future[subprocess.Popen[bytes]]) -> None:
        """Start the process and write to it. It may be ended with the thread that starts it: this one lives as long."""
        try:
            process = _python_process(__name__)
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
        process.wait()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        with suppress(OSError, EOFError, pickle.UnpicklingError), pipe:
            while True:
                self._take(*pickle.load(pipe))
        self._process.wait()
        self.has_ended = True
        self._fail(_ENDED)

    def _take(self, what: str, number: int, content: Any) -> None:
        """Take a message of the process."""
        if what == "begin":
            if (call := self._open.get(number)) is not None:
                call.began_at = call.began_at or time.monotonic()
                call.begin()
        elif (call := self._open.pop(number, None)) is not None:
            with suppress(InvalidStateError):  # the caller has gone away
                (call.answer.set_result if what == "done" else call.answer.set_exception)(content)

    def _fail(self, reason: str) -> None:
        while self._open:
            with suppress(KeyError, InvalidStateError):
                self._open.popitem()[1].answer.set_exception(EndedError(reason))


def _python_process(module: str) -> subprocess.Popen[bytes]:
    """Start a process that runs a module of this package, with pipes to it and from it."""
    # It finds what this process finds, whatever has put it on the path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", module], env=environment, stdin=pipe, stdout=pipe, bufsize=-1)


class _Calls:
    """The process's side: its object, and the calls that it has."""

    def __init__(self, target: Any, results: BinaryIO) -> None:
        self._target, self._results, self._lock = target, results, threading.Lock()
        self._tasks: dict[int, asyncio.Task[Any]] = {}

    async def answer(self, calls: BinaryIO) -> None:
        """Answer calls until the other process wants no more, or is gone."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            with suppress(EOFError, OSError):
                while True:
                    loop.call_soon_threadsafe(self._take, *pickle.load(calls))
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()

    def _take(self, what: str, number: int, method: str = "", args: tuple[Any, ...] = ()) -> None:
        if what == "call":
            begin = partial(self._send, "begin", number, None)
            task = self._tasks[number] = asyncio.ensure_future(getattr(self._target, method)(*args, begin))
            task.add_done_callback(partial(self._done, number))
        elif number in self._tasks:
            self._tasks[number].cancel()

    def _done(self, number: int, task: asyncio.Task[Any]) -> None:
        # Here, since a task that is cancelled before it has begun comes to no line of its own.
        del self._tasks[number]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._send("raised", number, error)
        else:
            self._send("done", number, None if task.cancelled() else task.result())

    def _send(self, *message: Any) -> None:
        with self._lock, suppress(OSError):
            pickle.dump(message, self._results, protocol=5)
            self._results.flush()


def main() -> None:
    """Be such a process, until the other one is gone. Whoever stops both lets this one finish first."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints goes elsewhere
    make, args = pickle.load(calls)
    target = make(*args)
    asyncio.run(_Calls(target, results).answer(calls))
    target.close()
    os._exit(0)  # a model that hangs does not keep the process


if __name__ == "__main__":
    main()
