"""What a policy and its models do on the splits of its table: the evaluation, calibration and mistakes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.sources import difference, fingerprints_of, labelled_examples, option_names, read_policy_chain
from cauc_ray.comparison.result import Comparison
from cauc_ray.display import Grid, with_interval
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.answer_keys import NOT_SAID
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.metrics import Reliability, calibration_error, reliability_bins
from cauc_ray.numbers.threads import in_threads
from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.policy import Policy, Stage
from cauc_ray.policies.trace import own_answers
from cauc_ray.reporting.finding import Inputs

_MOST_PAIRS = 6
_MOST_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy on its splits.

    Attributes:
        calibration: Its calibration split.
        validation: Its validation split, None without one that has all labels.
        test: The split of the report.
        evaluation: The policy's evaluation on it.
        split: Its name.
    """

    calibration: ChainLogits
    validation: ChainLogits | None
    test: ChainLogits
    evaluation: Evaluation
    split: str

    @property
    def policy(self) -> Policy:
        """Return the policy."""
        return self.evaluation.policy

    @property
    def answering(self) -> range:
        """Return the stages that give answers: all but encoders, which come first."""
        return range(len(self.policy.stages) - len(self.policy.answering), len(self.policy.stages))

    def label(self, index: int) -> str:
        """Return the name of a class, its index where nobody has named it; of answers in words the text of a key."""
        names = self.evaluation.names
        if isinstance(names, Mapping):
            return names.get(index) or NOT_SAID.get(index) or str(index)
        return str(index) if names is None else names[index]


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
    return Measured(
        calibration=chains[0],
        validation=chains[1] if len(chains) > 1 and chains[1].labelled.all() else None,
        test=test,
        evaluation=Evaluation.of(policy, test, names=option_names(inputs.logits, policy, split)),
        split=split,
    )


def _require_same(what: str, fitted_on: str, fingerprint: str, inputs: Inputs) -> None:
    if fingerprint != fitted_on:
        raise DataError(
            f"{what} in {inputs.logits} is not what {inputs.policy_name} was fitted on (fingerprint {fingerprint}, not "
            f"{fitted_on}); name the right table with --logits, or fit again"
        )


def read_comparison(path: AnyPath, measured: Measured) -> Comparison:
    """Read a comparison. Raises DataError unless it was measured on the same table."""
    if measured.validation is None:
        raise DataError(f"{path}: the policy has no labelled validation split to compare methods on")
    compared = Comparison.load(path)
    expected = fingerprints_of(measured.calibration, measured.validation, measured.test)
    if (why := difference(compared.about.get("fingerprints"), expected)) is not None:
        raise DataError(f"{path}: {why}")
    return compared


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """A model's reliability on test, and the expected calibration error of its 15 bins, before and after."""

    stage: Stage
    before: Reliability
    after: Reliability
    errors: tuple[float, float]

    def grid(self) -> Grid:
        """Return a table of the bins that have examples."""
        n_bins, rows = len(self.after.counts), []
        for at in np.flatnonzero(self.before.counts + self.after.counts).tolist():
            cells = [text for bins in (self.after, self.before) for text in (f"{bins.counts[at]:,}", _in_bin(bins, at))]
            rows.append((f"{at / n_bins:.2f} – {(at + 1) / n_bins:.2f}", *cells))
        headings = ("confidence", "n", "accuracy (95 %)", "n before", "accuracy before")
        return Grid(f"{self.stage.name}, after calibration and before it", headings, tuple(rows))


def _in_bin(bins: Reliability, at: int) -> str:
    return with_interval(bins.accuracy[at], (bins.low[at], bins.high[at])) if bins.counts[at] else "–"


def measure_calibration(measured: Measured, stage: Stage, logits: Floats) -> ModelCalibration:
    """Measure a model on all test examples, also those that never reach it."""
    blocks = in_threads(lambda rows: stage.by_itself(logits[rows]), list(measured.test.part.blocks()))
    answers, calibrated, raw = map(np.concatenate, zip(*blocks, strict=True))
    rows = [(confidences, answers == measured.test.labels) for confidences in (raw, calibrated)]
    before, after = (reliability_bins(*of) for of in rows)
    return ModelCalibration(stage, before, after, (calibration_error(*rows[0]), calibration_error(*rows[1])))


@dataclass(frozen=True, slots=True)
class StageMistakes:
    """What went wrong among the examples that a stage answered.

    Attributes:
        name: The stage.
        counts: Numbers of examples by kind.
        pairs: The most frequent confusions.
        surest: The most confident wrong answers.
    """

    name: str
    counts: dict[str, int]
    pairs: Grid
    surest: Grid


def find_mistakes(measured: Measured) -> list[StageMistakes]:
    """Find what went wrong on test among the answers of each stage."""
    alone = own_answers(measured.test, measured.answering) == measured.test.labels[:, None]
    return [_mistakes(measured, stage, alone) for stage in measured.answering]


def _mistakes(measured: Measured, stage: int, alone: Bools) -> StageMistakes:
    """Find what went wrong among a stage's answers.   alone: whether models' own answers are right, bool (N, S)."""
    chain, replay, model = measured.test, measured.evaluation.replay, stage - measured.answering.start
    rows = np.flatnonzero(replay.stages == stage)
    right = replay.predictions[rows] == chain.labels[rows]
    wrong = rows[~right]
    by_last, by_any = alone[wrong, -1], alone[wrong].any(axis=1)
    counted = {
        "wrong": np.ones_like(wrong),
        "last model right": by_last,
        "another right": by_any & ~by_last,
        "no model right": ~by_any,
    }
    if measured.policy.fuses:
        counted |= {"broken by fusion": alone[wrong, model], "fixed by fusion": ~alone[rows[right], model]}
    labels, answers = ([measured.label(index) for index in of[wrong]] for of in (chain.labels, replay.predictions))
    pairs = sorted(Counter(zip(labels, answers, strict=True)).items(), key=lambda item: (-item[1], item[0]))
    ids = [chain.example_ids[row] for row in wrong]
    # Among equals by id: nothing depends on the order of the files.
    mistakes = sorted(
        zip(ids, labels, answers, replay.confidences[wrong].tolist(), strict=True),
        key=lambda mistake: (-mistake[3], mistake[0]),
    )
    return StageMistakes(
        name=chain.models[stage],
        counts={"answered": len(rows)} | {kind: int(of.sum()) for kind, of in counted.items()},
        pairs=Grid(
            "Most frequent confusions",
            ("right answer", "answered", "n"),
            tuple((*pair, f"{n:,}") for pair, n in pairs[:_MOST_PAIRS]),
            n_left=2,
        ),
        surest=Grid(
            "Most confident mistakes",
            ("example", "right answer", "answered", "confidence"),
            tuple((*words, f"{confidence:.3f}") for *words, confidence in mistakes[:_MOST_EXAMPLES]),
            n_left=3,
        ),
    )


def mistakes_grid(mistakes: Sequence[StageMistakes]) -> Grid:
    """Return a table of the mistakes by stage."""
    rows = tuple((stage.name, *(f"{n:,}" for n in stage.counts.values())) for stage in mistakes)
    return Grid("Mistakes by the stage that answered", ("stage", *mistakes[0].counts), rows)
