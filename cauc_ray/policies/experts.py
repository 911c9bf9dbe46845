"""What an embedding tells before a model is asked: how competent each model is, and which labels are likely.

Ridge regressions on embeddings e of length 1: g_j(e) of whether model j is right, less its mean, and s_0(e) of the
labels. An expert that does not predict rows that it has not seen is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.products import products
from cauc_ray.numbers.ridge import fit_ridge
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.features import unit_rows

# An expert is used if it explains more than this share of the variance of rows that were left out of its fit.
LEAST_OF_LABELS, LEAST_OF_MODELS = 0.01, 0.003


@dataclass(frozen=True, slots=True)
class Experts:
    """Linear functions of embeddings.

    of_models: float64 (M, d), a row of zeros for a model without an expert; model_offsets: (M,).
    of_labels: float64 (K, d), and label_offsets: (K,); None without one.
    """

    of_models: Floats
    model_offsets: Floats
    of_labels: Floats | None = None
    label_offsets: Floats | None = None

    def competences(self, embeddings: Floats) -> Floats:
        """Return g, float64 (n, M).   embeddings: float (n, d)."""
        found: Floats = products(unit_rows(embeddings), self.of_models) + self.model_offsets
        return found

    def priors(self, embeddings: Floats) -> Floats | None:
        """Return s_0, float64 (n, K), None without a label expert."""
        if self.of_labels is None:
            return None
        found: Floats = products(unit_rows(embeddings), self.of_labels) + self.label_offsets
        return found


@dataclass(frozen=True, slots=True)
class Told:
    """What experts tell of the rows that they were fitted on, each by the fit on all other rows.

    competences: by model, float64 (N,), None without an expert.   prior: float64 (N, K), None without one.
    """

    competences: tuple[Floats | None, ...]
    prior: Floats | None


def fit_experts(
    embeddings: Floats, correct: Bools, labels: Ints, n_options: int, *, with_labels: bool
) -> tuple[Experts, Told]:
    """Fit experts on labelled rows.

    embeddings: float (N, d).   correct: bool (N, M).   labels: int (N,).   with_labels: whether to fit one of labels.
    """
    vectors = unit_rows(np.asarray(embeddings, dtype=np.float32))
    of_models = [_expert(vectors, right[:, None], LEAST_OF_MODELS) for right in np.float64(correct).T]
    weights = np.stack([np.zeros(vectors.shape[1]) if one is None else one[0][:, 0] for one in of_models])
    offsets = np.array([0.0 if one is None else one[1][0] - own.mean() for one, own in zip(of_models, correct.T)])
    told = tuple(None if one is None else one[2][:, 0] - own.mean() for one, own in zip(of_models, correct.T))
    label = _expert(vectors, np.eye(n_options)[labels], LEAST_OF_LABELS) if with_labels else None
    if label is None:
        return Experts(weights, offsets), Told(told, None)
    return Experts(weights, offsets, label[0].T, label[1]), Told(told, label[2])


def _expert(vectors: Floats, targets: Floats, least: float) -> tuple[Floats, Floats, Floats] | None:
    """Return weights (d, T), offsets (T,) and held-out predictions (N, T); None where these explain too little."""
    fit = fit_ridge(vectors.astype(np.float64), targets)
    explained = 1 - ((targets - fit.held_out) ** 2).sum() / ((targets - fit.level) ** 2).sum()
    if not explained > least:
        return None
    return fit.weights, fit.level - fit.centre @ fit.weights, fit.held_out
