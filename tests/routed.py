"""A policy that looks at an embedding first, then asks models in an order of its own: what a router does."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from cauc_ray.numbers.logits import softmax
from cauc_ray.policies.policy import Policy, Step


class Routed(Policy):
    """A row goes from the encoder, stage 0, to the model that its embedding says, and from there to the one before.

    A row's state is which stages it has been at. It stops where a model is sure, or when none is left.   begins: the
    stage that all rows go to first.
    """

    in_turn: ClassVar[bool] = False
    method: Literal["routed"] = "routed"
    begins: int = 0

    def first(self, n, ids):
        return np.full(n, self.begins, dtype=np.int8) if self.begins else None

    def step(self, stage, logits, state):
        n, n_stages = len(logits), len(self.stages)
        been = np.zeros((n, n_stages)) if state is None else np.nan_to_num(state[:, :n_stages], neginf=0.0)
        been[:, stage] = 1.0
        if stage == 0:
            to = 1 + logits.argmax(axis=1) % (n_stages - 1)
            nothing = np.full(n, np.nan)
            return Step(
                np.full(n, -1, np.int32), nothing, np.zeros(n, bool), been, np.zeros((n, 0)), to.astype(np.int8)
            )
        scores = self.stages[stage].scores(logits)
        confidences = softmax(scores).max(axis=1)
        candidates = 1 + (stage - 1 - np.arange(1, n_stages - 1)) % (n_stages - 1)  # those before it, around the corner
        left = been[:, candidates] == 0
        to = candidates[left.argmax(axis=1)]
        accepted = (confidences >= self.threshold) | ~left.any(axis=1)
        return Step(scores.argmax(axis=1).astype(np.int32), confidences, accepted, been, scores, to.astype(np.int8))


def routed(fitted: Policy, *, begins: int = 0) -> Routed:
    """Return such a policy with the numbers of a fitted one, whose first model becomes the encoder."""
    numbers = {name: getattr(fitted, name) for name in Policy.model_fields if name != "method"}
    return Routed.model_construct(**{**numbers, "reference": None, "begins": begins})
