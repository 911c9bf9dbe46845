"""Submit a job to a cluster through Ray's Jobs API and follow its log: the Python side of `cauc submit`."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cauc_ray.errors import ConfigError, ExecutionError, printable, unknown_name

# What stays here of a working directory, beside what .gitignore and .rayignore name: environments, caches, outputs
# and data, which jobs read from storage that all nodes see.
EXCLUDES = (
    *(".git", ".venv", "venv", ".tox", "node_modules", "__pycache__", "*.py[cod]", "*.egg-info", ".*_cache"),
    *(".hypothesis", "/build/", "/dist/", "/out/", "/data/", "/cauc-demo/"),
    *("*.parquet", "*.arrow", "*.npy", "*.npz", "*.safetensors", "*.pt", "*.pth", "*.gguf", "*.onnx"),
)
REACH_DEADLINE_S = 10.0
ANSWER_DEADLINE_S = 30.0
UPLOAD_DEADLINE_S = 600.0
# The log is looked at so often for its end, where nothing comes.
LOOK_EVERY_S = 2.0

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended.

    exit_code: of its driver, None where it has none: it was stopped, or never began.   message: what Ray says.
    log: all of it.
    """

    exit_code: int | None
    message: str
    log: str

    @property
    def last_line(self) -> str:
        """Return the last line of the log."""
        return next((line for line in reversed(self.log.splitlines()) if line.strip()), "")


@dataclass(slots=True)
class Submitted:
    """A job that a cluster has.   id: by which Ray knows it.   address: of the head's dashboard."""

    id: str
    address: str
    _client: Any = field(repr=False)

    def follow(self, on_log: Callable[[str], None] = lambda text: None) -> Ended:
        """Wait for the job's end; on_log gets its log, piece by piece as it comes.

        Raises ExecutionError where the head no longer answers; the job may go on.
        """
        log: list[str] = []

        def add(text: str) -> None:
            if text:
                log.append(text)
                on_log(text)

        while not (details := self._details()).status.is_terminal():
            for text in _tail(self._client, self.id, skip=sum(map(len, log)), ended=self._has_ended):
                add(text)
            time.sleep(LOOK_EVERY_S / 4)  # the log's end comes before the job's
        # What came between the last look and the end.
        whole = _within(ANSWER_DEADLINE_S, lambda: self._client.get_job_logs(self.id), self.address)
        add(whole[sum(map(len, log)) :])
        return Ended(details.driver_exit_code, details.message or "", "".join(log))

    def stop(self) -> None:
        """Have Ray stop the job: SIGTERM, and SIGKILL after three seconds."""
        _within(ANSWER_DEADLINE_S, lambda: self._client.stop_job(self.id), self.address)

    def _details(self) -> Any:
        return _within(ANSWER_DEADLINE_S, lambda: self._client.get_job_info(self.id), self.address)

    def _has_ended(self) -> bool:
        ended: bool = self._details().status.is_terminal()
        return ended


def submit(job: str, config: str | Path, *, address: str | None = None, working_dir: str | Path = ".") -> Submitted:
    """Submit `python -m jobs.JOB --config CONFIG` to a cluster, with a working directory that is uploaded for it.

    config: a file of the working directory, or one elsewhere, whose path must then be that of the same file on the
    head.   address: http(s)://HOST:PORT of the head's dashboard, or as Ray's own command takes it (default:
    RAY_API_SERVER_ADDRESS, else RAY_ADDRESS, else a cluster of this machine).
    working_dir: with jobs/ and the packages that the job imports.
    Tokens are taken as Ray takes them. Raises ConfigError where there is no such job or config, ExecutionError where
    the cluster is not reached or refuses.
    """
    folder = Path(working_dir).resolve()
    entrypoint = f"python -m jobs.{_known(job, folder)} --config {shlex.quote(_path_there(Path(config), folder))}"
    client = _client(address)
    job_id = _within(
        UPLOAD_DEADLINE_S,
        lambda: client.submit_job(
            entrypoint=entrypoint, runtime_env={"working_dir": str(folder), "excludes": list(EXCLUDES)}
        ),
        client.get_address(),
    )
    return Submitted(job_id, client.get_address(), client)


def _known(job: str, folder: Path) -> str:
    """Return a job's name. Raises ConfigError where the working directory has no such."""
    jobs = folder / "jobs"
    if not jobs.is_dir():
        raise ConfigError(f"{folder} has no folder jobs; name the working directory that has it with --working-dir")
    modules = {path.stem for path in jobs.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    packages = {path.parent.name for path in jobs.glob("*/__main__.py")}
    known = {name for name in modules | packages if (jobs / f"{name}.yaml").is_file()}
    if re.fullmatch(r"\w+", job) is None or job not in modules | packages:
        raise ConfigError(f"{folder}: {unknown_name('job', job, known)}")
    return job


def _path_there(config: Path, folder: Path) -> str:
    """Return a config's path for the job: relative where it is uploaded, else absolute."""
    path = config.resolve()
    if not path.is_file():
        raise ConfigError(f"there is no config {config}")
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _client(address: str | None) -> Any:
    """Return a client of the Jobs API."""
    try:
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError("submitting jobs needs Ray's dashboard: pip install 'ray[default]'") from error
    for name in ("ray.dashboard.modules.job.sdk", "ray.dashboard.modules.dashboard_sdk", "ray._private"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it tells of every step
    address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or os.environ.get("RAY_ADDRESS")
    said = address or "this machine"
    if address is not None and address != "auto":
        _require_reachable(address)
    with _env("RAY_API_SERVER_ADDRESS", address):  # Ray takes it before what it is given
        return _within(ANSWER_DEADLINE_S, lambda: JobSubmissionClient(address), said)


def _require_reachable(address: str) -> None:
    """Raise ExecutionError where nothing listens: Ray would wait without end."""
    try:
        url = urlsplit(address if "://" in address else f"//{address}")
        host, port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((host or "", port), timeout=REACH_DEADLINE_S).close()
    except (OSError, UnicodeError, ValueError) as error:
        raise ExecutionError(f"no Ray cluster at {address!r}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _env(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        else:
            os.environ.pop(name, None)


def _within(deadline_s: float, call: Callable[[], Value], address: str) -> Value:
    """Return what a call of the client returns. Raises ExecutionError where that fails, or takes too long.

    The client itself has no deadlines.
    """
    answer: queue.Queue[tuple[Value | None, Exception | None]] = queue.Queue()

    def ask() -> None:
        try:
            answer.put((call(), None))
        except Exception as error:
            answer.put((None, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        value, error = answer.get(timeout=deadline_s)
    except queue.Empty:
        raise ExecutionError(f"the Ray cluster at {address} has not answered for {deadline_s:g} s") from None
    if error is not None:
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExecutionError(f"the Ray cluster at {address}: {printable(said)}") from error
    return value  # type: ignore[return-value]


def _tail(client: Any, job_id: str, *, skip: int, ended: Callable[[], bool]) -> Iterator[str]:
    """Yield a job's log as it comes, without its first letters, until it ends or the connection does.

    ended: asked where nothing comes for a while; raises where the head does not answer.
    """
    pieces: queue.Queue[str | None] = queue.Queue()

    async def read() -> None:
        async for text in client.tail_job_logs(job_id):
            pieces.put(text)

    def run() -> None:
        try:
            asyncio.run(read())
        except Exception:  # whatever it was, the caller asks how the job is
            logging.getLogger(__name__).debug("the log of %s broke off", job_id, exc_info=True)
        finally:
            pieces.put(None)

    threading.Thread(target=run, daemon=True).start()
    while True:
        try:
            text = pieces.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            if ended():
                return
            continue
        if text is None:
            return
        left = text[skip:]
        skip = max(0, skip - len(text))
        if left:
            yield left
