"""GraphRouter (Feng et al., ICLR 2025): message passing between queries and models, whose edges it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from cauc_ray.baselines.routing import fit_router, note_of_router
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.routers import LogisticRouter


class GraphRouterPolicy(LogisticRouter):
    """GraphRouter, whose scores are linear in the query once the models have gathered their messages."""

    method: Literal["graphrouter"] = "graphrouter"


def fit(fitting: Fitting) -> Sequence[Policy]:
    """Train the network to predict, of random halves of the calibration split's edges, which lead to the best model.

    As published, quality first: AdamW by binary cross-entropy, a score being the sigmoid of the mean product of the
    aligned query and the convolved model. Saved outputs hold no descriptions of models or tasks: a model's features
    are its index, accuracy and cost instead of an embedded text, and there is one task. Where models tie, all of the
    best are targets. A step hides one random half of the edges instead of 32 halves, which orders test queries as
    well and takes a tenth of the time. Of at most 2,000 epochs that of the lowest validation loss counts; training
    stops when none was lower for 500.
    """
    from cauc_ray.baselines.networks.graph import trained  # torch

    return fit_router(fitting, GraphRouterPolicy, trained)


METHOD = Method(
    "graphrouter",
    "router",
    fit,
    packages=("torch", "sklearn"),
    extra="baselines",
    note=note_of_router("no descriptions of models", "one mask a step, early stopping"),
    reads="neither",
)
