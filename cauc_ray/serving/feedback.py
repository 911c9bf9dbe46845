"""Feedback: what has become known of answers, read from a body and counted once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cauc_ray.numbers.answer_keys import answer_keys
from cauc_ray.numbers.answer_rules import rule_of
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.answer_ids import sampled_rows, was_drawn
from cauc_ray.serving.bodies import read_as

# Confidences are the float32 values of the answer.
_ROUNDING = 1e-6

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
        label: Labels; right answers as texts where models answer in words.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    policy_id: str
    answer_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None = None
    rows: list[_Option] | None = None
    prediction: list[_Option] = Field(min_length=1)
    confidence: list[Annotated[float, Field(ge=0, le=1)]]
    stage: list[Annotated[int, Field(ge=0)]]
    label: list[_Option] | list[Annotated[str, Field(min_length=1)]]


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
    def read(
        cls,
        body: bytes,
        policy: Policy,
        most_rows: int,
        labels: Sequence[str] | None = None,
        rule: str | None = None,
    ) -> Feedback:
        """Read a request's body.

        Args:
            body: The body.
            policy: The policy that answered.
            most_rows: The most rows of a request.
            labels: The names of the options, None if they are unknown or not the same for all rows.
            rule: By which answers in words are the same, None where models score options.

        Raises:
            RequestError: 400 if the body is invalid, 413 for too many rows.
        """
        message = read_as(FeedbackMessage, body, "feedback")
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
        label = _keys(message.label, rule)
        if labels is not None and label.max() >= len(labels):
            raise RequestError(f"labels are 0 to {len(labels) - 1}, got {label.max()}")
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
            np.array(message.prediction) == label,
            label,
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


def _keys(labels: Sequence[int | str], rule: str | None) -> Ints:
    """Return labels as predictions name them, int (n,): options, or keys of right answers by a rule."""
    if not isinstance(labels[0], str):
        return np.array(labels)
    if rule is None:
        raise RequestError(f"labels are numbers of options, got the text {labels[0]!r:.80}")
    return answer_keys(rule_of(rule).references([str(label) for label in labels]))
