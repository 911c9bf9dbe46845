"""Features of a query: its embedding, and a model's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.numbers.softmax import log_softmax
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.trace import Examples

# Lower log probabilities carry no more information; also that of options that a row does not have.
LOWEST_LOG_PROBABILITY = -20.0

# Of a float32 feature, relative to its mean where that is large.
_ROUNDING = 1e-6


def option_features(logits: Floats, n_options: int | None = None) -> Floats:
    """Return features of a model's logits: log probabilities, sorted ones, entropy, margin; float32 (N, 2 K + 2).

    n_options: K, where the features must be as wide as those of another split, whose questions may have more or
    fewer options. Without it, as many as there are columns.
    """
    own = log_softmax(logits)
    clipped = np.maximum(own, LOWEST_LOG_PROBABILITY)
    ranked = -np.sort(-clipped, axis=1)
    probabilities = np.exp(own)
    entropy = -(probabilities * clipped).sum(axis=1)
    best = -np.sort(-probabilities, axis=1)[:, :2]
    margin = best[:, 0] - best[:, 1:].sum(axis=1)
    k = n_options or logits.shape[1]
    absent = ((0, 0), (0, max(0, k - logits.shape[1])))
    lists = [np.pad(own, absent, constant_values=LOWEST_LOG_PROBABILITY)[:, :k] for own in (clipped, ranked)]
    return np.column_stack([*lists, entropy, margin]).astype(np.float32)


def scaler_of(features: Floats) -> Any:
    """Fit scikit-learn's StandardScaler; a feature that is constant but for rounding is only centred.

    features: float32 (N, d). The least change of such a feature, divided by a deviation that is rounding, would be
    enormous.
    """
    from sklearn.preprocessing import StandardScaler  # which controls and text routers do without

    scaler = StandardScaler().fit(features)
    scaler.scale_[scaler.scale_ <= _ROUNDING * np.maximum(np.abs(scaler.mean_), 1.0)] = 1.0
    return scaler


def answer_vectors(calibration: Examples, stage: int, *, with_answer: bool = False) -> Callable[[Examples], Floats]:
    """Return what is known once a model has answered: its outputs, and the query's embedding where there is one.

    stage: index of the model.   with_answer: whether the option that it chose is a feature. The function returned
    gives the vectors of examples, float32 (N, d), standardised as the calibration split has them.
    """
    n_options = calibration.chain.logits[stage].shape[1]

    def features(examples: Examples) -> Floats:
        logits = examples.chain.logits[stage]
        found = [option_features(logits, n_options)]
        if examples.embeddings is not None:
            found.append(np.asarray(examples.embeddings, dtype=np.float32))
        if with_answer:
            found.append((logits.argmax(axis=1)[:, None] == np.arange(n_options)).astype(np.float32))
        return np.column_stack(found)

    scaler = scaler_of(features(calibration))

    def vectors(examples: Examples) -> Floats:
        scaled: Floats = scaler.transform(features(examples))
        return scaled

    return vectors


@dataclass(frozen=True, slots=True)
class QueryVectors:
    """What a router reads of a query before it chooses: its embedding, or the first model's outputs.

    Embeddings have length 1, as sentence encoders give them, which published learning rates and noise are for; image
    encoders give any length.

    outputs: of the first model, standardised; None where there are embeddings.   embedding_note: a note on these
    for tables.
    """

    outputs: Callable[[Examples], Floats] | None
    embedding_note: str = ""

    @classmethod
    def of(cls, calibration: Examples) -> QueryVectors:
        """Choose what is read, and measure its scale where it needs one."""
        outputs = None if calibration.embeddings is not None else answer_vectors(calibration, 0)
        return cls(outputs, calibration.embedding_note)

    @property
    def paid(self) -> bool:
        """Return whether it is the first model's outputs, whose call every example then pays for."""
        return self.outputs is not None

    def __call__(self, examples: Examples) -> Floats:
        """Return the examples' vectors, float32 (N, d)."""
        if self.outputs is not None:
            return self.outputs(examples)
        assert examples.embeddings is not None
        return unit_rows(np.asarray(examples.embeddings, dtype=np.float32))

    def note(self, *others: str) -> str:
        """Return the note for tables on a method that reads these, after its other notes."""
        own = "features: the first model's outputs, its call paid" if self.paid else self.embedding_note
        return "; ".join(filter(None, (*others, own)))


def unit_rows(vectors: Floats) -> Floats:
    """Return vectors scaled to length 1, of their shape and dtype; those of length 0 stay."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)  # squares leave float32 early
    scaled: Floats = (vectors / np.where(lengths > 0, lengths, 1)).astype(vectors.dtype)
    return scaled
