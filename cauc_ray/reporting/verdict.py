"""The report in one sentence: what the policy has, beside calling the last model on everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cauc_ray.api.tables import number, percent
from cauc_ray.numbers.intervals import Difference, Share, paired_difference
from cauc_ray.reporting.comparison import SingleModel
from cauc_ray.reporting.measured import Measured

# good: cheaper than the last model and not shown to be worse.   trade: a gain in one for a loss in the other.
# bad: another way to answer has more for less.   same: one model, which is what it is held against.
Tone: TypeAlias = Literal["good", "trade", "bad", "same"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy is worth on test, at its own threshold.

    relative_cost: to the last model alone, None where that is free.   gain: in accuracy, against the last model on
    the same examples.   better: single models that are as accurate or more, and cost no more, cheapest first.
    """

    tone: Tone
    sentence: str
    consequence: str
    accuracy: Share
    macro_f1: float
    cost: float
    unit: str
    relative_cost: float | None
    avoided: float
    gain: Difference
    last: SingleModel
    better: tuple[SingleModel, ...]


def judge(measured: Measured, singles: tuple[SingleModel, ...]) -> Verdict:
    """Say what the policy is worth."""
    chain, evaluation = measured.test, measured.evaluation
    measures = evaluation.measures
    assert measures.accuracy is not None
    assert measures.macro_f1 is not None
    right = evaluation.replay.predictions == chain.labels
    gain = paired_difference(right, chain.logits[-1].argmax(axis=1) == chain.labels)
    better = tuple(
        each
        for each in sorted(singles, key=lambda each: each.cost)
        if each.cost <= measures.cost and each.accuracy.value >= measures.accuracy.value
    )
    last, unit = singles[-1], measured.policy.cost_unit
    tone = _tone(gain, measures.relative_cost, bool(better), len(singles))
    return Verdict(
        tone=tone,
        sentence=_sentence(measures.accuracy, measures.cost, unit, measures.relative_cost, gain, last.name),
        consequence=_consequence(tone, gain, better, last.name),
        accuracy=measures.accuracy,
        macro_f1=measures.macro_f1,
        cost=measures.cost,
        unit=unit,
        relative_cost=measures.relative_cost,
        avoided=1 - measures.stages[-1].reached / measures.n,
        gain=gain,
        last=last,
        better=better,
    )


def _tone(gain: Difference, relative_cost: float | None, dominated: bool, n_models: int) -> Tone:
    if n_models == 1:
        return "same"
    saves = relative_cost is not None and relative_cost < 1
    if dominated or (not saves and gain.low <= 0):
        return "bad"
    if saves and gain.high >= 0:
        return "good"
    return "trade"


def _sentence(accuracy: Share, cost: float, unit: str, relative: float | None, gain: Difference, last: str) -> str:
    held = "" if relative is None else f", {relative:.2f} of what {last} alone costs"
    interval = f"95 % interval {_signed(gain.low)} to {_signed(gain.high)}"
    if gain.value == 0 and gain.low == gain.high == 0:
        against = f"as right as {last} alone on every example"
    else:
        against = f"{_signed(gain.value)} points against {last} alone ({interval})"
    return f"{percent(accuracy.value)} right at {number(cost)} {unit} per example{held}; {against}."


def _consequence(tone: Tone, gain: Difference, better: tuple[SingleModel, ...], last: str) -> str:
    if tone == "same":
        return "A policy of one model: it is what it is held against."
    if tone == "bad" and better:
        model = better[0]
        return (
            f"No reason to use it as it is: {model.name} alone is right on {percent(model.accuracy.value)} and costs "
            f"{number(model.cost)}, no more than this policy."
        )
    if tone == "bad":
        return (
            f"No reason to use it as it is: it costs no less than {last} alone, and is not shown to be more accurate."
        )
    if tone == "trade" and gain.high < 0:
        return (
            f"Cheaper, and less accurate than {last} alone by more than chance explains: a trade to be made on purpose."
        )
    if tone == "trade":
        return f"More accurate than {last} alone, and dearer: a trade to be made on purpose."
    if gain.low > 0:
        return f"Cheaper than {last} alone, and more accurate by more than chance explains."
    return f"Cheaper than {last} alone; that it is less accurate is not shown on these {gain.n:,} examples."


def _signed(value: float) -> str:
    """Return a share in points, with a sign."""
    return f"{100 * value:+.2f}".replace("-", "\N{MINUS SIGN}")
