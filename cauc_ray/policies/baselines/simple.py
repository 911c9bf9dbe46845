"""Methods that learn nothing but temperatures: raw confidences, the Asymmetric Duo, and the controls."""

from __future__ import annotations

import numpy as np

from cauc_ray.numbers.calibration import fit_temperatures
from cauc_ray.numbers.logits import real_options
from cauc_ray.numbers.metrics import upper_hull
from cauc_ray.numbers.multinomial import fit_classifier
from cauc_ray.numbers.products import products
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.baselines.routing import routed
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.methods import Fitted, Fitting, Thresholded
from cauc_ray.policies.routers import RandomPolicy, random_numbers
from cauc_ray.policies.scored import DuoPolicy, RawPolicy
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, Trace, trace_policy, with_embedding_paid


def fit_margin(fitting: Fitting) -> Fitted:
    """Return Margin Sampling (Ramirez et al., COLM 2024), published for two models."""
    return Thresholded.of(fitting.policy(RawPolicy, method="margin"), fitting)


def fit_max_probability(fitting: Fitting) -> Fitted:
    """Return the cascade of raw probabilities: CAUC without calibration or fusion, as a control."""
    return Thresholded.of(fitting.policy(RawPolicy, method="max-probability"), fitting)


def fit_duo(fitting: Fitting) -> Fitted:
    """Fit Asymmetric Duo's temperatures (Zhou et al., 2025) jointly, to the lowest NLL on the calibration split.

    All models always answer; their logits are summed by weights 1 / (M T_m).
    With two models that is the problem of CAUC-RF's pair, whose published form searches a grid, then by L-BFGS;
    with more it is its natural extension, one temperature for each.
    """
    chain = fitting.calibration.chain
    unweighted = fitting.policy(DuoPolicy, of_stages=[{"weight": 1.0}] * len(chain.models))
    logits = [stage.bounded(logits) for stage, logits in zip(unweighted.stages, chain.logits, strict=True)]
    weights = fit_temperatures(logits, chain.labels).weights
    stages = zip(unweighted.stages, weights, strict=True)
    weighted = tuple(stage.model_copy(update={"weight": float(weight)}) for stage, weight in stages)
    policy = unweighted.model_copy(update={"stages": weighted})
    note = "" if len(chain.models) == 2 else f"extended to {len(chain.models)} models"
    return Thresholded.of(policy, fitting, note=note)


def fit_random(fitting: Fitting) -> Fitted:
    """Mix single models at random, those that validation puts on the hull of cost and accuracy: what any router beats.

    The random numbers depend on an example's id: it goes on to the next model of the hull by its own.
    """
    costs, accuracies = fitting.validation.chain.costs.means, fitting.validation.correct().mean(axis=0)
    order = upper_hull(costs, accuracies, falling=True)
    return Thresholded.of(fitting.policy(RandomPolicy, order.tolist(), seed=fitting.seed), fitting)


def fit_shuffled(fitting: Fitting) -> Fitted:
    """Fit CAUC-RF, and give its confidences to other examples, chosen at random: they no longer mean anything."""
    policy = fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))

    def shuffled(examples: Examples) -> Trace:
        own = trace_policy(policy, examples.chain)
        order = np.argsort(random_numbers(examples.chain.example_ids, fitting.seed))
        return Trace(own.predictions, own.confidences[order], own.calls)

    return Thresholded(shuffled, fitting.validation, note="CAUC-RF's confidences")


def fit_embedding(fitting: Fitting) -> Fitted:
    """Fit a classifier of the queries' embeddings that calls no model: what such a classifier gives by itself."""
    chain = fitting.calibration.chain
    n_options = chain.logits[0].shape[1]
    classifier = fit_classifier(_vectors(fitting.calibration), chain.labels, n_options)

    def answers(examples: Examples) -> Trace:
        scores = products(_vectors(examples), classifier.weights.T) + classifier.offsets
        options = real_options(examples.chain.logits[0])
        k = min(n_options, options.shape[1])  # splits may differ in the most options that a question has
        choices = np.where(np.isfinite(options[:, :k]), scores[:, :k], -np.inf).argmax(axis=1)[:, None]
        calls = np.zeros((1, len(examples.chain.models)), dtype=bool)
        return with_embedding_paid(Trace(choices.astype(np.int32), np.ones(choices.shape), calls), examples)

    return Thresholded(answers, fitting.validation, note=fitting.calibration.embedding_note or "calls no model")


def _vectors(examples: Examples) -> Floats:
    assert examples.embeddings is not None
    return np.asarray(examples.embeddings, dtype=np.float64)


def fit_oracle(fitting: Fitting) -> Fitted:
    """Return the cheapest model that is right, where one is, and the cheapest of all else. It sees the labels.

    There is nothing to fit.
    """
    prices = fitting.validation.chain.costs.means

    def chosen(examples: Examples) -> Trace:
        return routed(examples.correct().astype(np.float64), prices, examples.chain)

    note = "sees the labels; not attainable"
    return Thresholded(chosen, fitting.validation, given=0.0, note=note, sees_labels=True)
