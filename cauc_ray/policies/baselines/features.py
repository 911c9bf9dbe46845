"""What is known of a query: by its embedding, and by what a model's logits say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.softmax import log_softmax
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.trace import Examples

# Log probabilities below this say nothing more; it stands for options that a row does not have, too.
LOWEST_LOG_PROBABILITY = -20.0

# Of a float32 feature, relative to its mean where that is large.
_ROUNDING = 1e-6


def option_features(logits: Floats, n_options: int | None = None) -> Floats:
    """Return what a model's logits say: log probabilities, sorted ones, entropy and margin, float32 (N, 2 K + 2).

    n_options: K, where another split is to have features of the same width: questions of one split may have more
    options than those of the other. Without it, as many as there are columns.
    """
    own = log_softmax(logits)
    clipped = np.maximum(own, LOWEST_LOG_PROBABILITY)
    ranked = -np.sort(-clipped, axis=1)
    probabilities = np.exp(own)
    entropy = -(probabilities * clipped).sum(axis=1)
    best = -np.sort(-probabilities, axis=1)[:, :2]
    margin = best[:, 0] - (best[:, 1] if best.shape[1] > 1 else 0.0)
    lists = [_of_width(column, n_options) for column in (clipped, ranked)]
    return np.column_stack([*lists, entropy, margin]).astype(np.float32)


def _of_width(log_probabilities: Floats, n_options: int | None) -> Floats:
    if n_options is None:
        return log_probabilities
    n_absent = max(0, n_options - log_probabilities.shape[1])
    padded = np.pad(log_probabilities, ((0, 0), (0, n_absent)), constant_values=LOWEST_LOG_PROBABILITY)
    return padded[:, :n_options]


@dataclass(frozen=True, slots=True)
class Scaling:
    """Means and deviations of features, float32 (d,), as the calibration split has them."""

    mean: Floats
    deviation: Floats

    @classmethod
    def of(cls, vectors: Floats) -> Scaling:
        """Measure features (N, d). One that never changes is left as it is, but for its mean."""
        mean: Floats = vectors.mean(axis=0, dtype=np.float64)
        deviation: Floats = vectors.std(axis=0, dtype=np.float64)
        # Rounding alone gives what never changes a deviation; divided by it, the least change would be enormous.
        changes = deviation > _ROUNDING * np.maximum(np.abs(mean), 1.0)
        return cls(mean.astype(np.float32), np.where(changes, deviation, 1.0).astype(np.float32))

    def __call__(self, vectors: Floats) -> Floats:
        """Return features of mean 0 and deviation 1, float32 (N, d)."""
        scaled: Floats = ((vectors - self.mean) / self.deviation).astype(np.float32)
        return scaled


@dataclass(frozen=True, slots=True)
class QueryVectors:
    """What a router reads of a query before it chooses: its embedding, or the first model's outputs.

    Embeddings have length 1, as sentence encoders give them, which published learning rates and noise are for; encoders
    of images give any length. Outputs are standardised.

    n_options: of the calibration split.   scaling: of the first model's outputs there; None for embeddings.
    """

    n_options: int
    scaling: Scaling | None

    @classmethod
    def of(cls, calibration: Examples) -> QueryVectors:
        """Choose what is read, and measure its scale where it needs one."""
        logits = calibration.chain.logits[0]
        n_options = logits.shape[1]
        read = None if calibration.embeddings is not None else Scaling.of(option_features(logits, n_options))
        return cls(n_options, read)

    @property
    def paid(self) -> bool:
        """Say whether it is the first model's outputs, whose call every example then pays for."""
        return self.scaling is not None

    def __call__(self, examples: Examples) -> Floats:
        """Return the examples' vectors, float32 (N, d)."""
        if self.scaling is not None:
            return self.scaling(option_features(examples.chain.logits[0], self.n_options))
        assert examples.embeddings is not None
        return unit_rows(np.asarray(examples.embeddings, dtype=np.float32))

    def note(self, *others: str) -> str:
        """Return what tables say of a method that reads these, after what else there is to say."""
        own = "features: the first model's outputs, its call paid" if self.paid else ""
        return "; ".join(filter(None, (*others, own)))


def unit_rows(vectors: Floats) -> Floats:
    """Return vectors scaled to length 1, of their shape and dtype; those of length 0 stay."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)  # squares leave float32 early
    scaled: Floats = (vectors / np.where(lengths > 0, lengths, 1)).astype(vectors.dtype)
    return scaled
