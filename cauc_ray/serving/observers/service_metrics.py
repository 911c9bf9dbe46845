"""What a service counts, for Prometheus; on Ray their names begin with `ray_`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cauc_ray.models.answers import Wire
from cauc_ray.policies.monitor import Watched
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.policies_live import InForce
from cauc_ray.serving.request_state import RequestState

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

# Takes what is to be added, set or observed of a metric with its tags.
Note: TypeAlias = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a shell.

    Attributes:
        series: Returns what takes the values of given tags.
        end: Forgets the series of given tags; Ray forgets gauges that are set no more by itself.
    """

    series: Callable[[Mapping[str, str]], Note]
    end: Callable[[Mapping[str, str]], object] = lambda tags: None


# Takes the name, the kind, the tags, the description and a histogram's boundaries.
NewMetric: TypeAlias = Callable[[str, Kind, tuple[str, ...], str, list[float]], Metric]
# What a metric of a kind is asked to do, in prometheus_client as in Ray.
ACTS: Mapping[Kind, str] = {"counter": "inc", "gauge": "set", "histogram": "observe"}

# Before the names of all metrics.
PREFIX = "cauc_serve_"
# By name: its kind, its tags after the model, its description. `_total` is added to the names of counters.
METRICS: dict[str, tuple[Kind, tuple[str, ...], str]] = {
    "requests": ("counter", ("status",), "Requests for inference, by HTTP status"),
    "rows": ("counter", ("stage", "outcome"), "Rows that left a stage, by outcome"),
    "request_seconds": ("histogram", (), "Seconds from a request's arrival to its answer"),
    "stage_seconds": ("histogram", ("stage",), "Seconds that rows took at a stage, waiting included"),
    "call_seconds": ("histogram", ("stage",), "Seconds of a call, seen from the router"),
    "batch_rows": ("histogram", ("stage",), "Rows in one call of a stage"),
    "wire_bytes": (
        "counter",
        ("stage", "way"),
        "Bytes that calls of a remote stage have sent (way out) and received (in)",
    ),
    "confidence": ("histogram", ("stage",), "Confidence of rows after a stage"),
    "cost": ("counter", ("stage", "unit"), "What a stage's answers cost, in the policy's unit"),
    "degraded": ("counter", ("stage", "reason"), "Rows that a stage should have answered"),
    "queued_rows": ("gauge", ("stage",), "Rows waiting for a stage in one router"),
    "policy": ("gauge", ("policy",), "Share of requests of an active policy, 0 for earlier ones"),
    "policy_rows": ("counter", ("role",), "Rows that the incumbent or the candidate has answered"),
    "policy_decisions": ("counter", ("decision", "by"), "Decisions, by hand or by rule"),
    "policy_changes": ("counter", ("outcome",), "Changes of the policy, by outcome"),
    "watch_valid": ("gauge", (), "1 while the policy is valid, 0 once it has drifted"),
    "watch_evidence": (
        "gauge",
        ("feature",),
        "Highest evidence so far that answers have drifted from validation's, log10; the alarm is at 1.3",
    ),
    "watch_accuracy": ("gauge", ("stage",), "Accuracy of a stage's answers, by feedback"),
    "watch_calibration_error": ("gauge", ("stage",), "Calibration error of a stage's answers, by feedback"),
    "watch_agreement": ("gauge", ("stage",), "Share of answers that the whole cascade gives too"),
    "watch_cost": ("gauge", ("stage", "unit"), "Mean cost of a stage's answers, of all calls"),
    "feedback_rows": ("counter", ("outcome",), "Rows of feedback, by outcome"),
    "shadow_rows": ("counter", ("outcome",), "Early answers that were chosen to be compared"),
    "log_rows": ("counter", ("outcome",), "Rows of the log, and labels for it, by outcome"),
    "shadow_cost": ("counter", ("stage", "unit"), "What comparisons cost, in the policy's unit"),
}
_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
_BOUNDARIES = {
    "batch_rows": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0],
    "confidence": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0],
}


class ServingMetrics(Observer):
    """Counts what one replica of a service does for the model of one name.

    What requests add to counters goes on with `flush` only: to Ray an addition takes longer than much of a request.
    """

    def __init__(self, new_metric: NewMetric, model: str, stages: Sequence[str], unit: str) -> None:
        self._model, self._stages, self._unit = model, tuple(stages), unit
        self._metrics = {
            name: new_metric(PREFIX + name, kind, ("model", *tags), description, _BOUNDARIES.get(name, _SECONDS))
            for name, (kind, tags, description) in METRICS.items()
        }
        self._notes: dict[tuple[str, ...], Note] = {}
        self._counts: dict[tuple[str, ...], float] = defaultdict(float)
        self._lock = threading.Lock()
        self._shares: Mapping[str, float] = {}
        self._had_shares: set[str] = set()

    def count(self, name: str, *tags: str, n: float = 1.0) -> None:
        """Add to a counter, from any thread.

        Args:
            name: Its key in METRICS.
            tags: Values of its tags there.
            n: The number to add.
        """
        with self._lock:
            self._counts[name, *tags] += n

    def note(self, name: str, value: float, *tags: str) -> None:
        """Set a gauge, or add a value to a histogram; name and tags as for count."""
        self._note(name, *tags)(value)

    def flush(self) -> None:
        """Publish the counts."""
        shares = self._shares
        for policy_id in {*self._had_shares, *shares}:
            self.note("policy", shares.get(policy_id, 0.0), policy_id)
        for policy_id in self._had_shares - shares.keys():
            self._end("policy", policy_id)
        self._had_shares = set(shares)
        with self._lock:
            counts, self._counts = self._counts, defaultdict(float)
        for key, amount in counts.items():
            if amount > 0:  # Ray's counters refuse 0
                self._note(*key)(amount)

    def on_answer(self, request: RequestState) -> None:
        """Count a request's rows at each stage: accepted, deferred, capped, degraded or failed."""
        for visit in request.visits:
            stage, n = self._stages[visit.stage], len(visit.confidences)
            capped = request.capped and visit.stage == request.last_stage
            self.count("rows", stage, "accepted", n=n - visit.n_on)
            self.count("rows", stage, "capped" if capped else "deferred", n=visit.n_on)
            self.count("cost", stage, self._unit, n=float(visit.costs.sum()))
            self.note("stage_seconds", visit.waited_s, stage)
            note = self._note("confidence", stage)
            for confidence in visit.confidences.tolist():
                note(confidence)
        for missed in request.missed:
            stage = self._stages[missed.stage]
            self.count("rows", stage, "degraded" if missed.degrades else "failed", n=missed.n)
            if missed.degrades:
                self.count("degraded", stage, missed.trouble, n=missed.n)
        if request.question is not None and request.is_answered:
            is_candidate = request.question.member is request.question.in_force.candidate
            self.count("policy_rows", "candidate" if is_candidate else "incumbent", n=request.n)

    def on_call(self, stage: int, n_rows: int, call_s: float, wire: Wire | None) -> None:
        """Note a call of a stage."""
        name = self._stages[stage]
        if wire is not None:
            self.count("wire_bytes", name, "out", n=wire.bytes_out)
            self.count("wire_bytes", name, "in", n=wire.bytes_in)
        self.note("call_seconds", call_s, name)
        self.note("batch_rows", n_rows, name)

    def on_policies(self, in_force: InForce) -> None:
        """Report the policies' shares of the requests, by id."""
        self._shares = in_force.shares

    def watched(self, watched: Watched) -> None:
        """Report the monitoring of the active policy."""
        self.note("watch_valid", float(watched.valid))
        for feature, evidence in watched.evidence.items():
            self.note("watch_evidence", max(0.0, evidence.log10), feature)
        for stage, sums in zip(self._stages, watched.stages, strict=True):
            if sums.mean_cost is not None:
                self.note("watch_cost", sums.mean_cost[0], stage, self._unit)
            if sums.outcomes.n:
                self.note("watch_accuracy", sums.accuracy.value, stage)
                self.note("watch_calibration_error", sums.outcomes.error, stage)
            if sums.n_compared:
                self.note("watch_agreement", sums.agreement.value, stage)

    def _note(self, name: str, *values: str) -> Note:
        """Return the function that takes a metric's values, by the values of its tags after the model."""
        note = self._notes.get((name, *values))
        if note is None:
            note = self._notes[name, *values] = self._metrics[name].series(self._tags(name, *values))
        return note

    def _end(self, name: str, *values: str) -> None:
        del self._notes[name, *values]
        self._metrics[name].end(self._tags(name, *values))

    def _tags(self, name: str, *values: str) -> dict[str, str]:
        return dict(zip(("model", *METRICS[name][1]), (self._model, *values), strict=True))
