"""Runs over a small and a large input, in a process and Ray session of its own: FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import ray
from runs import numbered_input, python_pool, two_model_policy

import cauc_ray


def memory(folder: Path) -> None:
    """Print the most bytes that Arrow has had in this process after a small run and after one eight times as large."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    pool = python_pool(folder, [("by_x", {}), ("by_x", {"factor": 5.0})], batch_size=8192)
    for n in (50_000, 400_000):
        inputs = ray.get(
            ray.remote(numbered_input).remote(folder / str(n), n), timeout=120
        )  # its memory does not count
        cauc_ray.run(pool, two_model_policy(), inputs, folder / f"out-{n}")
        print(pa.default_memory_pool().max_memory())


if __name__ == "__main__":
    memory(Path(sys.argv[1]))
