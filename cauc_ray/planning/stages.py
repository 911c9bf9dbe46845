"""What a plan knows of a stage: its batches, what they take by an earlier run's ledger, what it defers, replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.execution.ledger import LEDGER_SCHEMA, read_record
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.saved import SavedSpec
from cauc_ray.numbers.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class BatchSeconds:
    """Seconds of a batch of n rows: per_call + per_row n."""

    per_call: float
    per_row: float

    def of(self, n: int) -> float:
        """Return the seconds of a batch of so many rows."""
        return self.per_call + self.per_row * n


@dataclass(frozen=True, slots=True)
class RouterSeconds:
    """Seconds that routers take, each one thing at a time.

    Attributes:
        per_request: Seconds to read a request and to write its answer.
        per_call: Seconds to send a call and to take its end.
        replicas: Number of routers, which share requests evenly.
    """

    per_request: float = 0.0
    per_call: float = 0.0
    replicas: int = 1

    def of(self, n_requests: float, n_calls: float = 0.0) -> float:
        """Return the seconds of requests and calls, as though all routers were one."""
        return (self.per_request * n_requests + self.per_call * n_calls) / self.replicas

    def load(self, stages: Sequence[PlannedStage], rate: float) -> float:
        """Return the share of their time that routers work at a rate of requests a second, where calls are full."""
        calls = reaches(stages) / [stage.batch_size for stage in stages]
        return self.of(rate, rate * float(calls.sum()))


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a chain.

    Attributes:
        name: Its name.
        batch_size: Rows in a full batch.
        batch_wait_s: Seconds that a row waits for a full batch.
        seconds: Seconds of a batch.
        deferral: Share of its rows that are deferred, 0 at the last stage.
        replicas: Number of its replicas.
        queue_rows: Rows that may wait before the stage ahead is held back, None where that never happens.
    """

    name: str
    batch_size: int
    batch_wait_s: float
    seconds: BatchSeconds
    deferral: float
    replicas: int = 1
    queue_rows: int | None = None

    @property
    def batch_s(self) -> float:
        """Return the seconds of a full batch."""
        return self.seconds.of(self.batch_size)

    @property
    def row_s(self) -> float:
        """Return the seconds of a row in a full batch."""
        return self.batch_s / self.batch_size


def reaches(stages: Sequence[PlannedStage]) -> Floats:
    """Return the share of all rows that reach each stage, float (M,)."""
    return np.cumprod([1.0, *(stage.deferral for stage in stages[:-1])])


def loads(stages: Sequence[PlannedStage], rate: float) -> Floats:
    """Return each stage's load at a rate of rows a second, float (M,): the share of its capacity in full batches.

    From 1 on its queue grows without end. Below, its replicas may be busy for a larger share of the time, since
    batches that are not full take longer for each row.
    """
    row_s: Floats = np.array([stage.row_s / stage.replicas for stage in stages])
    return reaches(stages) * rate * row_s


def with_drift(stages: Sequence[PlannedStage], factor: float) -> tuple[PlannedStage, ...]:
    """Return the stages with every deferral rate times a factor, 1 at most."""
    return tuple(replace(stage, deferral=min(1.0, factor * stage.deferral)) for stage in stages)


def with_replicas(stages: Sequence[PlannedStage], counts: Sequence[int]) -> tuple[PlannedStage, ...]:
    """Return the stages with so many replicas each."""
    return tuple(replace(stage, replicas=n) for stage, n in zip(stages, counts, strict=True))


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of a stage's batches, and where they are from.

    Attributes:
        seconds: Seconds of a batch.
        source: Where they are from.
        error: Root mean square error of the fit over the mean seconds of a call; None without a fit.
        n_calls: Number of fitted calls.
        least_rows: Rows of the smallest of their batches.
        most_rows: Rows of the largest.
    """

    seconds: BatchSeconds
    source: Literal["ledger", "saved"]
    error: float | None = None
    n_calls: int = 0
    least_rows: int = 0
    most_rows: int = 0


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """What a run's ledger says: each stage's seconds, the share that it deferred, and of which policy it was."""

    policy_id: str
    timings: dict[str, Timing]
    deferral: dict[str, float]


def fit_seconds(rows: Ints, seconds: Floats) -> Timing:
    """Fit the seconds of a call by least squares: per_call + per_row n, neither below 0.

    Calls of one size do not identify both: all their seconds count as the rows'.

    Args:
        rows: Rows of each call, int (C,).
        seconds: Seconds of each call, float (C,).
    """
    n, mean_rows, mean_s = len(rows), float(rows.mean()), float(seconds.mean())
    spread = float(((rows - mean_rows) ** 2).sum())
    per_row = float(((rows - mean_rows) * (seconds - mean_s)).sum()) / spread if spread else mean_s / mean_rows
    per_row = max(0.0, per_row)
    per_call = mean_s - per_row * mean_rows
    if per_call < 0 or not spread:  # the best without a share of the call's own
        per_call, per_row = 0.0, float((rows * seconds).sum() / (rows.astype(np.float64) ** 2).sum())
    residuals = seconds - per_call - per_row * rows
    error = float(np.sqrt((residuals**2).mean())) / mean_s if mean_s > 0 else 0.0
    return Timing(BatchSeconds(per_call, per_row), "ledger", error, n, int(rows.min()), int(rows.max()))


def saved_timing(stage: StageSpec) -> Timing:
    """Return the seconds that a saved stage declares. Raises ConfigError for other stages, and without seconds."""
    model = stage.model
    if isinstance(model, SavedSpec) and model.seconds_per_call + model.seconds_per_row:
        return Timing(BatchSeconds(model.seconds_per_call, model.seconds_per_row), "saved")
    why = "declares no seconds" if isinstance(model, SavedSpec) else "is not a saved one"
    raise ConfigError(f"no timing for stage {stage.name!r}, which {why}: give an earlier run's folder, --ledger RUN")


def read_earlier_run(path: str | AnyPath, stages: Sequence[str]) -> EarlierRun:
    """Read what the folder of a `cauc run`, a path or a URI, says of some stages.

    Each replica's first call is left out where others are there: models allocate and tune in it. Raises ConfigError
    or DataError in one line where the folder holds no run, or a stage has no call.
    """
    folder = path_of(path)
    if not (folder / "run.json").is_file() or not (folder / "ledger").is_dir():
        raise ConfigError(f"{folder} is not the folder of an earlier `cauc run`: it has no run.json or no ledger")
    record = read_record(folder)
    ledger = _read_ledger(folder / "ledger")
    timings, deferral = {}, {}
    for stage in stages:
        calls = ledger.filter(pc.equal(ledger.column("stage"), stage))
        if not len(calls):
            names = sorted(set(ledger.column("stage").to_pylist()))
            raise ConfigError(
                f"{folder}: its ledger has no answered call of stage {stage!r}; it has {', '.join(names)}"
            )
        timings[stage] = _timing(calls)
        if not timings[stage].seconds.of(1):
            raise DataError(f"{folder}: its ledger says that stage {stage!r} takes no time")
        accepted, deferred = (pc.sum(calls.column(name)).as_py() for name in ("accepted", "deferred"))
        deferral[stage] = deferred / max(1, accepted + deferred)
    return EarlierRun(record.policy_id, timings, deferral)


def _read_ledger(folder: AnyPath) -> pa.Table:
    """Return the calls that came back, by when they started."""
    tables = [read_parquet(file) for file in parquet_files(folder)]
    for table in tables:
        lacks = [name for name in LEDGER_SCHEMA.names if name not in table.column_names]
        if lacks:
            raise DataError(f"{folder} is not a ledger: a file of it has no column {lacks[0]!r}")
    ledger = pa.concat_tables(tables)
    answered = pc.greater(pc.add(ledger.column("accepted"), ledger.column("deferred")), 0)
    came_back = pc.and_(pc.is_valid(ledger.column("compute_s")), answered)
    return ledger.filter(came_back).sort_by("started_at")


def _timing(calls: pa.Table) -> Timing:
    rows, seconds, replica = (calls.column(name).to_numpy() for name in ("batch", "compute_s", "replica"))
    first = np.unique(replica, return_index=True)[1]
    later = np.setdiff1d(np.arange(len(rows)), first)
    fitted = later if seconds[later].any() else np.arange(len(rows))
    return fit_seconds(rows[fitted].astype(np.int64), seconds[fitted])
