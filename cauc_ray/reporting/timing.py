"""What a run's ledger and summary say of each stage's time and compute."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, ValidationError

from cauc_ray.errors import DataError, explain
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import parquet_below, read_parquet


class _Summary(BaseModel):
    """Some of a summary's keys; it has more."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, strict=True)


class StageTiming(_Summary):
    """A stage in a run: as its summary has it, with the replicas and nodes that its ledger names."""

    name: str
    reached: int
    answered: int
    failed: int
    calls: int
    batch_fill: float
    compute_s: float
    busy_share: float | None
    queue_s: float | None
    cost: float
    cost_share: float | None
    replicas: int = 0
    nodes: int = 0


class RunTiming(_Summary):
    """A run.   run_s: of work, elapsed_s: with Ray and the models started."""

    run_id: str
    pool: str | None = None
    n: int
    n_failed: int
    cost: float | None
    cost_unit: str
    relative_cost: float | None
    run_s: float
    elapsed_s: float
    stages: tuple[StageTiming, ...]


def read_timing(run: Path) -> RunTiming:
    """Read a run's folder. Raises DataError where its summary lacks something."""
    path = run / "summary.json"
    used = _used(run / "ledger")
    try:
        timing = RunTiming.model_validate_json(json.dumps(read_json(path)))
    except ValidationError as error:
        raise DataError(f"{path} is not the summary of a run: {explain(error)}") from error
    stages = []
    for stage in timing.stages:
        replicas, nodes = used.get(stage.name, (0, 0))
        stages.append(stage.model_copy(update={"replicas": replicas, "nodes": nodes}))
    return timing.model_copy(update={"stages": tuple(stages)})


def _used(folder: Path) -> dict[str, tuple[int, int]]:
    """Return how many replicas and nodes answered calls of each stage."""
    files = parquet_below(folder) if folder.is_dir() else []
    if not files:
        return {}
    columns = ["stage", "replica", "node"]
    tables = [read_parquet(file) for file in files]
    if any(set(columns) - set(table.column_names) for table in tables):
        raise DataError(f"{folder} is no ledger: it lacks one of the columns {', '.join(columns)}")
    ledger = pa.concat_tables([table.select(columns) for table in tables])
    used = {}
    for stage in pc.unique(ledger.column("stage")).to_pylist():
        own = ledger.filter(pc.equal(ledger.column("stage"), stage))
        used[stage] = tuple(pc.count_distinct(own.column(key)).as_py() for key in ("replica", "node"))
    return used
