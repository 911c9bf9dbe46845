"""The progress of runs and jobs as Ray metrics, for Prometheus and dashboards; Ray puts `ray_` before their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ray.util.metrics import Counter, Gauge

from cauc_ray.execution.progress import RateMeter, RunProgress, StageProgress

_OUTCOMES = ("accepted", "deferred", "failed", "degraded")
_STAGE_GAUGES = {
    "queued_rows": "Rows waiting for a stage",
    "in_flight_rows": "Rows at a stage's replicas",
    "replicas": "Replicas of a stage that work",
    "starting_replicas": "Replicas of a stage that are being started",
    "rows_per_second": "Rows that a stage's models had each second, over the last ten",
    "accepted_share": "Share of its answers that a stage kept, since the start",
}
_RUN_GAUGES = {
    "finished_rows": "Rows of a run that are committed, by earlier attempts too",
    "eta_seconds": "Seconds to the end of a run at the rate of the last minute; absent if unknown",
}


class RunMetrics:
    """Reports a run's progress to Ray.

    Gauges and counters have the tags run and stage, those of the whole run only run. Counters count from the
    start of this process; Ray adds `_total` to their names.
    """

    def __init__(self, run_id: str, stages: Sequence[str]) -> None:
        of_run, of_stage = ("run",), ("run", "stage")
        self._tags = {"run": run_id}
        self._gauges = {
            name: Gauge(f"cauc_run_{name}", description, tag_keys=keys)
            for gauges, keys in ((_STAGE_GAUGES, of_stage), (_RUN_GAUGES, of_run))
            for name, description in gauges.items()
        }
        self._rows = Counter("cauc_run_rows", "Rows that left a stage, by outcome", tag_keys=(*of_stage, "outcome"))
        self._cost = Counter("cauc_run_cost", "What a stage's calls cost, in the policy's unit", tag_keys=of_stage)
        self._busy = Counter("cauc_run_busy_seconds", "Seconds that a stage's replicas computed", tag_keys=of_stage)
        self._meter = RateMeter()
        self._last = tuple(StageProgress(name) for name in stages)

    def report(self, progress: RunProgress) -> None:
        """Report the run's progress; cheap enough for once a second."""
        rates = self._meter.add(progress)
        for stage, last, rows_per_s in zip(progress.stages, self._last, rates.stage_rows_per_s, strict=True):
            tags = {**self._tags, "stage": stage.name}
            shares = (rows_per_s or 0.0, stage.accepted_share or 0.0)
            self._set(tags, _STAGE_GAUGES, stage.queued, stage.in_flight, stage.replicas, stage.starting, *shares)
            for outcome in _OUTCOMES:
                _add(self._rows, getattr(stage, outcome) - getattr(last, outcome), {**tags, "outcome": outcome})
            _add(self._cost, stage.cost - last.cost, tags)
            _add(self._busy, stage.busy_s - last.busy_s, tags)
        # Ray omits a gauge that is NaN, and keeps the last value of one that is not set again.
        self._set(self._tags, _RUN_GAUGES, progress.n_finished, math.nan if rates.eta_s is None else rates.eta_s)
        self._last = progress.stages

    def close(self) -> None:
        """Set the run's gauges to 0: nothing is under way any more."""
        for stage in self._last:
            self._set({**self._tags, "stage": stage.name}, _STAGE_GAUGES, *[0] * len(_STAGE_GAUGES))
        self._set(self._tags, _RUN_GAUGES, 0, 0)

    def _set(self, tags: dict[str, str], names: Iterable[str], *values: float) -> None:
        for name, value in zip(names, values, strict=True):
            self._gauges[name].set(float(value), tags=tags)


class JobMetrics:
    """Reports a job's progress to Ray; the tag unit is what it counts, such as rows."""

    def __init__(self, job: str) -> None:
        tags, total = ("job", "unit"), "What a job has to do in all; absent where it is not known"
        self._job = job
        self._done = Gauge("cauc_job_done", "What a job has done, by earlier attempts too", tag_keys=tags)
        self._total = Gauge("cauc_job_total", total, tag_keys=tags)

    def report(self, done: int, total: int | None, unit: str) -> None:
        """Report the job's progress."""
        tags = {"job": self._job, "unit": unit}
        self._done.set(float(done), tags=tags)
        if total is not None:
            self._total.set(float(total), tags=tags)


def _add(counter: Counter, amount: float, tags: dict[str, str]) -> None:
    if amount > 0:  # Ray refuses 0
        counter.inc(float(amount), tags=tags)
