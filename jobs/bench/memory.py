"""Measure the memory of a run over an input far larger than the object store.

A million rows of 12 KB are made on the fly by a ray.data.Dataset, through an object store of 500 MB. Two stages that
take no time read the payload's rows. The most that any process of the driver, the controller, the reading tasks and the
replicas holds is set against the input; what they share with the object store counts in each. What the controller
grows by is the most that it holds in the last third of the run over what it held after 5 % of the rows. With --parquet
the rows are written to files first, which reading tasks then read. The part starts a Ray session of its own, for the
size of its store.
"""

from __future__ import annotations

import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

import cauc_ray
from cauc_ray.execution.progress import RunProgress
from jobs.bench.models import Columns
from jobs.bench.planted import SleepingStage, planted_rows, write_cascade
from jobs.bench.processes import own_session, processes

DEFERRAL = 0.3
ROWS_PER_MAKE = 1024
# How the titles of Ray's actors and tasks begin, by what they do in a run; the driver is this process.
ROLES = {"controller": "RunController", "reader": "read_blocks", "worker": "StageWorker"}


def measure(
    rows: int = 1_000_000,
    row_bytes: int = 12_288,
    store_mb: float = 500.0,
    batch: int = 256,
    every: float = 1.0,
    parquet: bool = False,
) -> dict[str, Any]:
    """Run the cascade once and watch the session's processes and its object store.

    rows, row_bytes: of the input.   store_mb: size of the object store.   batch: rows of one.   every: seconds between
    two looks at the memory.   parquet: write the rows to Parquet first and run over that.
    """
    stages = [SleepingStage("small", batch, deferral=DEFERRAL), SleepingStage("large", batch, cost=4.0)]
    looks: list[dict[str, int]] = []
    n_finished, is_over = [0], threading.Event()

    def follow(progress: RunProgress) -> None:
        n_finished[0] = progress.n_finished

    def watch() -> None:
        while not is_over.wait(every):
            looks.append({"n_finished": n_finished[0], **rss_by_role(), **object_store()})

    with tempfile.TemporaryDirectory() as scratch, own_session(4, store_mb):
        folder = Path(scratch)
        pool, policy = write_cascade(folder, stages)
        inputs = dataset(rows, row_bytes)
        if parquet:
            inputs.write_parquet(str(folder / "input"))
            inputs = folder / "input"
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        summary = cauc_ray.run(pool, policy, inputs, folder / "out", on_progress=follow)
        is_over.set()
        watcher.join(60)
    input_mb = rows * row_bytes / 1e6
    peak_mb = {
        name: max((look[name] for look in looks), default=0) / 1e6 for name in ("driver", *ROLES, "stored", "spilled")
    }
    held = [look["controller"] for look in looks if look["controller"] and look["n_finished"] >= 0.05 * rows]
    growth = max(held[-(len(held) // 3) :]) - held[0] if len(held) > 2 else None
    return {
        "rows": summary["n"],
        "input_mb": input_mb,
        "store_mb": store_mb,
        "rows_per_s": summary["n"] / summary["run_s"],
        "run_s": summary["run_s"],
        "controller_growth_mb": None if growth is None else growth / 1e6,
        "peak_mb": peak_mb,
        "peak_to_input": {name: size / input_mb for name, size in peak_mb.items()},
        "looks": len(looks),
    }


def rss_by_role() -> dict[str, int]:
    """Return the most bytes in memory of any process of each role in a run."""
    found = {"driver": psutil.Process().memory_info().rss}
    for role, title in ROLES.items():
        found[role] = 0
        for process in processes(title):
            with suppress(psutil.Error):  # it has ended since it was listed
                found[role] = max(found[role], process.memory_info().rss)
    return found


def object_store() -> dict[str, int]:
    """Return the bytes that objects take in the store now, and those that were ever spilled from it."""
    # What `ray memory --stats-only` prints: Ray has no public call for it, and its metrics are ten seconds old.
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    store = get_memory_info_reply(state).store_stats
    return {"stored": int(store.object_store_bytes_used), "spilled": int(store.spilled_bytes_total)}


def dataset(n: int, row_bytes: int) -> Any:
    """Return a ray.data.Dataset that makes n rows when they are read: example_id, payload and the stages' columns."""

    def make(batch: Columns) -> Columns:
        numbers = batch["id"]
        rows = planted_rows(np.random.default_rng(int(numbers[0])), len(numbers), [DEFERRAL])
        payload = np.empty((len(numbers), row_bytes // 4), dtype=np.float32)
        payload[:] = numbers[:, None]
        return {**rows.columns(), "example_id": np.char.add("row-", numbers.astype(str)), "payload": payload}

    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.range(n).map_batches(make, batch_size=ROWS_PER_MAKE, batch_format="numpy")
