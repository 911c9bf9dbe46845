"""Measuring by tasks on Ray whose values are kept in a folder as they end: sweeps into a folder, the paper's tables."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import pyarrow as pa

import cauc_ray
from cauc_ray.api.offline import require_apart
from cauc_ray.api.options import SweepJobOptions, SweptSet
from cauc_ray.api.sources import Source, read_examples
from cauc_ray.comparison.measuring import choose_methods, hidden_of
from cauc_ray.comparison.sweeping import (
    PURPOSE,
    RESULTS,
    STATUSES,
    SUMMARY,
    measure,
    of_chain,
    redraw,
    require_methods,
    summarise,
)
from cauc_ray.data.logits import LogitTable, encoders
from cauc_ray.errors import CaucWarning, ConfigError, DataError, unknown_name
from cauc_ray.execution.session import ray_session
from cauc_ray.execution.tasks import N_CPUS, Outcome, Task, run_tasks
from cauc_ray.files.documents import make_folder, read_json, require_new, write_json
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath, absolute, content_digest, path_of

# In an output folder: whose it is, and the values of its tasks.
RECORD, TASKS = "tasks.json", "tasks"


@dataclass(frozen=True, slots=True)
class Written:
    """A task's value, as files hold it.   content: for JSON.   table: what is kept as Parquet, if anything."""

    content: Any
    table: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A folder of tasks' values, which are Written: KEY.json for each, and KEY.parquet where one has a table.

    The JSON is written last and whole; its key is made from the task, what its value depends on, and the version of the
    package that measured it.
    """

    folder: AnyPath

    def get(self, task: Task) -> Outcome | None:
        """Return what came of a task, None where nothing is kept, or nothing that can be read."""
        path = self._path(task)
        try:
            kept = read_json(path)
            table = read_parquet(self._path(task, "parquet")) if kept["has_table"] else None
            value = Written(kept["content"], table)
        except (DataError, LookupError, TypeError):
            return None
        return Outcome(task, value, None, tuple(kept["warnings"]), kept["seconds"], kept["attempts"])

    def put(self, outcome: Outcome) -> Outcome:
        """Keep what came of a task, unless it failed. Returns it as get() will."""
        if outcome.error is not None:
            return outcome
        path = self._path(outcome.task)
        make_folder(self.folder)
        written: Written = outcome.value
        if written.table is not None:
            write_parquet(self._path(outcome.task, "parquet"), written.table)
        content = {
            "part": outcome.task.part,
            "name": outcome.task.name,
            "seconds": outcome.seconds,
            "attempts": outcome.attempts,
            "warnings": list(outcome.warnings),
            "has_table": written.table is not None,
            "content": written.content,
        }
        write_json(path, content)
        # What a run that goes on will read, in place of what it was made from: both runs have the same.
        return replace(outcome, value=Written(json.loads(json.dumps(written.content)), written.table))

    def _path(self, task: Task, form: str = "json") -> AnyPath:
        key = json.dumps([task.part, task.name, task.identity, cauc_ray.__version__])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.{form}"


def require_own(folder: AnyPath, kind: str) -> None:
    """Raise ConfigError where a folder holds anything but kept tasks of a kind.   kind: such as "sweep"."""
    if not (folder / RECORD).is_file():
        require_new(folder)
    elif read_json(folder / RECORD) != {"kind": kind}:
        raise ConfigError(f"output {folder} is not the folder of a {kind}; choose another path or remove it")


def run_kept(
    folder: AnyPath,
    kind: str,
    rounds: Sequence[Sequence[Task]],
    *,
    deadline_s: float,
    address: str | None,
    on_outcome: Callable[[Outcome, int, int], None],
) -> list[Outcome]:
    """Run tasks on Ray, and keep their values, which are Written; those that the folder has are not measured again.

    folder: the output; values are in tasks/ there.   kind: as require_own() takes it.
    rounds: tasks that may run at the same time, one round after the other.   deadline_s: of each task.   address: of a
    Ray cluster, as ray_session() takes it.   on_outcome: called with what came of each task, its number and how many
    there are. Returns outcomes in the order of the tasks; what tasks warned of is a CaucWarning. Raises ExecutionError
    where Ray cannot be reached, ConfigError where another process writes into the folder.
    """
    require_own(folder, kind)
    kept, outcomes = Kept(folder / TASKS), dict[Task, Outcome]()
    tasks = [task for of_round in rounds for task in of_round]
    with ray_session(address, N_CPUS), _held(folder):
        write_json(folder / RECORD, {"kind": kind})
        for of_round in rounds:
            found = [outcome for task in of_round if (outcome := kept.get(task)) is not None]
            left = [task for task in of_round if task not in {outcome.task for outcome in found}]
            for outcome in chain(found, map(kept.put, run_tasks(left, deadline_s) if left else ())):
                for warning in outcome.warnings:
                    warnings.warn(f"{outcome.task}: {warning}", CaucWarning, stacklevel=2)
                outcomes[outcome.task] = outcome
                on_outcome(outcome, len(outcomes), len(tasks))
    return [outcomes[task] for task in tasks]


@contextmanager
def _held(folder: AnyPath) -> Iterator[None]:
    """Make an output folder and hold it for this process, where it is local. Raises ConfigError where another does."""
    make_folder(folder)
    if not isinstance(folder, Path):
        yield
        return
    held = os.open(folder, os.O_RDONLY)  # the lock ends with the process, however that ends
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"output {folder} is being written by another run; wait for it, or choose another") from error
    except OSError:
        pass  # a file system that has no locks
    try:
        yield
    finally:
        os.close(held)


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
        encoder, hidden = self.swept.embedding or self.options.embedding, hidden_of([self.method], self.models)
        read = read_examples(source, PURPOSE, encoder, hidden=hidden)
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
        chains = options.chains or (() if options.models is None else (options.models,))
        sets = (SweptSet(name=absolute(logits).name, logits=absolute(logits), chains=chains),)
    elif logits is not None or not sets:
        raise ConfigError("a sweep is of one logit table, or of the sets of a config; give one of the two")
    require_apart(output, *(each.logits for each in sets))
    points = {task: point for each in sets for task, point in _points(options, each)}
    folder = path_of(output)
    how: dict[str, Any] = {"deadline_s": options.deadline_s, "address": options.address, "on_outcome": on_outcome}
    in_order = run_kept(folder, "sweep", [list(points)], **how)
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


def _points(options: SweepJobOptions, swept: SweptSet) -> Iterator[tuple[Task, _Point]]:
    """Yield what to measure of a set, each as a task. Raises CaucError for what is missing."""
    table, digest = LogitTable(swept.logits), content_digest(swept.logits)
    chains = swept.chains or (tuple(Source(str(swept.logits), of_chain(options, None)).models),)
    encoder = swept.embedding or options.embedding
    if encoder is not None and encoder not in encoders(table.path):
        raise ConfigError(f"{table.path}: {unknown_name('encoder', encoder, encoders(table.path))}")
    whole = options.model_dump(mode="json", exclude={"sets", "chains", "models", "methods", "seeds", "seed", "address"})
    splits = [split for split, cut in options.cuts.items() if cut is None]
    for models in chains:
        for model in models:
            if model not in table.models:
                raise DataError(f"{table.path}: {unknown_name('model', model, table.models)}")
            for split in set(splits).difference(table.splits(model)):
                raise DataError(f"{table.path}: model {model!r}: {unknown_name('split', split, table.splits(model))}")
        hidden = Source(str(swept.logits), of_chain(options, models)).hidden
        chosen, _ = choose_methods(options.methods, models, embedding=encoder, hidden=hidden)
        for method, seed in product(chosen, options.all_seeds):
            point = _Point(swept, models, method, seed, options)
            depends_on = [digest, point.keys, encoder, options.pooled, whole]
            part = f"{swept.name}, {' → '.join(models)}"
            yield Task(part, f"{method}, seed {seed}", point.measure, json.dumps(depends_on)), point
