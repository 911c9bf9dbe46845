"""Routers by known queries like the one asked: Benchmark Routing, and RouteLLM's similarity-weighted ranking.

Benchmark Routing (Shnitzer et al., COLM 2024) takes the model that was right most often on the nearest known queries.
RouteLLM (Ong et al., ICLR 2025) estimates the probability that the last model of a chain would win over the first, and
calls the last where that is high enough; models between the two are never called.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from sklearn.neighbors import NearestNeighbors

from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.baselines.routing import QueryVectors, Values, fit_first_or_last, fit_router, unit_rows
from cauc_ray.policies.methods import Fitted, Fitting
from cauc_ray.policies.trace import Examples

# Numbers of neighbours tried besides all of them, in square roots of the number of known queries.
ROOTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Sharpnesses tried of a neighbour's weight.
SHARPNESSES = (0.0, 5.0, 10.0, 20.0)

# Queries looked up at once: bounds memory, changes nothing.
_QUERIES_AT_ONCE = 1024

# Similarities that are computed at a time: 64 MB of float32.
SIMILARITIES_AT_ONCE = 2**24

# Cosines of float32 vectors are known to about this.
_COSINE_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Nearest:
    """The weighted share of right answers that each model gave on the k known queries of the highest cosine.

    A neighbour weighs exp(sharpness x (cosine - 1)). At sharpness 0 all k weigh the same; with all n known queries the
    shares are then the models' accuracies, whatever the query, and nothing is left to route by.

    index: of the vectors of the n known queries.   correct: bool (n, M).   k: 1 to n.
    """

    index: NearestNeighbors
    correct: Bools
    k: int
    sharpness: float
    vectors: QueryVectors

    def __call__(self, examples: Examples) -> Floats:
        """Return g_j(x), the estimated probabilities that the models are right, float64 (N, M)."""
        if self.k == len(self.correct) and self.sharpness == 0:  # the same for all: no need to look for neighbours
            return np.tile(self.correct.mean(axis=0), (len(examples), 1))
        g: Floats = self.estimates(examples, (self.k,), (self.sharpness,))[0, 0]
        return g

    def estimates(self, examples: Examples, sizes: tuple[int, ...], sharpnesses: tuple[float, ...]) -> Floats:
        """Return g for each of B sharpnesses and S rising numbers of neighbours, float64 (B, S, N, M)."""
        vectors = self.vectors(examples)
        found = np.empty((len(sharpnesses), len(sizes), len(vectors), self.correct.shape[1]))
        last = np.array(sizes) - 1
        for start in range(0, len(vectors), _QUERIES_AT_ONCE):
            rows = slice(start, start + _QUERIES_AT_ONCE)
            distances, near = self.index.kneighbors(vectors[rows], sizes[-1])  # distance: 1 less the cosine
            for at, sharpness in enumerate(sharpnesses):
                weights = np.exp(-sharpness * distances.astype(np.float64))[:, :, None]
                shares = np.cumsum(weights * self.correct[near], axis=1) / np.cumsum(weights, axis=1)
                found[at, :, rows] = np.moveaxis(shares[:, last], 1, 0)
        return found


def fit_benchmark_routing(fitting: Fitting) -> Fitted:
    """Remember the calibration queries, and choose the number of neighbours and their weights on validation.

    The published method rates a model on a whole new task by the mean of its estimates there; this is its rule for a
    single query, argmax_j g_j(x). Its k, metric and weights are not published. Tried are multiples of sqrt(n), each
    with every sharpness, and all n of equal weight; the smallest mean squared error of g, a proper loss, decides.
    """
    return fit_router(fitting, _known_queries, "each query by its own neighbours")


def _known_queries(fitting: Fitting, vectors: QueryVectors) -> Nearest:
    known = vectors(fitting.calibration)
    # Brute force: trees gain nothing in hundreds of dimensions, and have no cosine.
    index = NearestNeighbors(metric="cosine", algorithm="brute").fit(known)
    return best(Nearest(index, fitting.calibration.correct(), len(known), 0.0, vectors), fitting.validation)


def best(alike: Nearest, validation: Examples) -> Nearest:
    """Return the estimates of smallest squared error on validation.

    alike: all n neighbours at equal weight. Among equals these remain, else the lowest sharpness and the fewest
    neighbours.
    """
    sizes, correct = sizes_to_try(alike.k), validation.correct()
    if not sizes:
        return alike
    losses = ((alike.estimates(validation, sizes, SHARPNESSES) - correct) ** 2).mean(axis=(2, 3))
    if losses.min() >= np.mean((alike(validation) - correct) ** 2):
        return alike
    sharpness, size = np.unravel_index(losses.argmin(), losses.shape)
    return replace(alike, k=sizes[size], sharpness=SHARPNESSES[sharpness])


def sizes_to_try(n: int) -> tuple[int, ...]:
    """Return the numbers of neighbours to try among n known queries, rising, all below n."""
    sizes = {max(1, round(root * n**0.5)) for root in ROOTS}
    return tuple(sorted(size for size in sizes if size < n))


@dataclass(frozen=True, slots=True)
class SimilarityWeighted:
    """The share of the last model's wins among fitted queries, weighted by their similarity.

    vectors: of examples.   queries: float32 (B, d), of length 1.   outcomes: float32 (B,), 1 where the last model won,
    -1 where the first did, 0 where neither.
    """

    vectors: QueryVectors
    queries: Floats
    outcomes: Floats

    def __call__(self, examples: Examples) -> Floats:
        """Return the probability that the last model wins over the first, float64 (N,)."""
        asked = unit_rows(self.vectors(examples))
        size = max(SIMILARITIES_AT_ONCE // len(self.queries), 1)
        blocks = [self._shares(asked[start : start + size]) for start in range(0, len(asked), size)]
        return np.concatenate(blocks)

    def _shares(self, asked: Floats) -> Floats:
        similarities = asked @ self.queries.T
        highest = similarities.max(axis=1, keepdims=True)
        # To a query that resembles none, all are equally similar.
        relative = np.where(highest > _COSINE_ROUNDING, similarities, 0.0) / np.maximum(highest, _COSINE_ROUNDING)
        weights = np.power(np.float32(10.0), relative)
        # Wins less losses, so that ties alone are even odds to the bit, not a choice by rounding.
        sums = (weights @ np.column_stack([self.outcomes, np.ones_like(self.outcomes)])).astype(np.float64)
        shares: Floats = (1.0 + sums[:, 0] / sums[:, 1]) / 2.0
        return shares


def fit_routellm_sw(fitting: Fitting) -> Fitted:
    """Keep the calibration split's queries, and who won: nothing is trained.

    The original solves a Bradley-Terry regression for each query, in which a battle i weighs
    10 x 10^(similarity_i / highest similarity) and a tie is half a win for each. Of two models' battles alone its
    solution is the weighted share of wins: ratings apart by 400 log10(share / (1 - share)), hence that probability.
    """
    return fit_first_or_last(fitting, _known_outcomes)


def _known_outcomes(fitting: Fitting, vectors: QueryVectors) -> Values:
    right = fitting.calibration.correct().astype(np.float32)
    return SimilarityWeighted(vectors, unit_rows(vectors(fitting.calibration)), right[:, -1] - right[:, 0])
