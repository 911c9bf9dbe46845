"""The contents of a file or folder that cauc-ray writes or reads: `cauc show` loads them and prints them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from cauc_ray.api.summaries import RunSummary
from cauc_ray.comparison.result import Comparison
from cauc_ray.data.logits import FAILED, LogitTable
from cauc_ray.display import Figures, Grid, Sheet, Shown, count_text
from cauc_ray.errors import CaucError, DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import count_rows, parquet_files, read_footer
from cauc_ray.files.paths import AnyPath, hive_values, visible
from cauc_ray.models.pool import Pool, Replicas, load_pool
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.policy_sheet import shared_prompts

# By the columns that a table of the kind has; the first that fits.
_TABLES = {
    "predictions": {"example_id", "prediction", "confidence", "stage", "cost"},
    "ledger": {"run_id", "stage", "replica", "started_at", "batch", "accepted", "deferred"},
    "failed rows": {"example_id", "stage", "reason"},
    "comparison": {"method", "paradigm", "accuracy", "setup_s"},
    "curves of a comparison": {"method", "setting", "validation_accuracy", "accuracy", "cost"},
    "summary of a comparison": {"method", "budget", "accuracy_mean", "accuracy_std"},
    "logits": {"example_id", "label", "logits"},
    "embeddings": {"example_id", "embedding"},
    "input": {"example_id"},
}
# Most entries of a folder that are named.
_MOST = 50


class Result(Protocol):
    """A result that prints itself."""

    def sheet(self) -> Sheet:
        """Return its display."""

    def as_json(self) -> dict[str, Any]:
        """Return its figures."""


class Listing(Figures):
    """Properties of a file or folder by name; a list has a line for each entry."""

    __slots__ = ()

    def sheet(self) -> Sheet:
        """Return the properties, a row each."""
        rows = [(name, "\n".join(map(str, at)) if isinstance(at, list) else str(at)) for name, at in self.items()]
        return Sheet("", [Grid("", (), tuple(rows), texts=(1,))] if rows else [])


@dataclass(frozen=True, slots=True, repr=False)
class Contents(Shown):
    """A file or folder, its kind, and the result that it holds."""

    kind: str
    path: AnyPath
    result: Result

    def as_json(self) -> dict[str, Any]:
        """Return the kind, the path, and the figures of the result."""
        return {**self.result.as_json(), "kind": self.kind, "path": str(self.path)}

    def sheet(self) -> Sheet:
        """Return the display of the result."""
        sheet = self.result.sheet()
        return sheet if sheet.title else Sheet(f"{self.path}: {self.kind}", sheet.parts)


def contents(path: AnyPath, *, depth: int = 2) -> Contents:
    """Load what a file or folder holds.

    Kinds: policy, pool, logit table, run, comparison, the tables of these, and a folder with any of them.

    Args:
        path: The file or folder.
        depth: Levels of folders in which these are looked for.

    Raises:
        CaucError: It holds anything else.
    """
    if path.is_dir():
        return _folder(path, depth)
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    if path.suffix == ".json":
        return _document(path)
    if path.suffix in (".yaml", ".yml"):
        return Contents("pool", path, _pool(load_pool(path)))
    if path.suffix == ".parquet":
        return _table(path)
    raise DataError(
        f"{path} is not a file of cauc-ray: a policy (.json), a pool (.yaml), a Parquet file, a logit table or the "
        "folder of a run or a comparison was expected"
    )


def _folder(path: AnyPath, depth: int) -> Contents:
    for name in ("summary.json", "comparison.json"):
        if (path / name).is_file():
            return _document(path / name)
    if hive_values(path, "model") or hive_values(path, "embedding"):
        return _logit_table(path)
    if (path / "run.json").is_file():
        return Contents("run", path, Listing(state="not finished; --resume continues it"))
    entries = visible(path)
    if entries and all(entry.suffix == ".parquet" for entry in entries):
        return _table(path)
    held = []
    for entry in entries if depth else ():
        with suppress(CaucError, OSError):  # not ours
            held.append(f"{entry.name}: {contents(entry, depth=depth - 1).kind}")
    if not held:
        raise DataError(f"{path} holds nothing of cauc-ray")
    return Contents("folder", path, Listing(holds=held[:_MOST]))


def _document(path: AnyPath) -> Contents:
    """Load a JSON file, by the keys that documents of a kind have."""
    content: Any = None
    with suppress(DataError):  # the errors below say what was expected
        content = read_json(path)
    keys = content.keys() if isinstance(content, dict) else set()
    if path.name == "summary.json" or keys >= {"run_id", "stages"}:
        return Contents("run", path, RunSummary.load(path))
    if keys >= {"rows", "conventions", "summary"}:
        return Contents("comparison", path, Comparison.load(path))
    if path.name == "pool.json" and "models" in keys:
        return _logit_table(path.parent)
    if isinstance(content, dict) and "format" not in keys:
        raise DataError(
            f"{path} is not a file of cauc-ray: a policy, or the summary of a run or a comparison was expected"
        )
    return Contents("policy", path, Policy.load(path))


def _pool(pool: Pool) -> Listing:
    stages = [f"{s.name}: {s.model.kind}, batches of {s.batch_size}, {_replicas_text(s.replicas)}" for s in pool.stages]
    prompts = shared_prompts({stage.name: stage.model.shown for stage in pool.stages})
    return Listing({"name": pool.name, "task": pool.task, "stages": stages, **prompts})


def _replicas_text(replicas: Replicas) -> str:
    most = count_text(replicas.max, "replica")
    return most if replicas.min == replicas.max else f"{replicas.min}-{most}"


def _logit_table(path: AnyPath) -> Contents:
    info = LogitTable(path).info
    about = {} if info is None else {"cost_unit": info.cost_unit, "logit_kind": info.logit_kind, "note": info.note}
    parts = {
        "models": _rows_by_split(path, "model"),
        "failed": _rows_by_split(path / FAILED, "model"),
        "embeddings": _rows_by_split(path, "embedding"),
    }
    prompts = shared_prompts({model.name: model.prompt for model in info.models} if info else {})
    held = {name: rows for name, rows in parts.items() if rows}
    return Contents("logit table", path, Listing({**about, **prompts, **held}))


def _rows_by_split(path: AnyPath, kind: str) -> list[str]:
    """Return for each model (or encoder) how many rows it has in each split."""
    lines = []
    for name in hive_values(path, kind) if path.is_dir() else ():
        folder = path / f"{kind}={name}"
        splits = {split: _n_rows(parquet_files(folder / f"split={split}")) for split in hive_values(folder, "split")}
        lines.append(f"{name}: {', '.join(f'{split} {n:,}' for split, n in splits.items())}")
    return lines


def _n_rows(files: Iterable[Any]) -> int:
    return sum(map(count_rows, files))


def _table(path: AnyPath) -> Contents:
    files = list(parquet_files(path))
    footers = [read_footer(file) for file in files]
    columns, metadata = footers[-1].schema.names, footers[-1].metadata.metadata or {}
    kind = next((kind for kind, needed in _TABLES.items() if needed <= set(columns)), "Parquet")
    about = {key.decode(): metadata[key].decode() for key in (b"cost_unit", b"models", b"split") if key in metadata}
    n = sum(footer.n_rows for footer in footers)
    return Contents(kind, path, Listing(rows=n, files=len(files), columns=json.dumps(columns), **about))
