"""What an embedding tells before a model is asked: how competent each model is, and which labels are likely.

Ridge regressions on embeddings e of length 1: g_j(e) of whether model j is right, less its mean, and s_0(e) of the
labels. An expert that does not predict rows that it has not seen is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cauc_ray.numbers.products import products
from cauc_ray.numbers.ridge import RidgeFit, fit_ridge
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

    @property
    def arrays(self) -> dict[str, Floats]:
        """Return the arrays by the names of the fields, without those that there are not."""
        return {name: own for name in self.__slots__ if (own := getattr(self, name)) is not None}

    def tell(self, embeddings: Floats) -> Floats:
        """Return g and, with a label expert, s_0, float64 (n, M) or (n, M + K).   embeddings: float (n, d)."""
        vectors = unit_rows(np.asarray(embeddings, dtype=np.float32))
        told = products(vectors, self.of_models) + self.model_offsets
        if self.of_labels is None or self.label_offsets is None:
            return told
        return np.column_stack([told, products(vectors, self.of_labels) + self.label_offsets])


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
    vectors = unit_rows(np.asarray(embeddings, dtype=np.float32)).astype(np.float64)
    right = correct - correct.mean(axis=0)
    of_models = [_expert(vectors, own[:, None], LEAST_OF_MODELS) for own in right.T]
    experts = Experts(
        np.stack([np.zeros(vectors.shape[1]) if one is None else one.weights[:, 0] for one in of_models]),
        np.array([0.0 if one is None else one.offsets[0] for one in of_models]),
    )
    told = tuple(None if one is None else one.held_out[:, 0] for one in of_models)
    label = _expert(vectors, np.eye(n_options)[labels], LEAST_OF_LABELS) if with_labels else None
    if label is None:
        return experts, Told(told, None)
    return replace(experts, of_labels=label.weights.T, label_offsets=label.offsets), Told(told, label.held_out)


def _expert(vectors: Floats, targets: Floats, least: float) -> RidgeFit | None:
    """Return a fit of targets, float64 (N, T); None where it explains too little of rows that it has not seen."""
    if not np.ptp(targets, axis=0).any():  # nothing to explain
        return None
    fit = fit_ridge(vectors, targets)
    explained = 1 - ((targets - fit.held_out) ** 2).sum() / ((targets - fit.level) ** 2).sum()
    return fit if explained > least else None
