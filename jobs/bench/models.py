"""Models that a benchmark's stages run: they take the time that they are given, and little else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Floats

# A batch as Ray Data gives it out and takes it back.
Columns: TypeAlias = dict[str, npt.NDArray[Any]]


def from_column(column: str, seconds_per_call: float = 0.0, seconds_per_row: float = 0.0) -> Callable[[Batch], Floats]:
    """Answer with two logits, a column of the input and 0, sleeping for what the call shall take."""

    def answer(batch: Batch) -> Floats:
        started = time.perf_counter()
        gaps = batch[column]
        logits = np.zeros((len(gaps), 2), dtype=np.float32)
        logits[:, 0] = gaps
        remaining = seconds_per_call + seconds_per_row * len(gaps) - (time.perf_counter() - started)
        if remaining > 0:
            time.sleep(remaining)
        return logits

    return answer
