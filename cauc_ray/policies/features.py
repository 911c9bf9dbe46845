"""What scorers and routers read of a row: a model's outputs, and an embedding."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.logits import LOG_FLOOR, log_softmax
from cauc_ray.numbers.products import lengths_of
from cauc_ray.numbers.types import Floats

# Of a float32 feature, relative to its mean where that is large.
_ROUNDING = 1e-6


def option_features(logits: Floats, n_options: int | None = None) -> Floats:
    """Return features of a model's logits: log probabilities, sorted ones, entropy, margin; float32 (N, 2 K + 2).

    Args:
        logits: Raw logits, float (N, columns).
        n_options: K, for features as wide as those of another split, whose questions may have more or fewer options;
            None for the number of columns.
    """
    log_probabilities = log_softmax(logits)
    clipped = np.maximum(log_probabilities, LOG_FLOOR)
    ranked = -np.sort(-clipped, axis=1)
    probabilities = np.exp(log_probabilities)
    # One after the other, so that options that a row lacks change no bit.
    entropy = -np.cumsum(probabilities * clipped, axis=1)[:, -1]
    best = -np.sort(-probabilities, axis=1)[:, :2]
    margin = best[:, 0] - best[:, 1:].sum(axis=1)
    k = n_options or logits.shape[1]
    absent = ((0, 0), (0, max(0, k - logits.shape[1])))
    lists = (clipped, ranked)
    padded = [np.pad(values, absent, constant_values=LOG_FLOOR)[:, :k] for values in lists]
    return np.column_stack([*padded, entropy, margin]).astype(np.float32)


def answer_features(
    logits: Floats, n_options: int, embeddings: Floats | None = None, *, with_answer: bool = False
) -> Floats:
    """Return the features of rows that a model has answered, float32 (N, d): its outputs, and embeddings.

    Args:
        logits: Raw logits of the model, float (N, columns).
        n_options: As for option_features.
        embeddings: Embeddings of the rows, float (N, e); None without any.
        with_answer: Whether the chosen option is a feature.
    """
    features = [option_features(logits, n_options)]
    if embeddings is not None:
        features.append(np.asarray(embeddings, dtype=np.float32))
    if with_answer:
        features.append((logits.argmax(axis=1)[:, None] == np.arange(n_options)).astype(np.float32))
    return np.column_stack(features)


@dataclass(frozen=True, slots=True)
class Scaler:
    """Standardises features.   means, scales: float64 (d,)."""

    means: Floats
    scales: Floats

    @classmethod
    def of(cls, features: Floats) -> Scaler:
        """Measure features, float32 (N, d); one that is constant but for rounding is only centred.

        The least change of such a feature, divided by a deviation that is rounding, would be enormous.
        """
        means, scales = features.mean(axis=0, dtype=np.float64), features.std(axis=0, dtype=np.float64)
        constant = scales <= _ROUNDING * np.maximum(np.abs(means), 1.0)
        return cls(means, np.where(constant, 1.0, scales))

    def __call__(self, features: Floats) -> Floats:
        """Return standardised features, float32 (N, d)."""
        scaled: Floats = ((features - self.means) / self.scales).astype(np.float32)
        return scaled


def unit_rows(vectors: Floats) -> Floats:
    """Return vectors scaled to length 1, of their shape and dtype; those of length 0 stay."""
    lengths = lengths_of(vectors)[:, None]
    scaled: Floats = (vectors / np.where(lengths > 0, lengths, 1)).astype(vectors.dtype)
    return scaled
