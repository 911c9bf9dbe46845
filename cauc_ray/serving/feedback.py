"""Feedback: what has become known of answers that a service gave."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cauc_ray.errors import explain
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.store import Store

# Confidences are the float32 values of the answer.
_ROUNDING = 1e-6

# Answers whose feedback one router remembers, so that it is counted once.
MOST_REMEMBERED = 10_000

_Option = Annotated[int, Field(ge=0, lt=2**31)]


class FeedbackMessage(BaseModel):
    """The body: values of the answers, and the labels, each a list by row.

    answer_id: from the response's parameters.   rows: which of the answer's rows these are, all of them without it.
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
    """Rows of an answer that one policy gave, and which were right; arrays (n,).

    stages: int.   confidences: float64.   correct: bool.   answer: identifies the answer.   rows: int, of
    the answer; None where these are its first ones.
    """

    policy_id: str
    stages: Ints
    confidences: Floats
    correct: Bools
    answer: str = ""
    rows: Ints | None = None

    def __len__(self) -> int:
        return len(self.stages)

    @classmethod
    def read(cls, body: bytes, policy: Policy, most_rows: int) -> Feedback:
        """Read a request's body. Raises RequestError: 400 where it makes no sense, 413 for too many rows."""
        try:
            message = FeedbackMessage.model_validate_json(body)
        except ValidationError as error:
            raise RequestError(f"the feedback is invalid: {explain(error)}") from error
        columns = {name: getattr(message, name) for name in ("prediction", "confidence", "stage", "label", "rows")}
        sizes = {name: len(values) for name, values in columns.items() if values is not None}
        if len(set(sizes.values())) > 1:
            lengths = ", ".join(f"{n} of {name}" for name, n in sizes.items())
            raise RequestError(f"the feedback's lists must have the same length, got {lengths}")
        if sizes["label"] > most_rows:
            raise RequestError(f"feedback may have up to {most_rows} rows, got {sizes['label']}", 413)
        if max(message.stage) >= len(policy.stages):
            raise RequestError(f"stages are 0 to {len(policy.stages) - 1}, got {max(message.stage)}")
        rows = np.arange(sizes["label"]) if message.rows is None else np.array(message.rows)
        if message.rows is not None and message.answer_id is None:
            raise RequestError("rows need the answer_id of their answer")
        if len(np.unique(rows)) < len(rows) or rows.max() >= most_rows:
            raise RequestError(f"the feedback's rows must be distinct, from 0 to {most_rows - 1}")
        return cls(
            message.policy_id,
            np.array(message.stage),
            np.array(message.confidence, dtype=np.float64),
            np.array(message.prediction) == np.array(message.label),
            message.answer_id or _content_of(message),
            rows,
        )

    def given_by(self, policy: Policy) -> Feedback:
        """Return the answers that the policy gave by itself: not those that a request's cap or a fault cut short."""
        own = (self.stages == len(policy.stages) - 1) | (self.confidences >= policy.threshold - _ROUNDING)
        return self.at(own)

    def at(self, kept: Bools) -> Feedback:
        """Return some of the rows.   kept: bool (n,)."""
        rows = np.arange(len(self)) if self.rows is None else self.rows
        own = self.stages[kept], self.confidences[kept], self.correct[kept]
        return Feedback(self.policy_id, *own, self.answer, rows[kept])


class Reported:
    """Remembers which rows had their feedback, for all replicas of a service together.

    Each keeps at most MOST_REMEMBERED entries in the store, and drops its oldest first.
    store: returns the one of a prefix.   key: of the service's life.
    """

    def __init__(self, store: Callable[[str], Store], key: str) -> None:
        self._stores, self._key = store, key
        self._own: deque[tuple[str, str]] = deque()
        self._lock = threading.Lock()

    def new(self, feedback: Feedback) -> Feedback:
        """Return the rows that had none before, and remember them. Blocks for a few calls to the store."""
        rows = range(len(feedback)) if feedback.rows is None else feedback.rows.tolist()
        store, left, n_before = self._store(feedback.policy_id), sum(1 << row for row in rows), 0
        # An entry is written once: of two routers that take the same rows at once, one finds the other's.
        while left and not store.add(f"{feedback.answer}:{n_before}", f"{left:x}".encode()):
            left &= ~int(store.get(f"{feedback.answer}:{n_before}") or b"0", 16)
            n_before += 1
        if left:
            self._remember(feedback.policy_id, f"{feedback.answer}:{n_before}")
        return feedback.at(np.array([bool(left >> row & 1) for row in rows], dtype=bool))

    def forget(self, policy_id: str) -> None:
        """Forget all feedback on a policy that is no longer active."""
        self._store(policy_id).clear()
        with self._lock:
            self._own = deque(entry for entry in self._own if entry[0] != policy_id)

    def _remember(self, policy_id: str, name: str) -> None:
        with self._lock:
            self._own.append((policy_id, name))
            oldest = self._own.popleft() if len(self._own) > MOST_REMEMBERED else None
        if oldest is not None:
            self._store(oldest[0]).delete(oldest[1])

    def _store(self, policy_id: str) -> Store:
        return self._stores(f"feedback:{self._key}:{policy_id}")


def _content_of(message: FeedbackMessage) -> str:
    """Return an identifier for feedback without an answer_id: its content."""
    return hashlib.sha256(message.model_dump_json().encode()).hexdigest()[:32]
