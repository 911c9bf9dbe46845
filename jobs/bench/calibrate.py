"""Measure a calibration by shards, out of core, against the fit of the same table in one process."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.api.options import FitOptions
from cauc_ray.api.sharding import fit_shards
from cauc_ray.data.table_info import PoolModel, TableInfo, write_info
from cauc_ray.execution.session import ray_session
from cauc_ray.policies.policy import Policy
from jobs.bench.children import printed

MODELS = {"small": (4.0, 1.0), "large": (6.0, 4.0)}  # how much logits favour the label; the cost of a call
FILES = 12
GROUP_ROWS = 4096
BUDGET = 3.0

# The fit in one process, in a process of its own, whose memory is then its own too.
ALONE = """
import json, resource, sys, time
import cauc_ray
import cauc_ray.api.offline
started = time.perf_counter()
policy = cauc_ray.fit(sys.argv[1], models=json.loads(sys.argv[2]), method=sys.argv[3], budget=float(sys.argv[4]))
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "policy": policy.to_json()}))
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument(
        "--rows", type=int, default=200_000, help="rows of the calibration split; validation has a tenth"
    )
    parser.add_argument("--options", type=int, default=1_000, help="options of a row")
    parser.add_argument("--shards", type=int, default=os.cpu_count() or 1, help="how many hold the rows, a CPU each")
    parser.add_argument(
        "--sample",
        type=int,
        metavar="ROWS",
        help="compare with one process on a table of so many rows, where the whole is too large for one (default: all)",
    )
    parser.add_argument("--methods", nargs="+", choices=["base", "rf"], default=["base", "rf"], help="what is fitted")


def missing(options: argparse.Namespace) -> str | None:
    """Need nothing but the machine."""
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Write a table, fit it in one process and by shards, and compare time, memory and numbers."""
    with tempfile.TemporaryDirectory(prefix="cauc-bench-") as folder:
        whole = calibration_table(Path(folder, "whole"), options.rows, options.options)
        n_bytes = 4 * options.rows * options.options * len(MODELS)
        print(f"{options.rows:,} x {options.options:,} float32 of {len(MODELS)} models, {n_bytes / 1e9:.1f} GB")
        results: dict[str, Any] = {"rows": options.rows, "options": options.options, "shards": options.shards}
        if options.sample is None:
            return results | {method: compared(whole, method, options.shards) for method in options.methods}
        sample = calibration_table(Path(folder, "sample"), options.sample, options.options)
        for method in options.methods:
            _, results[method] = by_shards(whole, method, options.shards)
            print(f"of {options.sample:,} rows:")
            results[method]["sample"] = compared(sample, method, options.shards)
        return results | {"sample_rows": options.sample}


def calibration_table(table: Path, n: int, k: int) -> Path:
    """Write a table with n rows of calibration, and a tenth of validation."""
    return write_table(table, k, calibration=n, validation=max(2, n // 10))


def write_table(table: Path, k: int, **splits: int) -> Path:
    """Write a table.   splits: rows of each."""
    for split, n in splits.items():
        write_split(table, split, n, k)
    models = [PoolModel(name=name, cost=cost) for name, (_, cost) in MODELS.items()]
    write_info(table, TableInfo(cost_unit="GFLOPs", logit_kind="raw", models=models))
    return table


def write_split(table: Path, split: str, n: int, k: int) -> None:
    """Write both models' logits of a split as files of a dozen parts: noise that they share in part, and the label."""
    for part in range(FILES):
        start, stop = n * part // FILES, n * (part + 1) // FILES
        rng = np.random.default_rng([part, *split.encode()])
        labels = rng.integers(0, k, stop - start).astype(np.int32)
        shared = 0.7 * rng.standard_normal((len(labels), k), dtype=np.float32)
        for model, (strength, _) in MODELS.items():
            logits = rng.standard_normal(shared.shape, dtype=np.float32) + shared
            logits[np.arange(len(labels)), labels] += rng.normal(strength, 1.5, len(labels)).astype(np.float32)
            offsets = np.arange(len(labels) + 1, dtype=np.int32) * k
            columns = {
                "example_id": [f"{row:08d}" for row in range(start, stop)],
                "label": labels,
                "logits": pa.ListArray.from_arrays(pa.array(offsets), pa.array(logits.ravel())),
            }
            into = table / f"model={model}" / f"split={split}"
            into.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(columns), into / f"part-{part:02d}.parquet", row_group_size=GROUP_ROWS)


def by_shards(table: Path, method: str, n_shards: int) -> tuple[Policy, dict[str, Any]]:
    """Fit by shards; return the policy, and what that took."""
    started = time.perf_counter()
    with ray_session(None, n_shards):
        session_s = time.perf_counter() - started
        asked = {"models": list(MODELS), "method": method, "budget": BUDGET, "shards": n_shards}
        found = fit_shards(table, FitOptions.of(asked))
        start_s = session_s + found.shards.start_s
        took_s = time.perf_counter() - started - start_s
    peak = max(found.shards.peak_bytes)
    print(
        f"{method}: {n_shards} shards {took_s:.1f} s after {start_s:.1f} s of starting, of them "
        f"{found.shards.open_s:.1f} s of reading; {peak / 1e6:,.0f} MB each; {found.shards.n_passes} passes"
    )
    return found.policy, {"sharded_s": took_s, "start_s": start_s, "shard_peak_bytes": peak}


def compared(table: Path, method: str, n_shards: int) -> dict[str, Any]:
    """Fit once by shards and once in one process."""
    words = [sys.executable, "-c", ALONE, table, json.dumps(list(MODELS)), method, BUDGET]
    [alone] = printed(*words)
    print(f"{method}: one process {alone['seconds']:.1f} s, {alone['peak_bytes'] / 1e6:,.0f} MB")
    policy, took = by_shards(table, method, n_shards)
    ratio = took["sharded_s"] * n_shards / alone["seconds"]
    apart = furthest(policy, Policy.of(json.loads(alone["policy"])))
    print(f"  time x shards to one process: {ratio:.2f}; numbers apart by {apart:.1g} of themselves at most")
    return {
        "alone_s": alone["seconds"],
        "alone_peak_bytes": alone["peak_bytes"],
        **took,
        "time_x_shards_over_alone": ratio,
        "furthest": apart,
    }


def furthest(one: Policy, other: Policy) -> float:
    """Return by how much numbers of two policies differ at most, relative to themselves."""
    pairs = zip(_numbers(one.model_dump()), _numbers(other.model_dump()), strict=True)
    return max(abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in _numbers(inner)]
    if isinstance(value, list | tuple):
        return [number for inner in value for number in _numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []
