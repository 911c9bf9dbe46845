"""What routers share: the choice of one model by value and price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.costs import LARGEST
from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.baselines.confidence import answers_of
from cauc_ray.policies.trace import Examples, Trace


class Values(Protocol):
    """A fitted router's core: what it expects of each model on each query."""

    def __call__(self, examples: Examples) -> Floats:
        """Return the value of each model's answer, float64 (N, M), in whatever unit, the same for all models."""
        ...


@dataclass(frozen=True, slots=True)
class Router:
    """A router: the model of the highest value less its price, where the price of a unit of cost is the threshold.

    values: of models on queries.   prices: mean cost of each model's call on validation, float64 (M,), known in
    advance.   paid: what it reads are the first model's outputs, whose call every example then pays for.
    """

    values: Values
    prices: Floats
    paid: bool

    def trace(self, examples: Examples) -> Trace:
        """Return the choices at every price; threshold 0 is that of no price: quality first."""
        return routed(self.values(examples), self.prices, examples.chain, paid=self.paid)


def router(values: Values, validation: Examples, *, paid: bool) -> Router:
    """Return a router that chooses by values, with the prices of the validation split."""
    return Router(values, validation.chain.costs.means, paid)


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
