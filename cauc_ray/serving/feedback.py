"""Feedback: what has become known of answers that a service gave."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cauc_ray.errors import explain
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.faults import RequestError

# A confidence comes as the float32 that the answer said.
_ROUNDING = 1e-6

_Option = Annotated[int, Field(ge=0, lt=2**31)]


class FeedbackMessage(BaseModel):
    """The body: what the answers said, and the labels, a list of each by row."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    policy_id: str
    prediction: list[_Option] = Field(min_length=1)
    confidence: list[Annotated[float, Field(ge=0, le=1)]]
    stage: list[Annotated[int, Field(ge=0)]]
    label: list[_Option]


@dataclass(frozen=True, slots=True)
class Feedback:
    """Answers that one policy gave, and which were right; arrays (n,).

    stages: int.   confidences: float64.   correct: bool.
    """

    policy_id: str
    stages: Ints
    confidences: Floats
    correct: Bools

    def __len__(self) -> int:
        return len(self.stages)

    @classmethod
    def read(cls, body: bytes, policy: Policy, most_rows: int) -> Feedback:
        """Read a request's body. Raises RequestError: 400 where it makes no sense, 413 for too many rows."""
        try:
            message = FeedbackMessage.model_validate_json(body)
        except ValidationError as error:
            raise RequestError(f"the feedback is not understood: {explain(error)}") from error
        columns = {name: getattr(message, name) for name in ("prediction", "confidence", "stage", "label")}
        sizes = {name: len(values) for name, values in columns.items()}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"{n} of {name}" for name, n in sizes.items())
            raise RequestError(f"the feedback's lists must be of the same rows; there are {told}")
        if sizes["label"] > most_rows:
            raise RequestError(f"feedback has at most {most_rows} rows, not {sizes['label']}", 413)
        if max(message.stage) >= len(policy.stages):
            raise RequestError(f"a stage is 0 to {len(policy.stages) - 1}, not {max(message.stage)}")
        return cls(
            message.policy_id,
            np.array(message.stage),
            np.array(message.confidence, dtype=np.float64),
            np.array(message.prediction) == np.array(message.label),
        )

    def given_by(self, policy: Policy) -> Feedback:
        """Return the answers that the policy gave by itself: not those that a request's cap or a fault cut short."""
        own = (self.stages == len(policy.stages) - 1) | (self.confidences >= policy.threshold - _ROUNDING)
        return Feedback(self.policy_id, self.stages[own], self.confidences[own], self.correct[own])
