"""The vector that a learned router reads of a query."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.types import Floats
from cauc_ray.policies.baselines.routing import Features, Scaling, features_of
from cauc_ray.policies.trace import Examples


@dataclass(frozen=True, slots=True)
class QueryVectors:
    """Embeddings of length 1, as sentence encoders give them, or the first model's standardised outputs.

    The published learning rates and noise are for embeddings of length 1; encoders of images give any length.

    scaling: of the first model's outputs on calibration; None where the features are embeddings.
    """

    scaling: Scaling | None

    @classmethod
    def of(cls, calibration: Features) -> QueryVectors:
        """Measure the scale of the calibration split's features, where they need one."""
        return cls(Scaling.of(calibration.vectors) if calibration.paid else None)

    def __call__(self, examples: Examples) -> Floats:
        """Return the examples' vectors, float32 (N, d)."""
        vectors = features_of(examples).vectors
        return unit_rows(vectors) if self.scaling is None else self.scaling(vectors)


def unit_rows(vectors: Floats) -> Floats:
    """Return vectors scaled to length 1, of their shape and dtype; those of length 0 stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Floats = vectors / np.where(lengths > 0, lengths, 1)
    return scaled
