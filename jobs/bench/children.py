"""Processes that a part starts and ends: one that prints JSON, and a service."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from cauc_ray.errors import ExecutionError

ROOT = Path(__file__).parents[2]
# A service that is told to end has ended within this.
END_S = 60.0


def printed(*words: object, env: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Run a command in the repository and yield the JSON objects that it prints, a line each; Ray may print others.

    Raises ExecutionError with the last line of its standard error where it fails.
    """
    with TemporaryFile("w+") as log:
        command = [str(word) for word in words]
        environment = {**os.environ, **(env or {})}
        with subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
        if process.returncode:
            raise ExecutionError(f"{' '.join(command)[:200]} ended with {process.returncode}: {_last_line(log)}")


@contextmanager
def served(folder: Path, *, local: bool) -> Iterator[str]:
    """Serve the pool.yaml of a folder with its policy.json for the length of the block; yield the service's URL.

    local: without Ray. Raises ExecutionError where it does not start.
    """
    command = [str(Path(sys.executable).with_name("cauc")), "serve", "pool.yaml", "--policy", "policy.json"]
    options = ["--port", "0", "--json", *(["--local"] if local else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    with ExitStack() as resources:
        log = resources.enter_context(TemporaryFile("w+"))
        service = resources.enter_context(
            subprocess.Popen(
                [*command, *options], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        )
        resources.callback(_end, service)
        assert service.stdout is not None
        started = next((line for line in service.stdout if line.startswith("{")), None)
        if started is None:
            raise ExecutionError(f"the service does not start: {_last_line(log)}")
        url: str = json.loads(started)["url"]
        yield url


def free_ports(n: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(n)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    return (log.read().strip().splitlines() or ["it printed nothing"])[-1]
