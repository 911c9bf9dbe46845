"""Agreement-based cascading (Kolawole et al., TMLR 2025): an answer that two models give is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from cauc_ray.numbers.logits import real_options, same_width, softmax, widened
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Step
from cauc_ray.policies.scored import MethodPolicy

# From here on, two models must agree.
AGREED = 1.0
_BELOW_ONE = float(np.nextafter(1.0, 0.0))


class AgreementPolicy(MethodPolicy):
    """Models one after the other until two agree on an answer; else the last answers.

    The answer so far is that of most models, among equals the one of the highest mean probability. That probability is
    compared with the threshold, and is 1 higher where two models agree. At the threshold 1 this is the published rule.
    A lower one also takes answers of one model that are probable enough; a higher one only the more probable of those
    that two agree on.

    A row's state has two numbers for each option: the sum of its probabilities, and how many models answered with it.
    """

    method: Literal["agreement"] = "agreement"

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Add the stage's probabilities and vote; at the last stage take its own answer."""
        numbers = self.stages[stage]
        scores = numbers.scores(logits)
        if stage == len(self.stages) - 1:
            return self.own_answer(stage, real_options(logits))
        rows = np.arange(len(scores))
        votes, sums = np.zeros(scores.shape), np.where(np.isneginf(scores), -np.inf, softmax(scores))
        votes[rows, scores.argmax(axis=1)] = 1.0
        if state is not None:
            earlier, names = state.reshape(len(rows), -1, 2), (numbers.name, "the stages before")
            sums, summed = same_width(sums, earlier[..., 0], names)
            votes = np.maximum(widened(votes, sums.shape[1]), 0.0)
            votes[:, : earlier.shape[1]] += np.maximum(earlier[..., 1], 0.0)
            sums = sums + summed
        means = sums / (stage + 1)
        predictions = (votes + means).argmax(axis=1).astype(np.int32)
        confidences = means[rows, predictions]
        agreed = np.where(votes[rows, predictions] > 1, AGREED, 0.0)
        worth = np.minimum(confidences, _BELOW_ONE) + agreed
        scores = np.log(sums, out=np.full(sums.shape, -np.inf), where=sums > 0)
        carried = np.stack([sums, votes], axis=2).reshape(len(rows), -1)
        return Step(predictions, confidences, worth >= self.threshold, carried, scores, worth=worth)


def fit(fitting: Fitting) -> Sequence[AgreementPolicy]:
    """Return the cascade at the published rule: it learns nothing but the models' temperatures."""
    return [fitting.policy(AgreementPolicy).model_copy(update={"threshold": AGREED})]


METHOD = Method(
    "agreement",
    "cascade",
    fit,
    note="single models in place of ensembles; budgets weigh calibrated probabilities, too",
)
