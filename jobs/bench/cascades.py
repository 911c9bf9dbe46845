"""Cascades whose deferral is planted: rows, a policy for them, pools and inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import cauc_ray
from cauc_ray.data.table_info import PoolModel, TableInfo, write_info
from cauc_ray.data.writing import write_logits
from cauc_ray.files.documents import write_text
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy

# How far a model's logit for option 0 is from option 1, and how often its answer is right, on rows that are
# easy and hard for it: each gap is the log odds of being right, so that temperatures come out near 1, and the
# threshold lies far from both confidences, also where RF adds an easy gap and hard ones of the other sign.
EASY_GAP, EASY_RIGHT = 3.5, 0.97
HARD_GAP, HARD_RIGHT = 0.4, 0.6
THRESHOLD = 0.8
CALIBRATION_ROWS = 4000

# As a pool file has it.
Stage: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlantedRows:
    """Rows of which a chain defers planted shares.

    gaps: float32 (N, M), each model's logit of option 0 where option 1 has 0.   labels: int32 (N,), 0 or 1.
    """

    gaps: Floats
    labels: Ints

    def columns(self) -> dict[str, Any]:
        """Return the input's columns: example_id, label, and the gaps as gap0, gap1 and so on."""
        n, m = self.gaps.shape
        ids = np.char.add("row-", np.arange(n).astype(str)).astype(object)
        return {"example_id": ids, "label": self.labels} | {f"gap{j}": self.gaps[:, j] for j in range(m)}


def planted_rows(rng: np.random.Generator, n: int, deferral: Sequence[float]) -> PlantedRows:
    """Plant n rows of which each stage but the last defers a share of those that reach it, as exactly as n allows."""
    labels = rng.integers(0, 2, n).astype(np.int32)
    reached = np.full(n, True)
    gaps = []
    for share in (*deferral, 0.5):
        hard = rng.random(n) < share
        rows = np.flatnonzero(reached)
        hard[rows] = rng.permutation(len(rows)) < round(share * len(rows))
        right = rng.random(n) < np.where(hard, HARD_RIGHT, EASY_RIGHT)
        gaps.append(np.where(hard, HARD_GAP, EASY_GAP) * np.where(right == (labels == 0), 1.0, -1.0))
        reached &= hard
    return PlantedRows(np.stack(gaps, axis=1).astype(np.float32), labels)


def write_table(path: Path, models: Mapping[str, float], deferral: Sequence[float], **splits: PlantedRows) -> Policy:
    """Write planted rows as a logit table and fit CAUC-RF on as many calibration rows of their own.

    models: the cost of each, cheapest first.   splits: further splits of the table, by name.
    """
    calibration = planted_rows(np.random.default_rng(1), CALIBRATION_ROWS, deferral)
    for split, rows in {"calibration": calibration, **splits}.items():
        logits = [np.stack([gaps, np.zeros_like(gaps)], axis=1) for gaps in rows.gaps.T]
        write_split(path, models, split, rows.columns()["example_id"], rows.labels, logits)
    return cauc_ray.fit(path, models=list(models), method="rf", threshold=THRESHOLD)


def write_split(
    path: Path, models: Mapping[str, float], split: str, ids: Sequence[str], labels: Ints, logits: Sequence[Floats]
) -> None:
    """Write a split of a logit table.   logits: of each model, (N, K)."""
    for model, own in zip(models, logits, strict=True):
        write_logits(path, model, split, example_ids=ids, labels=labels, logits=own)
    listed = [PoolModel(name=name, cost=cost) for name, cost in models.items()]
    write_info(path, TableInfo(cost_unit="s", logit_kind="raw", models=listed))


def stage(name: str, model: Mapping[str, Any], batch: int, *, replicas: int = 1, num_cpus: float = 0.1) -> Stage:
    """Return a stage of a pool file.   model: as the file has it."""
    return {
        "name": name,
        "model": dict(model),
        "batch_size": batch,
        "replicas": {"min": replicas, "max": replicas},
        "resources": {"num_cpus": num_cpus},
    }


def column_model(place: int, **seconds: float) -> dict[str, Any]:
    """Return a model that answers from its column of planted rows.   seconds: per_call and per_row, that it takes."""
    kwargs = {"column": f"gap{place}", **{f"seconds_{name}": value for name, value in seconds.items()}}
    return {"kind": "python", "factory": "jobs.bench.models:from_column", "kwargs": kwargs}


def write_pool(path: Path, stages: Sequence[Stage], task: str = "multiple-choice", **settings: Any) -> Path:
    """Write a pool file.   settings: what it says next to its stages."""
    write_text(path, yaml.safe_dump({"name": "bench", "task": task, "stages": list(stages), **settings}))
    return path


def write_input(
    path: Path, columns: Mapping[str, Any], *, files: int = 1, row_group_size: int = 8192, **options: Any
) -> Path:
    """Write an input's columns to so many Parquet files in a folder, with row groups that a reader can take whole.

    options: of pyarrow.parquet.write_table.
    """
    path.mkdir()
    table = pa.table(dict(columns))
    for number, rows in enumerate(np.array_split(np.arange(table.num_rows), files)):
        part = table.slice(int(rows[0]), len(rows))
        pq.write_table(part, path / f"part-{number:04d}.parquet", row_group_size=row_group_size, **options)
    return path
