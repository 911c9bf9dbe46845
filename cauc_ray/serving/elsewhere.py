"""A process that does for a service what would keep its event loop, or Python's lock, for long: JSON of megabytes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO, TypeVar

from cauc_ray.protocol.tensors import INTERNAL_ERROR, RequestError

# What takes longer than this to be done is given up, with the process.
DEADLINE_S = 60.0

# Longer JSON, and more output values in JSON, are read and written elsewhere; here that would take some 5 ms, for which
# all other requests would wait.
LONG_JSON, LONG_OUTPUT = 250_000, 50_000

T = TypeVar("T")


class Elsewhere:
    """Calls functions in another Python process, one after another; it starts with the first call.

    Not a ProcessPoolExecutor: that would import the program's main module again, whatever it does.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elsewhere")
        self._process: subprocess.Popen[bytes] | None = None

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns of arguments; all of them can be pickled.

        Raises RequestError as the function does, and one of 503 where the process ends or takes too long.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._called, function, args)

    async def call_if(self, is_long: bool, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns, called there where that takes long, else here."""
        return await self.call(function, *args) if is_long else function(*args)

    def wait(self, function: Callable[..., T], *args: Any) -> T:
        """Return what a function returns, as call does, in a thread that waits for it."""
        return self._thread.submit(self._called, function, args).result()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()  # a call under way ends, too
        self._thread.shutdown()
        self._end()

    def _called(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        process = self._process = self._process or python_process(__name__)
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(DEADLINE_S, process.kill)
        timer.start()
        try:
            pickle.dump((function, args), process.stdin, protocol=5)
            process.stdin.flush()
            result: T | RequestError = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            self._end()
            raise RequestError("the process that does this has ended; try again", 503, 1.0) from error
        finally:
            timer.cancel()
        if isinstance(result, RequestError):
            raise result
        return result

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with suppress(OSError), self._process:  # what is left in its pipes goes nowhere
                self._process = None


def python_process(module: str) -> subprocess.Popen[bytes]:
    """Start a process that runs a module of this package, with pipes to it and from it."""
    # It finds what this process finds, whatever has put it on the path.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-m", module], env=environment, stdin=pipe, stdout=pipe, bufsize=-1)


def pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return what python_process reads and writes in its process; signals for all processes are left to the other."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    calls, results = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints goes elsewhere
    return calls, results


def main() -> None:
    """Do what comes, until the other process is gone. Whoever stops both lets it finish first."""
    calls, results = pipes()
    with suppress(EOFError, BrokenPipeError):
        while True:
            function, args = pickle.load(calls)
            try:
                result = function(*args)
            except RequestError as error:
                result = error
            except Exception as error:
                print(f"{function!r} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                result = RequestError(INTERNAL_ERROR, 500)
            pickle.dump(result, results, protocol=5)
            results.flush()


if __name__ == "__main__":
    main()
