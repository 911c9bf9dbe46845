"""EmbedLLM (Zhuang et al., ICLR 2025), which predicts on which queries a model is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cauc_ray.baselines.routing import fit_router, note_of_router
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.routers import LogisticRouter


class EmbedLLMPolicy(LogisticRouter):
    """EmbedLLM, whose network is linear in the query."""

    method: Literal["embedllm"] = "embedllm"


def fit(fitting: Fitting) -> Sequence[Policy]:
    """Train on the calibration split's correctness, up to the lowest NLL on validation.

    The published rule, the model of the highest logit difference between right and wrong, knows no cost; here the
    probability of being right, which rises with it, is what a price is set against.
    """
    from cauc_ray.baselines.networks.model_vectors import trained_embedllm  # torch

    return fit_router(fitting, EmbedLLMPolicy, trained_embedllm)


METHOD = Method(
    "embedllm",
    "router",
    fit,
    packages=("torch", "sklearn"),
    extra="baselines",
    note=note_of_router(),
    reads="neither",
)
