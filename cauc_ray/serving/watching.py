"""What a service learns of its answers: a router's monitoring, evaluated at intervals, and feedback, counted once."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cauc_ray.errors import explain
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.monitor import Evidence, Watch, Watched, verdict, watch_report
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import Answered
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.metrics import ServingMetrics
from cauc_ray.serving.policies_live import Store
from cauc_ray.serving.request_state import RequestState
from cauc_ray.serving.shadows import sampled_rows, was_drawn

# Confidences are the float32 values of the answer.
_ROUNDING = 1e-6

# Answers whose feedback one router remembers, so that it is counted once.
MOST_REMEMBERED = 10_000

# Rows that are kept between two computations; those after them are not watched. A row takes about 10 us, and this
# many are enough.
MOST_KEPT = 2000

logger = logging.getLogger(__name__)

_Option = Annotated[int, Field(ge=0, lt=2**31)]


class FeedbackMessage(BaseModel):
    """The body: values of the answers, and the labels, each a list by row.

    Attributes:
        policy_id: Id of the policy that answered.
        answer_id: Id of the answer, from the response's parameters.
        rows: Numbers of the answer's rows; without them all of its rows.
        prediction: Predictions.
        confidence: Confidences.
        stage: Stages that answered.
        label: Labels.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    policy_id: str
    answer_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    rows: list[_Option] | None = None
    prediction: list[_Option] = Field(min_length=1)
    confidence: list[Annotated[float, Field(ge=0, le=1)]]
    stage: list[Annotated[int, Field(ge=0)]]
    label: list[_Option]


@dataclass(frozen=True, slots=True)
class Feedback:
    """Rows of an answer of one policy, with their labels; arrays (n,).

    Attributes:
        policy_id: Id of the policy.
        answer: Identifies the answer.
        rows: Numbers of the answer's rows, int.
        stages: Stages that answered, int.
        confidences: Confidences, float64.
        correct: Whether the answer is the label, bool.
        labels: Labels, int.
        is_named: Whether the answer is identified by its id.
    """

    policy_id: str
    answer: str
    rows: Ints
    stages: Ints
    confidences: Floats
    correct: Bools
    labels: Ints
    is_named: bool = True

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def read(cls, body: bytes, policy: Policy, most_rows: int, labels: Sequence[str] | None = None) -> Feedback:
        """Read a request's body. Raises RequestError: 400 where it makes no sense, 413 for too many rows.

        labels: the names of the options, if they are the same for all rows and known.
        """
        try:
            message = FeedbackMessage.model_validate_json(body)
        except ValidationError as error:
            raise RequestError(f"the feedback is invalid: {explain(error)}") from error
        columns = {name: getattr(message, name) for name in ("prediction", "confidence", "stage", "label", "rows")}
        sizes = {name: len(values) for name, values in columns.items() if values is not None}
        if len(set(sizes.values())) > 1:
            lengths = ", ".join(f"{n} of {name}" for name, n in sizes.items())
            raise RequestError(f"the feedback's lists must have the same length, got {lengths}")
        n = sizes["label"]
        if n > most_rows:
            raise RequestError(f"feedback may have up to {most_rows} rows, got {n}", 413)
        if max(message.stage) >= len(policy.stages):
            raise RequestError(f"stages are 0 to {len(policy.stages) - 1}, got {max(message.stage)}")
        if labels is not None and max(message.label) >= len(labels):
            raise RequestError(f"labels are 0 to {len(labels) - 1}, got {max(message.label)}")
        if message.rows is not None and message.answer_id is None:
            raise RequestError("rows need the answer_id of their answer")
        rows = np.arange(n) if message.rows is None else np.array(message.rows)
        if len(np.unique(rows)) < n or rows.max() >= most_rows:
            raise RequestError(f"the feedback's rows must be distinct, from 0 to {most_rows - 1}")
        return cls(
            message.policy_id,
            # Without an answer_id, its content identifies it.
            message.answer_id or hashlib.sha256(message.model_dump_json().encode()).hexdigest()[:32],
            rows,
            np.array(message.stage),
            np.array(message.confidence, dtype=np.float64),
            np.array(message.prediction) == np.array(message.label),
            np.array(message.label),
            message.answer_id is not None,
        )

    @property
    def was_drawn(self) -> bool:
        """Return whether its policy was drawn among several."""
        return self.is_named and was_drawn(self.answer)

    def given_by(self, policy: Policy) -> Feedback:
        """Return the answers that the policy gave by itself: not those that a request's cap or a fault cut short."""
        if policy.scored:  # confidences do not say what was compared with the threshold: all count
            return self
        accepted = self.stages == len(policy.stages) - 1
        for stage in range(len(policy.stages) - 1):
            at_stage = self.stages == stage
            accepted[at_stage] = self.confidences[at_stage] + _ROUNDING >= policy.threshold_of(stage)
        return self.at(accepted)

    def at(self, mask: Bools) -> Feedback:
        """Return the rows of a mask, bool (n,)."""
        columns = ("rows", "stages", "confidences", "correct", "labels")
        return replace(self, **{name: getattr(self, name)[mask] for name in columns})

    def logged(self, share: float) -> list[tuple[str, int]]:
        """Return the labels of the rows that are in a shadow sample of that share, by their example ids in the log."""
        n = int(self.rows.max(initial=-1)) + 1
        chosen = sampled_rows(self.answer, n, share) if self.is_named and n else None
        if chosen is None:
            return []
        labels = zip(self.rows.tolist(), self.labels.tolist(), strict=True)
        return [(f"{self.answer}-{row}", label) for row, label in labels if chosen[row]]


class Reported:
    """Remembers which rows had their feedback, for all replicas of a service together.

    Each keeps at most MOST_REMEMBERED entries in the store, and drops its oldest first.   life: of the service.
    """

    def __init__(self, store: Store, life: str) -> None:
        self._store, self._prefix = store, f"feedback:{life}:"
        self._entries: deque[tuple[str, str]] = deque()  # policies and keys
        self._lock = threading.Lock()

    def new(self, feedback: Feedback) -> Feedback:
        """Return the rows that had none before, and remember them. Blocks for a few calls to the store."""
        left, n_before = sum(1 << row for row in feedback.rows.tolist()), 0
        prefix = f"{self._prefix}{feedback.policy_id}:{feedback.answer}:"
        # An entry is written once: of two routers that take the same rows at once, one finds the other's.
        while left and not self._store.put(f"{prefix}{n_before}", f"{left:x}".encode(), overwrite=False):
            left &= ~int(self._store.get(f"{prefix}{n_before}") or b"0", 16)
            n_before += 1
        if left:
            with self._lock:
                self._entries.append((feedback.policy_id, f"{prefix}{n_before}"))
                oldest = self._entries.popleft()[1] if len(self._entries) > MOST_REMEMBERED else None
            if oldest is not None:
                self._store.delete(oldest)
        return feedback.at(np.array([bool(left >> row & 1) for row in feedback.rows.tolist()], dtype=bool))

    def forget(self, policy_id: str) -> None:
        """Forget all feedback on a policy that is no longer active."""
        self._store.delete(f"{self._prefix}{policy_id}:", by_prefix=True)
        with self._lock:
            self._entries = deque(entry for entry in self._entries if entry[0] != policy_id)


@dataclass(frozen=True, slots=True)
class WatchedHere:
    """What one router has seen of a policy's answers; None where there is nothing to compare them with."""

    policy_id: str
    watched: Watched | None


@dataclass(slots=True)
class _Asked:
    """A request that is watched.   answers: with the rows that were cut short, bool (n,), once they are known."""

    n: int
    answers: tuple[Answered, Bools] | None = None
    is_over: bool = False


@dataclass(slots=True)
class _PolicyWatch:
    """The watch of one policy, and the answers and labels since it last computed.

    Attributes:
        policy_id: Id of the policy.
        digest: Digest of the policy with its reference.
        watch: The watch; None without a reference.
        asked: Requests in their order.
        more: Calls of the watch's methods that are due, with their arguments.
        n_asked: Rows that have arrived; one thread counts them.
        n_taken: Rows that were taken from `asked`; another thread counts them.
        held: Whether the policy was valid when the watch last computed.
    """

    policy_id: str
    digest: str
    watch: Watch | None
    asked: deque[_Asked] = field(default_factory=deque)
    more: deque[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=deque)
    n_asked: int = 0
    n_taken: int = 0
    held: bool = True

    def take(self) -> list[tuple[Answered, Bools]]:
        """Take the answers to the requests before the first one that is not answered yet."""
        taken = []
        while self.asked and self.asked[0].is_over:
            one = self.asked.popleft()
            self.n_taken += one.n
            if one.answers is not None:
                taken.append(one.answers)
        return taken


class Watching:
    """Watches the active policy. Rows arrive on the event loop; begin() and settle() may run in threads."""

    def __init__(
        self, policy: Policy, policy_id: str, metrics: ServingMetrics, n_routers: int, store: Store, alarm: str
    ) -> None:
        """Begin.

        n_routers: the most that there may be, which share the rate of false alarms.   alarm: the key in the store of
        what has raised an alarm about the policy, for all routers and those to come.
        """
        self._metrics, self._n_routers, self._store, self._alarm = metrics, n_routers, store, alarm
        self._settling = threading.Lock()
        self.begin(policy, policy_id)

    def begin(self, policy: Policy, policy_id: str) -> None:
        """Watch another policy, from no row on."""
        watch = None if policy.reference is None else Watch(policy, self._n_routers)
        content = json.dumps(policy.model_dump(mode="json"), sort_keys=True)
        self._watch = _PolicyWatch(policy_id, hashlib.sha256(content.encode()).hexdigest()[:16], watch)

    @contextmanager
    def asked(self, policy_id: str, n: int) -> Iterator[Callable[[RequestState], None]]:
        """Watch a request of n rows, which is answered in the block: what is returned keeps its answers.

        Answers are compared in the order in which they were asked for: while a stage hangs, those of the stages before
        it come first, and would look like a drift.
        """
        monitored, asked = self._of(policy_id), _Asked(n)
        if monitored is not None and monitored.n_asked - monitored.n_taken < MOST_KEPT:
            monitored.asked.append(asked)
            monitored.n_asked += n
        try:
            yield partial(_keep, asked)
        finally:
            asked.is_over = True

    def outcomes(self, policy_id: str, stages: Ints, confidences: Floats, correct: Bools) -> None:
        """Keep what became known of answers, as Watch.add_outcomes takes it."""
        if (monitored := self._of(policy_id)) is not None:
            monitored.more.append((Watch.add_outcomes, (stages, confidences, correct)))

    def agreements(self, policy_id: str, stages: Ints, agreed: Bools) -> None:
        """Keep whether answers were the whole cascade's, as Watch.add_agreements takes it."""
        if (monitored := self._of(policy_id)) is not None:
            monitored.more.append((Watch.add_agreements, (stages, agreed)))

    def settle(self) -> WatchedHere:
        """Evaluate all stored rows, report the result and return it."""
        with self._settling:
            monitored = self._watch
            if monitored.watch is None:
                self._latched(monitored, {})
                return WatchedHere(monitored.policy_id, None)
            if answers := monitored.take():
                answered, cut_short = zip(*answers, strict=True)
                monitored.watch.add(Answered.joined(answered), np.concatenate(cut_short))
            for add, arguments in _taken(monitored.more):
                add(monitored.watch, *arguments)
            watched = monitored.watch.watched()
            watched = Watched(watched.stages, self._latched(monitored, watched.evidence))
            self._metrics.watched(watched)
            if monitored.held and not watched.holds:
                logger.warning(f"policy {monitored.policy_id} {verdict(watched)}")
            monitored.held = watched.holds
            return WatchedHere(monitored.policy_id, watched)

    def _latched(self, monitored: _PolicyWatch, evidence: Mapping[str, Evidence]) -> Mapping[str, Evidence]:
        """Return evidence with what has ever spoken against the policy in any router, and keep what is new of that.

        What is kept of another policy is dropped: it has been replaced.
        """
        content = json.loads(self._store.get(self._alarm) or b"null")
        latched = content["evidence"] if content is not None and content["policy"] == monitored.digest else {}
        ours = {name: asdict(one) for name, one in evidence.items() if not one.holds and name not in latched}
        if ours:
            self._store.put(
                self._alarm, json.dumps({"policy": monitored.digest, "evidence": {**latched, **ours}}).encode()
            )
        elif content is not None and not latched:
            self._store.delete(self._alarm)
        return {
            name: replace(one, log10=max(one.log10, of["log10"]), at=of["at"], since=of["since"])
            if one.holds and (of := latched.get(name)) is not None
            else one
            for name, one in evidence.items()
        }

    def _of(self, policy_id: str) -> _PolicyWatch | None:
        """Return the watch of a policy, None where there is none."""
        monitored = self._watch
        return monitored if monitored.watch is not None and monitored.policy_id == policy_id else None


def report_of(policy: Policy, policy_id: str, routers: Sequence[WatchedHere]) -> dict[str, Any]:
    """Return the routers' monitoring of the active policy as JSON; holds is null without a reference."""
    seen = [one.watched for one in routers if one.policy_id == policy_id and one.watched is not None]
    if policy.reference is None or not seen:
        verdict_text = "is not watched: at this threshold or budget it has no reference to compare answers with"
        return {"policy_id": policy_id, "holds": None, "says": verdict_text, "routers": 0}
    return {**watch_report(policy, Watched.merged(seen)), "routers": len(seen)}


def _keep(asked: _Asked, request: RequestState) -> None:
    """Keep a request's answers if the policy was to give them, and has what they are compared with."""
    if request.capped or request.policy.reference is None:
        return
    answers = Answered(request.predictions, request.confidences, request.stages, request.costs, request.likeliest)
    asked.answers = answers, request.degraded


def _taken(entries: deque[Any]) -> list[Any]:
    """Take out what is there now; more may come meanwhile."""
    return [entries.popleft() for _ in range(len(entries))]
