"""A run: tasks on Ray, tables and figures from what came of them, a folder that holds all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from cauc_ray.api.grids import PaperTable
from cauc_ray.api.offline import require_apart
from cauc_ray.comparison.comparing import SINGLE
from cauc_ray.comparison.measuring import published
from cauc_ray.comparison.quoted import columns_of, paper_name
from cauc_ray.execution.session import ray_session
from cauc_ray.execution.tasks import N_CPUS, Outcome
from cauc_ray.files.atomic import make_folder
from cauc_ray.files.documents import write_json, write_text
from cauc_ray.files.listing import hive_values
from cauc_ray.files.parquet import write_parquet
from cauc_ray.paper.compared import TITLES, compared_table, setup_table
from cauc_ray.paper.config import PaperConfig
from cauc_ray.paper.drawing import require_matplotlib
from cauc_ray.paper.figures import Drawn, draw_figures
from cauc_ray.paper.fused import growth_table, pairs_table
from cauc_ray.paper.keeping import kept_in
from cauc_ray.paper.plan import NotRun, plan_of
from cauc_ray.paper.report import report


@dataclass(frozen=True, slots=True)
class Paper:
    """What a run made.

    failed: tasks that have no value, and why, in one line each.   warned: what tasks warned of.   seconds: of it all.
    """

    config: PaperConfig
    tables: tuple[PaperTable, ...]
    figures: tuple[Drawn, ...]
    not_run: tuple[NotRun, ...]
    failed: tuple[str, ...]
    warned: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return all numbers of the tables, what the figures say, and what is missing."""
        return {
            "source": published()["source"],
            "config": self.config.model_dump(mode="json", by_alias=True),
            "seconds": self.seconds,
            "tables": {table.name: list(table.rows) for table in self.tables},
            "figures": [{"name": each.name, "caption": each.caption} for each in self.figures],
            "not_run": [{"what": each.what, "why": each.why} for each in self.not_run],
            "failed": list(self.failed),
            "warned": list(self.warned),
        }


def run_paper(
    config: PaperConfig,
    output: str | Path,
    *,
    address: str | None = None,
    on_outcome: Callable[[Outcome, int, int], None] = lambda outcome, place, of: None,
) -> Paper:
    """Measure all that a config names, and write tables, figures and a report into a folder.

    output: new, or that of a run of the same config that was ended early: what it measured is kept in tasks/ there,
    and not measured again unless the logits have changed.   address: of a Ray cluster; without one as ray_session()
    has it. Each chain is a task there, which reads the logits by their path.   on_outcome: told what came of each
    task, its place and their number.
    A task that fails is told in the result, and does not keep the others from their tables. Raises ConfigError where
    a folder is missing or cannot be made or matplotlib is missing, ExecutionError where Ray cannot be reached.
    """
    started = time.perf_counter()
    require_matplotlib()
    plan = plan_of(config)
    folder = Path(output)
    sets = [path for path in config.logits.iterdir() if path.is_dir() and hive_values(path, "model")]
    require_apart(folder, *sets)
    outcomes: list[Outcome] = []
    n_tasks = len(plan.tasks) + len(plan.alone)
    kept = kept_in(folder / "tasks")
    with ray_session(address, N_CPUS):
        for tasks in (plan.tasks, plan.alone):  # the timed one has the machine to itself
            for outcome in kept.run(tasks, config.deadline_s):
                outcomes.append(outcome)
                on_outcome(outcome, len(outcomes), n_tasks)
    make_folder(folder / "figures")
    by_task = {outcome.task: outcome for outcome in outcomes}
    in_order = [by_task[task] for task in (*plan.tasks, *plan.alone)]
    values = {(each.task.part, each.task.name): each.value for each in in_order if each.error is None}
    paper = Paper(
        config=config,
        tables=_tables(config, values),
        figures=draw_figures(config, values, folder / "figures"),
        not_run=(*plan.not_run, *_methods_not_run(config, values)),
        failed=tuple(f"{each.task}: {each.error}" for each in in_order if each.error is not None),
        warned=tuple(f"{each.task}: {warning}" for each in in_order for warning in each.warnings),
        seconds=time.perf_counter() - started,
    )
    _write(folder, paper)
    return paper


def _tables(config: PaperConfig, values: dict[tuple[str, str], Any]) -> tuple[PaperTable, ...]:
    """Return the tables of which there is a value."""
    makers: dict[str, Callable[[Any], PaperTable]] = {
        **{name: partial(compared_table, name) for name in TITLES},
        "complementarity": pairs_table,
        "growing-chain": growth_table,
        "setup-time": lambda found: setup_table(*found[0]),
    }
    tables = []
    for name, chains in config.tables.by_name.items():
        found = [(chain, values[name, chain.name]) for chain in chains if (name, chain.name) in values]
        if found:
            tables.append(makers[name](found))
    return tuple(tables)


def _methods_not_run(config: PaperConfig, values: dict[tuple[str, str], Any]) -> list[NotRun]:
    """Return the methods that a comparison left out, and those that the paper's tables have besides."""
    left_out: dict[str, NotRun] = {}
    for name in TITLES:
        chains = config.tables.by_name[name]
        comparisons = [values[name, chain.name] for chain in chains if (name, chain.name) in values]
        absent = {each["method"]: each["why"] for of in comparisons for each in of.not_run}
        left_out |= {method: NotRun(f"method {paper_name(method)}", why) for method, why in absent.items()}
        if not comparisons:
            continue
        seen = {row["method"] for of in comparisons for row in of.rows} | set(absent)
        for method in dict.fromkeys(method for rows in columns_of(name).values() for method in rows):
            if not method.startswith(SINGLE) and not any(m == method or m.startswith(f"{method}-") for m in seen):
                left_out[f"{name}/{method}"] = NotRun(f"{name} / {paper_name(method)}", "the method was not run")
    return list(left_out.values())


def _write(folder: Path, paper: Paper) -> None:
    make_folder(folder / "tables")
    for table in paper.tables:
        write_parquet(folder / "tables" / f"{table.name}.parquet", pa.Table.from_pylist(list(table.rows)))
        write_text(folder / "tables" / f"{table.name}.md", table.markdown())
    write_text(folder / "report.md", report(paper.tables, paper.figures, paper.not_run, paper.failed, paper.warned))
    write_json(folder / "paper.json", paper.as_json())
