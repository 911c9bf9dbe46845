"""A sweep as tasks on Ray, which are kept as they end: the work of `cauc sweep` into a folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cauc_ray.api.examples import ExampleReader
from cauc_ray.api.offline import require_apart
from cauc_ray.api.options import SweepJobOptions, SweptSet
from cauc_ray.api.sources import Source
from cauc_ray.comparison.kept import Written, run_kept
from cauc_ray.comparison.redrawing import redraw
from cauc_ray.comparison.sweeping import (
    PURPOSE,
    RESULTS,
    STATUSES,
    SUMMARY,
    measure,
    methods_of,
    of_chain,
    require_methods,
    summarise,
)
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.queries import encoders
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.execution.tasks import Outcome, Task
from cauc_ray.files.documents import write_json
from cauc_ray.files.listing import content_digest
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath, absolute, path_of


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep on Ray measured.

    rows: one for each set, chain, method, seed and budget, in that order; those without a value say why.
    summary: their mean and spread over seeds.   missing: tasks without a value, and why, in one line each.
    """

    rows: tuple[dict[str, Any], ...]
    summary: tuple[dict[str, Any], ...]
    missing: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the summary, how many rows there are of each status, and what is missing."""
        counts = {f"n_{status}": sum(row["status"] == status for row in self.rows) for status in STATUSES}
        # Every operating point is too much for a summary; results.parquet has them.
        summary = [row for row in self.summary if row["budget"] is not None]
        return {
            "n_rows": len(self.rows),
            **counts,
            "summary": summary,
            "missing": list(self.missing),
            "seconds": self.seconds,
        }


@dataclass(frozen=True, slots=True)
class _Point:
    """What a task measures: one method on one chain of one table with one seed, at all budgets."""

    swept: SweptSet
    models: tuple[str, ...]
    method: str
    seed: int
    options: SweepJobOptions

    @property
    def keys(self) -> dict[str, Any]:
        return {"set": self.swept.name, "chain": ",".join(self.models), "method": self.method, "seed": self.seed}

    def measure(self) -> Written:
        source = Source(str(self.swept.logits), of_chain(self.options, self.models))
        read = ExampleReader(source, self.swept.embedding or self.options.embedding).read(PURPOSE)
        splits = redraw(dict(zip(self.options.cuts, read, strict=True)), self.options.pooled, self.seed)
        return Written(measure(self.keys, self.models, self.options, splits))

    def missing(self, reason: str) -> list[dict[str, Any]]:
        """Return its rows where it has no value."""
        budgets: list[tuple[str | None, float | None]] = [
            *(("relative", share) for share in self.options.relative_budgets),
            *(("cost", budget) for budget in self.options.budgets),
        ]
        of_all = {**self.keys, "status": "missing", "reason": reason}
        return [{**of_all, "budget_kind": kind, "budget": budget} for kind, budget in budgets or [(None, None)]]


def run_sweep(
    options: SweepJobOptions,
    output: str | AnyPath,
    logits: AnyPath | None = None,
    *,
    on_outcome: Callable[[Outcome, int, int], None] = lambda outcome, index, of: None,
) -> Sweep:
    """Measure by tasks on Ray, and write results.parquet, summary.parquet and summary.json into a folder.

    output: new, or that of an earlier sweep: what it measured is kept in tasks/ there by what it depends on, and is not
    measured again.   logits: the table, where options have no sets; tasks read tables by their paths.   on_outcome:
    called with what came of each task, its number and how many there are.
    A task that fails has rows that say so. Raises ConfigError or DataError where a set, model, split or encoder is
    missing, before anything is written.
    """
    started = time.perf_counter()
    require_methods(options.methods)
    sets = options.sets
    if logits is not None and not sets:
        sets = (SweptSet(name=absolute(logits).name, logits=absolute(logits), chains=_chains(options)),)
    elif logits is not None or not sets:
        raise ConfigError("a sweep is of one logit table, or of the sets of a config; give one of the two")
    require_apart(output, *(each.logits for each in sets))
    points = {_task(point, identity): point for each in sets for point, identity in _points(options, each)}
    folder = path_of(output)
    in_order = run_kept(
        folder,
        "sweep",
        [list(points)],
        deadline_s=options.deadline_s,
        address=options.address,
        on_outcome=on_outcome,
    )
    failed = [each for each in in_order if each.error is not None]
    rows = [
        row
        for each in in_order
        for row in (each.value.content if each.error is None else points[each.task].missing(each.error))
    ]
    found = Sweep(
        rows=tuple(rows),
        summary=tuple(summarise(rows)),
        missing=tuple(f"{each.task}: {each.error}" for each in failed),
        seconds=time.perf_counter() - started,
    )
    write_parquet(folder / "results.parquet", pa.Table.from_pylist(rows, schema=RESULTS))
    write_parquet(folder / "summary.parquet", pa.Table.from_pylist(list(found.summary), schema=SUMMARY))
    write_json(folder / "summary.json", found.as_json())
    return found


def _chains(options: SweepJobOptions) -> tuple[tuple[str, ...], ...]:
    return options.chains or (() if options.models is None else (options.models,))


def _points(options: SweepJobOptions, swept: SweptSet) -> Iterator[tuple[_Point, str]]:
    """Yield what to measure of a set, each with what its value depends on. Raises CaucError for what is missing."""
    table, digest = LogitTable(swept.logits), content_digest(swept.logits)
    chains = swept.chains or (tuple(Source(str(swept.logits), of_chain(options, None)).models),)
    encoder = swept.embedding or options.embedding
    if encoder is not None and encoder not in encoders(table.path):
        raise ConfigError(f"{table.path}: {unknown_name('encoder', encoder, encoders(table.path))}")
    whole = options.model_dump(mode="json", exclude={"sets", "chains", "models", "methods", "seeds", "seed", "address"})
    for models in chains:
        _require_there(table, models, [split for split, cut in options.cuts.items() if cut is None])
        for method in methods_of(options.methods, models):
            for seed in options.all_seeds:
                point = _Point(swept, models, method, seed, options)
                depends_on = [digest, point.keys, encoder, options.pooled, whole]
                yield point, json.dumps(depends_on)


def _require_there(table: LogitTable, models: Sequence[str], splits: Sequence[str]) -> None:
    for model in models:
        if model not in table.models:
            raise DataError(f"{table.path}: {unknown_name('model', model, table.models)}")
        for split in splits:
            if split not in table.splits(model):
                raise DataError(f"{table.path}: model {model!r}: {unknown_name('split', split, table.splits(model))}")


def _task(point: _Point, identity: str) -> Task:
    part = f"{point.swept.name}, {' → '.join(point.models)}"
    return Task(part, f"{point.method}, seed {point.seed}", point.measure, identity)
