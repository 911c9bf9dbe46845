"""Cascades of models that answer in words by one raw confidence, as users set them up without calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cauc_ray.numbers.answer_keys import confidences_in
from cauc_ray.policies.family import Control
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.trace import Examples, Trace, own_answers

# What a missing confidence counts as.
_NONE = -1e6


def fit(fitting: Fitting) -> Sequence[Control]:
    """Return a cascade for each confidence that all models give: the next model is asked where it is low."""
    n = min(confidences_in(logits).shape[1] for logits in fitting.calibration.chain.logits)

    def by(column: int) -> Control:
        def trace(examples: Examples) -> Trace:
            chain = examples.chain
            columns = [confidences_in(logits)[:, column] for logits in chain.logits]
            confidences = np.nan_to_num(np.stack(columns, axis=1), nan=_NONE)
            return Trace(own_answers(chain), confidences, np.tri(len(chain.models), dtype=bool))

        return Control(trace)

    return [by(column) for column in range(n)]


METHOD = Method(
    "confidence",
    "cascade",
    fit,
    note="the best of its raw confidences on validation",
    unpublished="compares a raw confidence, which is not calibrated",
    reads="answers",
)
