"""The report in two sentences: what the policy has, and whether that is better than one model on everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cauc_ray.api.tables import number, percent
from cauc_ray.numbers.intervals import Difference, paired_difference
from cauc_ray.reporting.measured import Measured, SingleModel

# good: cheaper than the last model and not shown to be worse.   trade: a gain in one for a loss in the other.
# bad: another way to answer has more for less.   same: a policy of one model, compared with itself.
Tone: TypeAlias = Literal["good", "trade", "bad", "same"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy is worth on test, at its own threshold.

    gain: in accuracy, against the last model on the same examples.   better: single models that are as accurate or
    more, and cost no more, cheapest first.
    """

    tone: Tone
    sentence: str
    consequence: str
    gain: Difference
    better: tuple[SingleModel, ...]


def judge(measured: Measured) -> Verdict:
    """Compare the policy with its single models."""
    measures, singles = measured.evaluation.measures, measured.singles
    accuracy, relative, last = measures.accuracy, measures.relative_cost, singles[-1].name
    assert accuracy is not None
    right = measured.evaluation.replay.predictions == measured.test.labels
    gain = paired_difference(right, measured.alone[:, -1])
    cheaper = sorted((each for each in singles if each.cost <= measures.cost), key=lambda each: each.cost)
    better = tuple(each for each in cheaper if each.accuracy.value >= accuracy.value)
    tone, consequence = _consequence(gain, relative is not None and relative < 1, better, singles)
    against = f"as right as {last} alone on every example"
    if gain.low or gain.high:
        interval = f"95 % interval {_signed(gain.low)} to {_signed(gain.high)}"
        against = f"{_signed(gain.value)} percentage points against {last} alone ({interval})"
    share_of_last = "" if relative is None else f", {relative:.2f} of the cost of {last} alone"
    sentence = (
        f"{percent(accuracy.value)} of the answers are right at {number(measures.cost)} {measured.policy.cost_unit} "
        f"per example{share_of_last}; {against}."
    )
    return Verdict(tone, sentence, consequence, gain, better)


def _consequence(
    gain: Difference, saves: bool, better: tuple[SingleModel, ...], singles: tuple[SingleModel, ...]
) -> tuple[Tone, str]:
    last = singles[-1].name
    if len(singles) == 1:
        return "same", "A policy of one model: there is nothing to compare it with."
    if better:
        model = f"{better[0].name} alone is right on {percent(better[0].accuracy.value)}"
        return "bad", f"Do not use it as it is: {model} and costs {number(better[0].cost)}, no more than this policy."
    if not saves and gain.low <= 0:
        return (
            "bad",
            f"Do not use it as it is: it costs no less than {last} alone, and is not shown to be more accurate.",
        )
    if not saves:
        return "trade", f"More accurate than {last} alone, and more expensive: decide whether that is worth it."
    if gain.high < 0:
        return (
            "trade",
            f"Cheaper, and less accurate than {last} alone by more than chance: decide whether that is fine.",
        )
    if gain.low > 0:
        return "good", f"Cheaper than {last} alone, and more accurate by more than chance."
    return "good", f"Cheaper than {last} alone; these {gain.n:,} examples do not show that it is less accurate."


def _signed(value: float) -> str:
    """Return a share in percentage points, with a sign."""
    return f"{100 * value:+.2f}".replace("-", "\N{MINUS SIGN}")
