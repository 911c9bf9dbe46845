"""The label expert: a classifier on the queries' embeddings that calls no model, as a control of what models add."""

from __future__ import annotations

import numpy as np

from cauc_ray.numbers.logits import real_options
from cauc_ray.numbers.ridge import fit_ridge
from cauc_ray.policies.features import unit_rows
from cauc_ray.policies.methods import Fitted, Fitting, Thresholded
from cauc_ray.policies.trace import Examples, Trace, with_embedding_paid


def fit_embedding(fitting: Fitting) -> Fitted:
    """Fit labels as a ridge regression on embeddings of length 1, whose penalty leave-one-out errors choose."""
    chain = fitting.calibration.chain
    n_options = chain.logits[0].shape[1]
    expert = fit_ridge(_vectors(fitting.calibration), np.eye(n_options)[chain.labels])

    def answers(examples: Examples) -> Trace:
        scores, options = expert.predict(_vectors(examples)), real_options(examples.chain.logits[0])
        k = min(n_options, options.shape[1])  # splits may differ in the most options that a question has
        chosen = np.where(np.isfinite(options[:, :k]), scores[:, :k], -np.inf).argmax(axis=1)[:, None]
        calls = np.zeros((1, len(examples.chain.models)), dtype=bool)
        return with_embedding_paid(Trace(chosen.astype(np.int32), np.ones(chosen.shape), calls), examples)

    return Thresholded(answers, fitting.validation, note=fitting.calibration.embedding_note or "calls no model")


def _vectors(examples: Examples) -> np.ndarray:
    assert examples.embeddings is not None
    return unit_rows(np.asarray(examples.embeddings, dtype=np.float64))
