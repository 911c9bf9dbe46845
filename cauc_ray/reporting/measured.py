"""What a policy and its models do on the splits of its table: answers, calibration, mistakes, and the verdict."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.sources import labelled_examples, read_policy_chain
from cauc_ray.display import number, percent
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.calibrators import UNCALIBRATED
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.intervals import Difference, Share, paired_difference, share
from cauc_ray.numbers.metrics import Reliability, calibration_error, reliability_bins
from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.policy import Policy, Stage
from cauc_ray.policies.routers import ChoosingPolicy
from cauc_ray.policies.trace import own_answers, replay
from cauc_ray.reporting.finding import Inputs

_MOST_PAIRS = 6
_MOST_EXAMPLES = 5
# Wrong answers are counted in as many classes of confidence.
_N_BARS = 10


@dataclass(frozen=True, slots=True)
class SingleModel:
    """A model by itself on test: mean cost of a call, accuracy."""

    name: str
    cost: float
    accuracy: Share


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy on its splits.

    Attributes:
        policy: The policy.
        calibration: Its calibration split.
        validation: Its validation split, None without one that has all labels.
        expected_cost: Mean cost of the policy there.
        test: The split of the report.
        evaluation: The policy's evaluation on it.
        split: Its name.
        alone: Whether models' own answers are right on it, bool (N, M); an encoder is not among the models.
        singles: The models, M.
    """

    policy: Policy
    calibration: ChainLogits
    validation: ChainLogits | None
    expected_cost: float | None
    test: ChainLogits
    evaluation: Evaluation
    split: str
    alone: Bools
    singles: tuple[SingleModel, ...]

    @property
    def n_encoders(self) -> int:
        """Return how many of the policy's stages, the first ones, give no answers."""
        return len(self.policy.stages) - len(self.policy.answering)

    @property
    def chooses(self) -> bool:
        """Return whether the policy chooses one model for each example."""
        return isinstance(self.policy, ChoosingPolicy)


def measure_policy(inputs: Inputs, split: str) -> Measured:
    """Read the splits of the policy's table, check that they are the policy's, and replay the policy on one of them.

    Raises DataError where the table lacks a split or labels, or is not what the policy was fitted on; ConfigError
    where the split is one that the policy was fitted or chosen on.
    """
    policy = inputs.policy
    fitted_on = [at for at in (policy.calibration, policy.validation) if at is not None]
    if split in [at.split for at in fitted_on]:
        raise ConfigError(f"split {split!r} is what the policy was fitted or chosen on; measure it on another")
    chains = [labelled_examples(read_policy_chain(inputs.logits, policy, at.split)) for at in fitted_on]
    for chain, at in zip(chains, fitted_on, strict=True):
        _require_same(f"split {at.split!r}", at.examples_fingerprint, chain.examples_fingerprint(), inputs)
    for place, stage in enumerate(policy.stages):
        if stage.diagnostics is not None:
            fingerprint = chains[0].logits_fingerprint(place)
            _require_same(f"model {stage.name!r}", stage.diagnostics.logits_fingerprint, fingerprint, inputs)
    test = read_policy_chain(inputs.logits, policy, split)
    test.require_labels("a report")
    models = range(len(policy.stages) - len(policy.answering), len(policy.stages))
    alone = own_answers(test, models) == test.labels[:, None]
    costs = test.costs.means[models.start :].tolist()
    shares = [share(int(is_right.sum()), len(test)) for is_right in alone.T]
    validation = chains[1] if len(chains) > 1 and chains[1].labelled.all() else None
    return Measured(
        policy=policy,
        calibration=chains[0],
        validation=validation,
        expected_cost=None if validation is None else float(replay(policy, validation).costs.mean()),
        test=test,
        evaluation=Evaluation.of(policy, test),
        split=split,
        alone=alone,
        singles=tuple(map(SingleModel, test.models[models.start :], costs, shares)),
    )


def _require_same(what: str, fitted_on: str, fingerprint: str, inputs: Inputs) -> None:
    if fingerprint != fitted_on:
        raise DataError(
            f"{what} in {inputs.logits} is not what {inputs.policy_name} was fitted on (fingerprint {fingerprint}, not "
            f"{fitted_on}); name the right table with --logits, or fit again"
        )


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """A model's reliability on test, and the expected calibration error of its 15 bins."""

    stage: Stage
    before: Reliability
    after: Reliability
    error_before: float
    error_after: float


def measure_calibration(measured: Measured, stage: Stage, logits: Floats) -> ModelCalibration:
    """Measure a model on all test examples, also those that never reach it."""
    answered = [by.answers(by.scores(logits, stage.name)) for by in (UNCALIBRATED, stage.calibrator)]
    rows = [(confidences, answers == measured.test.labels) for answers, confidences in answered]
    bins, errors = [reliability_bins(*of) for of in rows], [calibration_error(*of) for of in rows]
    return ModelCalibration(stage, bins[0], bins[1], errors[0], errors[1])


@dataclass(frozen=True, slots=True)
class StageMistakes:
    """What went wrong among the examples that a stage answered.

    Attributes:
        name: The stage.
        n: Number of the examples.
        accuracy: Share of right answers.
        counts: Numbers of examples by kind.
        quartiles: Quartiles of the wrong answers' confidences, None without any.
        bars: Wrong answers in each tenth of confidence.
        pairs: Label, answer and frequency of confusions, most frequent first.
        surest: Id, label, answer and confidence of the most confident wrong answers.
    """

    name: str
    n: int
    accuracy: Share
    counts: dict[str, int]
    quartiles: tuple[float, ...] | None
    bars: tuple[int, ...]
    pairs: tuple[tuple[int, int, int], ...]
    surest: tuple[tuple[str, int, int, float], ...]


def find_mistakes(measured: Measured, stage: int) -> StageMistakes:
    """Find what went wrong on test among a stage's answers."""
    chain, replay, alone = measured.test, measured.evaluation.replay, measured.alone
    rows, model = np.flatnonzero(replay.stages == stage), stage - measured.n_encoders
    right = replay.predictions[rows] == chain.labels[rows]
    wrong = rows[~right]
    labels, answers, confidences = (of[wrong] for of in (chain.labels, replay.predictions, replay.confidences))
    pairs = Counter(zip(labels.tolist(), answers.tolist(), strict=True))
    columns = ([chain.example_ids[row] for row in wrong], labels.tolist(), answers.tolist(), confidences.tolist())
    by_last, by_any = alone[wrong, -1], alone[wrong].any(axis=1)
    counted = {
        "wrong": np.ones_like(wrong),
        "last model right": by_last,
        "another right": by_any & ~by_last,
        "no model right": ~by_any,
    }
    if measured.policy.fuses:
        counted |= {"broken by fusion": alone[wrong, model], "fixed by fusion": ~alone[rows[right], model]}
    return StageMistakes(
        name=chain.models[stage],
        n=len(rows),
        accuracy=share(int(right.sum()), len(rows)),
        counts={what: int(of.sum()) for what, of in counted.items()},
        quartiles=tuple(np.quantile(confidences, [0.25, 0.5, 0.75]).tolist()) if len(wrong) else None,
        bars=tuple(np.histogram(confidences, bins=_N_BARS, range=(0.0, 1.0))[0].tolist()),
        pairs=tuple((*pair, n) for pair, n in sorted(pairs.items(), key=lambda item: (-item[1], item[0])))[
            :_MOST_PAIRS
        ],
        # Among equals by id: nothing depends on the order of the files.
        surest=tuple(sorted(zip(*columns, strict=True), key=lambda mistake: (-mistake[3], mistake[0])))[
            :_MOST_EXAMPLES
        ],
    )


# good: cheaper than the last model and not shown to be worse.   trade: a gain in one for a loss in the other.
# bad: another way to answer has more for less.   same: a policy of one model, compared with itself.
Tone: TypeAlias = Literal["good", "trade", "bad", "same"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy is worth on test, at its own threshold.

    Attributes:
        tone: The kind of verdict.
        sentence: The result.
        consequence: What to do.
        gain: Gain in accuracy over the last model on the same examples.
        better: Single models that are as accurate or more, and cost no more, cheapest first.
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
    better = [at for at in singles if at.cost <= measures.cost and at.accuracy.value >= accuracy.value]
    better.sort(key=lambda at: at.cost)
    tone, consequence = _consequence(gain, relative is not None and relative < 1, tuple(better), singles)
    against = f"as right as {last} alone on every example"
    if gain.low or gain.high:
        interval = f"95 % interval {_signed(gain.low)} to {_signed(gain.high)}"
        against = f"{_signed(gain.value)} percentage points against {last} alone ({interval})"
    share_of_last = "" if relative is None else f", {relative:.2f} of the cost of {last} alone"
    sentence = (
        f"{percent(accuracy.value)} of the answers are right at {number(measures.cost)} {measured.policy.cost_unit} "
        f"per example{share_of_last}; {against}."
    )
    return Verdict(tone, sentence, consequence, gain, tuple(better))


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
