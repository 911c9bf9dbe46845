"""Measure the memory that a run's sink, manifest and summary take over a billion rows, without models and input.

Blocks of made answers go through a run's own committer, as the controller hands them over, with the calls that led
there. What the parts hold is emptied once it is committed, so that a small disk is enough; the manifest and the ledger
stay. Then the run is opened to be resumed, and summarised.
"""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from cauc_ray.api.summary import summarise
from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.rows import Call, Owner, Rows
from cauc_ray.execution.committing import Committer
from cauc_ray.execution.ledger import RunTables, new_record, parts_of
from cauc_ray.execution.reader import BlockHeader
from cauc_ray.execution.runner import BLOCK_ROWS
from cauc_ray.execution.session import ray_session
from jobs.bench.planted import write_table

STAGES = {"small": 1.0, "large": 8.0}
BATCH = 256
# Of the rows, answered by the second stage.
DEFERRED = 0.25


def measure(rows: int = 1_000_000_000) -> dict[str, Any]:
    """Commit all rows, then read the manifest and summarise the run.   rows: of the run."""
    n_blocks = -(-rows // BLOCK_ROWS)
    with tempfile.TemporaryDirectory() as folder, ray_session(None, 1):
        out, policy = Path(folder) / "out", write_table(Path(folder) / "LOGITS", STAGES, (DEFERRED,))
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
        n_parts = len(list(Path(folder).glob("out/manifest/*.json")))
        manifest_mb = sum(file.stat().st_size for file in Path(folder).glob("out/manifest/*.json")) / 1e6
    if not summary["n"] == sum(there.rows.values()) == rows:
        raise AssertionError(f"{summary['n']} rows were counted, {sum(there.rows.values())} are in the manifest")
    return {
        "rows": rows,
        "blocks": n_blocks,
        "parts": n_parts,
        "commit_s": commit_s,
        "rows_per_s": rows / commit_s,
        "commit_peak_mb": commit_mb,
        "held_mb": held,
        "manifest_mb": manifest_mb,
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
    block = Owner(number, n, BlockHeader(0, number, ids, labels, (), "", None, may_return=False))
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
    committer.add_block(block)


def _empty(folder: Path) -> None:
    """Empty the files in a folder."""
    for file in folder.glob("*.parquet"):
        if file.stat().st_size:
            file.write_bytes(b"")


def _peak_mb() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
