"""Measure a two-stage cascade through cauc-ray against the same cascade in Ray Data alone, cold start on both sides.

Both read the same Parquet rows (512 float32 each beside what the models read), use the same sleeping models and the
same policy step, and write the same predictions. One Ray session is up before either starts; each turn starts its own
actors. cauc-ray and the plans of data_plans.py take turns, and the best turn of each counts. Three cases: a fixed cost
per call and one per row, the same totals at a full batch as a cost per row only, and the first with nothing deferred.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import cauc_ray
from cauc_ray.errors import ExecutionError
from cauc_ray.execution.session import ray_session
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.policies.policy import Policy
from jobs.bench.cascades import planted_rows, write_input, write_pool, write_table

MODELS = ("small", "large")
PAYLOAD = 512
# Seconds of a call and of a row, for the small and for the large model.
FIXED = ((0.005, 0.0), (0.020, 0.0001))
CASES = ("fixed", "per_row", "nothing_deferred")
INPUT_FILES = 8
# The plans of filter, map_batches and union; the others gather or skip the deferred rows within a model's own code.
UNION_PLANS = ("lazy", "materialized", "repartitioned")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--rows", type=int, default=80_000, help="rows of the input")
    parser.add_argument("--batch", type=int, default=256, help="rows in a full batch of either model")
    parser.add_argument("--deferral", type=float, default=0.3, help="share of the rows that the large model answers")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which costs to measure")
    parser.add_argument("--plans", nargs="+", default=None, help="plans of data_plans.py, None for all")


def missing(options: argparse.Namespace) -> str | None:
    """Need nothing: Ray Data comes with ray and pyarrow, and pandas, which it imports, with the dev extra."""
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the cases one after the other."""
    results: dict[str, Any] = {}
    with ray_session(None, 4):
        for case in options.cases:
            print(f"-- {case}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                results[case] = one_case(Path(folder), case, options)
    return results


def one_case(folder: Path, case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Write the input, let the sides take turns, and check that they gave the same answers."""
    deferral = 0.0 if case == "nothing_deferred" else options.deferral
    takes = per_row(options.batch) if case == "per_row" else FIXED
    kwargs = [
        {"column": f"gap{place}", "seconds_per_call": call, "seconds_per_row": row}
        for place, (call, row) in enumerate(takes)
    ]
    seconds = [call + row * options.batch for call, row in takes]
    policy = write_table(folder / "LOGITS", dict(zip(MODELS, seconds, strict=True)), [deferral or 0.3])
    rng = np.random.default_rng(0)
    columns = planted_rows(rng, options.rows, [deferral]).columns()
    payload = rng.random((options.rows, PAYLOAD), dtype=np.float32)
    columns["payload"] = pa.FixedShapeTensorArray.from_numpy_ndarray(payload)
    inputs = write_input(folder / "input", columns, files=INPUT_FILES)
    del columns, payload
    sides = {"cauc-ray": ours(folder, inputs, policy, kwargs, options.batch)}
    sides |= plans(inputs, policy, kwargs, options.batch, options.plans)
    turns: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(options.repeats):
        for side, run in sides.items():
            out = folder / f"{side}-{turn}"
            started = time.perf_counter()
            run(out)
            turns[side].append(options.rows / (time.perf_counter() - started))
            print(f"{side:>15}: {turns[side][-1]:8,.0f} rows/s", flush=True)
    for side in sides:
        compare_answers(folder / "cauc-ray-0" / "predictions", folder / f"{side}-0", side)
    best = {side: max(rates) for side, rates in turns.items()}
    own = best.pop("cauc-ray")
    rival = max(best, key=best.__getitem__)
    union = max((plan for plan in best if plan in UNION_PLANS), key=best.__getitem__, default=None)
    print(f"cauc-ray {own:,.0f} rows/s; best of Ray Data, {rival}, {best[rival]:,.0f}: {own / best[rival]:.2f} times")
    if union is not None:
        print(f"  best of those with filter and union, {union}, {best[union]:,.0f}: {own / best[union]:.2f} times")
    return {
        "rows": options.rows,
        "turns_rows_per_s": turns,
        "rows_per_s": own,
        "ray_data_rows_per_s": best,
        "best_plan": rival,
        "to_best_plan": own / best[rival],
        "best_union_plan": union,
        "to_best_union_plan": None if union is None else own / best[union],
        "to_plan": {plan: own / rate for plan, rate in best.items()},
    }


def per_row(batch: int) -> tuple[tuple[float, float], ...]:
    """Return the same seconds of a full batch with no fixed cost per call."""
    return tuple((0.0, call / batch + row) for call, row in FIXED)


def ours(
    folder: Path, inputs: Path, policy: Policy, kwargs: list[dict[str, Any]], batch: int
) -> Callable[[Path], object]:
    """Return what runs the cascade through cauc-ray."""
    stages = [
        {
            "name": name,
            "model": {"kind": "python", "factory": "jobs.bench.models:from_column", "kwargs": own},
            "batch_size": batch,
            "resources": {"num_cpus": 0.5},
        }
        for name, own in zip(MODELS, kwargs, strict=True)
    ]
    pool = write_pool(folder / "pool.yaml", stages)
    return lambda out: cauc_ray.run(pool, policy, inputs, out)


def plans(
    inputs: Path, policy: Policy, kwargs: list[dict[str, Any]], batch: int, names: list[str] | None
) -> Mapping[str, Callable[[Path], object]]:
    """Return what runs each plan of Ray Data."""
    import ray

    from jobs.bench.data_plans import PLANS, DataCascade

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Ray 2.60's newer reader packs the files into blocks of 128 MB, two in all here, so that the stages do not overlap.
    context.use_datasource_v2 = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    cascade = DataCascade(policy, kwargs[0], kwargs[1], batch, INPUT_FILES)
    chosen = PLANS if names is None else {name: PLANS[name] for name in names}
    return {name: partial(plan, cascade, inputs) for name, plan in chosen.items()}


def compare_answers(expected: Path, found: Path, side: str) -> None:
    """Raise ExecutionError where a side's predictions are not the same, row for row."""
    folder = found / "predictions" if (found / "predictions").is_dir() else found
    own, theirs = (
        pa.concat_tables(read_parquet(file) for file in parquet_files(path)).sort_by("example_id")
        for path in (expected, folder)
    )
    for name in own.column_names:
        if not pc.all(pc.equal(own.column(name), theirs.column(name))).as_py() or len(own) != len(theirs):
            raise ExecutionError(f"{side}: column {name} of the predictions is not what cauc-ray answered")
