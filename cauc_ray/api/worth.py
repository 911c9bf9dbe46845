"""Whether a policy is worth it: its accuracy and cost next to those of its models by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from cauc_ray.display import percent, points_with_interval
from cauc_ray.numbers.answer_keys import own_answer
from cauc_ray.numbers.chain import Chain, ChainPart, cost_text
from cauc_ray.numbers.intervals import Difference, Share, paired_difference, share
from cauc_ray.numbers.logits import LogitKind
from cauc_ray.numbers.types import Bools
from cauc_ray.policies.evidence import Measures
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import Answered, of_rows

# good: cheaper than the last model and not shown to be worse.   trade: a gain in one for a loss in the other.
# bad: another way to answer has more for less.   same: a policy of one model, compared with itself.
Tone: TypeAlias = Literal["good", "trade", "bad", "same"]


@dataclass(frozen=True, slots=True)
class SingleModel:
    """A model by itself on the examples of an evaluation.

    Attributes:
        name: Its name.
        cost: Mean cost of a call.
        accuracy: Over the labelled examples; None without any.
        gain: Accuracy of the policy less that of the model, on the same examples; None without labels.
    """

    name: str
    cost: float
    accuracy: Share | None
    gain: Difference | None


def models_alone(policy: Policy, chain: Chain, answers: Answered) -> tuple[SingleModel, ...]:
    """Measure each model that answers by itself: the option of its largest logit.

    Args:
        policy: Policy of the chain.
        chain: Examples, wherever their logits are.
        answers: Answers of the policy.
    """
    first = len(policy.stages) - len(policy.answering)
    costs = chain.costs.means[first:].tolist()
    stages = [(at, stage.name, costs[at]) for at, stage in enumerate(policy.answering) if stage.has_answers]
    labelled = chain.labelled
    if not labelled.any():
        return tuple(SingleModel(name, cost, None, None) for _, name, cost in stages)
    kinds = chain.logit_kinds[first:]
    (alone,) = of_rows(chain, partial(_block_right, kinds))
    right, alone = (answers.predictions == chain.labels)[labelled], alone[labelled]
    return tuple(
        SingleModel(name, cost, share(int(alone[:, at].sum()), len(right)), paired_difference(right, alone[:, at]))
        for at, name, cost in stages
    )


def _block_right(kinds: Sequence[LogitKind], part: ChainPart, rows: slice) -> tuple[Bools]:
    answers = [own_answer(of[rows], kind) for of, kind in zip(part.logits[-len(kinds) :], kinds, strict=True)]
    right: Bools = np.stack(answers, axis=1) == part.labels[rows][:, None]
    return (right,)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a policy is worth, at its own threshold.

    Attributes:
        tone: In one word.
        answer: In one sentence.
        gain: Difference in accuracy to the last model on the same examples.
        better: Single models that are as accurate or more and cost no more, cheapest first.
    """

    tone: Tone
    answer: str
    gain: Difference
    better: tuple[SingleModel, ...]


def judge(measures: Measures, models: Sequence[SingleModel], unit: str) -> Verdict | None:
    """Compare a policy with its models by themselves; None without labels."""
    last, accuracy = models[-1], measures.accuracy
    if accuracy is None or last.gain is None:
        return None
    affordable = sorted((model for model in models if model.cost <= measures.cost), key=lambda model: model.cost)
    better = tuple(model for model in affordable if model.accuracy and model.accuracy.value >= accuracy.value)
    gain, saving = last.gain, 1 - measures.cost / last.cost if last.cost else None
    if len(models) == 1:
        return Verdict("same", "One model: there is nothing to compare it with.", gain, better)
    if better:
        first = better[0]
        assert first.accuracy is not None
        text = f"{first.name} alone is as accurate ({percent(first.accuracy.value)}) and costs no more"
        return Verdict("bad", f"Not worth it: {text} ({cost_text(first.cost, unit)}).", gain, better)
    return Verdict(*against(last.name, saving, gain.value, gain.low, gain.high), gain, better)


def against(model: str, saving: float | None, gain: float, low: float, high: float) -> tuple[Tone, str]:
    """Return whether a way to answer is worth it against a model, in one word and in one sentence.

    Args:
        model: Name of the model.
        saving: Share of the model's cost that is saved; None if it costs nothing.
        gain: Difference in accuracy to the model on the same examples.
        low: Lower end of its interval.
        high: Upper end.
    """
    tone: Tone
    if saving is not None and saving > 0:
        tone, word = ("good", "Worth it") if high >= 0 else ("trade", "A trade")
        text = f"saves {percent(saving)} of the cost of {model}"
    else:
        tone, word = ("trade", "A trade") if low > 0 else ("bad", "Not worth it")
        text = f"costs {'as much as' if not saving else f'{percent(-saving)} more than'} {model}"
    return tone, f"{word}: {text}, at {points_with_interval(gain, low, high)} points of accuracy."
