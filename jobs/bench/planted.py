"""Synthetic examples, their logit tables, policies fitted on them, pools, inputs, and models that sleep."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import cauc_ray
from cauc_ray.data.writing import PoolModel, TableInfo, write_info, write_logits
from cauc_ray.errors import GuardWarning
from cauc_ray.files.documents import write_text
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy

# How far a model's logit for option 0 is from option 1, and how often its answer is right, on rows that are
# easy and hard for it: each gap is the log odds of being right, so that temperatures come out near 1, and the
# threshold lies far from both confidences, also where RF adds an easy gap and hard ones of the other sign.
EASY_GAP, EASY_RIGHT = 3.5, 0.97
HARD_GAP, HARD_RIGHT = 0.4, 0.6
THRESHOLD = 0.8
CALIBRATION_ROWS = 4000

# A stage of a pool file.
Stage: TypeAlias = dict[str, Any]
# A batch of Ray Data.
Columns: TypeAlias = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class SleepingStage:
    """A stage whose model sleeps.

    Attributes:
        name: Its name.
        batch: Rows of a batch.
        per_call: Seconds of a call.
        per_row: Seconds of a row.
        replicas: Number of replicas.
        cost: Cost of a row.
        deferral: Share of its rows that it defers.
    """

    name: str
    batch: int
    per_call: float = 0.0
    per_row: float = 0.0
    replicas: int = 1
    cost: float = 1.0
    deferral: float = 0.0


@dataclass(frozen=True, slots=True)
class PlantedRows:
    """Rows of which a chain defers planted shares.

    Attributes:
        gaps: Each model's logit of option 0 where option 1 has 0, float32 (N, M).
        labels: 0 or 1, int32 (N,).
    """

    gaps: Floats
    labels: Ints

    @property
    def logits(self) -> list[Floats]:
        """Return each model's logits, float32 (N, 2)."""
        return [np.stack([gaps, np.zeros_like(gaps)], axis=1) for gaps in self.gaps.T]

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


def planted_logits(
    rng: np.random.Generator, labels: Ints, k: int, strength: float, *, noise: float = 1.0, spread: float = 1.5
) -> Floats:
    """Return float32 logits (N, k): noise, and on the label strength, with a standard deviation of spread."""
    logits = np.float32(noise) * rng.standard_normal((len(labels), k), dtype=np.float32)
    logits[np.arange(len(labels)), labels] += rng.normal(strength, spread, len(labels)).astype(np.float32)
    return logits


def drawn_labels(logits: Mapping[str, Floats]) -> Ints:
    """Draw labels of rows from the models' own answers, (N, K) each: each model is right about as often."""
    rng = np.random.default_rng(1)
    chosen = np.stack([of_model.argmax(axis=1) for of_model in logits.values()])
    n = chosen.shape[1]
    labels: Ints = chosen[rng.integers(0, len(chosen), n), np.arange(n)].astype(np.int32)
    labels[rng.random(n) < 0.1] = 0
    return labels


def fit_deferring(logits: Mapping[str, Floats], labels: Ints, costs: Mapping[str, float], deferral: float) -> Policy:
    """Fit CAUC-RF with the threshold at which the first model defers a share of the rows; with none, its least."""
    with warnings.catch_warnings(action="ignore", category=GuardWarning):  # of random models
        fitted = cauc_ray.fit(logits, labels, costs=costs, method="rf", threshold=0.0)
        if not deferral:
            return fitted
        threshold = float(np.quantile(fitted.predict(logits).confidence, deferral))
        return cauc_ray.fit(logits, labels, costs=costs, method="rf", threshold=threshold)


def write_table(path: Path, models: Mapping[str, float], deferral: Sequence[float], **splits: PlantedRows) -> Policy:
    """Write planted rows as a logit table and fit CAUC-RF on as many calibration rows of their own.

    Args:
        path: The folder of the table.
        models: The cost of each, cheapest first.
        deferral: Share that each stage but the last defers.
        splits: Further splits of the table, by name.
    """
    calibration = planted_rows(np.random.default_rng(1), CALIBRATION_ROWS, deferral)
    for split, rows in {"calibration": calibration, **splits}.items():
        write_split(path, models, split, rows.columns()["example_id"], rows.labels, rows.logits)
    return cauc_ray.fit(path, models=list(models), method="rf", threshold=THRESHOLD)


def write_split(
    path: Path, models: Mapping[str, float], split: str, ids: Sequence[str], labels: Ints, logits: Sequence[Floats]
) -> None:
    """Write a split of a logit table, with logits of each model, (N, K)."""
    for model, of_model in zip(models, logits, strict=True):
        write_logits(path, model, split, example_ids=ids, labels=labels, logits=of_model)
    listed = [PoolModel(name=name, cost=cost) for name, cost in models.items()]
    write_info(path, TableInfo(cost_unit="s", logit_kind="raw", models=listed))


def stage(name: str, model: Mapping[str, Any], batch: int, *, replicas: int = 1, num_cpus: float = 0.1) -> Stage:
    """Return a stage of a pool file with a model as the file has it."""
    return {
        "name": name,
        "model": dict(model),
        "batch_size": batch,
        "replicas": {"min": replicas, "max": replicas},
        "resources": {"num_cpus": num_cpus},
    }


def column_model(number: int, of: SleepingStage) -> dict[str, Any]:
    """Return a model that answers from its column of planted rows and takes a stage's seconds."""
    kwargs = {"column": f"gap{number}", "seconds_per_call": of.per_call, "seconds_per_row": of.per_row}
    return {"kind": "python", "factory": "jobs.bench.planted:from_column", "kwargs": kwargs}


def write_cascade(
    folder: Path,
    stages: Sequence[SleepingStage],
    *,
    num_cpus: float = 0.1,
    of_stage: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> tuple[Path, Policy]:
    """Write a cascade's pool.yaml, LOGITS and policy.json; return the pool's path and the policy.

    Args:
        folder: An empty folder.
        stages: The stages.
        num_cpus: CPUs of a replica.
        of_stage: More keys of each stage.
        settings: More keys of the pool.
    """
    deferral = [at.deferral for at in stages[:-1]]
    validation = planted_rows(np.random.default_rng(3), CALIBRATION_ROWS, deferral)
    policy = write_table(folder / "LOGITS", {at.name: at.cost for at in stages}, deferral, validation=validation)
    policy.save(folder / "policy.json")
    of_pool = [
        stage(at.name, column_model(number, at), at.batch, replicas=at.replicas, num_cpus=num_cpus) | dict(of_stage)
        for number, at in enumerate(stages)
    ]
    return write_pool(folder / "pool.yaml", of_pool, **settings), policy


def write_pool(path: Path, stages: Sequence[Stage], task: str = "multiple-choice", **settings: Any) -> Path:
    """Write a pool file of stages and other keys."""
    write_text(path, yaml.safe_dump({"name": "bench", "task": task, "stages": list(stages), **settings}))
    return path


def write_input(
    path: Path, columns: Mapping[str, Any], *, files: int = 1, row_group_size: int = 8192, **options: Any
) -> Path:
    """Write an input's columns to some Parquet files in a folder, with row groups that a reader can take whole.

    Args:
        path: A folder, which is made.
        columns: Columns by name.
        files: Files in the folder.
        row_group_size: Rows of a row group.
        options: Of pyarrow.parquet.write_table.
    """
    path.mkdir()
    table = pa.table(dict(columns))
    for number, rows in enumerate(np.array_split(np.arange(table.num_rows), files)):
        part = table.slice(int(rows[0]), len(rows))
        pq.write_table(part, path / f"part-{number:04d}.parquet", row_group_size=row_group_size, **options)
    return path


def from_column(column: str, seconds_per_call: float = 0.0, seconds_per_row: float = 0.0) -> Callable[[Batch], Floats]:
    """Answer with two logits, a column of the input and 0, sleeping for the rest of the call's seconds."""

    def answer(batch: Batch) -> Floats:
        started = time.perf_counter()
        gaps = batch[column]
        logits = np.zeros((len(gaps), 2), dtype=np.float32)
        logits[:, 0] = gaps
        remaining = seconds_per_call + seconds_per_row * len(gaps) - (time.perf_counter() - started)
        if remaining > 0:
            time.sleep(remaining)
        return logits

    return answer
