"""Seconds of a stage's batches: from the ledger of an earlier run, or as the pool file declares them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.optimize import nnls

from cauc_ray.errors import ConfigError, DataError, warn
from cauc_ray.execution.ledger import LEDGER_SCHEMA, read_record
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.saved import SavedSpec
from cauc_ray.numbers.types import Floats, Ints

# Batches of up to this many times the largest measured one are planned without a warning.
MOST_EXTRAPOLATION = 1.5
# A fit is off if it misses the seconds of a typical call by more than this share.
MOST_ERROR = 0.2


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of a stage's batches, per_call + per_row n for n rows, and their source.

    Attributes:
        per_call: Seconds of a call.
        per_row: Seconds of a row of it.
        source: The ledger of a run, the seconds of a saved stage, or the cost of a call in the pool file.
        error: Median absolute error of the fit over the mean seconds of a call; None without a fit.
        n_calls: Number of fitted calls.
        least_rows: Rows of the smallest of their batches.
        most_rows: Rows of the largest.
    """

    per_call: float
    per_row: float
    source: Literal["ledger", "saved", "cost"]
    error: float | None = None
    n_calls: int = 0
    least_rows: int = 0
    most_rows: int = 0

    def of(self, n: int) -> float:
        """Return the seconds of a batch of n rows."""
        return self.per_call + self.per_row * n

    def check(self, stage: str, batch_size: int) -> None:
        """Warn where the fit is off, or does not cover a stage's batches."""
        if self.error is not None and self.error > MOST_ERROR:
            warn(
                f"stage {stage!r}: the fit of its seconds is off by {self.error:.0%} of a call (median over "
                f"{self.n_calls:,} calls): its calls take times of their own, so take the plan for a rough one"
            )
        if self.n_calls and batch_size > MOST_EXTRAPOLATION * self.most_rows:
            warn(f"stage {stage!r} is planned with batches of {batch_size}, the largest measured has {self.most_rows}")
        elif self.n_calls and self.least_rows == self.most_rows and batch_size > 1:
            warn(
                f"stage {stage!r}: every call had {self.most_rows} rows, which does not tell what a smaller batch "
                "takes; its share of their seconds is assumed"
            )


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """The policy of a run, and by stage the seconds of its batches and the share of its rows that it deferred."""

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
    if np.ptp(rows):
        (per_call, per_row), _ = nnls(np.stack([np.ones(len(rows)), rows], axis=1), seconds)
    else:
        per_call, per_row = 0.0, seconds.mean() / rows[0]
    error = np.median(np.abs(seconds - per_call - per_row * rows)) / max(seconds.mean(), 1e-300)
    extremes = int(rows.min()), int(rows.max())
    return Timing(float(per_call), float(per_row), "ledger", float(error), len(rows), *extremes)


def declared_timing(stage: StageSpec) -> Timing:
    """Return the seconds that a saved stage, or a stage's cost in seconds, declares. Raises ConfigError without any."""
    model = stage.model
    if isinstance(model, SavedSpec) and model.seconds_per_call + model.seconds_per_row:
        return Timing(model.seconds_per_call, model.seconds_per_row, "saved")
    if stage.cost is not None and stage.cost.unit == "s" and stage.cost.value:
        return Timing(0.0, stage.cost.value, "cost")
    raise ConfigError(
        f"no timing for stage {stage.name!r}: the pool file declares no seconds of it; give the folder of an earlier "
        "run, --ledger RUN"
    )


def read_earlier_run(path: str | AnyPath, stages: Sequence[str]) -> EarlierRun:
    """Read what the folder of a `cauc run`, a path or a URI, says of some stages.

    Each replica's first call is left out where others are there: models allocate and tune in it. Raises ConfigError
    or DataError in one line where the folder holds no run, or a stage has no call.
    """
    folder = path_of(path)
    if not (folder / "run.json").is_file() or not (folder / "ledger").is_dir():
        raise ConfigError(f"{folder} is not the folder of an earlier `cauc run`: it has no run.json or no ledger")
    record, ledger = read_record(folder), _read_ledger(folder / "ledger")
    timings, deferral = {}, {}
    for stage in stages:
        calls = ledger.filter(pc.equal(ledger.column("stage"), stage))
        if not len(calls):
            names = ", ".join(sorted(set(ledger.column("stage").to_pylist())))
            raise ConfigError(f"{folder}: its ledger has no answered call of stage {stage!r}; it has {names}")
        timings[stage] = _timing(calls)
        if not timings[stage].of(1):
            raise DataError(f"{folder}: its ledger says that stage {stage!r} takes no time")
        accepted, deferred = (pc.sum(calls.column(name)).as_py() for name in ("accepted", "deferred"))
        deferral[stage] = deferred / (accepted + deferred)
    return EarlierRun(record.policy_id, timings, deferral)


def _read_ledger(folder: AnyPath) -> pa.Table:
    """Return the answered calls, by when they started."""
    tables = [read_parquet(file) for file in parquet_files(folder)]
    for table in tables:
        lacks = [name for name in LEDGER_SCHEMA.names if name not in table.column_names]
        if lacks:
            raise DataError(f"{folder} is not a ledger: a file of it has no column {lacks[0]!r}")
    ledger = pa.concat_tables(tables)
    answered = pc.greater(pc.add(ledger.column("accepted"), ledger.column("deferred")), 0)
    return ledger.filter(pc.and_(pc.is_valid(ledger.column("compute_s")), answered)).sort_by("started_at")


def _timing(calls: pa.Table) -> Timing:
    rows, seconds, replica = (calls.column(name).to_numpy() for name in ("batch", "compute_s", "replica"))
    first = np.unique(replica, return_index=True)[1]
    later = np.setdiff1d(np.arange(len(rows)), first)
    fitted = later if seconds[later].any() else np.arange(len(rows))
    return fit_seconds(rows[fitted].astype(np.int64), seconds[fitted])
