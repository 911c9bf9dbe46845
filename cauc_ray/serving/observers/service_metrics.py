"""What a service counts, for Prometheus; on Ray their names begin with `ray_`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from cauc_ray.models.answers import Wire
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.monitor import Watched
from cauc_ray.serving.observers.observer import Observer
from cauc_ray.serving.policies_live import InForce
from cauc_ray.serving.request_state import RequestState

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

# Takes what is to be added, set or observed of a metric with its tags.
Note: TypeAlias = Callable[[float], None]
# Takes the name, the kind, the tags, the description and a histogram's boundaries; returns the Note for given tags.
NewMetric: TypeAlias = Callable[[str, Kind, tuple[str, ...], str, list[float]], Callable[[Mapping[str, str]], Note]]
# What a metric of a kind is asked to do, in prometheus_client as in Ray.
ACTS: Mapping[Kind, str] = {"counter": "inc", "gauge": "set", "histogram": "observe"}

# By name: its kind, its tags, its description. `_total` is added to the names of counters.
METRICS: dict[str, tuple[Kind, tuple[str, ...], str]] = {
    "cauc_serve_requests": ("counter", ("model", "status"), "Requests for inference, by HTTP status"),
    "cauc_serve_rows": ("counter", ("model", "stage", "outcome"), "Rows that left a stage, by outcome"),
    "cauc_serve_request_seconds": ("histogram", ("model",), "Seconds from a request's arrival to its answer"),
    "cauc_serve_stage_seconds": (
        "histogram",
        ("model", "stage"),
        "Seconds that rows took at a stage, waiting included",
    ),
    "cauc_serve_call_seconds": ("histogram", ("model", "stage"), "Seconds of a call, seen from the router"),
    "cauc_serve_batch_rows": ("histogram", ("model", "stage"), "Rows in one call of a stage"),
    "cauc_serve_wire_bytes": (
        "counter",
        ("model", "stage", "way"),
        "Bytes that calls of a remote stage have sent (way out) and received (in)",
    ),
    "cauc_serve_confidence": ("histogram", ("model", "stage"), "Confidence of rows after a stage"),
    "cauc_serve_cost": ("counter", ("model", "stage", "unit"), "What a stage's answers cost, in the policy's unit"),
    "cauc_serve_degraded": ("counter", ("model", "stage", "reason"), "Rows that a stage should have answered"),
    "cauc_serve_queued_rows": ("gauge", ("model", "stage"), "Rows waiting for a stage in one router"),
    "cauc_serve_policy": ("gauge", ("model", "policy"), "Share of requests of an active policy, 0 for earlier ones"),
    "cauc_serve_policy_rows": ("counter", ("model", "policy"), "Rows that a policy has answered"),
    "cauc_serve_policy_decisions": (
        "counter",
        ("model", "decision", "by"),
        "Decisions, by hand or by rule",
    ),
    "cauc_serve_policy_changes": ("counter", ("model", "outcome"), "Changes of the policy, by outcome"),
    "cauc_serve_watch_holds": ("gauge", ("model",), "1 while the policy is valid, 0 once it has drifted"),
    "cauc_serve_watch_evidence": (
        "gauge",
        ("model", "feature"),
        "Highest evidence so far that answers have drifted from validation's, log10; the alarm is at 1.3",
    ),
    "cauc_serve_watch_accuracy": ("gauge", ("model", "stage"), "Accuracy of a stage's answers, by feedback"),
    "cauc_serve_watch_calibration_error": (
        "gauge",
        ("model", "stage"),
        "Calibration error of a stage's answers, by feedback",
    ),
    "cauc_serve_watch_agreement": ("gauge", ("model", "stage"), "Share of answers that the whole cascade gives too"),
    "cauc_serve_watch_cost": ("gauge", ("model", "stage", "unit"), "Mean cost of a stage's answers, of all calls"),
    "cauc_serve_feedback_rows": ("counter", ("model", "outcome"), "Rows of feedback, by outcome"),
    "cauc_serve_shadow_rows": ("counter", ("model", "outcome"), "Early answers that were chosen to be compared"),
    "cauc_serve_log_rows": ("counter", ("model", "outcome"), "Rows of the log, and labels for it, by outcome"),
    "cauc_serve_shadow_cost": ("counter", ("model", "stage", "unit"), "What comparisons cost, in the policy's unit"),
}
_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]
_BOUNDARIES = {
    "cauc_serve_batch_rows": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0],
    "cauc_serve_confidence": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0],
}


class ServingMetrics(Observer):
    """Counts what one replica of a service does for the model of one name.

    What requests add to counters goes on with `flush` only: to Ray an addition takes longer than much of a request.
    """

    def __init__(self, new_metric: NewMetric, model: str, stages: Sequence[str], unit: str) -> None:
        self._model, self._stages, self._unit = model, tuple(stages), unit
        self._metrics = {
            name: new_metric(name, kind, tags, description, _BOUNDARIES.get(name, _SECONDS))
            for name, (kind, tags, description) in METRICS.items()
        }
        self._policy: str | None = None
        self._notes: dict[tuple[str, ...], Note] = {}
        self._counts: dict[tuple[str, ...], float] = defaultdict(float)
        self._shares: Mapping[str, float] = {}
        self._had_shares: set[str] = set()

    def flush(self) -> None:
        """Have everybody see what has been counted."""
        shares = self._shares
        for policy_id in {*self._had_shares, *shares}:
            self._note("cauc_serve_policy", policy_id)(shares.get(policy_id, 0.0))
        self._had_shares = set(shares)  # of one that is gone Ray forgets the series
        for key, amount in list(self._counts.items()):
            if amount > 0:  # Ray's counters refuse 0
                self._note(*key)(amount)
            del self._counts[key]

    def request(self, status: int, seconds: float) -> None:
        """Count a request for inference that has been answered."""
        self._counts["cauc_serve_requests", str(status)] += 1
        self._note("cauc_serve_request_seconds")(seconds)

    def on_answer(self, request: RequestState) -> None:
        """Count a request's rows at each stage: accepted, deferred, capped, degraded or failed."""
        for visit in request.visits:
            stage, n = self._stages[visit.stage], len(visit.confidences)
            capped = request.capped and visit.stage == request.last_stage
            self._counts["cauc_serve_rows", stage, "accepted"] += n - visit.n_on
            self._counts["cauc_serve_rows", stage, "capped" if capped else "deferred"] += visit.n_on
            self._counts["cauc_serve_cost", stage, self._unit] += float(visit.costs.sum())
            self._note("cauc_serve_stage_seconds", stage)(visit.waited_s)
            note = self._note("cauc_serve_confidence", stage)
            for confidence in visit.confidences.tolist():
                note(confidence)
        for missed in request.missed:
            stage = self._stages[missed.stage]
            self._counts["cauc_serve_rows", stage, "degraded" if missed.degrades else "failed"] += missed.n
            if missed.degrades:
                self._counts["cauc_serve_degraded", stage, missed.trouble] += missed.n
        if request.question is not None and request.is_answered:
            self._counts["cauc_serve_policy_rows", request.question.member.id] += request.n

    def on_call(self, stage: int, n_rows: int, call_s: float, wire: Wire | None) -> None:
        """Note a call of a stage."""
        name = self._stages[stage]
        if wire is not None:
            self._counts["cauc_serve_wire_bytes", name, "out"] += wire.bytes_out
            self._counts["cauc_serve_wire_bytes", name, "in"] += wire.bytes_in
        self._note("cauc_serve_call_seconds", name)(call_s)
        self._note("cauc_serve_batch_rows", name)(n_rows)

    def on_policies(self, in_force: InForce) -> None:
        """Report the policies' shares of the requests, by id."""
        self._shares = in_force.shares

    def queued(self, rows: Sequence[int]) -> None:
        """Report how many rows wait for each stage."""
        for stage, n in zip(self._stages, rows, strict=True):
            self._note("cauc_serve_queued_rows", stage)(n)

    def policy_decision(self, decision: str, by: str) -> None:
        """Count a decision on a policy."""
        self._note("cauc_serve_policy_decisions", decision, by)(1)

    def policy_change(self, outcome: Literal["taken", "refused", "overtaken"]) -> None:
        """Count what became of a change."""
        self._note("cauc_serve_policy_changes", outcome)(1)

    def watched(self, watched: Watched) -> None:
        """Report the monitoring of the active policy."""
        self._note("cauc_serve_watch_holds")(float(watched.holds))
        for feature, evidence in watched.evidence.items():
            self._note("cauc_serve_watch_evidence", feature)(max(0.0, evidence.log10))
        for stage, sums in zip(self._stages, watched.stages, strict=True):
            if sums.mean_cost is not None:
                self._note("cauc_serve_watch_cost", stage, self._unit)(sums.mean_cost[0])
            if sums.outcomes.n:
                self._note("cauc_serve_watch_accuracy", stage)(sums.accuracy.value)
                self._note("cauc_serve_watch_calibration_error", stage)(sums.outcomes.error)
            if sums.n_compared:
                self._note("cauc_serve_watch_agreement", stage)(sums.agreement.value)

    def feedback(self, **n_rows: int) -> None:
        """Count rows of feedback by outcome: counted, cut_short, repeated, other_policy or not_watched."""
        for outcome, n in n_rows.items():
            self._counts["cauc_serve_feedback_rows", outcome] += n

    def shadowed(self, stage: int, costs: Floats) -> None:
        """Note the costs of a stage's shadow answers, by row."""
        self._counts["cauc_serve_shadow_cost", self._stages[stage], self._unit] += float(costs.sum())

    def shadow_rows(self, outcome: str, n: int) -> None:
        """Count chosen early answers: compared with the whole cascade's, or dropped."""
        self._counts["cauc_serve_shadow_rows", outcome] += n

    def logged(self, counts: Mapping[str, int]) -> None:
        """Count rows of the log by outcome: written, incomplete or dropped; labels as label_written, label_dropped."""
        for outcome, n in counts.items():
            self._counts["cauc_serve_log_rows", outcome] += n

    def _note(self, name: str, *values: str) -> Note:
        """Return what takes what is noted of a metric.   values: of its tags after the model."""
        note = self._notes.get((name, *values))
        if note is None:
            tags = dict(zip(METRICS[name][1], (self._model, *values), strict=True))
            note = self._notes[name, *values] = self._metrics[name](tags)
        return note
