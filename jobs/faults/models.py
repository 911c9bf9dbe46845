"""Models that answer from their input, and misbehave where a fault is ordered."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Floats

N_OPTIONS = 4
# A model that hangs does so for longer than any deadline of a trial, one that is slow to load for so long.
HANGS_S = 600.0
SLOW_S = 3.0


def planted(
    place: int,
    seconds: float,
    notes: str,
    fault: str = "",
    at_calls: Sequence[int] = (),
    on_rows: Sequence[str] = (),
    loading: str = "",
    times: int = 0,
    bad: int = 0,
    bad_from: int = 0,
    sick_s: float = 0.0,
) -> Callable[[Batch], object]:
    """Answer with a stage's logits, which stand in the input's payload, after so many seconds.

    place: of the stage.   notes: a folder where every process notes itself and its calls.   fault: what happens
    at_calls, each time once: the n-th calls of the stage in all its processes; or whenever a batch holds one of
    on_rows.   loading: what happens while loading, so many times: "dies" or "slow"; "down" dies whenever the folder
    has a file of that name.   bad: so many of the stage's processes have the fault in every call from their
    bad_from-th on; with sick_s, all processes have it for so long, from the stage's bad_from-th call on.
    """
    folder = Path(notes)
    folder.mkdir(parents=True, exist_ok=True)
    if loading == "down" and (folder / "down").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if loading in ("dies", "slow") and any(_claim(folder / f"loading-{place}-{n}") for n in range(times)):
        if loading == "dies":
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SLOW_S)
    (folder / f"process-{place}-{os.getpid()}").touch()

    n_own = 0

    def turned_bad(n_calls: int) -> bool:
        nonlocal n_own
        n_own += 1
        if sick_s and n_calls >= bad_from:
            since = folder / f"struck-{place}-sick"
            _claim(since)
            return time.time() - since.stat().st_mtime < sick_s
        own = folder / f"struck-{place}-bad-{os.getpid()}"
        if n_own == bad_from and any(_claim(folder / f"turned-{place}-{n}") for n in range(bad)):
            own.touch()
        return own.exists()

    def answer(batch: Batch) -> object:
        n_calls = _count(folder / f"calls-{place}")
        due = turned_bad(n_calls) or any(n_calls >= n and _claim(folder / f"struck-{place}-{n}") for n in at_calls)
        guilty = bool(set(on_rows) & set(batch["example_id"]))
        if guilty:
            (folder / f"struck-{place}-rows").touch()
        time.sleep(seconds)
        logits = np.array(batch["payload"][:, N_OPTIONS * place : N_OPTIONS * (place + 1)])
        return _misbehaved(fault, logits) if due or guilty else logits

    return answer


def _misbehaved(fault: str, logits: Floats) -> object:
    """Return what a fault makes of an answer, or do not return."""
    if fault == "nan":
        logits[len(logits) // 2, 1] = np.nan
        return logits
    if fault == "shape":
        return logits[:, :, None]
    if fault == "length":
        return logits[:-1]
    if fault == "raises":
        raise RuntimeError("the device has gone away")
    if fault == "hangs":
        time.sleep(HANGS_S)
    if fault == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"there is no fault {fault!r}")


def _claim(path: Path) -> bool:
    """Say whether this is the first to ask for a path, of all processes."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _count(path: Path) -> int:
    """Count one more, over all processes, and return how many there have been, this one among them."""
    file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(file, b".")
        return os.fstat(file).st_size
    finally:
        os.close(file)
