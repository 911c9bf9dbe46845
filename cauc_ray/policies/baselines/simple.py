"""Methods that learn nothing but temperatures: raw confidences, the Asymmetric Duo, and the controls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import numpy as np

from cauc_ray.numbers.calibration import fit_temperatures
from cauc_ray.numbers.logits import log_softmax, top_option
from cauc_ray.numbers.metrics import upper_hull
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.baselines.routing import chosen_calls, routed
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.methods import Fitted, Fitting, Thresholded
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, Trace, calls_in_turn, own_answers, trace_policy


def raw_cascade(confidence: Callable[[Floats], Floats], examples: Examples) -> Trace:
    """Return each stage's own answer, and how sure it is by its raw logits; nothing is trained.

    confidence: of logits (N, K), float64 (N,). In a chain of several models one threshold holds for every stage.
    """
    chain = examples.chain
    confidences = np.stack([confidence(logits) for logits in chain.logits], axis=1)
    return Trace(own_answers(chain), confidences, calls_in_turn(len(chain.models)))


def margins(logits: Floats) -> Floats:
    """Return p(1) - p(2), the two largest raw probabilities, float64 (N,); 1 where there is one option."""
    probabilities = np.exp(log_softmax(logits))
    if probabilities.shape[1] == 1:
        return np.ones(len(logits))
    second, first = np.partition(probabilities, -2, axis=1)[:, -2:].T
    found: Floats = first - second
    return found


def fit_margin(fitting: Fitting) -> Fitted:
    """Return Margin Sampling (Ramirez et al., COLM 2024), published for two models."""
    return Thresholded(partial(raw_cascade, margins), fitting.validation)


def fit_max_probability(fitting: Fitting) -> Fitted:
    """Return the cascade of raw probabilities: CAUC without calibration or fusion, as a control."""
    return Thresholded(partial(raw_cascade, lambda logits: top_option(logits)[1]), fitting.validation)


def fit_duo(fitting: Fitting) -> Fitted:
    """Fit Asymmetric Duo's temperatures (Zhou et al., 2025) jointly, to the lowest NLL on the calibration split.

    All models always answer; their logits are summed by weights 1 / (M T_m).
    With two models that is the problem of CAUC-RF's pair, whose published form searches a grid, then by L-BFGS;
    with more it is its natural extension, one temperature for each.
    """
    chain = fitting.calibration.chain
    weights = fit_temperatures(chain.logits, chain.labels).weights

    def duo(examples: Examples) -> Trace:
        logits = examples.chain.logits
        fused = sum(weight * np.float64(own) for weight, own in zip(weights, logits, strict=True))
        predictions, confidences = top_option(np.asarray(fused))
        return Trace(predictions[:, None], confidences[:, None], np.ones((1, len(logits)), dtype=bool))

    note = "" if len(chain.models) == 2 else f"extended to {len(chain.models)} models"
    return Thresholded(duo, fitting.validation, note=note)


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
