"""Measure how near an offline run comes to its bound, the busy time of its bottleneck stage.

Three saved stages of cost 1 : 4 : 20 have 1 : 2 : 4 replicas, and the first two defer 0.5 and 0.4 of their rows: all
three then have the same work per replica, so that any of them may turn out to be the bottleneck, by a hair: look at
the least busy one too. Batches are the
smaller the dearer the stage. What a stage loses at both ends is about one call (its replicas start one after another,
as batches reach them, and do not end together), so a call should be short against the run; yet every call costs the
controller a few milliseconds. With 64, 32 and 8 rows a call takes 0.3, 0.5 and 0.6 s of 80.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.execution.session import ray_session
from jobs.bench.cascades import planted_rows, write_input, write_pool, write_table
from jobs.bench.ledgers import read_calls

COSTS = {"small": 1.0, "middle": 4.0, "large": 20.0}
REPLICAS = (1, 2, 4)
DEFERRAL = (0.5, 0.4)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--rows", type=int, default=20_000, help="rows of the input")
    parser.add_argument("--seconds", type=float, default=80.0, help="what each stage has to compute per replica")
    parser.add_argument("--batch", type=int, nargs=3, default=(64, 32, 8), help="batch size of each stage")


def missing(options: argparse.Namespace) -> str | None:
    """Need nothing."""
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cascade once; busy shares and batch fill are from its ledger."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        rows = planted_rows(np.random.default_rng(0), options.rows, DEFERRAL)
        policy = write_table(path / "LOGITS", COSTS, DEFERRAL, test=rows)
        seconds_per_row = {name: cost * options.seconds / options.rows for name, cost in COSTS.items()}
        stages = [
            {
                "name": name,
                "model": {
                    "kind": "saved", "logits": "LOGITS", "model": name, "split": "test",
                    "seconds_per_row": seconds_per_row[name],
                },
                "batch_size": batch,
                "replicas": {"min": n_replicas, "max": n_replicas},
                "resources": {"num_cpus": 0.1},
            }
            for name, n_replicas, batch in zip(COSTS, REPLICAS, options.batch, strict=True)
        ]  # fmt: skip
        pool = write_pool(path / "pool.yaml", stages)
        inputs = write_input(path / "input", {"example_id": rows.columns()["example_id"], "label": rows.labels})
        with ray_session(None, 2):
            summary = cauc_ray.run(pool, policy, inputs, path / "out")
        figures = [
            {
                "name": calls.name,
                "replicas": n_replicas,
                "batch_size": batch,
                "reached": stage["reached"],
                "deferral": 1 - stage["answered"] / stage["reached"],
                "calls": len(calls),
                "compute_s_per_replica": float(calls.compute_s.sum()) / n_replicas,
                "span_s": calls.span_s,
                "busy_share": calls.busy_share(n_replicas),
                "full_share": calls.full_share(batch),
                "fill": calls.fill(batch),
            }
            for calls, stage, n_replicas, batch in zip(
                read_calls(path / "out", list(COSTS)), summary["stages"], REPLICAS, options.batch, strict=True
            )
        ]
    bottleneck = max(figures, key=lambda stage: stage["compute_s_per_replica"])
    for stage in figures:
        fill = "–" if stage["fill"] is None else f"{stage['full_share']:.1%} full, {stage['fill']:.1%} filled"
        print(
            f"{stage['name']:>7}: {stage['replicas']} replicas computed {stage['compute_s_per_replica']:.2f} s each, "
            f"busy {stage['busy_share']:.1%} of {stage['span_s']:.2f} s; deferred {stage['deferral']:.2f}; "
            f"{stage['calls']} batches of {stage['batch_size']}, all but the last: {fill}"
        )
    print(f"bottleneck {bottleneck['name']}: busy {bottleneck['busy_share']:.2%} of its first to last call")
    return {
        "rows": options.rows,
        "run_s": summary["run_s"],
        "elapsed_s": summary["elapsed_s"],
        "bottleneck": bottleneck["name"],
        "bottleneck_busy_share": bottleneck["busy_share"],
        "least_busy_share": min(stage["busy_share"] for stage in figures),
        "bottleneck_to_run": bottleneck["compute_s_per_replica"] / summary["run_s"],
        "deeper_full_share": min((s["full_share"] for s in figures[1:] if s["full_share"] is not None), default=None),
        "deeper_fill": min((s["fill"] for s in figures[1:] if s["fill"] is not None), default=None),
        "stages": figures,
    }
