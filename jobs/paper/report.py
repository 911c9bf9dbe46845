"""A run: every table and figure whose data are there, and a report of what was made and what is missing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from cauc_ray.api.offline import require_apart
from cauc_ray.comparison.published import paper_name, published
from cauc_ray.comparison.result import Comparison
from cauc_ray.comparison.selection import require_methods
from cauc_ray.errors import CaucError, ConfigError, GuardWarning, require_packages
from cauc_ray.files.documents import make_folder, write_json, write_text
from cauc_ray.files.parquet import write_parquet
from cauc_ray.policies.by_method import SINGLE
from jobs.paper.config import COMPARED, Chain, Entry, PaperConfig, ReliabilityFigure, published_columns
from jobs.paper.figures import PaperFigure, draw_gains, draw_reliability
from jobs.paper.measured import (
    MeasuredChain,
    OnCell,
    compare_chains,
    comparison_folder,
    fusion_gains,
    measured_chains,
    reliability,
)
from jobs.paper.tables import CONTENTS, PaperTable, surrogate_notes, table_of


@dataclass(slots=True)
class Paper:
    """The tables and figures of a config.

    Attributes:
        config: The config.
        tables: Its tables that have figures.
        figures: Its figures.
        not_run: Entries, columns of tables and methods that are not measured, and why.
        failed: Parts and methods that failed, and why.
        seconds: Of the whole run.
    """

    config: PaperConfig
    tables: list[PaperTable] = field(default_factory=list)
    figures: list[PaperFigure] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return all numbers of the tables, the captions of figures, and what is missing."""
        return {
            "source": published()["source"],
            "config": self.config.model_dump(mode="json", by_alias=True),
            "seconds": self.seconds,
            "tables": {table.name: list(table.rows) for table in self.tables},
            "headlines": {table.name: list(table.headlines) for table in self.tables if table.headlines},
            "figures": [{"image": figure.image, "caption": figure.caption} for figure in self.figures],
            "not_run": [{"what": what, "why": why} for what, why in self.not_run.items()],
            "failed": self.failed,
        }

    def markdown(self) -> str:
        """Return the report, for a file in the output."""
        parts = [CONTENTS["head"].strip().format(source=published()["source"]), *_section("Failed", self.failed)]
        parts += [table.markdown() for table in self.tables]
        for figure in self.figures:
            parts += [f"## {figure.title}", f"![{figure.title}]({figure.image})", figure.caption]
        parts += _section("Not run here", [f"{what}: {why}" for what, why in self.not_run.items()])
        return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"

    def save(self) -> None:
        """Write the tables as Parquet and Markdown, report.md and paper.json into the output."""
        folder = self.config.output
        make_folder(folder / "tables")
        for table in self.tables:
            write_parquet(folder / "tables" / f"{table.name}.parquet", pa.Table.from_pylist(list(table.rows)))
            write_text(folder / "tables" / f"{table.name}.md", table.markdown())
        write_text(folder / "report.md", self.markdown())
        write_json(folder / "paper.json", self.as_json())


def make_paper(config: PaperConfig, on_cell: OnCell = lambda outcome, index, of: None) -> Paper:
    """Measure all that a config names, and write tables, figures and a report into its output.

    Args:
        config: The config. Its output keeps finished cells of comparisons, which are not measured again.
        on_cell: Called as by compare(), in each table.

    Returns:
        The tables and figures, and what is missing: a table that fails does not keep the others from being made.

    Raises:
        ConfigError: The folder of sets or matplotlib is missing, a method is unknown, or the output holds inputs.
    """
    started = time.perf_counter()
    if not config.logits.is_dir():
        raise ConfigError(f"{config.logits} is not a folder of logit tables; name one with logits:")
    require_packages("a plot", "reports", "matplotlib")
    require_methods(config.methods)
    require_apart(config.output, config.logits)
    paper = Paper(config)
    with ExitStack() as session:
        # Tables show a method on every chain, also where a policy of it would disappoint.
        session.enter_context(warnings.catch_warnings(action="ignore", category=GuardWarning))
        if config.address is not None:
            from cauc_ray.execution.session import ray_session

            session.enter_context(ray_session(config.address, 1))  # one for all comparisons
        for part, entries in config.parts.items():
            obstacles = {entry.name: entry.obstacle(config.logits) for entry in entries}
            paper.not_run |= {f"{part} / {name}": why for name, why in obstacles.items() if why is not None}
            present = [entry for entry in entries if obstacles[entry.name] is None]
            try:
                _make(paper, part, present, on_cell)
            except CaucError as error:
                paper.failed.append(f"{part}: {error}")
            paper.not_run |= dict(_columns_not_run(part, entries, present, config))
    paper.seconds = time.perf_counter() - started
    paper.save()
    return paper


def _make(paper: Paper, part: str, entries: Sequence[Entry], on_cell: OnCell) -> None:
    """Make a table or figure of those of its entries whose data are there."""
    config = paper.config
    if part in config.tables.by_name:
        _make_table(paper, part, [entry for entry in entries if isinstance(entry, Chain)], on_cell)
    elif part == "complementarity-gain":
        rows = [row for entry in entries for row in fusion_gains(config, entry)]
        if rows:
            paper.figures.append(_with_banner(draw_gains(rows, config.output), entries, config))
    for entry in entries:
        if isinstance(entry, ReliabilityFigure):
            figure = draw_reliability(entry, reliability(config, entry), config.output)
            paper.figures.append(_with_banner(figure, [entry], config))


def _make_table(paper: Paper, part: str, chains: Sequence[Chain], on_cell: OnCell) -> None:
    """Make a table of chains; for tables of all methods, also the figures of accuracy over cost."""
    config, measured = paper.config, list[MeasuredChain]()
    comparisons = []
    for number, (group, comparison) in enumerate(compare_chains(config, part, chains, on_cell), start=1):
        comparisons.append(comparison)
        measured += measured_chains(group, comparison)
        failures = [entry for entry in comparison.not_run if entry["why"].startswith("failed: ")]
        paper.failed += [f"{part}, {entry['set']}: {entry['method']}: {entry['why'][8:]}" for entry in failures]
        if part in COMPARED:
            image = f"comparisons/{comparison_folder(config, part, number).name}/accuracy-cost.png"
            about = CONTENTS["titles"]["accuracy-cost"].format(table=CONTENTS["titles"][part])
            figure = PaperFigure(about, image, CONTENTS["captions"]["accuracy-cost"].strip())
            paper.figures.append(_with_banner(figure, group, config))
    in_order = sorted(measured, key=lambda of: chains.index(of.chain))
    if in_order:
        paper.tables.append(table_of(part, in_order, config))
    if part in COMPARED and comparisons:
        paper.not_run |= _methods_not_run(part, comparisons)


def _with_banner(figure: PaperFigure, entries: Iterable[Entry], config: PaperConfig) -> PaperFigure:
    banner = surrogate_notes(model for entry in entries for model in entry.surrogates(config.logits))
    return replace(figure, caption=" ".join([figure.caption, *banner]))


def _columns_not_run(
    part: str, entries: Sequence[Entry], present: Sequence[Entry], config: PaperConfig
) -> Iterator[tuple[str, str]]:
    """Yield the columns of the paper's table that no chain is compared with, and why."""
    configured = {entry.published: entry for entry in entries if isinstance(entry, Chain)}
    compared = {e.published for e in present if isinstance(e, Chain) and not e.surrogates(config.logits)}
    for column in published_columns(part):
        if column not in configured:
            yield f"{part} / {column}", "no logit table of it is configured"
        elif column not in compared and configured[column] in present:
            yield f"{part} / {column}", "the only logits of it here are surrogates"


def _methods_not_run(part: str, comparisons: Sequence[Comparison]) -> dict[str, str]:
    """Return by name the methods that a comparison left out, and the others of the paper's table, and why."""
    left_out = {entry["method"]: entry["why"] for comparison in comparisons for entry in comparison.not_run}
    not_run = {f"method {paper_name(method)}": why for method, why in left_out.items()}
    measured = {row["method"] for comparison in comparisons for row in comparison.rows} | set(left_out)
    for method in dict.fromkeys(method for rows in published_columns(part).values() for method in rows):
        if not method.startswith(SINGLE) and not any(m == method or m.startswith(f"{method}-") for m in measured):
            not_run[f"{part} / {paper_name(method)}"] = "the method was not run"
    return not_run


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []
