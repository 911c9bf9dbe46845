"""Routers by known queries like the one asked: Benchmark Routing, and RouteLLM's similarity-weighted ranking.

Benchmark Routing (Shnitzer et al., COLM 2024) takes the model that was right most often on the nearest known queries.
RouteLLM (Ong et al., ICLR 2025) estimates the probability that the last model of a chain would win over the first, and
calls the last where that is high enough; models between the two are never called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cauc_ray.policies.baselines.routing import Read, fit_first_or_last, fit_router
from cauc_ray.policies.features import unit_rows
from cauc_ray.policies.methods import Fitted, Fitting
from cauc_ray.policies.routers import near_shares

# Numbers of neighbours tried besides all of them, in square roots of the number of known queries.
ROOTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Sharpnesses tried of a neighbour's weight.
SHARPNESSES = (0.0, 5.0, 10.0, 20.0)


def fit_benchmark_routing(fitting: Fitting) -> Fitted:
    """Remember the calibration queries, and choose the number of neighbours and their weights on validation.

    The published method rates a model on a whole new task by the mean of its estimates there; this is its rule for a
    single query, argmax_j g_j(x). Its k, metric and weights are not published. Tried are multiples of sqrt(n), each
    with every sharpness, and all n of equal weight; the smallest mean squared error of g, a proper loss, decides.
    """
    return fit_router(fitting, "benchmark-routing", _known_queries, "each query by its own neighbours")


def _known_queries(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the known queries, with the number of neighbours and the sharpness of smallest squared error.

    Among equals all queries at equal weight, else the lowest sharpness and the fewest neighbours.
    """
    known, asked = vectors(fitting.calibration), vectors(fitting.validation)
    own, right = fitting.calibration.correct(), fitting.validation.correct()
    k, sharpness, sizes = len(known), 0.0, sizes_to_try(len(known))
    if sizes:
        errors = ((near_shares(asked, known, own, sizes, SHARPNESSES) - right) ** 2).mean(axis=(2, 3))
        if errors.min() < np.mean((own.mean(axis=0) - right) ** 2):
            at, size = np.unravel_index(errors.argmin(), errors.shape)
            k, sharpness = sizes[size], SHARPNESSES[at]
    return {"known": known, "correct": own.astype(np.uint8)}, {"k": k, "sharpness": sharpness}


def sizes_to_try(n: int) -> tuple[int, ...]:
    """Return the numbers of neighbours to try among n known queries, rising, all below n."""
    sizes = {max(1, round(root * n**0.5)) for root in ROOTS}
    return tuple(sorted(size for size in sizes if size < n))


def fit_routellm_sw(fitting: Fitting) -> Fitted:
    """Keep the calibration split's queries, and who won: nothing is trained.

    The original solves a Bradley-Terry regression for each query, in which a battle i weighs
    10 x 10^(similarity_i / highest similarity) and a tie is half a win for each. Of two models' battles alone its
    solution is the weighted share of wins: ratings apart by 400 log10(share / (1 - share)), hence that probability.
    """
    return fit_first_or_last(fitting, "routellm-sw", _known_outcomes)


def _known_outcomes(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    right = fitting.calibration.correct().astype(np.int8)
    return {"known": unit_rows(vectors(fitting.calibration)), "outcomes": right[:, -1] - right[:, 0]}, {}
