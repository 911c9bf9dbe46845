"""A sweep as tasks on Ray, whose rows are kept as they come, and the tables of all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from cauc_ray.api.offline import require_apart
from cauc_ray.comparison.comparing import SINGLE
from cauc_ray.comparison.kept import Kept, Written
from cauc_ray.comparison.sweeping.config import SweepConfig, SweptSet
from cauc_ray.comparison.sweeping.measuring import Point, measure_point
from cauc_ray.comparison.sweeping.tables import RESULTS, SUMMARY, summarise
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.queries import encoders
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.execution.session import ray_session
from cauc_ray.execution.tasks import N_CPUS, Outcome, Task
from cauc_ray.files.documents import write_json
from cauc_ray.files.listing import content_digest
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath, path_of


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep made.

    rows: one for each set, chain, method, seed and budget, in that order; those without a value say why.
    summary: their mean and spread over seeds.   missing: tasks without a value, and why, in one line each.
    warned: what tasks warned of.   seconds: of it all.
    """

    rows: tuple[dict[str, Any], ...]
    summary: tuple[dict[str, Any], ...]
    missing: tuple[str, ...]
    warned: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the summary, how many rows there are of each status, and what is missing."""
        counts = {f"n_{status}": sum(row["status"] == status for row in self.rows) for status in _STATUSES}
        return {
            "n_rows": len(self.rows),
            **counts,
            "summary": list(self.summary),
            "missing": list(self.missing),
            "warned": list(self.warned),
            "seconds": self.seconds,
        }


_STATUSES = ("ok", "unmet", "missing")


def run_sweep(
    config: SweepConfig,
    output: str | AnyPath,
    *,
    address: str | None = None,
    on_outcome: Callable[[Outcome, int, int], None] = lambda outcome, place, of: None,
) -> Sweep:
    """Measure all that a config names, and write results.parquet, summary.parquet and summary.json into a folder.

    output: new, or that of a run of the same config that was ended early: the rows that it measured are kept in
    tasks/ there, and not measured again unless the logits have changed.   address: of a Ray cluster; without one as
    ray_session() has it; tasks read the logits by their path.   on_outcome: told what came of each task, its place
    and their number.
    A task that fails has rows that say so. Raises ConfigError or DataError where a set, model, split or encoder is
    not there, before anything is written.
    """
    started = time.perf_counter()
    require_apart(output, *(each.logits for each in config.sets))
    points = {_task(point, identity): point for each in config.sets for point, identity in _points(config, each)}
    folder = path_of(output)
    kept = Kept(folder / "tasks", Written, lambda task, written: written.content)
    outcomes: dict[Task, Outcome] = {}
    with ray_session(address, N_CPUS):
        for outcome in kept.run(list(points), config.deadline_s):
            outcomes[outcome.task] = outcome
            on_outcome(outcome, len(outcomes), len(points))
    in_order = [outcomes[task] for task in points]
    rows = [row for outcome in in_order for row in _rows(points[outcome.task], outcome)]
    sweep = Sweep(
        rows=tuple(rows),
        summary=tuple(summarise(rows)),
        missing=tuple(f"{each.task}: {each.error}" for each in in_order if each.error is not None),
        warned=tuple(f"{each.task}: {warning}" for each in in_order for warning in each.warnings),
        seconds=time.perf_counter() - started,
    )
    write_parquet(folder / "results.parquet", pa.Table.from_pylist(rows, schema=RESULTS))
    write_parquet(folder / "summary.parquet", pa.Table.from_pylist(list(sweep.summary), schema=SUMMARY))
    write_json(folder / "summary.json", sweep.as_json())
    return sweep


def _points(config: SweepConfig, swept: SweptSet) -> list[tuple[Point, str]]:
    """Return what to measure of a set, each with what its value depends on. Raises CaucError for what is not there."""
    table = LogitTable(swept.logits)
    _require_there(config, swept, table)
    digest = content_digest(swept.logits)
    found = []
    for models in swept.chains:
        singles = {SINGLE: [f"{SINGLE}:{model}" for model in models]}
        for method in (name for each in config.methods for name in singles.get(each, [each])):
            for seed in config.seeds:
                point = Point(
                    set_name=swept.name,
                    logits=swept.logits,
                    embedding=swept.embedding,
                    models=models,
                    method=method,
                    seed=seed,
                    splits=config.splits,
                    redrawn=config.redrawn,
                    budgets=config.all_budgets,
                )
                found.append((point, json.dumps([digest, {**asdict(point), "logits": str(swept.logits)}])))
    return found


def _require_there(config: SweepConfig, swept: SweptSet, table: LogitTable) -> None:
    for model in dict.fromkeys(model for chain in swept.chains for model in chain):
        if model not in table.models:
            raise DataError(f"{table.path}: {unknown_name('model', model, table.models)}")
        for split in config.splits:
            if split not in table.splits(model):
                raise DataError(f"{table.path}: model {model!r}: {unknown_name('split', split, table.splits(model))}")
    if swept.embedding is not None and swept.embedding not in encoders(table.path):
        raise ConfigError(f"{table.path}: {unknown_name('encoder', swept.embedding, encoders(table.path))}")


def _task(point: Point, identity: str) -> Task:
    part = f"{point.set_name}, {' → '.join(point.models)}"
    return Task(part, f"{point.method}, seed {point.seed}", partial(measure_point, point), identity)


def _rows(point: Point, outcome: Outcome) -> list[dict[str, Any]]:
    """Return a task's rows with all columns; where it has no value, rows that say why."""
    found = outcome.value
    if outcome.error is not None:
        found = [{**key, "status": "missing", "reason": outcome.error} for key in point.keys]
    return [{name: row.get(name) for name in RESULTS.names} for row in found]
