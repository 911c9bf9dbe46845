"""The controls that every method is compared with: a random mix of single models, shuffled confidences, the oracle."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.areas import upper_hull
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.baselines.routing import chosen_calls, routed
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.method import Fitted, Fitting, Thresholded
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Cascade, Examples, PolicyCascade, Trace, own_answers


@dataclass(frozen=True, slots=True)
class RandomMix:
    """Single models mixed at random: what any router has to beat.

    order: indices of models by rising cost, those on the upper hull of cost and accuracy.   seed: of the random
    numbers, which depend on an example's id.
    """

    order: Ints
    seed: int

    def trace(self, examples: Examples) -> Trace:
        """Return the models' answers; an example goes to the next model by its random number."""
        steps = np.arange(len(self.order))
        confidences = (random_numbers(examples, self.seed)[:, None] + steps) / len(steps)
        calls = chosen_calls(self.order, len(examples.chain.models), paid=False)
        return Trace(own_answers(examples.chain, self.order), confidences, calls)


def random_numbers(examples: Examples, seed: int) -> Floats:
    """Return a number in (0, 1) for each example, float64 (N,), which depends on its id and the seed alone."""
    drawn = [hashlib.blake2b(f"{seed}:{own}".encode(), digest_size=8).digest() for own in examples.chain.example_ids]
    return (np.frombuffer(b"".join(drawn), dtype="<u8") >> 12).astype(np.float64) / 2.0**52 + 2.0**-54


def fit_random(fitting: Fitting) -> Fitted:
    """Choose which models to mix: those that the validation split puts on the hull of cost and accuracy."""
    costs, accuracies = fitting.validation.chain.costs.means, fitting.validation.correct().mean(axis=0)
    return Thresholded(RandomMix(upper_hull(costs, accuracies, falling=True), fitting.seed), fitting.validation)


@dataclass(frozen=True, slots=True)
class Shuffled:
    """A cascade whose confidences went to other examples: what is left of it if confidence means nothing."""

    cascade: Cascade
    seed: int

    def trace(self, examples: Examples) -> Trace:
        """Return the cascade's answers, each example's with the confidences of another, chosen at random."""
        own = self.cascade.trace(examples)
        order = np.argsort(random_numbers(examples, self.seed))
        return Trace(own.predictions, own.confidences[order], own.calls)


def fit_shuffled(fitting: Fitting) -> Fitted:
    """Fit CAUC-RF, whose confidences will be shuffled."""
    policy = fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))
    return Thresholded(Shuffled(PolicyCascade(policy), fitting.seed), fitting.validation, note="CAUC-RF's confidences")


@dataclass(frozen=True, slots=True)
class Oracle:
    """The cheapest model that is right, where one is, and the cheapest of all else. It sees the labels.

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
    return Thresholded(Oracle(costs), fitting.validation, given=0.0, note=note, sees_labels=True)
