"""What a file or folder that cauc-ray writes or reads holds: the Python side of `cauc show`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cauc_ray.data.logits import FAILED, LogitTable
from cauc_ray.errors import CaucError, DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import count_rows, open_parquet, parquet_files
from cauc_ray.models.pool import load_pool
from cauc_ray.policies.policy import Policy

# By the columns that a table of the kind has; the first that fits.
_TABLES = {
    "predictions": {"example_id", "prediction", "confidence", "stage", "cost"},
    "ledger": {"run_id", "stage", "replica", "started_at", "batch", "accepted", "deferred"},
    "failed rows": {"example_id", "stage", "reason"},
    "comparison": {"method", "paradigm", "accuracy", "setup_s"},
    "curves of a comparison": {"method", "setting", "validation_accuracy", "accuracy", "cost"},
    "summary of a sweep": {"method", "budget", "accuracy_mean", "accuracy_std"},
    "sweep": {"method", "threshold", "validation_accuracy", "accuracy", "cost"},
    "logits": {"example_id", "label", "logits"},
    "embeddings": {"example_id", "embedding"},
    "input": {"example_id"},
}
# Of a folder that holds several things, so many are named.
_MOST = 50


def contents(path: str | Path) -> dict[str, Any]:
    """Return what a file or folder holds: its kind, its path, and what there is to know of that kind.

    Kinds: policy, pool, logit table, run, sweep, comparison, paper, the tables of these, and a folder with any of them.
    Raises CaucError for anything else.
    """
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    if path.suffix == ".json":
        return _document(path)
    if path.suffix in (".yaml", ".yml"):
        return _pool(path)
    if path.suffix == ".parquet":
        return _table(path)
    raise DataError(
        f"{path} is not a file of cauc-ray: a policy (.json), a pool (.yaml), a Parquet file, a logit table or the "
        "folder of a run, a sweep or a comparison was expected"
    )


def _folder(path: Path) -> dict[str, Any]:
    for name in ("summary.json", "comparison.json", "paper.json"):
        if (path / name).is_file():
            return {**_document(path / name), "path": str(path)}
    if any(path.glob("model=*")) or any(path.glob("embedding=*")):
        return _logit_table(path)
    if (path / "run.json").is_file():
        return {"kind": "run", "path": str(path), "state": "not finished; --resume continues it"}
    parts = [each for each in path.iterdir() if not each.name.startswith((".", "_"))]
    if parts and all(each.suffix == ".parquet" for each in parts):
        return _table(path, len(parts))
    found = [named for each in sorted(path.iterdir()) if (named := _named(each)) is not None]
    if not found:
        raise DataError(f"{path} holds nothing of cauc-ray")
    return {"kind": "folder", "path": str(path), "holds": found[:_MOST]}


def _named(path: Path) -> str | None:
    """Return a file's name and kind, None where it is not ours."""
    try:
        return f"{path.name}: {contents(path)['kind']}"
    except (CaucError, OSError):
        return None


def _policy(path: Path) -> dict[str, Any]:
    policy = Policy.load(path)
    return {"kind": "policy", "path": str(path), "policy_id": policy.id, **policy.model_dump(mode="json")}


def _run(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "run", **content}


def _sweep(content: Mapping[str, Any]) -> dict[str, Any]:
    counts = {key: value for key, value in content.items() if key.startswith("n_")}
    return {"kind": "sweep by tasks", **counts, "missing": content["missing"]}


def _comparison(content: Mapping[str, Any]) -> dict[str, Any]:
    rows = [
        f"{row['method']}: accuracy {100 * row['accuracy']:.2f} % at {row['cost']:.4g} {content['cost_unit']}"
        for row in content["rows"]
    ]
    about = {key: content[key] for key in ("models", "n", "budget", "cost_unit")}
    return {"kind": "comparison", **about, "rows": rows}


def _paper(content: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "paper", "tables": sorted(content["tables"]), "failed": content["failed"]}


# By keys that a document of the kind has, what describes it.
_DOCUMENTS: Mapping[frozenset[str], Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    frozenset({"run_id", "stages"}): _run,
    frozenset({"n_rows", "n_ok", "missing"}): _sweep,
    frozenset({"rows", "conventions", "fingerprints"}): _comparison,
    frozenset({"tables", "figures", "failed"}): _paper,
}


def _document(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except DataError:
        content = None  # the errors below say what was expected
    if isinstance(content, dict):
        for keys, describe in _DOCUMENTS.items():
            if keys <= content.keys():
                return {**describe(content), "path": str(path)}
        if path.name == "pool.json" and "models" in content:
            return _logit_table(path.parent)
    if path.name == "summary.json":
        raise DataError(f"{path} is not the summary of a run or a sweep")
    return _policy(path)


def _pool(path: Path) -> dict[str, Any]:
    pool = load_pool(path)
    stages = [
        f"{s.name}: {s.model.kind}, batches of {s.batch_size}, {s.replicas.min}-{s.replicas.max} replicas"
        for s in pool.stages
    ]
    return {"kind": "pool", "path": str(path), "name": pool.name, "task": pool.task, "stages": stages}


def _logit_table(path: Path) -> dict[str, Any]:
    table = LogitTable(path)
    info = table.info
    about = {} if info is None else {"cost_unit": info.cost_unit, "logit_kind": info.logit_kind, "note": info.note}
    parts = {
        "models": _rows_by_split(path, "model"),
        "failed": _rows_by_split(path / FAILED, "model"),
        "embeddings": _rows_by_split(path, "embedding"),
    }
    return {"kind": "logit table", "path": str(path), **about, **{name: rows for name, rows in parts.items() if rows}}


def _rows_by_split(path: Path, kind: str) -> list[str]:
    """Return for each model (or encoder) how many rows it has in each split."""
    found = []
    for folder in sorted(path.glob(f"{kind}=*")):
        sizes = []
        for split in sorted(folder.glob("split=*")):
            n = sum(count_rows(file) for file in parquet_files(split))
            sizes.append(f"{split.name.partition('=')[2]} {n:,}")
        found.append(f"{folder.name.partition('=')[2]}: {', '.join(sizes)}")
    return found


def _table(path: Path, n_files: int = 1) -> dict[str, Any]:
    n, columns, metadata = 0, list[str](), dict[bytes, bytes]()
    for file in parquet_files(path):
        with open_parquet(file) as opened:
            n += opened.metadata.num_rows
            columns, metadata = opened.schema_arrow.names, opened.schema_arrow.metadata or {}
    kind = next((kind for kind, needed in _TABLES.items() if needed <= set(columns)), "Parquet")
    about = {
        key.decode(): value.decode() for key, value in metadata.items() if key in (b"cost_unit", b"models", b"split")
    }
    return {"kind": kind, "path": str(path), "rows": n, "files": n_files, "columns": json.dumps(columns), **about}
