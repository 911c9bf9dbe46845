"""What routers share: the features that they look at, and the choice of one model by value and price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.costs import LARGEST
from cauc_ray.numbers.softmax import log_softmax
from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.baselines.confidence import answers_of
from cauc_ray.policies.trace import Examples, Trace

# Log probabilities below this say nothing more; it stands for options that a row does not have, too.
LOWEST_LOG_PROBABILITY = -20.0

# Of a float32 feature, relative to its mean.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Features:
    """What a router knows of a query before it chooses.

    vectors: float32 (N, d).   paid: they are the first model's outputs, whose call every example then pays for.
    """

    vectors: Floats
    paid: bool

    @property
    def note(self) -> str:
        """Return what tables say of them."""
        return "features: the first model's outputs, its call paid" if self.paid else ""


def features_of(examples: Examples, n_options: int | None = None) -> Features:
    """Return the embeddings where there are any, else what the first model's logits say.

    n_options: as option_features takes it.
    """
    if examples.embeddings is not None:
        return Features(np.asarray(examples.embeddings, dtype=np.float32), paid=False)
    return Features(option_features(examples.chain.logits[0], n_options), paid=True)


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
        changes = deviation > _ROUNDING * np.abs(mean)
        return cls(mean.astype(np.float32), np.where(changes, deviation, 1.0).astype(np.float32))

    def __call__(self, vectors: Floats) -> Floats:
        """Return features of mean 0 and deviation 1, float32 (N, d)."""
        scaled: Floats = ((vectors - self.mean) / self.deviation).astype(np.float32)
        return scaled


class Values(Protocol):
    """A fitted router's core: what it expects of each model on each query."""

    def __call__(self, examples: Examples) -> Floats:
        """Return the value of each model's answer, float64 (N, M), in whatever unit, the same for all models."""
        ...


@dataclass(frozen=True, slots=True)
class Router:
    """A router: the model of the highest value less its price, where the price of a unit of cost is the threshold.

    values: of models on queries.   prices: mean cost of each model's call on validation, float64 (M,), known in
    advance.   paid: its features are the first model's outputs.
    """

    values: Values
    prices: Floats
    paid: bool

    def trace(self, examples: Examples) -> Trace:
        """Return the choices at every price; threshold 0 is that of no price: quality first."""
        return routed(self.values(examples), self.prices, examples.chain, paid=self.paid)


def router(values: Values, validation: Examples, features: Features) -> Router:
    """Return a router that chooses by values, with the prices of the validation split."""
    return Router(values, validation.chain.costs.means, features.paid)


def routed(values: Floats, prices: Floats, chain: ChainLogits, *, paid: bool) -> Trace:
    """Return a router's choices argmax_j (value_j - price x cost_j) at every price.

    values: float (N, M).   prices: float (M,), of a call of each model.
    Its steps are the models by rising cost. A row leaves a model for a dearer one when the price falls below what
    that one's value is higher per unit of cost; a step's confidence is less the highest such gain, so that the
    threshold is less the price: as it rises, rows move along the upper hull of (cost, value) to dearer models.
    A model that is no dearer than one of higher value is never chosen. At equality the cheaper one answers.
    """
    values = np.asarray(values, dtype=np.float64)
    order = np.argsort(prices, kind="stable")
    ranked, costs = values[:, order], prices[order]
    n, m = ranked.shape
    confidences = np.full((n, m), LARGEST)
    for place in range(m - 1):
        dearer_by = costs[place + 1 :] - costs[place]
        better_by = ranked[:, place + 1 :] - ranked[:, [place]]
        free = np.where(better_by > 0, LARGEST, -LARGEST)  # better at no cost; no better at no gain
        gains = np.where(dearer_by > 0, better_by / np.where(dearer_by > 0, dearer_by, 1.0), free)
        confidences[:, place] = -gains.max(axis=1)
    answers = np.stack([answers_of(chain.logits[model]) for model in order], axis=1)
    return Trace(answers, confidences, chosen_calls(order, m, paid=paid))


def chosen_calls(order: np.ndarray, n_models: int, *, paid: bool) -> Bools:
    """Return the calls of a router whose steps are models in an order, bool (S, M)."""
    calls = np.zeros((len(order), n_models), dtype=bool)
    calls[np.arange(len(order)), order] = True
    calls[:, 0] |= paid
    return calls
