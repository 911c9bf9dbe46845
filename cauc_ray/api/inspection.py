"""Recognise the files of cauc-ray and say what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cauc_ray.data.logits import FAILED, LogitTable
from cauc_ray.errors import DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import count_rows, open_parquet, parquet_files
from cauc_ray.models.pool import load_pool
from cauc_ray.policies.policy import Policy

_PARQUET_KINDS = {
    "predictions": {"example_id", "prediction", "confidence", "stage", "cost"},
    "ledger": {"run_id", "stage", "replica", "started_at", "batch", "accepted", "deferred"},
    "failed rows": {"example_id", "stage", "reason"},
    "comparison": {"method", "paradigm", "accuracy", "setup_s"},
    "curves of a comparison": {"method", "setting", "validation_accuracy", "accuracy", "cost"},
    "sweep": {"method", "threshold", "validation_accuracy", "accuracy", "cost"},
    "logits": {"example_id", "label", "logits"},
    "input": {"example_id"},
}


def inspect_path(path: str | Path) -> dict[str, Any]:
    """Say what a policy, pool, logit table, run output or Parquet file of cauc-ray holds.

    Returns a mapping with kind, path and what that kind has to tell. Raises CaucError for anything else.
    """
    path = Path(path)
    if path.is_dir():
        if (path / "summary.json").is_file():
            summary = read_json(path / "summary.json")
            if isinstance(summary, dict) and "run_id" in summary:
                return {"kind": "run", "path": str(path), **summary}
            if isinstance(summary, dict) and {"n_rows", "n_ok", "missing"} <= summary.keys():
                counts = {key: value for key, value in summary.items() if key.startswith("n_")}
                return {"kind": "budget sweep", "path": str(path), **counts, "missing": summary["missing"]}
            raise DataError(f"{path / 'summary.json'} is not the summary of a run")
        if any(path.glob("model=*")):
            return _logit_table(path)
        return _parquet(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    if path.suffix == ".json":
        policy = Policy.load(path)
        return {"kind": "policy", "path": str(path), "policy_id": policy.id, **policy.model_dump(mode="json")}
    if path.suffix in (".yaml", ".yml"):
        pool = load_pool(path)
        stages = [
            f"{s.name}: {s.model.kind}, batches of {s.batch_size}, {s.replicas.min}-{s.replicas.max} replicas"
            for s in pool.stages
        ]
        return {"kind": "pool", "path": str(path), "name": pool.name, "task": pool.task, "stages": stages}
    if path.suffix == ".parquet":
        return _parquet(path)
    raise DataError(
        f"{path} is none of a policy (.json), a pool (.yaml), a Parquet file, a logit table or a run's folder"
    )


def _logit_table(path: Path) -> dict[str, Any]:
    table = LogitTable(path)
    info = table.info
    about = {} if info is None else {"cost_unit": info.cost_unit, "logit_kind": info.logit_kind, "note": info.note}
    parts = {"models": path, "failed": path / FAILED, "embeddings": path}
    kinds = {"models": "model", "failed": "model", "embeddings": "embedding"}
    rows = {name: _rows_by_split(parts[name], kinds[name]) for name in parts}
    return {"kind": "logit table", "path": str(path), **about, **{name: told for name, told in rows.items() if told}}


def _rows_by_split(path: Path, kind: str) -> list[str]:
    """Say how many rows each model (or encoder) has in each split."""
    told = []
    for folder in sorted(path.glob(f"{kind}=*")):
        sizes = []
        for split in sorted(folder.glob("split=*")):
            n = sum(count_rows(file) for file in parquet_files(split))
            sizes.append(f"{split.name.partition('=')[2]} {n:,}")
        told.append(f"{folder.name.partition('=')[2]}: {', '.join(sizes)}")
    return told


def _parquet(path: Path) -> dict[str, Any]:
    n, files = 0, parquet_files(path)
    columns: list[str] = []
    metadata: dict[bytes, bytes] = {}
    for file in files:
        with open_parquet(file) as opened:
            n += opened.metadata.num_rows
            columns = opened.schema_arrow.names
            metadata = opened.schema_arrow.metadata or {}
    kind = next((kind for kind, needed in _PARQUET_KINDS.items() if needed <= set(columns)), "Parquet")
    told = {
        key.decode(): value.decode() for key, value in metadata.items() if key in (b"cost_unit", b"models", b"split")
    }
    return {"kind": kind, "path": str(path), "rows": n, "files": len(files), "columns": json.dumps(columns), **told}
