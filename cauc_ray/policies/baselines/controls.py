"""The controls that keep everyone honest: single models, choices by lot at equal cost, the oracle."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.baselines.confidence import answers_of
from cauc_ray.policies.baselines.routing import chosen_calls, routed
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.method import Fitted, Fitting, Steered
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Cascade, Examples, PolicyCascade, Trace


@dataclass(frozen=True, slots=True)
class Single:
    """One model alone, by its place in the chain."""

    place: int

    def trace(self, examples: Examples) -> Trace:
        """Return its answers."""
        answers = answers_of(examples.chain.logits[self.place])[:, None]
        calls = chosen_calls(np.array([self.place]), len(examples.chain.models), paid=False)
        return Trace(answers, np.ones(answers.shape), calls)


def fit_single(fitting: Fitting, place: int) -> Fitted:
    """Return one model of the chain alone."""
    return Steered(Single(place), fitting.validation)


@dataclass(frozen=True, slots=True)
class Lottery:
    """Single models mixed by lot: what any router has to beat.

    order: places of models by rising cost, those on the upper hull of cost and accuracy from the cheapest to the
    dearest.   seed: of the lots, which an example draws by its id.
    """

    order: Ints
    seed: int

    def trace(self, examples: Examples) -> Trace:
        """Return the models' answers, left for the next model's one after the other in the order of the lots."""
        chain = examples.chain
        answers = np.stack([answers_of(chain.logits[place]) for place in self.order], axis=1)
        steps = np.arange(len(self.order))
        confidences = (lots(examples, self.seed)[:, None] + steps) / len(steps)
        return Trace(answers, confidences, chosen_calls(self.order, len(chain.models), paid=False))


def lots(examples: Examples, seed: int) -> Floats:
    """Return a number in (0, 1) for each example, float64 (N,), which depends on its id and the seed alone."""
    drawn = [
        hashlib.blake2b(f"{seed}:{example}".encode(), digest_size=8).digest() for example in examples.chain.example_ids
    ]
    return (np.frombuffer(b"".join(drawn), dtype="<u8") >> 12).astype(np.float64) / 2.0**52 + 2.0**-54


def fit_random(fitting: Fitting) -> Fitted:
    """Choose which models to mix: those that the validation split puts on the hull of cost and accuracy."""
    costs, accuracies = fitting.validation.chain.costs.means, fitting.validation.correct().mean(axis=0)
    return Steered(Lottery(hull(costs, accuracies), fitting.seed), fitting.validation)


def hull(costs: Floats, accuracies: Floats) -> Ints:
    """Return the places of the models on the upper hull, from the cheapest to the dearest, by rising cost, int (H,).

    costs, accuracies: float (M,). Of models of one cost only the best counts.
    """
    order = np.lexsort((-accuracies, costs))
    order = order[np.r_[True, np.diff(costs[order]) > 0]]
    found = [order[0]]
    while found[-1] != order[-1]:
        rest = order[np.flatnonzero(order == found[-1])[0] + 1 :]
        slopes = (accuracies[rest] - accuracies[found[-1]]) / (costs[rest] - costs[found[-1]])
        found.append(rest[np.flatnonzero(slopes == slopes.max())[-1]])
    return np.array(found)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A cascade whose confidences went to other examples: what is left of it if confidence means nothing."""

    cascade: Cascade
    seed: int

    def trace(self, examples: Examples) -> Trace:
        """Return the cascade's answers, each example's with the confidences of another, by lot."""
        own = self.cascade.trace(examples)
        return Trace(own.predictions, own.confidences[np.argsort(lots(examples, self.seed))], own.calls)


def fit_shuffled(fitting: Fitting) -> Fitted:
    """Fit CAUC-RF, whose confidences will be shuffled."""
    policy = fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))
    return Steered(Shuffled(PolicyCascade(policy), fitting.seed), fitting.validation, note="CAUC-RF's confidences")


@dataclass(frozen=True, slots=True)
class Oracle:
    """The cheapest model that is right, where one is, and the cheapest of all else. It looks at the labels.

    prices: of a call of each model, float64 (M,).
    """

    prices: Floats

    def trace(self, examples: Examples) -> Trace:
        """Return the choice among models at every price of a unit of cost."""
        return routed(examples.correct().astype(np.float64), self.prices, examples.chain, paid=False)


def fit_oracle(fitting: Fitting) -> Fitted:
    """Return the oracle: there is nothing to fit."""
    costs = fitting.validation.chain.costs.means
    note = "told the labels; nobody can reach it"
    return Steered(Oracle(costs), fitting.validation, given=0.0, note=note, sees_labels=True)
