"""What a run carries and what memory it takes: its controller, its processes, its sink."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import ray

import cauc_ray
from cauc_ray.api.online import summarise
from cauc_ray.cascade.rows import Call, CallResult, Owner, Rows
from cauc_ray.execution.commits import Committer
from cauc_ray.execution.ledger import RunTables, new_record, parts_of
from cauc_ray.execution.progress import RunProgress
from cauc_ray.execution.runner import BLOCK_ROWS
from jobs.bench.planted import Columns, SleepingStage, planted_rows, write_cascade, write_input, write_table
from jobs.bench.processes import own_session, processes, scratch

DEFERRAL = 0.3
ROWS_PER_MAKE = 1024
# How the titles of Ray's actors and tasks begin, by what they do in a run; the driver is this process.
ROLES = {"controller": "RunController", "reader": "read_blocks", "worker": "StageWorker"}
STAGES = {"small": 1.0, "large": 8.0}
BATCH = 256
# Of the rows, answered by the second stage.
DEFERRED = 0.25


def controller(
    rows: int = 1_000_000,
    batch: int = 256,
    stage_replicas: int = 1,
    sleepers: tuple[int, ...] = (16, 48),
    call_seconds: float = 0.25,
    calls: int = 40,
) -> dict[str, Any]:
    """Measure what a run's controller can carry: rows a second of stages that take no time, and replicas kept busy.

    The rate is of three stages that do next to nothing, in batches of 256. The replicas are 64 of sleeping stages, 16
    and 48, with batches such that both stages have the same work when half of the rows are deferred. A rate is rows
    over the run's time without starting the stages.

    rows, batch, stage_replicas: of the stages that take no time.   sleepers: replicas of each sleeping stage.
    call_seconds: of a sleeping call.   calls: of each sleeping replica.
    """
    instant = [
        SleepingStage("first", batch, replicas=stage_replicas, cost=1.0, deferral=0.5),
        SleepingStage("second", batch, replicas=stage_replicas, cost=4.0, deferral=0.4),
        SleepingStage("third", batch, replicas=stage_replicas, cost=20.0),
    ]
    few, many = sleepers
    # Both stages answer the same share of the rows in a second: the second sees half of them.
    sleeping = [
        SleepingStage("first", 4 * many, call_seconds, replicas=few, deferral=0.5),
        SleepingStage("second", 2 * few, call_seconds, replicas=many, cost=4.0),
    ]
    carried = run(instant, rows)
    slept = run(sleeping, few * sleeping[0].batch * calls)
    n_calls = sum(stage["calls"] for stage in carried["stages"])
    return {
        "rows": rows,
        "rows_per_s": rows / carried["run_s"],
        "calls_per_s": n_calls / carried["run_s"],
        "sleepers": {
            "replicas": few + many,
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

    A million rows of 12 KB are made on the fly by a ray.data.Dataset, through an object store of 500 MB. Two stages
    that take no time read the payload's rows. The most that any process of the driver, the controller, the reading
    tasks and the replicas holds is set against the input; what they share with the object store counts in each. What
    the controller grows by is the most that it holds in the last third of the run over what it held after 5 % of the
    rows. With --parquet the rows are written to files first, which reading tasks then read. The part starts a Ray
    session of its own, for the size of its store.

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


def sink(rows: int = 1_000_000_000) -> dict[str, Any]:
    """Measure the memory that a run's sink, manifest and summary take over a billion rows, without models and input.

    Blocks of made answers go through a run's own committer, as the controller hands them over, with the calls that led
    there. What the parts hold is emptied once it is committed, so that a small disk is enough; the manifest and the
    ledger stay. Then the run is opened to be resumed, and summarised.

    rows: of the run.
    """
    n_blocks = -(-rows // BLOCK_ROWS)
    with scratch(1) as folder:
        out, policy = folder / "out", write_table(folder / "LOGITS", STAGES, (DEFERRED,))
        parts, record = parts_of(out), new_record(policy.id, BLOCK_ROWS, {"made": rows})
        committer = Committer(RunTables(out, record, tuple(STAGES), degrade=False))
        held, started = [], time.perf_counter()
        for number in range(n_blocks):
            _hand_over(committer, number, min(BLOCK_ROWS, rows - number * BLOCK_ROWS))
            if number % max(1, n_blocks // 20) == 0:
                held.append(psutil.Process().memory_info().rss / 1e6)
                _empty(out / "predictions")
        committer.close()
        commit_s, commit_mb = time.perf_counter() - started, _peak_mb()
        started = time.perf_counter()
        there = parts.committed()
        parts.clean()
        resume_s, resume_mb = time.perf_counter() - started, _peak_mb()
        started = time.perf_counter()
        summary = summarise(out, policy, dict.fromkeys(STAGES, BATCH))
        summary_s, summary_mb = time.perf_counter() - started, _peak_mb()
        entries = [file.stat().st_size for file in out.glob("manifest/*.json")]
    if not summary["n"] == sum(there.rows.values()) == rows:
        raise AssertionError(f"{summary['n']} rows were counted, {sum(there.rows.values())} are in the manifest")
    return {
        "rows": rows,
        "blocks": n_blocks,
        "parts": len(entries),
        "commit_s": commit_s,
        "rows_per_s": rows / commit_s,
        "commit_peak_mb": commit_mb,
        "held_mb": held,
        "manifest_mb": sum(entries) / 1e6,
        "resume_s": resume_s,
        "resume_peak_mb": resume_mb,
        "summary_s": summary_s,
        "summary_peak_mb": summary_mb,
        "answered": {stage["name"]: stage["answered"] for stage in summary["stages"]},
    }


def _hand_over(committer: Committer, number: int, n: int) -> None:
    """Give the committer a block of n answers, and the calls that they came of."""
    rng = np.random.default_rng(number)
    labels = rng.integers(0, 10, n).astype(np.int32)
    ids = pa.array([f"{number:08d}-{row:04d}" for row in range(n)])
    block = Owner(number, n)
    block.stages[:] = rng.random(n) < DEFERRED
    block.predictions[:], block.confidences[:] = rng.integers(0, 10, n), rng.random(n)
    block.costs[:] = np.cumsum(list(STAGES.values()))[block.stages]
    n_deferred = int(block.stages.sum())
    for stage, rows in enumerate((n, n_deferred)):
        for start in range(0, rows, BATCH):
            size = min(BATCH, rows - start)
            accepted = np.arange(size) >= (n_deferred * size // n if stage == 0 else 0)
            at = Rows(block, np.arange(size), None, np.arange(size), time.time(), 0.0)
            cost = np.full(size, list(STAGES.values())[stage])
            result = CallResult(block.predictions[:size], cost, accepted, cost, time.time(), 0.01, 0.0, None, "node")
            committer.add_call(Call(stage, [at], 0.0, replica=stage), result, None)
    committer.add_block(block, ids, labels)


def _empty(folder: Path) -> None:
    """Empty the files in a folder."""
    for file in folder.glob("*.parquet"):
        if file.stat().st_size:
            file.write_bytes(b"")


def _peak_mb() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
