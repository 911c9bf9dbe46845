"""What routers share: the choice of one model by value and price, or between the first model and the last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.baselines.features import QueryVectors
from cauc_ray.policies.baselines.simple import fit_single
from cauc_ray.policies.methods import Fitted, Fitting, Thresholded
from cauc_ray.policies.trace import Examples, Trace, costs_to_come, own_answers, with_embedding_paid

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
