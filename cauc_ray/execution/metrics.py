"""The progress of runs and jobs as Ray metrics, for Prometheus and dashboards; Ray puts `ray_` before their names."""

from __future__ import annotations

from collections.abc import Sequence

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
        of_stage = ("run", "stage")
        self._run = {"run": run_id}
        self._stages = tuple(stages)
        self._gauges = {
            name: Gauge(f"cauc_run_{name}", description, tag_keys=of_stage)
            for name, description in _STAGE_GAUGES.items()
        }
        self._run_gauges = {
            name: Gauge(f"cauc_run_{name}", description, tag_keys=("run",)) for name, description in _RUN_GAUGES.items()
        }
        self._rows = Counter("cauc_run_rows", "Rows that left a stage, by outcome", tag_keys=(*of_stage, "outcome"))
        self._cost = Counter("cauc_run_cost", "What a stage's calls cost, in the policy's unit", tag_keys=of_stage)
        self._busy = Counter("cauc_run_busy_seconds", "Seconds that a stage's replicas computed", tag_keys=of_stage)
        self._meter = RateMeter()
        self._last = tuple(StageProgress(name) for name in self._stages)

    def report(self, progress: RunProgress) -> None:
        """Report the run's progress; cheap enough for once a second."""
        rates = self._meter.add(progress)
        for stage, last, rows_per_s in zip(progress.stages, self._last, rates.stage_rows_per_s, strict=True):
            tags = {**self._run, "stage": stage.name}
            self._set(
                tags,
                queued_rows=stage.queued,
                in_flight_rows=stage.in_flight,
                replicas=stage.replicas,
                starting_replicas=stage.starting,
                rows_per_second=rows_per_s or 0.0,
                accepted_share=stage.accepted_share or 0.0,
            )
            for outcome in _OUTCOMES:
                _add(self._rows, getattr(stage, outcome) - getattr(last, outcome), {**tags, "outcome": outcome})
            _add(self._cost, stage.cost - last.cost, tags)
            _add(self._busy, stage.busy_s - last.busy_s, tags)
        # Ray omits a gauge that is NaN, and keeps the last value of one that is not set again.
        eta_s = float("nan") if rates.eta_s is None else rates.eta_s
        self._set_run(finished_rows=progress.n_finished, eta_seconds=eta_s)
        self._last = progress.stages

    def close(self) -> None:
        """Set the run's gauges to 0: nothing is under way any more."""
        for name in self._stages:
            self._set({**self._run, "stage": name}, **dict.fromkeys(_STAGE_GAUGES, 0))
        self._set_run(**dict.fromkeys(_RUN_GAUGES, 0))

    def _set(self, tags: dict[str, str], **values: float) -> None:
        for name, value in values.items():
            self._gauges[name].set(float(value), tags=tags)

    def _set_run(self, **values: float) -> None:
        for name, value in values.items():
            self._run_gauges[name].set(float(value), tags=self._run)


class JobMetrics:
    """Reports a job's progress to Ray; the tag unit is what it counts, such as rows."""

    def __init__(self, job: str) -> None:
        tags = ("job", "unit")
        self._job = job
        self._done = Gauge("cauc_job_done", "What a job has done, by earlier attempts too", tag_keys=tags)
        self._total = Gauge(
            "cauc_job_total", "What a job has to do in all; absent where it is not known", tag_keys=tags
        )

    def report(self, done: int, total: int | None, unit: str) -> None:
        """Report the job's progress."""
        tags = {"job": self._job, "unit": unit}
        self._done.set(float(done), tags=tags)
        if total is not None:
            self._total.set(float(total), tags=tags)


def _add(counter: Counter, amount: float, tags: dict[str, str]) -> None:
    if amount > 0:  # Ray refuses 0
        counter.inc(float(amount), tags=tags)
