"""The figures that the benchmark is judged by, and a file of them for each commit."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cauc_ray.display import Grid, number

SPECS: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["figure"]


def judged(parts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the figures of parts that something is asked of, or that a page shows.

    Args:
        parts: Figures by part, as the parts return them.
    """
    for spec in SPECS:
        for name, value in _found(parts.get(spec["part"], {}), spec["path"].split(".")):
            about = {key: asked for key, asked in spec.items() if key in ("part", "least", "most", "column")}
            about |= {"name": name} if "column" in spec else {}
            yield {**about, "what": f"{spec['what']} ({name})" if name else spec["what"], "measured": value}


def _found(figures: Any, path: list[str]) -> Iterator[tuple[str, float]]:
    """Yield the numbers at a path, each with the name that stands for its `*`."""
    if not path:
        yield "", float(figures)
    elif isinstance(figures, Mapping):
        names = list(figures) if path[0] == "*" else [path[0]]
        for name in names:
            for inner, value in _found(figures[name], path[1:]) if name in figures else ():
                yield (name if path[0] == "*" else inner), value


def grid(rows: list[dict[str, Any]]) -> Grid:
    """Return judged figures as a table."""
    lines = [(row["part"], row["what"], number(row["measured"]), _asked(row)) for row in rows]
    return Grid("", ("part", "figure", "measured", "asked"), tuple(lines), n_left=2, texts=(1,))


def by_name(rows: list[dict[str, Any]]) -> Grid:
    """Return judged figures that have a column as a table: a row for each name."""
    columns = tuple(dict.fromkeys(row["column"] for row in rows))
    cells = {(row["name"], row["column"]): number(row["measured"]) + ", missed" * _misses(row) for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    return Grid("", ("", *columns), tuple((name, *(cells.get((name, of), "") for of in columns)) for name in names))


def _misses(row: Mapping[str, Any]) -> bool:
    return not row.get("least", -math.inf) <= row["measured"] <= row.get("most", math.inf)


def _asked(row: Mapping[str, Any]) -> str:
    asked = [f"{sign} {number(row[key])}" for key, sign in (("least", "≥"), ("most", "≤")) if key in row]
    return "".join(asked) + ", missed" * _misses(row)


def save(folder: Path, parts: Mapping[str, Any]) -> Path:
    """Write the judged figures of parts into the file of this commit, next to those of other parts; return it."""
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    name = commit.stdout.strip() or "no-commit"
    path = folder / f"{name}.json"
    earlier = json.loads(path.read_text("utf-8"))["figures"] if path.is_file() else []
    earlier_rows = [row for row in earlier if row["part"] not in parts]
    saved = {"commit": name, "machine": machine(), "figures": [*earlier_rows, *judged(parts)]}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def machine() -> dict[str, Any]:
    """Return what a ratio may depend on: processor, cores, memory, Python."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text("utf-8").splitlines() if about.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9),
        "python": platform.python_version(),
    }
