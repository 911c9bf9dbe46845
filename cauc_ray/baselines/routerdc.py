"""RouterDC (Chen et al., NeurIPS 2024), which learns by contrast which models are best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from cauc_ray.baselines.routing import fit_router, note_of_router
from cauc_ray.baselines.texts import text_method
from cauc_ray.numbers.logits import softmax
from cauc_ray.numbers.products import products
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.features import unit_rows
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.routers import ValueRouter


class RouterDCPolicy(ValueRouter):
    """Values are similarities to a vector of each model, by arrays "projection", (D, d), and "models", (M, D)."""

    method: Literal["routerdc"] = "routerdc"

    def values(self, vectors: Floats) -> Floats:
        """Return the softmax of each query's similarities to the models, float64 (n, M)."""
        projected = products(vectors, self.arrays["projection"]).astype(np.float32)
        return softmax(products(unit_rows(projected), unit_rows(self.arrays["models"])))


def fit(fitting: Fitting) -> Sequence[Policy]:
    """Train a projection of frozen features, where the original trains its encoder, with both of its losses.

    The weights kept are those of the lowest sample-model loss on validation. Clusters are found by principal
    components and k-means, where the original takes t-SNE and k-means. Nothing in the method knows of costs: a price
    is set against the softmax of the similarities.
    """
    from cauc_ray.baselines.networks.model_vectors import trained_routerdc  # torch

    return fit_router(fitting, RouterDCPolicy, trained_routerdc)


METHOD = Method(
    "routerdc",
    "router",
    fit,
    packages=("torch", "sklearn"),
    extra="baselines",
    note=note_of_router("frozen encoder, clusters by PCA"),
    reads="neither",
)
ENCODER = text_method(
    "routerdc-encoder",
    "router",
    "Fine-tune the encoder (mDeBERTa-v3-base) by both contrasts.",
    "clusters by PCA",
    reads="neither",
)
