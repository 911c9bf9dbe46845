"""Benchmark Routing (Shnitzer et al., COLM 2024): the model that is right most often on the nearest queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from cauc_ray.baselines.routing import Read, fit_router, note_of_router
from cauc_ray.numbers.products import Weights, products
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.features import unit_rows
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.routers import ROWS_AT_ONCE, ValueRouter

# Numbers of neighbours tried, in square roots of the number of calibration queries; all of them are tried, too.
ROOTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Sharpnesses tried of a neighbour's weight.
SHARPNESSES = (0.0, 5.0, 10.0, 20.0)


class BenchmarkRoutingPolicy(ValueRouter):
    """Values are shares of right answers on near queries.

    Its arrays are "known", the calibration queries, (n, d), and "correct", (n, M).
    """

    method: Literal["benchmark-routing"] = "benchmark-routing"

    def values(self, vectors: Floats) -> Floats:
        """Return the share of each model's right answers on the nearest calibration queries, float64 (n, M)."""
        assert self.k is not None
        assert self.sharpness is not None
        queries = self.arrays.once("known", unit_weights)
        shares: Floats = near_shares(vectors, queries, self.arrays["correct"], (self.k,), (self.sharpness,))[0, 0]
        return shares


def fit(fitting: Fitting) -> Sequence[Policy]:
    """Remember the calibration queries, and choose the number of neighbours and their weights on validation.

    The published method rates a model on a whole new task by the mean of its estimates there; this is its rule for a
    single query, argmax_j g_j(x). Its k, metric and weights are not published. Tried are multiples of sqrt(n), each
    with every sharpness, and all n of equal weight; the smallest mean squared error of g, a proper loss, decides.
    """
    return fit_router(fitting, BenchmarkRoutingPolicy, _known_queries)


def _known_queries(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the calibration queries, with the number of neighbours and the sharpness of smallest squared error.

    Among equals all queries at equal weight, else the lowest sharpness and the fewest neighbours.
    """
    queries, asked = vectors(fitting.calibration), vectors(fitting.validation)
    correct, right = fitting.calibration.correct(), fitting.validation.correct()
    k, sharpness, sizes = len(queries), 0.0, sizes_to_try(len(queries))
    if sizes:
        errors = ((near_shares(asked, queries, correct, sizes, SHARPNESSES) - right) ** 2).mean(axis=(2, 3))
        if errors.min() < np.mean((correct.mean(axis=0) - right) ** 2):
            at, size = np.unravel_index(errors.argmin(), errors.shape)
            k, sharpness = sizes[size], SHARPNESSES[at]
    return {"known": queries, "correct": correct.astype(np.uint8)}, {"k": k, "sharpness": sharpness}


def sizes_to_try(n: int) -> tuple[int, ...]:
    """Return the numbers of neighbours to try among n known queries, rising, all below n."""
    sizes = {max(1, round(root * n**0.5)) for root in ROOTS}
    return tuple(sorted(size for size in sizes if size < n))


def unit_weights(queries: Floats) -> Weights:
    """Return queries, float32 (n, d), at length 1, prepared for products."""
    return Weights.of(unit_rows(queries))


def near_shares(
    vectors: Floats,
    queries: Floats | Weights,
    correct: Floats | Bools,
    sizes: Sequence[int],
    sharpnesses: Sequence[float],
) -> Floats:
    """Return the shares of right answers on the nearest calibration queries.

    Args:
        vectors: The queries to route, float32 (N, d).
        queries: The calibration queries, float32 (n, d), or what unit_weights() has made of them.
        correct: Which models answer the calibration queries right, (n, M).
        sizes: S numbers of neighbours by cosine, rising.
        sharpnesses: B sharpnesses; a neighbour weighs exp(sharpness x (cosine - 1)).

    Returns:
        The shares, float64 (B, S, N, M). With all n neighbours at sharpness 0 they are the models' accuracies,
        whatever the query.
    """
    estimates = np.empty((len(sharpnesses), len(sizes), len(vectors), correct.shape[1]))
    last, asked = np.array(sizes) - 1, unit_rows(vectors)
    prepared = queries if isinstance(queries, Weights) else unit_weights(queries)
    right = np.asarray(correct, dtype=np.float64)
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        cosines = products(asked[rows], prepared)
        near = _nearest(cosines, sizes[-1])
        distances = 1.0 - np.take_along_axis(cosines, near, axis=1)
        for at, sharpness in enumerate(sharpnesses):
            weights = np.exp(-sharpness * distances)[:, :, None]
            shares = np.cumsum(weights * right[near], axis=1) / np.cumsum(weights, axis=1)
            estimates[at, :, rows] = np.moveaxis(shares[:, last], 1, 0)
    return estimates


def _nearest(cosines: Floats, k: int) -> Ints:
    """Return the columns of the k highest of each row, int (n, k), highest first and of equals the first ones first."""
    n_columns = cosines.shape[1]
    lowest = np.partition(cosines, n_columns - k, axis=1)[:, n_columns - k]
    near = np.empty((len(cosines), k), dtype=np.int64)
    for row, (values, least) in enumerate(zip(cosines, lowest, strict=True)):
        candidates = np.flatnonzero(values >= least)  # more than k where some equal the lowest
        near[row] = candidates[np.argsort(-values[candidates], kind="stable")[:k]]
    return near


METHOD = Method(
    "benchmark-routing",
    "router",
    fit,
    packages=("sklearn",),
    extra="baselines",
    note=note_of_router("each query by its own neighbours"),
    reads="neither",
)
