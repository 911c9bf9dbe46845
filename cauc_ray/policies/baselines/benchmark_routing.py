"""Benchmark Routing (Shnitzer et al., COLM 2024): the model that was right most often on the nearest known queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from sklearn.neighbors import NearestNeighbors

from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.baselines.features import QueryVectors
from cauc_ray.policies.baselines.routing import fit_router
from cauc_ray.policies.methods import Fitted, Fitting
from cauc_ray.policies.trace import Examples

# Numbers of neighbours tried besides all of them, in square roots of the number of known queries.
ROOTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
# Sharpnesses tried of a neighbour's weight.
SHARPNESSES = (0.0, 5.0, 10.0, 20.0)

# Queries looked up at once: bounds memory, changes nothing.
_BLOCK = 1024


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
        for start in range(0, len(vectors), _BLOCK):
            rows = slice(start, start + _BLOCK)
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
    return fit_router(fitting, _remembered, "each query by its own neighbours")


def _remembered(fitting: Fitting, vectors: QueryVectors) -> Nearest:
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
