"""Ray sessions and their processes, commands that print JSON, and services, for the length of a part."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from cauc_ray.errors import ExecutionError

ROOT = Path(__file__).parents[2]
# A service has ended this many seconds after it was asked to.
END_S = 60.0
# For programs of a new process: the most memory that it has had, in bytes. What getrusage says is at least that of the
# process that started it.
PEAK = """
def peak():
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
"""


@contextmanager
def scratch(n_cpus: float | None = None) -> Iterator[Path]:
    """Yield an empty folder for the length of the block, with a Ray session if its CPUs are given."""
    with tempfile.TemporaryDirectory(prefix="bench") as folder, ExitStack() as resources:
        if n_cpus is not None:
            from cauc_ray.execution.session import ray_session

            resources.enter_context(ray_session(None, n_cpus))
        yield Path(folder)


def processes(*titles: str) -> list[psutil.Process]:
    """Return the live processes of Ray, started by this one, whose titles begin with one of these."""
    pattern = re.compile(f"ray::({'|'.join(titles)})")
    live = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if pattern.match((process.cmdline() or [""])[0]) and process.status() != psutil.STATUS_ZOMBIE:
                live.append(process)
    return live


def printed(*words: object, env: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Run a command in the repository and yield the JSON objects that it prints, a line each; Ray may print others.

    Raises ExecutionError with the last line of its standard error where it fails.
    """
    with tempfile.TemporaryFile("w+") as log:
        command = [str(word) for word in words]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(env or {})}, **streams) as process:
            assert process.stdout is not None
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
        if process.returncode:
            raise ExecutionError(f"{' '.join(command)[:200]} ended with {process.returncode}: {_last_line(log)}")


@contextmanager
def listening(command: Sequence[str]) -> Iterator[str]:
    """Run a service for the length of the block; yield the URL that it prints, in JSON, once it listens.

    Raises ExecutionError where it does not start.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with ExitStack() as resources:
        log = resources.enter_context(tempfile.TemporaryFile("w+"))
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": log, "text": True}
        service = resources.enter_context(subprocess.Popen(command, cwd=ROOT, env=environment, **streams))
        resources.callback(_end, service)
        assert service.stdout is not None
        started = next((line for line in service.stdout if line.startswith("{")), None)
        if started is None:
            raise ExecutionError(f"the service does not start: {_last_line(log)}")
        url: str = json.loads(started)["url"]
        yield url


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    return (log.read().strip().splitlines() or ["it printed nothing"])[-1]
