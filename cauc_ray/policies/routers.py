"""Policies that choose one model for each row: by an embedding, by the first model's outputs, or at random."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from cauc_ray.numbers.logits import real_options
from cauc_ray.numbers.products import products
from cauc_ray.numbers.sweep import stops_of
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.features import Scaler, answer_features, unit_rows
from cauc_ray.policies.policy import Stage, Step
from cauc_ray.policies.scored import MethodPolicy

# Queries that are compared with the known ones at a time: bounds memory, changes nothing.
ROWS_AT_ONCE = 1024


class RoutedStage(Stage):
    """A stage of a router, whose cost decides, too."""

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"cost"}


class ChoosingPolicy(MethodPolicy):
    """One model answers each row. The steps of its trace are the models that may."""

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
            self.own_answer(stage, logits[stage], worth=of_model) for stage, of_model in zip(ends, worth.T, strict=True)
        ]


class RouterPolicy(ChoosingPolicy):
    """A router, which reads the embedding that its first stage gives, or the first model's outputs.

    Every row takes the first stage's call.

    Attributes:
        n_options: Number of options of the first model that it reads; null if it reads an embedding.
        k: Number of neighbours of benchmark-routing; null for other methods.
        sharpness: Decay of the neighbours' weights of benchmark-routing; null for other methods.
    """

    OWN: ClassVar[tuple[str, ...]] = (*MethodPolicy.OWN, "n_options", "k", "sharpness")
    NEEDS_ARRAYS: ClassVar[bool] = True
    lowest_threshold: ClassVar[float] = -np.inf  # a price may be of either sign

    threshold: float
    n_options: int | None = Field(ge=1)
    k: int | None = Field(default=None, ge=1)
    sharpness: float | None = Field(default=None, ge=0)

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

    @abstractmethod
    def values(self, vectors: Floats) -> Floats:
        """Return what it expects of rows by what it reads of them, float32 (n, d)."""

    @abstractmethod
    def worth_of(self, first: Floats) -> Floats:
        """Return what is compared with the threshold at each model in the order of ends, float64 (n, S)."""

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Choose at the first stage; the model that is chosen answers."""
        if stage:
            return self.own_answer(stage, logits)
        to = self.ends[stops_of(self.worth_of(logits), self.threshold)].astype(np.int8)
        if self.encoder is not None:
            return self.no_answer(np.zeros((len(to), 0)), to)
        return self.own_answer(0, logits, accepted=to == 0, next=to)

    def every_step(self, logits: Sequence[Floats], ids: Sequence[str] | None) -> list[Step]:
        """Return the answers of all models that may be chosen."""
        return self.ended(logits, self.worth_of(logits[0]))


class ValueRouter(RouterPolicy):
    """A router to the model of the highest value, float64 (n, M), less its price.

    The threshold is minus the price of a unit of cost.
    """

    @property
    def ends(self) -> Ints:
        """Return the models by rising cost, int (S,)."""
        return super().ends[np.argsort([stage.cost for stage in self.answering], kind="stable")]

    def worth_of(self, first: Floats) -> Floats:
        """Return minus the price at which a row leaves each model."""
        return choices(self.values(self.vectors(first)), np.array([stage.cost for stage in self.answering]))


class LogisticRouter(ValueRouter):
    """A router whose values are logistic regressions.   Arrays: weights, (M, d), and offsets, (M,)."""

    def values(self, vectors: Floats) -> Floats:
        """Return each model's probability of being right, float64 (n, M)."""
        return sigmoid(products(vectors, self.arrays["weights"]) + np.asarray(self.arrays["offsets"], np.float64))


class FirstOrLastRouter(RouterPolicy):
    """A router to the last model where that probably wins over the first, float64 (n,).

    The threshold is of the probability that the first does not lose.
    """

    def worth_of(self, first: Floats) -> Floats:
        """Return the probability that the first model does not lose, and infinity."""
        wins = self.values(self.vectors(first))
        return np.column_stack([1.0 - wins, np.full(len(wins), np.inf)])


def choices(values: Floats, prices: Floats) -> Floats:
    """Return when rows leave models by rising price, float64 (N, M): argmax_j (value_j - price x cost_j).

    A row leaves a model for a more expensive one when the price falls below the gain in value per unit of cost. A
    step's worth is minus the highest such gain, so that the threshold is minus the price: as it rises, rows move along
    the upper hull of (cost, value) to expensive models. A model is never chosen if another has a higher value at the
    same cost or less. At equality the cheaper one answers. Between models of one cost no price decides: a row leaves at
    every threshold (-inf) or at none (inf).

    Args:
        values: Value of each model for each row, float (N, M).
        prices: Cost of a call of each model, float (M,).
    """
    order = np.argsort(prices, kind="stable")
    return ordered_choices(np.asarray(values, dtype=np.float64)[:, order], prices[order])


def ordered_choices(values: Floats, prices: Floats) -> Floats:
    """Return what choices() does of models by rising price.   values: float64 (N, M).   prices: (M,) or (N, M)."""
    n, m = values.shape
    worth = np.full((n, m), np.inf)
    for step in range(m - 1):
        extra_cost = prices[..., step + 1 :] - prices[..., [step]]
        extra_value = values[:, step + 1 :] - values[:, [step]]
        free = np.where(extra_value > 0, np.inf, -np.inf)  # better at no cost; no better at no gain
        gains = np.where(extra_cost > 0, extra_value / np.where(extra_cost > 0, extra_cost, 1.0), free)
        worth[:, step] = -gains.max(axis=1)
    return worth


def sigmoid(logits: Floats) -> Floats:
    """Return 1 / (1 + exp(-x)), float64, to full precision where that is near 0."""
    probabilities: Floats = np.exp(-np.logaddexp(0.0, -np.asarray(logits, dtype=np.float64)))
    return probabilities
