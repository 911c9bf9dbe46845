"""What a method sees of a split, and what it would answer there whatever its threshold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.chain import UNKNOWN_LABEL, Chain, ChainLogits, ChainPart, in_order
from cauc_ray.numbers.sweep import Frontier, Objective, sweep
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy, Stage


@dataclass(frozen=True, slots=True)
class Examples:
    """A split as a method sees it: what the models said, and what is known of the queries themselves.

    embeddings: float32 (N, d), by an encoder that a router may look at before any model is called.   texts: N.
    """

    chain: ChainLogits
    embeddings: Floats | None = None
    texts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for what, rows in (("embeddings", self.embeddings), ("texts", self.texts)):
            if rows is not None and len(rows) != len(self.chain):
                raise DataError(f"{self.chain.source}: {len(rows)} {what} for {len(self.chain)} examples")

    def __len__(self) -> int:
        return len(self.chain)

    def correct(self) -> Bools:
        """Return which models' answers are right, bool (N, M); of labelled examples."""
        answers = np.stack([logits.argmax(axis=1) for logits in self.chain.logits], axis=1)
        correct: Bools = answers == self.chain.labels[:, None]
        return correct

    def without_labels(self) -> Examples:
        """Return the same examples as they are when somebody asks."""
        unknown = np.full_like(self.chain.labels, UNKNOWN_LABEL)
        return replace(self, chain=replace(self.chain, labels=unknown))


@dataclass(frozen=True, slots=True)
class Answers:
    """A method's answers.   predictions: int32 (N,).   calls: bool (N, M), which models were called for each."""

    predictions: Ints
    calls: Bools

    def costs(self, chain: Chain) -> Floats:
        """Return what each example cost, float64 (N,)."""
        cost: Floats = np.where(self.calls, chain.costs.per_call, 0.0).sum(axis=1)
        return cost


@dataclass(frozen=True, slots=True)
class Trace:
    """What a method would answer at each of its S steps; an example stops where its confidence reaches a threshold.

    predictions: int32 (N, S).   confidences: float64 (N, S); the last step's stop nobody, all do who come there.
    calls: bool (S, M), which models were called for an example that stops at a step.
    likeliest: int16 (N, S), of each answer what Step.likeliest returns; None where nobody asked for it.
    """

    predictions: Ints
    confidences: Floats
    calls: Bools
    likeliest: Ints | None = None

    def frontier(self, chain: Chain, objective: Objective = "accuracy") -> Frontier:
        """Return all operating points on the chain's examples, which have labels."""
        inner = self.confidences[:, :-1]
        return sweep(inner, self.predictions, chain.labels, chain.costs, objective, self.calls)

    def stops(self, threshold: float) -> Ints:
        """Return the step at which each example stops, int (N,)."""
        accepted = self.confidences >= threshold
        accepted[:, -1] = True
        stops: Ints = accepted.argmax(axis=1)
        return stops

    def answers(self, threshold: float) -> Answers:
        """Return the answers at a threshold."""
        stops = self.stops(threshold)
        return Answers(self.predictions[np.arange(len(stops)), stops], self.calls[stops])


class Cascade(Protocol):
    """A method that one threshold steers: what it answers, and how sure it is, after each step."""

    def trace(self, examples: Examples) -> Trace:
        """Return its answers and confidences at every step."""
        ...


def calls_in_turn(n_models: int) -> Bools:
    """Return the calls of a cascade, bool (M, M): each step's own model and all before it."""
    return np.tri(n_models, dtype=bool)


@dataclass(frozen=True, slots=True)
class PolicyCascade:
    """A fitted policy, seen as a cascade whose threshold is still open."""

    policy: Policy

    def trace(self, examples: Examples) -> Trace:
        """Take every step of every example."""
        return trace_policy(self.policy, examples.chain)


def trace_policy(policy: Policy, chain: Chain, *, likeliest: bool = False) -> Trace:
    """Take every step of a policy for every example of a chain.   likeliest: whether the trace shall have it."""
    parts = chain.each(partial(_trace_part, policy, likeliest))
    ranks = [part.ranks for part in parts]
    return Trace(
        in_order(ranks, [part.predictions for part in parts]),
        in_order(ranks, [part.confidences for part in parts]),
        calls_in_turn(len(policy.stages)),
        in_order(ranks, [part.likeliest for part in parts]) if likeliest else None,
    )


@dataclass(frozen=True, slots=True)
class _PartTrace:
    """The steps of some rows.   ranks: int (n,).   The others: (n, M), as a trace has them; likeliest only if asked."""

    ranks: Ints
    predictions: Ints
    confidences: Floats
    likeliest: Ints


def _trace_part(policy: Policy, with_likeliest: bool, part: ChainPart) -> _PartTrace:
    n, m = len(part), len(part.logits)
    predictions, confidences = np.empty((n, m), dtype=np.int32), np.empty((n, m))
    codes = np.empty((n, m if with_likeliest else 0), dtype=np.int16)
    for rows in part.blocks():
        state = None
        for stage, logits in enumerate(part.logits):
            step = policy.step(stage, logits[rows], state)
            predictions[rows, stage], confidences[rows, stage] = step.predictions, step.confidences
            if with_likeliest:
                codes[rows, stage] = step.likeliest()
            state = step.state
    return _PartTrace(part.ranks, predictions, confidences, codes)


def answers_alone(policy: Policy, chain: Chain) -> Ints:
    """Return what each stage's model would answer by itself, int32 (N, M)."""
    parts = chain.each(partial(_part_alone, policy.stages))
    answers: Ints = in_order([ranks for ranks, _ in parts], [answers for _, answers in parts])
    return answers


def _part_alone(stages: tuple[Stage, ...], part: ChainPart) -> tuple[Ints, Ints]:
    answers = np.empty((len(part), len(stages)), dtype=np.int32)
    for rows in part.blocks():
        for place, (logits, stage) in enumerate(zip(part.logits, stages, strict=True)):
            answers[rows, place] = stage.scores(logits[rows]).argmax(axis=1)
    return part.ranks, answers
