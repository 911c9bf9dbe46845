"""Run a policy on real inputs with real models: the Python side of `cauc run`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from cauc_ray.data.files import parquet_files, read_parquet, write_json
from cauc_ray.data.inputs import RunInput
from cauc_ray.errors import CaucWarning
from cauc_ray.execution.ledger import new_folder, require_new
from cauc_ray.execution.runner import RunPlan, RunProgress, RunTotals, import_paths, new_run_id, run_cascade
from cauc_ray.execution.session import cpus_needed, ray_session
from cauc_ray.models.pool import Pool, StageSpec, load_pool
from cauc_ray.numbers.metrics import share
from cauc_ray.policies.policy import Policy


def run(
    pool: str | Path | Pool,
    policy: str | Path | Policy,
    input: str | Path,
    out: str | Path,
    *,
    address: str | None = None,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Run a policy's chain on every row of a Parquet input, on Ray.

    pool: the pool that holds the chain's stages, or its file.   policy: a policy, or its file.
    input: Parquet file or folder with example_id and the columns that the models read.
    out: a new folder for predictions/, ledger/, failed/ (only if a row failed) and summary.json.
    address: of a Ray cluster; without it the session of this process, or one of its own for this run.
    Returns the summary. Raises CaucError; nothing is written where a fault is found before the start.
    """
    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    stages = pool.chain(policy.models)
    _warn_of_other_costs(stages, policy)
    rows = RunInput(input)
    out = Path(out).absolute()
    require_new(out)
    plan = RunPlan(new_run_id(), stages, policy, rows.path.absolute(), out, import_paths())
    started = time.perf_counter()
    with ray_session(address, cpus_needed(stages)), new_folder(out):
        totals = run_cascade(plan, on_progress)
    summary = _summary(pool, policy, totals, time.perf_counter() - started, out)
    write_json(out / "summary.json", summary)
    return summary


def _warn_of_other_costs(stages: tuple[StageSpec, ...], policy: Policy) -> None:
    for spec, stage in zip(stages, policy.stages, strict=True):
        if spec.cost is not None and policy.costs == "per-model" and spec.cost.value != stage.cost:
            warnings.warn(
                f"the pool gives {spec.name!r} a cost of {spec.cost.value:g} {spec.cost.unit}, the policy "
                f"{stage.cost:g} {policy.cost_unit}; the policy's is counted",
                CaucWarning,
                stacklevel=3,
            )


def _summary(pool: Pool, policy: Policy, totals: RunTotals, elapsed_s: float, out: Path) -> dict[str, Any]:
    cost = sum(stage.cost for stage in totals.stages)
    of_last = policy.stages[-1].cost
    reached_last = totals.stages[-1].reached
    return {
        "run_id": totals.run_id,
        "pool": pool.name,
        "policy_id": policy.id,
        "method": policy.method,
        "n": totals.n,
        "n_failed": totals.n_failed,
        "accuracy": _accuracy(out),
        "cost_unit": policy.cost_unit,
        "total_cost": cost,
        "cost": cost / totals.n,
        "relative_cost": cost / totals.n / of_last if of_last > 0 else None,
        "expected_relative_cost": policy.expected.relative_cost,
        "last_stage_avoided": 1 - reached_last / totals.n,
        "run_s": totals.wall_s,
        "elapsed_s": elapsed_s,
        "stages": [asdict(stage) for stage in totals.stages],
    }


def _accuracy(out: Path) -> dict[str, float] | None:
    """Return the accuracy over the answered rows that have a label, with its interval; None without any."""
    n_hits = n = 0
    for file in parquet_files(out / "predictions") if (out / "predictions").is_dir() else []:
        table = read_parquet(file)
        if "label" not in table.column_names:
            return None
        n += len(table) - table.column("label").null_count
        n_hits += pc.sum(pc.equal(table.column("prediction"), table.column("label"))).as_py() or 0
    return asdict(share(n_hits, n)) if n else None
