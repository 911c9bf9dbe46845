"""Blocks of rows in threads: numpy releases the interpreter's lock, and results do not depend on their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

# From so many pieces of work on, starting threads pays.
_FEWEST_PIECES = 4
_MOST_THREADS = 8


def in_threads(work: Callable[[S], T], pieces: Sequence[S]) -> Iterable[T]:
    """Return what the work makes of each piece, in their order."""
    if len(pieces) < _FEWEST_PIECES:
        return map(work, pieces)
    # Ray sets the variable to the CPUs of a task; OpenMP allows a list of numbers.
    n_cpus = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    n_threads = min(int(n_cpus) if n_cpus.isdecimal() else os.cpu_count() or 1, _MOST_THREADS)
    if n_threads < 2:
        return map(work, pieces)
    with ThreadPoolExecutor(n_threads) as pool:
        return list(pool.map(work, pieces))
