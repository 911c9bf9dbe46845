"""What routers share: features of a query, the choice of one model by value and price, or of the first or the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.logits import log_softmax
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.methods import Fitted, Fitting, Thresholded
from cauc_ray.policies.trace import Examples, Trace, costs_to_come, own_answers, with_embedding_paid

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


# What a fitted router expects of each example: float64 (N, M), of each model's answer in one unit for all models, or
# float64 (N,), the probability that the last model wins over the first.
Values: TypeAlias = Callable[[Examples], Floats]
# Learns the values from the splits and what is read of a query.
Learn: TypeAlias = Callable[[Fitting, QueryVectors], Values]


@dataclass(frozen=True, slots=True)
class Router:
    """A router: the model of the highest value less its price, where the price of a unit of cost is the threshold.

    values: of the models on queries.   prices: mean cost of each model's call on validation, float64 (M,), known in
    advance; 0 for a model that is called for its embedding anyway.   paid: it reads the first model's outputs, whose
    call every example then pays for.
    """

    values: Values
    prices: Floats
    paid: bool

    def __call__(self, examples: Examples) -> Trace:
        """Return the choices at every price; threshold 0 is that of no price: quality first."""
        trace = routed(self.values(examples), self.prices, examples.chain, paid=self.paid)
        return with_embedding_paid(trace, examples)


def routed(values: Floats, prices: Floats, chain: ChainLogits, *, paid: bool) -> Trace:
    """Return a router's choices argmax_j (value_j - price x cost_j) at every price.

    values: float (N, M).   prices: float (M,), of a call of each model.
    Its steps are the models by rising cost. A row leaves a model for a more expensive one when the price falls below
    what that one's value is higher per unit of cost; a step's confidence is minus the highest such gain, so that the
    threshold is minus the price: as it rises, rows move along the upper hull of (cost, value) to expensive models.
    A model that is no more expensive than one of higher value is never chosen. At equality the cheaper one answers.
    Between models of one cost no price decides: a row leaves at every threshold (confidence -inf) or at none (inf).
    """
    values = np.asarray(values, dtype=np.float64)
    order = np.argsort(prices, kind="stable")
    ranked, costs = values[:, order], prices[order]
    n, m = ranked.shape
    confidences = np.full((n, m), np.inf)
    for step in range(m - 1):
        extra_cost = costs[step + 1 :] - costs[step]
        extra_value = ranked[:, step + 1 :] - ranked[:, [step]]
        free = np.where(extra_value > 0, np.inf, -np.inf)  # better at no cost; no better at no gain
        gains = np.where(extra_cost > 0, extra_value / np.where(extra_cost > 0, extra_cost, 1.0), free)
        confidences[:, step] = -gains.max(axis=1)
    return Trace(own_answers(chain, order), confidences, chosen_calls(order, m, paid=paid))


@dataclass(frozen=True, slots=True)
class FirstOrLast:
    """A router between the first and the last model of a chain.

    wins: of examples, the probability that the last model wins over the first, float64 (N,).   vectors: what that
    reads of a query; None where it reads the text.
    """

    wins: Values
    vectors: QueryVectors | None = None

    def __call__(self, examples: Examples) -> Trace:
        """Return both models' answers; the first's are trusted by the probability that it does not lose."""
        chain = examples.chain
        ends = np.array([0, len(chain.models) - 1])
        confidences = np.column_stack([1.0 - self.wins(examples), np.ones(len(examples))])
        calls = chosen_calls(ends, len(chain.models), paid=self.vectors is not None and self.vectors.paid)
        trace = Trace(own_answers(chain, ends), confidences, calls)
        return trace if self.vectors is None else with_embedding_paid(trace, examples)


def note_on_the_middle(n_models: int) -> str:
    """Return the note for tables on a router that leaves out the models in the middle of a chain."""
    return "first and last model only" if n_models > 2 else ""


def chosen_calls(order: Ints | Sequence[int], n_models: int, *, paid: bool) -> Bools:
    """Return the calls of a router whose steps are models in an order, bool (S, M)."""
    calls: Bools = np.asarray(order)[:, None] == np.arange(n_models)
    calls[:, 0] |= paid
    return calls


def fit_single(fitting: Fitting, model: int) -> Fitted:
    """Return one model of the chain alone, by its index."""

    def alone(examples: Examples) -> Trace:
        answers = own_answers(examples.chain, [model])
        return Trace(answers, np.ones(answers.shape), np.arange(len(examples.chain.models))[None] == model)

    return Thresholded(alone, fitting.validation)


def fit_router(fitting: Fitting, learn: Learn, *notes: str) -> Fitted:
    """Fit a router; without a budget it takes quality first. A chain of one model leaves nothing to learn.

    notes: for every table.
    """
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    vectors = QueryVectors.of(fitting.calibration)
    router = Router(learn(fitting, vectors), costs_to_come(fitting.validation).means, vectors.paid)
    return Thresholded(router, fitting.validation, given=0.0, note=vectors.note(*notes))


def fit_first_or_last(fitting: Fitting, learn: Learn) -> Fitted:
    """Fit a router between the first and the last model."""
    n_models = len(fitting.calibration.chain.models)
    if n_models == 1:
        return fit_single(fitting, 0)
    vectors = QueryVectors.of(fitting.calibration)
    router = FirstOrLast(learn(fitting, vectors), vectors)
    return Thresholded(router, fitting.validation, note=vectors.note(note_on_the_middle(n_models)))
