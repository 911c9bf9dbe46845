"""What a run's ledger says: how busy stages and replicas were, how full their batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.numbers.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class StageCalls:
    """A stage's calls that came back, by their start; all arrays (n,).

    started_s: seconds since the epoch.   compute_s, device_s: device_s is NaN without an accelerator.
    batch: rows.   replica: which answered.
    """

    name: str
    started_s: Floats
    compute_s: Floats
    device_s: Floats
    batch: Ints
    replica: Ints

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def ended_s(self) -> Floats:
        """Return when each call ended, in seconds since the epoch."""
        return self.started_s + self.compute_s

    @property
    def span_s(self) -> float:
        """Return the seconds from the first call's start to the last one's end."""
        return float(self.ended_s.max() - self.started_s.min())

    def busy_share(self, n_replicas: int) -> float:
        """Return the time that calls took over the time that the replicas had, from the first call to the last."""
        return float(self.compute_s.sum()) / (n_replicas * self.span_s)

    def replica_busy_shares(self) -> Floats:
        """Return each replica's share, from its own first call to its own last, float (R,)."""
        shares = []
        for replica in np.unique(self.replica):
            own = self.replica == replica
            span_s = self.ended_s[own].max() - self.started_s[own].min()
            shares.append(self.compute_s[own].sum() / span_s)
        return np.array(shares)

    def full_share(self, batch_size: int) -> float | None:
        """Return which share of all calls but the last was of full batches; None of a single call."""
        return float((self.batch[:-1] == batch_size).mean()) if len(self) > 1 else None


def read_calls(out: Path, stages: Sequence[str]) -> list[StageCalls]:
    """Read a run's ledger, stage by stage. Calls that were lost have no time and are left out."""
    ledger = pa.concat_tables(read_parquet(file) for file in parquet_files(out / "ledger"))
    ledger = ledger.filter(pc.is_valid(ledger.column("compute_s"))).sort_by("started_at")
    return [_calls(stage, ledger.filter(pc.field("stage") == stage)) for stage in stages]


def _calls(stage: str, calls: pa.Table) -> StageCalls:
    started = calls.column("started_at").cast(pa.int64()).to_numpy() / 1e6
    device_s = calls.column("device_s").to_numpy().astype(np.float64)
    compute_s, batch, replica = (calls.column(name).to_numpy() for name in ("compute_s", "batch", "replica"))
    return StageCalls(stage, started, compute_s, device_s, batch, replica)
