"""A run: what can be measured of a config, as tasks on Ray; tables and figures of their values in one folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from cauc_ray.api.offline import require_apart
from cauc_ray.api.tables import Grid
from cauc_ray.comparison.published import paper_name, published
from cauc_ray.comparison.selection import require_methods
from cauc_ray.comparison.tasks import run_stored
from cauc_ray.data.logits import LogitTable, encoders
from cauc_ray.errors import ConfigError, DataError, require_packages, unknown_name
from cauc_ray.execution.outcomes import Outcome, Task
from cauc_ray.files.documents import make_folder, write_json, write_text
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath, content_digest, path_of
from cauc_ray.paper.config import COMPARED, Chain, ComparedChain, Entry, PaperConfig
from cauc_ray.paper.figures import Drawn, Found, draw_figures
from cauc_ray.paper.measured import comparison_of, measure
from cauc_ray.paper.quoted import columns_of
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
        there = [each for each in entries if isinstance(each, Chain) and _missing(config.logits, each) is None]
        shown = {entry.published for entry in there if not entry.surrogates(config.logits)}
        for column in columns_of(part):
            if any(entry.published == column for entry in there) and column not in shown:
                not_run[f"{part} / {column}"] = "the only logits of it here are surrogates"
            elif not any(entry.published == column for entry in entries if isinstance(entry, Chain)):
                not_run[f"{part} / {column}"] = "no logit table of it is configured"
    return tasks, not_run


def status_page(config: PaperConfig, not_run: Mapping[str, str]) -> str:
    """Return a page that lists every table and figure of the paper with its status.   not_run: as plan_of() has it."""
    lines = []
    for item in CONTENTS["status"]["items"]:
        part = item.get("part", "")
        made = [entry.name for entry in config.parts.get(part, ()) if f"{part} / {entry.name}" not in not_run]
        missing: dict[str, list[str]] = {}
        for what, why in not_run.items():
            if what.startswith(f"{part} / "):
                missing.setdefault(why, []).append(what.removeprefix(f"{part} / "))
        notes = [f"{'; '.join(names)}: {why}" for why, names in missing.items()] + [item.get("note", "")]
        status = "made" if made else "not made" if part else "–"
        made_from, own = "; ".join(made) or "–", item.get("own", "–")
        lines.append((item["paper"], item["shows"], status, made_from, own, ". ".join(filter(None, notes)) or "–"))
    grid = Grid("Status", tuple(CONTENTS["status"]["headings"]), tuple(lines), n_left=6)
    return f"{CONTENTS['status']['head'].strip()}\n\n{grid.markdown().strip()}\n"


def _missing(root: AnyPath, entry: Entry) -> str | None:
    """Return what of an entry is missing, None where nothing is."""
    try:
        table = LogitTable(root / entry.set)
    except DataError as error:
        return str(error)
    for model in entry.wanted or table.models:
        if model not in table.models:
            return f"{table.path}: {unknown_name('model', model, table.models)}"
        if entry.split not in table.splits(model):
            return f"{table.path}: model {model!r}: {unknown_name('split', entry.split, table.splits(model))}"
    encoder = entry.embedding if isinstance(entry, ComparedChain) else None
    if encoder is not None and encoder not in encoders(table.path):
        return f"{table.path}: {unknown_name('encoder', encoder, encoders(table.path))}"
    return None


@dataclass(frozen=True, slots=True)
class Paper:
    """What a run made.

    not_run: entries, columns of tables and methods that are not measured, and why.   failed: tasks that have no value,
    and why, in one line each.   warned: what tasks warned of.   status: a page on every table and figure of the paper.
    seconds: of it all.
    """

    config: PaperConfig
    tables: tuple[PaperTable, ...]
    figures: tuple[Drawn, ...]
    not_run: dict[str, str]
    failed: tuple[str, ...]
    warned: tuple[str, ...]
    status: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return all numbers of the tables, what the figures show, and what is missing."""
        return {
            "source": published()["source"],
            "config": self.config.model_dump(mode="json", by_alias=True),
            "seconds": self.seconds,
            "tables": {table.name: list(table.rows) for table in self.tables},
            "headlines": {table.name: list(table.headlines) for table in self.tables if table.headlines},
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
        """Write the tables as Parquet and Markdown, report.md, status.md and paper.json into a folder."""
        make_folder(folder / "tables")
        for table in self.tables:
            write_parquet(folder / "tables" / f"{table.name}.parquet", pa.Table.from_pylist(list(table.rows)))
            write_text(folder / "tables" / f"{table.name}.md", table.markdown())
        write_text(folder / "report.md", self.markdown())
        write_text(folder / "status.md", self.status)
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
    in_order = run_stored(
        folder,
        "paper",
        rounds,
        on_ray=True,
        deadline_s=config.deadline_s,
        address=address,
        on_outcome=on_outcome,
    )
    values = {(each.task.part, each.task.name): each.value for each in in_order if each.error is None}
    found = {
        part: [(entry, values[part, entry.name]) for entry in entries if (part, entry.name) in values]
        for part, entries in config.parts.items()
    }
    lost = {
        f"{each.task.part} / {each.task.name}": f"failed: {each.error}" for each in in_order if each.error is not None
    }
    paper = Paper(
        config=config,
        tables=tuple(table_of(name, found[name], config.logits) for name in config.tables.by_name if found[name]),
        figures=tuple(draw_figures(found, folder / "figures", config.logits)),
        not_run=not_run | _methods_not_run(found),
        failed=tuple(f"{each.task}: {each.error}" for each in in_order if each.error is not None),
        warned=tuple(f"{each.task}: {warning}" for each in in_order for warning in each.warnings),
        status=status_page(config, not_run | lost),
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
