"""Runs over inputs that are large or slow, each part in a process and Ray session of its own: PART FOLDER."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import ray
from runs import numbered_input, python_pool, two_model_policy

import cauc_ray
from cauc_ray.errors import CaucError

# In the slow dataset: blocks, each of which takes so long, and the most that a reader may be silent.
BLOCKS, BLOCK_S, SILENCE_S = 10, 2.0, 10.0
ROWS = 64


def memory(folder: Path) -> None:
    """Print the most bytes that Arrow has had in this process after a small run and after one eight times as large."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    pool = python_pool(folder, [("by_x", {}), ("by_x", {"factor": 5.0})], batch_size=8192)
    for n in (50_000, 400_000):
        inputs = ray.get(
            ray.remote(numbered_input).remote(folder / str(n), n), timeout=120
        )  # what that takes is no run's
        cauc_ray.run(pool, two_model_policy(), inputs, folder / f"out-{n}")
        print(pa.default_memory_pool().max_memory())


def slow_dataset() -> ray.data.Dataset:
    """Return a Ray Dataset whose blocks come one after the other, each after a while."""
    import ray.data

    def rows(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(BLOCK_S)
        return {"example_id": np.array([f"row-{n}" for n in batch["id"]]), "x": batch["id"] % 7 - 3.0}

    each = ray.data.range(BLOCKS * ROWS, override_num_blocks=BLOCKS)
    return each.map_batches(rows, batch_size=ROWS, compute=ray.data.TaskPoolStrategy(size=1))


def first(folder: Path) -> None:
    """Run over the slow dataset until a model gives up on its last block."""
    small_blocks()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    ended = ("gives_up_on", {"example": f"row-{BLOCKS * ROWS - 1}"})
    try:
        cauc_ray.run(python_pool(folder, [ended, ("by_x", {})]), two_model_policy(), slow_dataset(), folder / "out")
    except CaucError as error:
        print(error)


def resumed(folder: Path) -> None:
    """Go on with it, where a reader that is silent for a few seconds, in place of ten minutes, is taken for hung."""
    small_blocks()
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        runtime_env={"worker_process_setup_hook": short_silence},
    )  # fmt: skip
    pool = python_pool(folder, [("by_x", {}), ("by_x", {})])
    try:
        print(cauc_ray.run(pool, two_model_policy(), slow_dataset(), folder / "out", resume=True)["n"])
    except CaucError as error:
        print(error)


def small_blocks() -> None:
    from cauc_ray.execution import runner

    runner.BLOCK_ROWS = ROWS


def short_silence() -> None:
    """Set the deadline in each worker process as it starts, where there is such a deadline."""
    from cauc_ray.execution import reading

    reading.READ_DEADLINE_S = SILENCE_S


if __name__ == "__main__":
    {"memory": memory, "first": first, "resumed": resumed}[sys.argv[1]](Path(sys.argv[2]))
