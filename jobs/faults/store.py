"""An object store that somebody else fills for some seconds."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import ray
from ray.exceptions import RayError

from jobs.faults.trial import Outcome, Trial

STORE_BYTES = 100 * 2**20
# What is put into the store, in parts, and how long it stays there.
HOG_BYTES = 2 * STORE_BYTES
PART_BYTES = 8 * 2**20
HELD_S = 4.0


def store_full(trial: Trial) -> Outcome:
    """Put more into the object store than it holds, at a random moment, and leave it there for some seconds."""
    with trial.striking(hog):
        wall_s = trial.run(trial.pool())
    return trial.outcome(wall_s)


def hog() -> bool:
    """Fill the store as far as it lets itself be filled, for some seconds."""
    held = []
    ends = time.monotonic() + HELD_S
    with suppress(RayError):
        for _ in range(HOG_BYTES // PART_BYTES):
            held.append(ray.put(np.ones(PART_BYTES, np.uint8)))
    time.sleep(max(0.0, ends - time.monotonic()))
    return bool(held)
