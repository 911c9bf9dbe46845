"""The throughput of a run's controller, and the memory of its processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import psutil
import ray

import cauc_ray
from cauc_ray.execution.progress import RunProgress
from jobs.bench.planted import Columns, SleepingStage, planted_rows, write_cascade, write_input
from jobs.bench.processes import own_session, processes, scratch

DEFERRAL = 0.3
ROWS_PER_MAKE = 1024
# How the titles of Ray's actors and tasks begin, by what they do in a run; the driver is this process.
ROLES = {"controller": "RunController", "reader": "read_blocks", "worker": "StageWorker"}


def controller(
    rows: int = 1_000_000,
    batch: int = 256,
    stage_replicas: int = 1,
    sleepers: tuple[int, ...] = (16, 48),
    call_seconds: float = 0.25,
    calls: int = 40,
) -> dict[str, Any]:
    """Measure a run's controller: its rows a second with stages that take no time, and how busy it keeps replicas.

    The rate is of three stages that do next to nothing. The busy share is of two sleeping stages, with batches such
    that both have the same work when half of the rows are deferred. A rate is rows over the run's time without
    starting the stages.

    Args:
        rows: Rows of the stages that take no time.
        batch: Rows of their batches.
        stage_replicas: Replicas of each of them.
        sleepers: Replicas of the first and of the second sleeping stage.
        call_seconds: Seconds of a sleeping call.
        calls: Calls of each sleeping replica.
    """
    instant = [
        SleepingStage("first", batch, replicas=stage_replicas, cost=1.0, deferral=0.5),
        SleepingStage("second", batch, replicas=stage_replicas, cost=4.0, deferral=0.4),
        SleepingStage("third", batch, replicas=stage_replicas, cost=20.0),
    ]
    n_first, n_second = sleepers
    # Both stages answer the same share of the rows in a second: the second sees half of them.
    sleeping = [
        SleepingStage("first", 4 * n_second, call_seconds, replicas=n_first, deferral=0.5),
        SleepingStage("second", 2 * n_first, call_seconds, replicas=n_second, cost=4.0),
    ]
    carried = run(instant, rows)
    slept = run(sleeping, n_first * sleeping[0].batch * calls)
    n_calls = sum(stage["calls"] for stage in carried["stages"])
    return {
        "rows": rows,
        "rows_per_s": rows / carried["run_s"],
        "calls_per_s": n_calls / carried["run_s"],
        "sleepers": {
            "replicas": n_first + n_second,
            "rows": slept["n"],
            "busy_share": {stage["name"]: stage["busy_share"] for stage in slept["stages"]},
            "batch_fill": {stage["name"]: stage["batch_fill"] for stage in slept["stages"]},
            "run_s": slept["run_s"],
            "elapsed_s": slept["elapsed_s"],
        },
    }


def run(stages: Sequence[SleepingStage], n: int) -> dict[str, Any]:
    """Run a cascade over n rows and return its summary."""
    with scratch(4) as folder:
        pool, policy = write_cascade(folder, stages, num_cpus=0.01)
        planted = planted_rows(np.random.default_rng(0), n, [stage.deferral for stage in stages[:-1]])
        inputs = write_input(folder / "input", planted.columns(), files=4)
        return cauc_ray.run(pool, policy, inputs, folder / "out")


def memory(
    rows: int = 1_000_000,
    row_bytes: int = 12_288,
    store_mb: float = 500.0,
    batch: int = 256,
    every: float = 1.0,
    parquet: bool = False,
) -> dict[str, Any]:
    """Measure the memory of a run over an input far larger than the object store.

    The rows are made on the fly by a ray.data.Dataset. Two stages that take no time read the payload. The most that any
    process of the driver, the controller, the reading tasks and the replicas holds is set against the input; memory
    shared with the object store counts in each. The controller's growth is the most that it holds in the last third of
    the run less what it held after 5 % of the rows.

    Args:
        rows: Rows of the input.
        row_bytes: Bytes of a row.
        store_mb: Size of the object store, which takes a Ray session of its own.
        batch: Rows of a batch.
        every: Seconds between two looks at the memory.
        parquet: Write the rows to Parquet files first, and run over these.
    """
    stages = [SleepingStage("small", batch, deferral=DEFERRAL), SleepingStage("large", batch, cost=4.0)]
    looks: list[dict[str, int]] = []
    n_finished, is_over = [0], threading.Event()

    def follow(progress: RunProgress) -> None:
        n_finished[0] = progress.n_finished

    def watch() -> None:
        while not is_over.wait(every):
            looks.append({"n_finished": n_finished[0], **rss_by_role(), **object_store()})

    with own_session(4, store_mb), scratch() as folder:
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
    rss = {"driver": psutil.Process().memory_info().rss}
    for role, title in ROLES.items():
        rss[role] = 0
        for process in processes(title):
            with suppress(psutil.Error):  # it has ended since it was listed
                rss[role] = max(rss[role], process.memory_info().rss)
    return rss


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
