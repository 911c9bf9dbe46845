"""Controls."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.baselines.routing import routed
from cauc_ray.errors import ConfigError
from cauc_ray.numbers.logits import real_options
from cauc_ray.numbers.metrics import upper_hull
from cauc_ray.numbers.multinomial import fit_classifier
from cauc_ray.numbers.products import products
from cauc_ray.numbers.sweep import stops_of
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.family import Control
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.methods.rf import rf_of
from cauc_ray.policies.policy import Step
from cauc_ray.policies.routers import ChoosingPolicy
from cauc_ray.policies.trace import Examples, Trace, trace_policy, with_embedding_paid


class RandomPolicy(ChoosingPolicy):
    """A random mix of models. Which one a row goes to depends on its id and the seed alone.

    A row leaves each model for the next more expensive one where its random number is below the threshold.

    Attributes:
        seed: Seed of the rows' random numbers.
    """

    by_id: ClassVar[bool] = True
    spends_budget: ClassVar[bool] = True
    searched: ClassVar[bool] = True
    OWN: ClassVar[tuple[str, ...]] = ("seed",)

    method: Literal["random"] = "random"
    seed: int = Field(ge=0)

    def first(self, n: int, ids: Sequence[str] | None) -> Ints:
        """Choose the model of each row."""
        if ids is None:
            raise ConfigError("method random chooses by the rows' ids, which are not known here")
        return self.ends[stops_of(self._worth(ids), self.threshold)].astype(np.int8)

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Take the answer."""
        return self.own_answer(stage, logits)

    def every_step(self, logits: Sequence[Floats], ids: Sequence[str] | None) -> list[Step]:
        """Return the answers of all models."""
        return self.ended(logits, self._worth(ids or ()))

    def _worth(self, ids: Sequence[str]) -> Floats:
        """Return one number for each model, in the order in which they are left, float64 (n, M)."""
        n_models = len(self.stages)
        worth: Floats = (random_numbers(ids, self.seed)[:, None] + np.arange(n_models)) / n_models
        return worth


def random_numbers(ids: Sequence[str], seed: int) -> Floats:
    """Return a number in (0, 1) for each example, float64 (N,), which depends on its id and the seed alone."""
    drawn = [hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest() for name in ids]
    return (np.frombuffer(b"".join(drawn), dtype="<u8") >> 12).astype(np.float64) / 2.0**52 + 2.0**-54


def fit_random(fitting: Fitting) -> Sequence[RandomPolicy]:
    """Mix single models at random, those that validation puts on the hull of cost and accuracy: what any router beats.

    Whether an example is passed to the next model of the hull depends on the random number of its id.
    """
    costs, accuracies = fitting.validation.chain.costs.means, fitting.validation.correct().mean(axis=0)
    order = upper_hull(costs, accuracies, falling=True)
    return [fitting.policy(RandomPolicy, order.tolist(), seed=fitting.seed)]


def fit_shuffled(fitting: Fitting) -> Sequence[Control]:
    """Fit CAUC-RF, and give its confidences to other examples, chosen at random: they no longer mean anything."""
    policy = rf_of(fitting.calibration.chain, fitting.validation.chain, fitting.names)

    def shuffled(examples: Examples) -> Trace:
        trace = trace_policy(policy, examples.chain)
        order = np.argsort(random_numbers(examples.chain.example_ids, fitting.seed))
        return Trace(trace.predictions, trace.confidences[order], trace.calls)

    return [Control(shuffled, spends_budget=True)]


def fit_embedding(fitting: Fitting) -> Sequence[Control]:
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

    return [Control(answers)]


def _vectors(examples: Examples) -> Floats:
    assert examples.embeddings is not None
    return np.asarray(examples.embeddings, dtype=np.float64)


def fit_oracle(fitting: Fitting) -> Sequence[Control]:
    """Return the cheapest model that is right, where one is, and the cheapest of all else. It sees the labels.

    There is nothing to fit.
    """
    prices = fitting.validation.chain.costs.means

    def chosen(examples: Examples) -> Trace:
        return routed(examples.correct().astype(np.float64), prices, examples.chain)

    return [Control(chosen, threshold=0.0)]


RANDOM = Method("random", "control", fit_random, reads="neither")
SHUFFLED = Method(
    "shuffled",
    "control",
    fit_shuffled,
    note="CAUC-RF's confidences",
    unpublished="gives a row another row's confidence",
)
EMBEDDING = Method(
    "embedding",
    "control",
    fit_embedding,
    note=lambda fitting: fitting.calibration.embedding_note or "calls no model",
    needs="embedding",
    unpublished="calls no model of the chain",
)
ORACLE = Method(
    "oracle",
    "control",
    fit_oracle,
    note="sees the labels; not attainable",
    needs="labels",
    unpublished="needs the labels",
    reads="neither",
)
