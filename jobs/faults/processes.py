"""The processes of runs on a Ray session that this process started."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

ACTORS = ("StageWorker", "BlockReader", "RunController")


def actors(*kinds: str) -> list[psutil.Process]:
    """Return the live actor processes of these kinds, all kinds of a run's if none is given."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            title = (process.cmdline() or [""])[0]
            of_run = any(title.startswith(f"ray::{kind}") for kind in kinds or ACTORS)
            if of_run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def replicas(notes: Path, place: int) -> list[psutil.Process]:
    """Return the live processes of a stage, whose models note themselves in a folder."""
    known = {path.name for path in notes.glob(f"process-{place}-*")}
    return [process for process in actors("StageWorker") if f"process-{place}-{process.pid}" in known]


def left_over(deadline_s: float = 15.0) -> int:
    """Return how many actors are still there, some time after a run."""
    ends = time.monotonic() + deadline_s
    while actors() and time.monotonic() < ends:
        time.sleep(0.1)
    return len(actors())


def wait_until(true: Callable[[], bool], deadline_s: float) -> bool:
    """Say whether something has become true in time."""
    ends = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True
