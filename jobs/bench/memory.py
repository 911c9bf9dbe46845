"""Measure the memory of a run over an input far larger than the object store.

A million rows of 12 KB are made on the fly by a ray.data.Dataset, through an object store of 500 MB. Two stages that
take no time read the payload's rows. The most that any process of the driver, the controller, the reading tasks and the
replicas holds is set against the input; what they share with the object store counts in each. What the controller
grows by is the most that it holds in the last third of the run over what it held after 5 % of the rows. With --parquet
the rows are written to files first, which reading tasks then read. The part starts a Ray session of its own, for the
size of its store.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.execution.progress import RunProgress
from jobs.bench.cascades import column_model, planted_rows, stage, write_pool, write_table
from jobs.bench.models import Columns
from jobs.bench.processes import DRIVER, ROLES, MemorySample, Sampler, own_session, session_is_up

STAGES = {"small": 1.0, "large": 4.0}
DEFERRAL = (0.3,)
ROWS_PER_MAKE = 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the input")
    parser.add_argument("--row-bytes", type=int, default=12_288, help="bytes of a row's payload")
    parser.add_argument("--store-mb", type=float, default=500.0, help="size of the object store")
    parser.add_argument("--batch", type=int, default=256, help="rows in a batch")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks at the memory")
    parser.add_argument("--parquet", action="store_true", help="write the rows to Parquet first and run over that")


def missing(options: argparse.Namespace) -> str | None:
    """Need a session of its own."""
    return session_is_up()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cascade once and watch the session's processes and its object store."""
    sampler = Sampler(every_s=options.every)

    def follow(progress: RunProgress) -> None:
        sampler.n_rows = progress.n_finished

    with tempfile.TemporaryDirectory() as folder, own_session(4, options.store_mb):
        path = Path(folder)
        policy = write_table(path / "LOGITS", STAGES, DEFERRAL)
        stages = [stage(name, column_model(place), options.batch) for place, name in enumerate(STAGES)]
        pool = write_pool(path / "pool.yaml", stages)
        inputs = dataset(options.rows, options.row_bytes)
        if options.parquet:
            inputs.write_parquet(str(path / "input"))
            inputs = path / "input"
        with sampler.sampling():
            summary = cauc_ray.run(pool, policy, inputs, path / "out", on_progress=follow)
    growth = controller_growth(sampler.samples, summary["n"])
    figures = {
        "rows": summary["n"],
        "input_mb": options.rows * options.row_bytes / 1e6,
        "store_mb": options.store_mb,
        "input_to_store": options.rows * options.row_bytes / 1e6 / options.store_mb,
        "rows_per_s": summary["n"] / summary["run_s"],
        "run_s": summary["run_s"],
        "controller_growth_mb": None if growth is None else growth / 1e6,
        "peak_rss_mb": {role: sampler.peak(role) / 1e6 for role in (DRIVER, *ROLES)},
        "peak_stored_mb": max((sample.stored for sample in sampler.samples), default=0) / 1e6,
        "spilled_mb": max((sample.spilled for sample in sampler.samples), default=0) / 1e6,
        "samples": len(sampler.samples),
    }
    figures["spilled_to_input"] = figures["spilled_mb"] / figures["input_mb"]
    figures["peak_to_input"] = {role: size / figures["input_mb"] for role, size in figures["peak_rss_mb"].items()}
    tell(figures)
    return figures


def tell(figures: dict[str, Any]) -> None:
    """Print what people read."""
    growth, peak = figures["controller_growth_mb"], figures["peak_rss_mb"]
    print(
        f"{figures['rows']:,} rows, {figures['input_mb']:,.0f} MB through a store of {figures['store_mb']:,.0f} MB: "
        f"{figures['rows_per_s']:,.0f} rows/s, {figures['run_s']:.1f} s"
    )
    print(
        "the controller was seen too seldom to tell its growth"
        if growth is None
        else f"the controller grew by {growth:.1f} MB after the first 5 % of the rows"
    )
    shares = figures["peak_to_input"]
    print("most memory of one process, and its share of the input: ", end="")
    print(", ".join(f"{role} {size:,.0f} MB ({shares[role]:.1%})" for role, size in peak.items()))
    print(f"object store: at most {figures['peak_stored_mb']:,.0f} MB in use, {figures['spilled_mb']:,.0f} MB spilled")


def controller_growth(samples: list[MemorySample], n_rows: int) -> int | None:
    """Return the most bytes of the last third of the samples over the first after 5 % of the rows."""
    seen = [s for s in samples if s.n_rows >= 0.05 * n_rows and s.rss["controller"]]
    if len(seen) < 3:
        return None
    held = [sum(sample.rss["controller"]) for sample in seen]
    return max(held[-(len(held) // 3) :]) - held[0]


def dataset(n: int, row_bytes: int) -> Any:
    """Return a ray.data.Dataset that makes n rows when they are read: example_id, payload and the stages' columns."""
    import ray

    def make(batch: Columns) -> Columns:
        numbers = batch["id"]
        rows = planted_rows(np.random.default_rng(int(numbers[0])), len(numbers), DEFERRAL)
        payload = np.empty((len(numbers), row_bytes // 4), dtype=np.float32)
        payload[:] = numbers[:, None]
        columns = rows.columns()
        return {**columns, "example_id": np.char.add("row-", numbers.astype(str)), "payload": payload}

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    return ray.data.range(n).map_batches(make, batch_size=ROWS_PER_MAKE, batch_format="numpy")
