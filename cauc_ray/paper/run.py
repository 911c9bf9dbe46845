"""A run: what can be measured of a config, as tasks on Ray; tables and figures of their values in one folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from cauc_ray.api.offline import require_apart
from cauc_ray.comparison.measuring import columns_of, paper_name, published, require_methods
from cauc_ray.comparison.tasks import run_kept
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import ConfigError, DataError, require_packages, unknown_name
from cauc_ray.execution.tasks import Outcome, Task
from cauc_ray.files.documents import make_folder, write_json, write_text
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath, content_digest, path_of
from cauc_ray.paper.config import COMPARED, Chain, ComparedChain, Entry, PaperConfig
from cauc_ray.paper.figures import Drawn, Found, draw_figures
from cauc_ray.paper.measured import comparison_of, measure
from cauc_ray.paper.tables import CONTENTS, PaperTable, table_of
from cauc_ray.policies.by_method import SINGLE


def plan_of(config: PaperConfig) -> tuple[list[Task], dict[str, str]]:
    """Return what to run, in the order of the config, and what not: entries whose logits are missing, other columns.

    Raises ConfigError where the folder of sets is missing.
    """
    if not config.logits.is_dir():
        raise ConfigError(f"there is no folder {config.logits} with sets of logits; name it with logits:")
    digest = cache(content_digest)  # many entries are of the same set
    tasks: list[Task] = []
    not_run: dict[str, str] = {}
    for part, entries in config.parts.items():
        for entry in entries:
            why = _missing(config.logits, entry)
            if why is not None:
                not_run[f"{part} / {entry.name}"] = why
                continue
            # All that its value depends on: the entry, and what the files hold.
            identity: list[Any] = [[digest(path) for path in entry.reads(config.logits)], entry.model_dump(mode="json")]
            if isinstance(entry, ComparedChain):
                identity += [list(config.methods), config.seed]
            tasks.append(Task(part, entry.name, partial(measure, config, part, entry), json.dumps(identity)))
        shown = {entry.published for entry in entries if isinstance(entry, Chain)}
        columns = [f"{part} / {column}" for column in columns_of(part) if column not in shown]
        not_run |= dict.fromkeys(columns, "no logit table of it is configured")
    return tasks, not_run


def _missing(root: AnyPath, entry: Entry) -> str | None:
    """Return what of an entry is missing, None where nothing is."""
    try:
        table = LogitTable(root / entry.set)
    except DataError as error:
        return str(error)
    absent = next((model for model in entry.wanted if model not in table.models), None)
    return None if absent is None else f"{table.path}: {unknown_name('model', absent, table.models)}"


@dataclass(frozen=True, slots=True)
class Paper:
    """What a run made.

    not_run: entries, columns of tables and methods that are not measured, and why.   failed: tasks that have no value,
    and why, in one line each.   warned: what tasks warned of.   seconds: of it all.
    """

    config: PaperConfig
    tables: tuple[PaperTable, ...]
    figures: tuple[Drawn, ...]
    not_run: dict[str, str]
    failed: tuple[str, ...]
    warned: tuple[str, ...]
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return all numbers of the tables, what the figures show, and what is missing."""
        return {
            "source": published()["source"],
            "config": self.config.model_dump(mode="json", by_alias=True),
            "seconds": self.seconds,
            "tables": {table.name: list(table.rows) for table in self.tables},
            "figures": [{"name": each.name, "caption": each.caption} for each in self.figures],
            "not_run": [{"what": what, "why": why} for what, why in self.not_run.items()],
            "failed": list(self.failed),
            "warned": list(self.warned),
        }

    def markdown(self) -> str:
        """Return the report, for a file next to the folder of the figures."""
        parts = [CONTENTS["head"].strip().format(source=published()["source"]), *_section("Failed", self.failed)]
        parts += [table.markdown() for table in self.tables]
        for each in self.figures:
            parts += [f"## {each.title}", f"![{each.title}](figures/{each.name}.png)", each.caption]
        parts += [
            *_section("Not run here", [f"{what}: {why}" for what, why in self.not_run.items()]),
            *_section("Warnings", self.warned),
        ]
        return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"

    def save(self, folder: AnyPath) -> None:
        """Write the tables as Parquet and Markdown, report.md and paper.json into a folder, local or remote."""
        make_folder(folder / "tables")
        for table in self.tables:
            write_parquet(folder / "tables" / f"{table.name}.parquet", pa.Table.from_pylist(list(table.rows)))
            write_text(folder / "tables" / f"{table.name}.md", table.markdown())
        write_text(folder / "report.md", self.markdown())
        write_json(folder / "paper.json", self.as_json())


def run_paper(
    config: PaperConfig,
    output: str | Path | AnyPath,
    *,
    address: str | None = None,
    on_outcome: Callable[[Outcome, int, int], None] = lambda outcome, place, of: None,
) -> Paper:
    """Measure all that a config names, and write tables, figures and a report into a folder.

    Args:
        config: what to measure. Each entry is a task on Ray, which reads the logits by their path.
        output: a folder, local or a URI: new, or that of an earlier run, whose values are kept in tasks/ by what they
            depend on, and not measured again.
        address: of a Ray cluster; without one as ray_session() takes it.
        on_outcome: called with what came of each task, its number and how many there are.

    Returns:
        The tables and figures, and what is missing: a task that fails does not keep the others from their tables.

    Raises:
        CaucError: ConfigError where a folder is missing or cannot be made or matplotlib is missing, ExecutionError
            where Ray cannot be reached.
    """
    started = time.perf_counter()
    require_packages("a plot", "reports", "matplotlib")
    require_methods(config.methods)
    tasks, not_run = plan_of(config)
    require_apart(output, *config.reads())
    folder = path_of(output)
    # What is timed has the machine to itself.
    rounds = [[task for task in tasks if (task.part == "setup-time") is is_timed] for is_timed in (False, True)]
    in_order = run_kept(folder, "paper", rounds, deadline_s=config.deadline_s, address=address, on_outcome=on_outcome)
    values = {(each.task.part, each.task.name): each.value for each in in_order if each.error is None}
    found = {
        part: [(entry, values[part, entry.name]) for entry in entries if (part, entry.name) in values]
        for part, entries in config.parts.items()
    }
    paper = Paper(
        config=config,
        tables=tuple(table_of(name, found[name]) for name in config.tables.by_name if found[name]),
        figures=tuple(draw_figures(found, folder / "figures")),
        not_run=not_run | _methods_not_run(found),
        failed=tuple(f"{each.task}: {each.error}" for each in in_order if each.error is not None),
        warned=tuple(f"{each.task}: {warning}" for each in in_order for warning in each.warnings),
        seconds=time.perf_counter() - started,
    )
    paper.save(folder)
    return paper


def _methods_not_run(found: Found) -> dict[str, str]:
    """Return by name the methods that a comparison left out, and the others of the paper's tables, and why."""
    not_run: dict[str, str] = {}
    for part in COMPARED:
        comparisons = [comparison_of(value) for _, value in found[part]]
        absent = {each["method"]: each["why"] for comparison in comparisons for each in comparison.not_run}
        not_run |= {f"method {paper_name(method)}": why for method, why in absent.items()}
        seen = {row["method"] for comparison in comparisons for row in comparison.rows} | set(absent)
        for method in dict.fromkeys(method for rows in columns_of(part).values() for method in rows if comparisons):
            if not method.startswith(SINGLE) and not any(m == method or m.startswith(f"{method}-") for m in seen):
                not_run[f"{part} / {paper_name(method)}"] = "the method was not run"
    return not_run


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []
