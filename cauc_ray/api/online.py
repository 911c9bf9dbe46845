"""Run a policy on real inputs with real models: the Python side of `cauc run`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cauc_ray.api.offline import policy_of
from cauc_ray.api.options import RunOptions
from cauc_ray.api.summary import summarise
from cauc_ray.cascade.agreement import require_agreement
from cauc_ray.data.inputs import RunInput, open_input
from cauc_ray.errors import CaucWarning, DataError
from cauc_ray.execution.ledger import new_record, resumed_record
from cauc_ray.execution.progress import RunProgress
from cauc_ray.execution.runner import block_rows, run_cascade
from cauc_ray.execution.session import cpus_needed, ray_session
from cauc_ray.files.atomic import new_folder, require_new
from cauc_ray.files.documents import read_json, write_json
from cauc_ray.files.paths import AnyPath, RemotePath, absolute
from cauc_ray.models.pool import Pool, StageSpec, load_pool
from cauc_ray.policies.checks import warn_of
from cauc_ray.policies.evidence import Guard
from cauc_ray.policies.policy import Policy

if TYPE_CHECKING:
    from ray.data import Dataset


def run(
    pool: str | AnyPath | Pool,
    policy: str | AnyPath | Policy,
    input: str | AnyPath | Dataset,
    out: str | AnyPath,
    *,
    resume: bool = False,
    retry_failed: bool = False,
    address: str | None = None,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> dict[str, Any]:
    """Run a policy's chain on every row of an input, on Ray.

    Args:
        pool: the pool that has the chain's stages, or its file.
        policy: a policy, or its file.
        input: a Parquet, CSV or JSONL file or folder, by path or URI, with example_id and the columns that models read;
            images; or a ray.data.Dataset. Each run executes a Dataset anew, and resuming needs its rows in the same
            order.
        out: a new folder, by path or URI, for predictions/, ledger/, failed/ (only if a row failed), manifest/ and
            summary.json.
        resume: continue the run in out that ended early: what it committed stays, the rest is done again. Where out
            does not exist or is empty, a new run starts.
        retry_failed: with resume, also of a finished run, try the rows in out/failed again.
        address: of a Ray cluster; without it the session of this process, or one for this run.
        on_progress: called with the state of the run as it goes on.

    Returns:
        The summary. Warns, with CaucWarning, where the pool's costs are not the policy's, and at the end where rows
        cost other than the policy expects.

    Raises:
        CaucError: nothing is written where a fault is found before the start.
    """
    options = RunOptions.of(locals())
    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    policy = policy_of(policy)
    stages = pool.chain(policy.models)
    require_agreement(stages, policy)
    _warn_of_other_costs(stages, policy)
    rows = _opened(input, pool)
    _require_columns(stages, rows)
    folder = absolute(out)
    costs = tuple(stage.cost for stage in policy.stages) if policy.costs == "per-model" else None
    record = new_record(policy.id, block_rows(rows.row_bytes), rows.identity, costs)
    resume = options.resume and folder.exists() and any(folder.iterdir())
    if resume:
        record = resumed_record(folder, record)
        if (folder / "summary.json").is_file():
            summary: dict[str, Any] = read_json(folder / "summary.json")
            if not retry_failed or not summary["n_failed"]:
                warn_of(map(Guard.model_validate, summary["guards"]))
                return summary
    else:
        require_new(folder)
    started = time.perf_counter()
    with ray_session(address, cpus_needed(stages)), nullcontext() if resume else new_folder(folder):
        (folder / "summary.json").unlink(missing_ok=True)  # where failed rows are tried again, the run is unfinished
        run_s = run_cascade(
            stages,
            policy,
            rows,
            folder,
            record,
            on_progress,
            columns=pool.columns_read(stages),
            degrade=pool.on_failure == "degrade",
            max_failed=pool.max_failed,
            retry_failed=retry_failed,
            names=pool.labels,
        )
    summary = {
        "run_id": record.run_id,
        "pool": pool.name,
        **summarise(folder, policy, {stage.name: stage.batch_size for stage in stages}),
        "run_s": run_s,
        "elapsed_s": time.perf_counter() - started,
    }
    write_json(folder / "summary.json", summary)
    warn_of(map(Guard.model_validate, summary["guards"]))
    return summary


def _opened(input: str | AnyPath | Dataset, pool: Pool) -> RunInput:
    if isinstance(input, str | Path | RemotePath):
        return open_input(input, pool.labels)
    from cauc_ray.execution.ray_data import DatasetInput  # Ray Data takes long to import

    return DatasetInput(input)


def _require_columns(stages: tuple[StageSpec, ...], rows: RunInput) -> None:
    for stage in stages:
        missing = sorted(stage.model.NEEDS.difference(rows.columns or stage.model.NEEDS))
        if missing:
            has = ", ".join(sorted(rows.columns or ()))
            raise DataError(f"stage {stage.name!r} needs a column {missing[0]!r}, and {rows.path} has only {has}")


def _warn_of_other_costs(stages: tuple[StageSpec, ...], policy: Policy) -> None:
    for spec, stage in zip(stages, policy.stages, strict=True):
        if spec.cost is not None and policy.costs == "per-model" and spec.cost.value != stage.cost:
            warnings.warn(
                f"the pool gives {spec.name!r} a cost of {spec.cost.value:g} {spec.cost.unit}, the policy "
                f"{stage.cost:g} {policy.cost_unit}; the policy's is counted",
                CaucWarning,
                stacklevel=3,
            )
