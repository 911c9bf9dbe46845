"""Run a policy on real inputs with real models: the Python side of `cauc run`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from cauc_ray.data.files import read_json, write_json
from cauc_ray.data.inputs import open_input
from cauc_ray.errors import CaucWarning
from cauc_ray.execution.ledger import new_folder, new_record, require_new, resumed_record
from cauc_ray.execution.loop import RunProgress
from cauc_ray.execution.runner import BLOCK_ROWS, run_cascade
from cauc_ray.execution.session import cpus_needed, ray_session
from cauc_ray.front.summary import summarise
from cauc_ray.models.pool import Pool, StageSpec, load_pool
from cauc_ray.policies.policy import Policy


def run(
    pool: str | Path | Pool,
    policy: str | Path | Policy,
    input: str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    address: str | None = None,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Run a policy's chain on every row of an input, on Ray.

    pool: the pool that holds the chain's stages, or its file.   policy: a policy, or its file.
    input: Parquet file or folder with example_id and the columns that the models read, or a folder of images.
    out: a new folder for predictions/, ledger/, failed/ (only if a row failed) and summary.json.
    resume: go on with the run in out that was ended early: what it committed stays, the rest is done anew.
    address: of a Ray cluster; without it the session of this process, or one of its own for this run.
    Returns the summary. Raises CaucError; nothing is written where a fault is found before the start.
    """
    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    policy = policy if isinstance(policy, Policy) else Policy.load(policy)
    stages = pool.chain(policy.models)
    _warn_of_other_costs(stages, policy)
    rows = open_input(input)
    out = Path(out).absolute()
    record = new_record(policy.id, BLOCK_ROWS, rows.identity)
    if resume:
        record = resumed_record(out, record)
        if (out / "summary.json").is_file():
            summary: dict[str, Any] = read_json(out / "summary.json")
            return summary
    else:
        require_new(out)
    started = time.perf_counter()
    with ray_session(address, cpus_needed(stages)), nullcontext() if resume else new_folder(out):
        run_s = run_cascade(stages, policy, rows, out, record, on_progress)
    summary = {
        "run_id": record.run_id,
        "pool": pool.name,
        **summarise(out, policy, {stage.name: stage.batch_size for stage in stages}),
        "run_s": run_s,
        "elapsed_s": time.perf_counter() - started,
    }
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
