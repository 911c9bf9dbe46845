"""Replay of a policy on saved logits, by the same step that a live run takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cauc_ray.numbers.chain import Chain, ChainLogits, ChainPart, in_order
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.metrics import Share, macro_f1, share
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Replay:
    """A policy's answers on saved logits; all arrays (N,).

    predictions: int32.   confidences: float64.   stages: int8, which one answered.   costs: float64, of all
    calls made for the example.
    """

    predictions: Ints
    confidences: Floats
    stages: Ints
    costs: Floats


def replay(policy: Policy, chain: Chain) -> Replay:
    """Run a policy on saved logits, calling each stage for the deferred examples only."""
    policy.check_chain(chain)
    parts = chain.each(partial(replay_part, policy))
    predictions, confidences, stages = (
        in_order([part.ranks for part in parts], values)
        for values in (
            [part.predictions for part in parts],
            [part.confidences for part in parts],
            [part.stages for part in parts],
        )
    )
    return Replay(predictions, confidences, stages, chain.costs.of_stops(stages))


@dataclass(frozen=True, slots=True)
class PartReplay:
    """The answers to some rows, as Replay has them.   ranks: int (n,)."""

    ranks: Ints
    predictions: Ints
    confidences: Floats
    stages: Ints


def replay_part(policy: Policy, part: ChainPart) -> PartReplay:
    """Run a policy on a part of a chain, calling each stage for the deferred examples only."""
    n = len(part)
    predictions, stages = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int8)
    confidences = np.empty(n)
    for block in part.blocks():
        rows, state = np.arange(block.start, block.stop), None
        for stage, logits in enumerate(part.logits):
            if not len(rows):
                break
            step = policy.step(stage, logits[rows], state)
            done = rows[step.accepted]
            predictions[done] = step.predictions[step.accepted]
            confidences[done] = step.confidences[step.accepted]
            stages[done] = stage
            rows, state = rows[~step.accepted], step.state[~step.accepted]
    return PartReplay(part.ranks, predictions, confidences, stages)


@dataclass(frozen=True, slots=True)
class StageShare:
    """How many examples reached a stage and stopped there, the share that did, and the accuracy of its answers."""

    name: str
    reached: int
    answered: int
    coverage: Share
    accepted_accuracy: Share


@dataclass(frozen=True, slots=True)
class Measures:
    """What answers on a split are worth; accuracy and macro-F1 over the labelled rows, None where there are none.

    cost: mean per example.   relative_cost: to one call of the last model on each; None where that is free.
    """

    n: int
    n_labelled: int
    accuracy: Share | None
    macro_f1: float | None
    cost: float
    relative_cost: float | None
    stages: tuple[StageShare, ...]


def measure(
    models: tuple[str, ...], predictions: Ints, stages: Ints, labels: Ints, labelled: Bools, costs: Costs
) -> Measures:
    """Measure answers: int (N,) predictions, the stages that gave them, labels and which rows have one."""
    correct = (predictions == labels) & labelled
    shares = []
    for place, name in enumerate(models):
        here, reached = stages == place, int((stages >= place).sum())
        answered, hits = int(here.sum()), int((correct & here).sum())
        shares.append(
            StageShare(
                name=name,
                reached=reached,
                answered=answered,
                coverage=share(answered, reached),
                accepted_accuracy=share(hits, int((here & labelled).sum())),
            )
        )
    some = bool(labelled.any())
    cost, of_last = float(costs.of_stops(stages).mean()), float(costs.means[-1])
    return Measures(
        n=len(predictions),
        n_labelled=int(labelled.sum()),
        accuracy=share(int(correct.sum()), int(labelled.sum())) if some else None,
        macro_f1=macro_f1(predictions[labelled], labels[labelled]) if some else None,
        cost=cost,
        relative_cost=cost / of_last if of_last > 0 else None,
        stages=tuple(shares),
    )


def measure_replay(policy: Policy, chain: Chain) -> tuple[Replay, Measures]:
    """Replay a policy and measure its answers."""
    result = replay(policy, chain)
    return result, measure(chain.models, result.predictions, result.stages, chain.labels, chain.labelled, chain.costs)


def single_model_accuracy(chain: ChainLogits, stage: int) -> Share:
    """Return the accuracy of one model alone on the labelled examples."""
    predictions = chain.logits[stage].argmax(axis=1)
    hits = (predictions == chain.labels) & chain.labelled
    return share(int(hits.sum()), int(chain.labelled.sum()))
