"""Policies that choose one model for each row: by an embedding, by the first model's outputs, or at random."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.logits import real_options, softmax
from cauc_ray.numbers.products import products
from cauc_ray.numbers.sweep import stops_of
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.features import Scaler, answer_features, unit_rows
from cauc_ray.policies.policy import Stage, Step
from cauc_ray.policies.scored import MethodPolicy

# Cosines of float32 vectors are known to about this.
_COSINE_ROUNDING = 1e-6
# Queries that are compared with the known ones at a time: bounds memory, changes nothing.
_AT_ONCE = 1024


class RoutedStage(Stage):
    """A stage of a router, whose cost decides, too."""

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"cost"}


class ChoosingPolicy(MethodPolicy):
    """One model answers each row. The steps of its trace are the models that may."""

    one_threshold: ClassVar[bool] = False

    stages: tuple[RoutedStage, ...] = Field(min_length=1)

    @property
    def in_turn(self) -> bool:
        """Return that rows do not go from each stage to the next."""
        return False

    @property
    def calls(self) -> Bools:
        """Return the calls of rows that end at each model: that one alone."""
        calls: Bools = self.ends[:, None] == np.arange(len(self.stages))
        return calls

    def ended(self, logits: Sequence[Floats], worth: Floats) -> list[Step]:
        """Return the step at which each of the models answers.   worth: float (n, S)."""
        ends = self.ends.tolist()
        return [
            self.own_answer(stage, real_options(logits[stage]), worth=own)
            for stage, own in zip(ends, worth.T, strict=True)
        ]


class RouterPolicy(ChoosingPolicy):
    """A router: the model of the highest value less its price, or the last where it probably wins over the first.

    The threshold is minus the price of a unit of cost; for routellm, of the probability that the first does not lose.
    It reads the embedding that its first stage gives, or the first model's outputs, whose call every row then takes.

    n_options: how many options of the first model it reads; null if it reads an embedding.   k, sharpness: of
    benchmark-routing, neighbours and how their weights fall; null for others.
    """

    OWN: ClassVar[tuple[str, ...]] = (*MethodPolicy.OWN, "n_options", "k", "sharpness")
    NEEDS_ARRAYS: ClassVar[bool] = True
    lowest_threshold: ClassVar[float] = -np.inf  # a price may be of either sign

    method: Literal["routerdc", "benchmark-routing", "routellm-mf", "routellm-sw", "graphrouter", "embedllm"]
    threshold: float
    n_options: int | None = Field(ge=1)
    k: int | None = Field(default=None, ge=1)
    sharpness: float | None = Field(default=None, ge=0)

    @property
    def ends(self) -> Ints:
        """Return the models by rising cost, int (S,); of routellm the first and the last."""
        costs = [stage.cost for stage in self.answering]
        return super().ends if self.method.startswith("routellm") else super().ends[np.argsort(costs, kind="stable")]

    @property
    def calls(self) -> Bools:
        """Return the calls of rows that end at each model: that one and the first stage, which is read."""
        calls = super().calls
        calls[:, 0] = True
        return calls

    def vectors(self, first: Floats) -> Floats:
        """Return what it reads of rows, float32 (n, d).   first: what the first stage gives, float (n, K)."""
        if self.n_options is None:
            return unit_rows(np.asarray(first, dtype=np.float32))
        scaler = Scaler(self.arrays["means"], self.arrays["scales"])
        return scaler(answer_features(real_options(first), self.n_options))

    def values(self, vectors: Floats) -> Floats:
        """Return each model's value, float64 (n, M), or the probability that the last one wins, float64 (n,)."""
        return VALUES[self.method](self, vectors)

    def worth_of(self, first: Floats) -> Floats:
        """Return what is compared with the threshold at each model in the order of ends, float64 (n, S)."""
        values = self.values(self.vectors(first))
        if values.ndim == 1:
            return np.column_stack([1.0 - values, np.full(len(values), np.inf)])
        return choices(values, np.array([stage.cost for stage in self.answering]))

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Choose at the first stage; the model that is chosen answers."""
        if stage:
            return self.own_answer(stage, real_options(logits))
        to = self.ends[stops_of(self.worth_of(logits), self.threshold)].astype(np.int8)
        if self.encoder is not None:
            return self.no_answer(np.zeros((len(to), 0)), to)
        return self.own_answer(0, real_options(logits), accepted=to == 0, next=to)

    def every_step(self, logits: Sequence[Floats], ids: Sequence[str] | None) -> list[Step]:
        """Return the answers of all models that may be chosen."""
        return self.ended(logits, self.worth_of(logits[0]))


def choices(values: Floats, prices: Floats) -> Floats:
    """Return when rows leave models by rising price, float64 (N, M): argmax_j (value_j - price x cost_j).

    values: float (N, M).   prices: float (M,), of a call of each model.
    A row leaves a model for a more expensive one when the price falls below what that one's value is higher per unit
    of cost; a step's worth is minus the highest such gain, so that the threshold is minus the price: as it rises, rows
    move along the upper hull of (cost, value) to expensive models. A model that is no more expensive than one of higher
    value is never chosen. At equality the cheaper one answers. Between models of one cost no price decides: a row
    leaves at every threshold (-inf) or at none (inf).
    """
    values = np.asarray(values, dtype=np.float64)
    order = np.argsort(prices, kind="stable")
    ranked, costs = values[:, order], prices[order]
    n, m = ranked.shape
    worth = np.full((n, m), np.inf)
    for step in range(m - 1):
        extra_cost = costs[step + 1 :] - costs[step]
        extra_value = ranked[:, step + 1 :] - ranked[:, [step]]
        free = np.where(extra_value > 0, np.inf, -np.inf)  # better at no cost; no better at no gain
        gains = np.where(extra_cost > 0, extra_value / np.where(extra_cost > 0, extra_cost, 1.0), free)
        worth[:, step] = -gains.max(axis=1)
    return worth


def sigmoid(logits: Floats) -> Floats:
    """Return 1 / (1 + exp(-x)), float64, to full precision where that is near 0."""
    found: Floats = np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=np.float64)))
    return found


def _logistic(policy: RouterPolicy, vectors: Floats) -> Floats:
    return sigmoid(products(vectors, policy.arrays["weights"]) + np.asarray(policy.arrays["offsets"], np.float64))


def _wins(policy: RouterPolicy, vectors: Floats) -> Floats:
    return sigmoid(products(vectors, policy.arrays["weights"][None])[:, 0])


def _cosines(policy: RouterPolicy, vectors: Floats) -> Floats:
    projected = products(vectors, policy.arrays["projection"]).astype(np.float32)
    return softmax(products(unit_rows(projected), unit_rows(policy.arrays["models"])))


def _near(policy: RouterPolicy, vectors: Floats) -> Floats:
    assert policy.k is not None
    assert policy.sharpness is not None
    known, correct = policy.arrays["known"], policy.arrays["correct"]
    shares: Floats = near_shares(vectors, known, correct, (policy.k,), (policy.sharpness,))[0, 0]
    return shares


def near_shares(
    vectors: Floats, known: Floats, correct: Floats | Bools, sizes: Sequence[int], sharpnesses: Sequence[float]
) -> Floats:
    """Return the shares of right answers on the nearest known queries, float64 (B, S, N, M).

    vectors: float32 (N, d).   known: float32 (n, d).   correct: (n, M).   sizes: S rising numbers of neighbours by
    cosine.   sharpnesses: B; a neighbour weighs exp(sharpness x (cosine - 1)). All n at sharpness 0 are the models'
    accuracies, whatever the query.
    """
    found = np.empty((len(sharpnesses), len(sizes), len(vectors), correct.shape[1]))
    last, asked, own = np.array(sizes) - 1, unit_rows(vectors), unit_rows(known)
    right = np.asarray(correct, dtype=np.float64)
    for start in range(0, len(vectors), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        cosines = products(asked[rows], own)
        near = np.argsort(-cosines, axis=1, kind="stable")[:, : sizes[-1]]
        distances = 1.0 - np.take_along_axis(cosines, near, axis=1)
        for at, sharpness in enumerate(sharpnesses):
            weights = np.exp(-sharpness * distances)[:, :, None]
            shares = np.cumsum(weights * right[near], axis=1) / np.cumsum(weights, axis=1)
            found[at, :, rows] = np.moveaxis(shares[:, last], 1, 0)
    return found


def _similar(policy: RouterPolicy, vectors: Floats) -> Floats:
    """Return the share of the last model's wins on known queries, which weigh by their similarity, float64 (n,)."""
    known, outcomes = policy.arrays["known"], np.float64(policy.arrays["outcomes"])
    found = np.empty(len(vectors))
    for start in range(0, len(vectors), _AT_ONCE):
        rows = slice(start, start + _AT_ONCE)
        similarities = products(unit_rows(vectors[rows]), known)
        highest = similarities.max(axis=1, keepdims=True)
        # To a query that resembles none, all are equally similar.
        relative = np.where(highest > _COSINE_ROUNDING, similarities, 0.0) / np.maximum(highest, _COSINE_ROUNDING)
        weights = np.power(10.0, relative)
        # Wins less losses, so that ties alone are even odds to the bit, not a choice by rounding.
        found[rows] = (1.0 + (weights * outcomes).sum(axis=1) / weights.sum(axis=1)) / 2.0
    return found


# What a router expects of rows by their vectors.
VALUES: Mapping[str, Callable[[RouterPolicy, Floats], Floats]] = {
    "routerdc": _cosines,
    "benchmark-routing": _near,
    "routellm-mf": _wins,
    "routellm-sw": _similar,
    "graphrouter": _logistic,
    "embedllm": _logistic,
}


class RandomPolicy(ChoosingPolicy):
    """A random mix of models. Which one a row goes to depends on its id and the seed alone.

    A row leaves each model for the next more expensive one where its random number is below the threshold.
    """

    by_id: ClassVar[bool] = True
    spends_budget: ClassVar[bool] = True
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
        return self.own_answer(stage, real_options(logits))

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
    drawn = [hashlib.blake2b(f"{seed}:{own}".encode(), digest_size=8).digest() for own in ids]
    return (np.frombuffer(b"".join(drawn), dtype="<u8") >> 12).astype(np.float64) / 2.0**52 + 2.0**-54
