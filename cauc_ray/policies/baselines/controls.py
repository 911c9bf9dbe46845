"""The controls that every method is compared with: a random mix of single models, shuffled confidences, the oracle."""

from __future__ import annotations

import hashlib

import numpy as np

from cauc_ray.numbers.areas import upper_hull
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.baselines.routing import chosen_calls, routed
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.methods import Fitted, Fitting, Thresholded
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, Trace, own_answers, trace_policy


def random_numbers(examples: Examples, seed: int) -> Floats:
    """Return a number in (0, 1) for each example, float64 (N,), which depends on its id and the seed alone."""
    drawn = [hashlib.blake2b(f"{seed}:{own}".encode(), digest_size=8).digest() for own in examples.chain.example_ids]
    return (np.frombuffer(b"".join(drawn), dtype="<u8") >> 12).astype(np.float64) / 2.0**52 + 2.0**-54


def fit_random(fitting: Fitting) -> Fitted:
    """Mix single models at random, those that validation puts on the hull of cost and accuracy: what any router beats.

    The random numbers depend on an example's id: it goes on to the next model of the hull by its own.
    """
    costs, accuracies = fitting.validation.chain.costs.means, fitting.validation.correct().mean(axis=0)
    order = upper_hull(costs, accuracies, falling=True)

    def mixed(examples: Examples) -> Trace:
        steps = np.arange(len(order))
        confidences = (random_numbers(examples, fitting.seed)[:, None] + steps) / len(steps)
        calls = chosen_calls(order, len(examples.chain.models), paid=False)
        return Trace(own_answers(examples.chain, order), confidences, calls)

    return Thresholded(mixed, fitting.validation)


def fit_shuffled(fitting: Fitting) -> Fitted:
    """Fit CAUC-RF, and give its confidences to other examples, chosen at random: they no longer mean anything."""
    policy = fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))

    def shuffled(examples: Examples) -> Trace:
        own = trace_policy(policy, examples.chain)
        order = np.argsort(random_numbers(examples, fitting.seed))
        return Trace(own.predictions, own.confidences[order], own.calls)

    return Thresholded(shuffled, fitting.validation, note="CAUC-RF's confidences")


def fit_oracle(fitting: Fitting) -> Fitted:
    """Return the cheapest model that is right, where one is, and the cheapest of all else. It sees the labels.

    There is nothing to fit.
    """
    prices = fitting.validation.chain.costs.means

    def chosen(examples: Examples) -> Trace:
        return routed(examples.correct().astype(np.float64), prices, examples.chain, paid=False)

    note = "sees the labels; not attainable"
    return Thresholded(chosen, fitting.validation, given=0.0, note=note, sees_labels=True)
