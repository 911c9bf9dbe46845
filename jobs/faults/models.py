"""The model of every stage: it answers from its input, and misbehaves as orders in a folder say."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Floats

N_OPTIONS = 4
# Where in a row's payload its number is, behind the logits of three stages.
NUMBER = 3 * N_OPTIONS
# A model that hangs does so for longer than any deadline of a trial.
HANGS_S = 600.0
# How likely each call is to be one of a few.
CHANCE = 0.25


def give_order(notes: Path, stage: int, **order: Any) -> bool:
    """Order what the models of a stage do from now on, in all of its processes.

    does: "nan", "shape", "length", "raises", "hangs" or "dies".   calls: in this many of the next ones, at random.
    replicas: in all calls of this many processes.   until: in all calls before this time.   rows: whenever a batch has
    one of these numbers.   loads: this many of the next processes die while they load. Returns True.
    """
    written = notes / f".order-{stage}"
    written.write_text(json.dumps(order))
    return written.rename(notes / f"order-{stage}").exists()


def planted(stage: int, seconds: float, notes: str) -> Callable[[Batch], object]:
    """Answer with a stage's logits, from the input's payload, after some seconds.

    notes: a folder with orders, where every process notes itself and each fault.
    """
    folder = Path(notes)
    order = _order(folder, stage)
    if _claim(folder / f"struck-{stage}-loading", order.get("loads", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"process-{stage}-{os.getpid()}").touch()
    is_bad = False

    def is_due(order: dict[str, Any], numbers: Floats) -> bool:
        nonlocal is_bad
        struck = folder / f"struck-{stage}"
        is_bad = is_bad or _claim(struck, order.get("replicas", 0))
        is_one = random.random() < CHANCE and _claim(struck, order.get("calls", 0))
        always = time.time() < order.get("until", 0.0) or not set(order.get("rows", ())).isdisjoint(numbers)
        if always:
            _claim(struck, 1)
        return is_bad or is_one or always

    def answer(batch: Batch) -> object:
        (folder / f"called-{stage}").touch()
        order = _order(folder, stage)
        due = is_due(order, batch["payload"][:, NUMBER])
        time.sleep(seconds)
        logits = np.array(batch["payload"][:, N_OPTIONS * stage : N_OPTIONS * (stage + 1)])
        return _misbehaved(order["does"], logits) if due else logits

    return answer


def _order(folder: Path, stage: int) -> dict[str, Any]:
    path = folder / f"order-{stage}"
    order: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return order


def _misbehaved(does: str, logits: Floats) -> object:
    """Return what a fault makes of an answer, or do not return."""
    if does == "raises":
        raise RuntimeError("the device has gone away")
    if does == "hangs":
        time.sleep(HANGS_S)
    if does == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "nan":
        logits[len(logits) // 2, 1] = np.nan
    return {"nan": logits, "shape": logits[:, :, None], "length": logits[:-1]}[does]


def _claim(path: Path, times: int) -> bool:
    """Say whether this is among the first to ask for a path, as many as times, of all processes."""
    for number in range(times):
        try:
            os.close(os.open(f"{path}-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False
