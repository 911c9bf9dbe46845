"""Run a policy on real inputs with real models, and sum up what that took: the Python side of `cauc run`."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.api.options import Common, OnRay, Options, Pairs, options_of, takes
from cauc_ray.api.summaries import RunSummary
from cauc_ray.cascade.allowance import Allowance
from cauc_ray.cascade.worker import require_agreement
from cauc_ray.data.datasets import DatasetSpec, RunInput, open_input
from cauc_ray.errors import DataError, OptionError, warn
from cauc_ray.execution.ledger import RunRecord, new_record, parts_of, resumed_record
from cauc_ray.execution.progress import RunProgress, StageProgress
from cauc_ray.files.documents import new_folder, require_folder, require_new, write_json
from cauc_ray.files.parquet import parquet_below, read_parquet
from cauc_ray.files.paths import AnyPath, RemotePath, absolute
from cauc_ray.models.costs import cost_unit
from cauc_ray.models.pool import Pool, StageSpec, load_pool
from cauc_ray.numbers.chain import cost_text
from cauc_ray.numbers.intervals import Mean, share
from cauc_ray.policies.checks import as_expected, warn_of
from cauc_ray.policies.evidence import Guard
from cauc_ray.policies.policy import Policy, policy_of

if TYPE_CHECKING:
    from ray.data import Dataset


class RunOptions(Options):
    """Options of a run."""

    def require_agreement(self) -> None:
        """Raise ConfigError where failed rows are to be tried again in a new run."""
        if self.retry_failed and not self.resume:
            raise OptionError("only a run that is resumed has failed rows to try again; give {resume} as well")


@takes(RunOptions)
def run(
    pool: str | AnyPath | Pool,
    policy: str | AnyPath | Policy,
    input: str | AnyPath | Dataset,
    output: str | AnyPath,
    *,
    resume: Common[bool] = False,
    retry_failed: Common[bool] = False,
    columns: Common[Pairs | None] = None,
    address: OnRay[str | None] = None,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> RunSummary:
    """Run a policy's chain on every row of an input, on Ray.

    Args:
        pool: A pool file with the chain's stages. In Python also a Pool.
        policy: A policy file. In Python also a Policy.
        input: A file or folder, by path or URI: tables with the columns that models read (Parquet, CSV, JSON, Arrow,
            ORC, also compressed) or images; or NAME=PATH for the files of a benchmark. In Python also a
            ray.data.Dataset: each run executes it anew, and resuming needs its rows in the same order.
        output: A new folder, by path or URI, for predictions/, ledger/, failed/ (only if a row failed), manifest/ and
            summary.json.
        resume: Continue the run in the output folder that ended early, if any: its commits stay.
        retry_failed: With resume, try the failed rows again, also those of a finished run.
        columns: The data's own names for example_id, label, image, question, choices (a+b+c for several), context and
            other columns that models read, as image=jpeg.
        address: Address of a Ray cluster (default: RAY_ADDRESS, else a session of this machine).
        on_progress: Called with the state of the run as it goes on.

    Returns:
        The summary. Warns, with CaucWarning, where the pool's costs are not the policy's, and at the end where rows
        cost other than the policy expects.

    Raises:
        CaucError: nothing is written where a fault is found before the start.
    """
    options: RunOptions = options_of(run).of(locals())
    from cauc_ray.execution.cluster import cpus_needed  # Ray takes seconds to import
    from cauc_ray.execution.runner import CascadeRun, block_rows
    from cauc_ray.execution.session import ray_session, runs_here

    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    policy = policy_of(policy)
    stages = pool.chain(policy.models)
    model_columns = pool.columns_read(stages)
    require_agreement(stages, policy)
    allowance = Allowance.of(pool, policy)
    _warn_of_other_costs(stages, policy)
    is_here, folder = runs_here(address), absolute(output)
    costs = tuple(stage.cost for stage in policy.stages) if policy.costs == "per-model" else None
    models = {stage.name: stage.model.identity for stage in stages}

    @cache
    def opened() -> tuple[RunInput, RunRecord]:
        rows = _opened(input, pool, options.columns or {}, model_columns)
        require_usable(stages, rows.columns, str(rows.path), pool, is_here)
        size = block_rows(rows.row_bytes, rows.n_rows)
        record = new_record(policy.id, size, rows.identity, costs=costs, models=models)
        return rows, resumed_record(folder, record) if resume else record

    resume = options.resume and folder.exists() and any(folder.iterdir())
    location = absolute(input) if isinstance(input, str | Path | RemotePath) else None
    if not resume and isinstance(location, RemotePath) and location.exists():
        require_usable(stages, None, str(location), pool, is_here)  # it is opened while models load: that may take long
    else:
        opened()
    if resume:
        if (folder / "summary.json").is_file():
            summary = RunSummary.load(folder / "summary.json")
            if not retry_failed or not summary["n_failed"]:
                warn_of(map(Guard.model_validate, summary["guards"]))
                return summary
    else:
        require_new(folder)
    require_folder(folder)
    started = time.perf_counter()
    on_progress(RunProgress(time.monotonic(), None, 0, tuple(StageProgress(stage.name) for stage in stages)))
    with ray_session(address, cpus_needed(stages)), nullcontext() if resume else new_folder(folder):
        (folder / "summary.json").unlink(missing_ok=True)  # where failed rows are tried again, the run is unfinished
        run_s = CascadeRun(
            stages,
            policy,
            opened,
            folder,
            columns=model_columns,
            degrade=pool.on_failure == "degrade",
            max_failed=pool.max_failed,
            allowance=allowance,
            retry_failed=retry_failed,
            names=pool.label_names,
        ).run(on_progress)
    figures = {
        "run_id": opened()[1].run_id,
        "pool": pool.name,
        **summarise(folder, policy, {stage.name: stage.batch_size for stage in stages}),
        "run_s": run_s,
        "elapsed_s": time.perf_counter() - started,
    }
    summary = RunSummary(figures)
    write_json(folder / "summary.json", summary)
    warn_of(map(Guard.model_validate, summary["guards"]))
    return summary


def _opened(
    input: str | AnyPath | Dataset, pool: Pool, columns: Mapping[str, str], model_columns: frozenset[str] | None
) -> RunInput:
    if isinstance(input, str | Path | RemotePath):
        labels = pool.label_names
        spec = DatasetSpec(str(input), pool.task, columns, labels=labels, model_columns=model_columns, rule=pool.rule)
        return open_input(spec)
    from cauc_ray.execution.ray_data import DatasetInput  # Ray Data takes long to import

    return DatasetInput(input, pool.task, columns, pool.label_names, model_columns, pool.rule)


def require_usable(
    stages: Iterable[StageSpec], columns: Iterable[str] | None, rows: str, pool: Pool, is_here: bool
) -> None:
    """Refuse models that cannot be loaded as far as their settings tell, and rows without the columns that they need.

    Args:
        stages: The stages.
        columns: Columns of the rows, None where they are unknown.
        rows: Where these are, for messages.
        pool: The pool of the stages.
        is_here: Whether the stages run on this machine.

    Raises:
        ConfigError: A model cannot be loaded.
        DataError: A column is missing.
    """
    row_columns = None if columns is None else frozenset(columns)
    for stage in stages:
        stage.model.check(is_here)
        read = stage.model.columns_read
        # A model that declares no columns is given the inputs that the pool declares.
        needed = read.required | (pool.inputs.keys() if read.names is None else frozenset())
        missing = sorted(needed.difference(row_columns or needed))
        if missing:
            listed = ", ".join(sorted(row_columns or ()))
            remedy = f"name the column that has it with --columns {missing[0]}=NAME"
            raise DataError(
                f"stage {stage.name!r} needs a column {missing[0]!r}, and {rows} has only {listed}; {remedy}"
            )


def _warn_of_other_costs(stages: tuple[StageSpec, ...], policy: Policy) -> None:
    for spec, stage in zip(stages, policy.stages, strict=True):
        declared = None if spec.cost is None else spec.cost.value  # auto is None, too
        if policy.costs == "per-model" and declared not in (None, stage.cost):
            warn(
                f"the pool gives {spec.name!r} a cost of {declared:g} {cost_unit(spec)}, the policy "
                f"{cost_text(stage.cost, policy.cost_unit, 6)}; the policy's is counted",
            )


def summarise(out: AnyPath, policy: Policy, batch_sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the totals of a finished run, by stage and over all.

    batch_sizes: rows in a full batch, by stage. Costs are the ledger's: what was spent, in a resumed run also on
    rows that had to be computed again, which each stage counts as repeated. Times are over a stage's replicas, each
    from the start of its first call to the end of its last: compute_s in model and policy (busy_share of it all),
    waiting_s otherwise; device_s is None without a GPU, bytes_out and
    bytes_in are without a remote model. queue_s: seconds that a row waited for its call, on average.
    lost_calls: those that brought neither an answer nor a row to go on with. Of the whole run, cost is what was spent
    for each row that was answered, None if none was, saving what that is less than the last model's, and expected_...
    what the policy predicts, None where it predicts nothing; guards say whether rows cost what it predicts.
    """
    totals, called = parts_of(out).committed().totals, _by_stage(out / "ledger")
    answered_by, failed_at = totals.get("answered", Counter()), totals.get("failed", Counter())
    rows = totals.get("rows", Counter())
    n_answered, n_failed = answered_by.total(), failed_at.total()
    n = n_answered + n_failed
    total, of_last = sum(stage["cost"] for stage in called.values()), policy.stages[-1].cost
    stages: list[dict[str, Any]] = []
    answered, failed = (np.array([of[name] for name in policy.models]) for of in (answered_by, failed_at))
    if len({*policy.ends.tolist()}) == len(policy.ends):
        calls = np.eye(len(policy.stages), dtype=np.int64)  # of rows that end at each stage, those they have been at
        calls[policy.ends] = policy.calls
        answered_reached, failed_reached = answered @ calls, failed @ calls
    else:  # there are several ways to a stage
        answered_reached, failed_reached = np.array([totals["called"][name] for name in policy.models]), failed
    for name, reached in zip(policy.models, (answered_reached + failed_reached).tolist(), strict=True):
        of = called.get(name, Counter[str]())
        at_work_s = max(
            of["replica_s"], of["compute_s"]
        )  # the clocks that say when and how long differ by microseconds
        stages.append(
            {
                "name": name,
                "reached": reached,
                "answered": answered_by[name],
                "failed": failed_at[name],
                "repeated": of["rows"] - (reached - failed_at[name]),
                "calls": of["calls"],
                "lost_calls": of["lost_calls"],
                "batch_fill": of["batch"] / max(1, of["calls"] * batch_sizes[name]),
                "cost": float(of["cost"]),
                "cost_share": of["cost"] / total if total > 0 else None,
                "compute_s": float(of["compute_s"]),
                **{key: of.get(key) for key in _MEASURED},
                "waiting_s": float(at_work_s - of["compute_s"]),
                "busy_share": of["compute_s"] / at_work_s if at_work_s > 0 else None,
                "queue_s": of["row_queue_s"] / of["rows_waited"] if of["rows_waited"] else None,
            }
        )
    # For each answer: rows that failed saved nothing.
    cost = total / n_answered if n_answered else None
    relative = cost / of_last if cost is not None and of_last > 0 else None
    expected_relative = expected_reach = None
    if (expected := policy.expected) is not None:
        expected_relative, expected_reach = expected.relative_cost, expected.stages[-1].reached / expected.n
    guard = None
    if n_answered:
        mean_cost = Mean.of_sums(n_answered, totals["cost"]["sum"], totals["cost"]["squares"])
        guard = as_expected(policy.expected, mean_cost, "this input", policy.budget, policy.cost_unit)
    return {
        "policy_id": policy.id,
        "method": policy.method,
        "n": n,
        "n_failed": n_failed,
        "degraded": rows["degraded"],
        "accuracy": asdict(share(rows["right"], rows["labelled"])) if rows["labelled"] else None,
        "cost_unit": policy.cost_unit,
        "total_cost": total,
        "cost": cost,
        "relative_cost": relative,
        "expected_relative_cost": expected_relative,
        "saving": _rest(relative),
        "expected_saving": _rest(expected_relative),
        "last_stage_avoided": 1 - float(answered_reached[-1]) / n_answered if n_answered else None,
        "expected_last_stage_avoided": _rest(expected_reach),
        "stages": stages,
        "guards": [] if guard is None else [guard.model_dump()],
    }


# What only some models measure.
_MEASURED = ("device_s", "bytes_out", "bytes_in")
_SUMMED = (
    *("rows", "lost_calls", "batch", "cost", "compute_s", "row_queue_s", "rows_waited", "calls"),
    *_MEASURED,
)


def _by_stage(ledger: AnyPath) -> dict[str, Counter[str]]:
    """Return what the calls of each stage add up to, from one file after the other.

    replica_s: from the start of each replica's first call to the end of its last. What no
    call has, such as device_s, is missing.
    """
    stages: dict[str, Counter[str]] = {}
    # A replica has a number of its own in every attempt at a run, so that no time between two attempts counts.
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    how = [*((key, "sum") for key in _SUMMED), ("started_s", "min"), ("ended_s", "max")]
    for file in parquet_below(ledger) if ledger.is_dir() else ():  # no row may have been readable
        for row in _calls(read_parquet(file)).group_by(["stage", "replica"]).aggregate(how).to_pylist():
            sums = {key: row[f"{key}_sum"] for key in _SUMMED if row[f"{key}_sum"] is not None}
            stages.setdefault(row["stage"], Counter()).update(sums)
            started_s, ended_s = spans.get((row["stage"], row["replica"]), (math.inf, -math.inf))
            ends = min(started_s, row["started_s_min"]), max(ended_s, row["ended_s_max"])
            spans[row["stage"], row["replica"]] = ends
    for (stage, _), (started_s, ended_s) in spans.items():
        stages[stage].update({"replica_s": ended_s - started_s})
    return stages


def _calls(ledger: pa.Table) -> pa.Table:
    """Return the calls of a ledger with what is summed of them.

    A call that never came back has no compute_s: of its replica's time it counts no more than its start.
    """
    compute_s = pc.fill_null(ledger.column("compute_s"), 0.0)
    rows = pc.add(ledger.column("accepted"), ledger.column("deferred"))
    started_s = pc.divide(pc.cast(pc.cast(ledger.column("started_at"), pa.int64()), pa.float64(), safe=False), 1e6)
    columns = {
        "rows": rows,
        "lost_calls": pc.cast(pc.equal(rows, 0), pa.int64()),
        "compute_s": compute_s,
        "started_s": started_s,
        "ended_s": pc.add(started_s, compute_s),
        "row_queue_s": pc.multiply(ledger.column("queue_s"), ledger.column("batch")),
        "rows_waited": pc.if_else(pc.is_valid(ledger.column("queue_s")), ledger.column("batch"), 0),
        "calls": pa.repeat(1, len(ledger)),
        **{key: ledger.column(key) for key in ("stage", "replica", "batch", "cost", *_MEASURED)},
    }
    return pa.table(columns)


def _rest(share: float | None) -> float | None:
    return None if share is None else 1 - share
