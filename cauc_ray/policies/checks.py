"""Checks of fitted policies for common problems; the policy file keeps the results (docs/how-to/guards.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from cauc_ray.errors import GuardError, GuardWarning, warn
from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.chain import Chain, ChainPart, cost_text
from cauc_ray.numbers.intervals import Mean, label_shift, mean_difference, ranking, signs_of
from cauc_ray.numbers.metrics import calibration_error, worsening
from cauc_ray.numbers.sweep import most_within
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import Guard, GuardName, Measures, StageFigures
from cauc_ray.policies.policy import Policy, Stage
from cauc_ray.policies.trace import Answered, Trace, of_rows

# The false alarm rate of each guard's tests together.
LEVEL = 0.01
# A rise of the calibration error that matters, one point.
LEAST_RISE = 0.01
# A policy that costs more than its largest model has to be more accurate; with a larger p-value it hardly is.
LARGEST_P_OF_GAIN = 0.2
# With fewer, accuracies are not known to 10 points with 95 % confidence: (1.96 / 0.1) ** 2 / 4 = 96.04.
FEWEST_EXAMPLES = 97


def check_policy(
    policy: Policy, measures: Measures, trace: Trace, answered: Answered, chain: Chain, calibration: Chain
) -> dict[str, Any]:
    """Return a policy's guards and figures, as its file has them.

    Args:
        policy: Policy at its threshold.
        measures: Its results on the chain.
        trace: Its steps there.
        answered: Its answers there.
        chain: Examples, some of them labelled.
        calibration: Examples that it was fitted on, which may be the same.
    """
    rows = np.flatnonzero(chain.labelled)
    labels, reached = chain.labels[rows], trace.stops(policy.threshold)[rows]
    alone, after, before = (of[rows] for of in of_rows(chain, partial(_block_alone, policy.answering)))
    correct = answered.predictions[rows] == labels
    figures = []
    for step, end in enumerate(policy.ends.tolist() if len(policy.ends) == alone.shape[1] else ()):
        model = end - len(policy.stages)
        right = trace.predictions[rows, step] == labels
        fixed, broken = ((reached >= step) & of for of in (right & ~alone[:, model], ~right & alone[:, model]))
        figures.append(
            StageFigures(
                name=policy.models[end],
                n_fixed=int(fixed.sum()),
                n_broken=int(broken.sum()),
                ranking=ranking(trace.compared[rows, step], right),
            )
        )
    guards = [_few_examples(policy), _separable(policy), _calibration_worse(policy, measures, alone, before, after)]
    if alone.shape[1] > 1:
        costs = chain.costs.means[-alone.shape[1] :]
        guards += _single_models(policy, measures, costs, correct, alone)
    if calibration is not chain:
        guards.append(_shift(policy, measures, calibration.labels, labels, alone))
    return {"guards": tuple(guards), "figures": tuple(figures)}


def _block_alone(stages: tuple[Stage, ...], part: ChainPart, rows: slice) -> tuple[Bools, Floats, Floats]:
    """Return of each model's own answers whether they are right and their confidences, calibrated and raw, (n, M)."""
    columns = []
    for stage, logits in zip(stages, part.logits[-len(stages) :], strict=True):
        predictions, confidences, raw = stage.by_itself(logits[rows])
        columns.append((predictions == part.labels[rows], confidences, raw))
    right, after, before = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    return right, after, before


def _guard(name: GuardName, stage: str | None, fired: bool, text: str, **figures: float) -> Guard:
    numbers = {key: float(number) for key, number in figures.items()}
    return Guard(name=name, stage=stage, fired=fired, message=text, figures=numbers)


def _few_examples(policy: Policy) -> Guard:
    """Check whether calibration or validation has too few examples."""
    split = min((split for split in (policy.calibration, policy.validation) if split), key=lambda split: split.n)
    text = f"{split.split} has {split.n:,} examples; {FEWEST_EXAMPLES} are needed to know an accuracy to 10 points"
    return _guard("few-examples", None, split.n < FEWEST_EXAMPLES, text, n=split.n, fewest=FEWEST_EXAMPLES)


def _separable(policy: Policy) -> Guard:
    """Check whether a model is right on all calibration examples, so that no temperature fits best."""
    fits = {stage.name: stage.diagnostics.status for stage in policy.answering if stage.diagnostics is not None}
    name = next((name for name, status in fits.items() if status is FitStatus.SEPARABLE), None)
    text = f"{name or 'no model'} is right on all {policy.calibration.n:,} examples of {policy.calibration.split}"
    return _guard("separable", name, name is not None, text, n=policy.calibration.n)


def _calibration_worse(policy: Policy, measures: Measures, alone: Bools, before: Floats, after: Floats) -> Guard:
    """Check whether calibration makes the confidences in a model's answers worse."""
    tests = []
    for stage, right, raw, calibrated in zip(policy.answering, alone.T, before.T, after.T, strict=True):
        errors = [calibration_error(confidences, right) for confidences in (raw, calibrated)]
        rises = errors[1] >= errors[0] + LEAST_RISE
        tests.append((worsening(raw, calibrated, right).p_above if rises else 1.0, errors, stage.name))
    p_value, errors, name = min(tests)
    p_value = min(1.0, p_value * len(tests))
    text = (
        f"calibration changes the calibration error of {name} on {measures.split} from {errors[0]:.3f} to "
        f"{errors[1]:.3f} (p = {p_value:.2g})"
    )
    figures = {"error_before": errors[0], "error_after": errors[1], "p_value": p_value}
    return _guard("calibration-worse", name, p_value <= LEVEL, text, **figures)


def _single_models(policy: Policy, measures: Measures, costs: Floats, correct: Bools, alone: Bools) -> Iterator[Guard]:
    """Compare the policy with its largest model, and with all models that cost no more, by sign tests."""
    cost, unit, split, names = measures.cost, policy.cost_unit, measures.split, [at.name for at in policy.answering]
    tests = [signs_of(correct, single) for single in alone.T]
    last, accuracy = tests[-1], 100 * float(correct.mean())
    fired = cost > most_within(float(costs[-1])) and last.p_gain > LARGEST_P_OF_GAIN
    text = (
        f"an example of {split} costs {cost_text(cost, unit)}, {costs[-1]:.4g} by {names[-1]} alone, for "
        f"{100 * last.rate:+.2f} points of accuracy (p = {last.p_gain:.2g})"
    )
    figures = {"cost": cost, "largest_cost": costs[-1], "gain": last.rate, "p_value": last.p_gain}
    yield _guard("cost-above-largest", None, fired, text, **figures)
    affordable = np.flatnonzero(costs <= most_within(cost)).tolist()
    if affordable:
        model = min(affordable, key=lambda index: tests[index].p_loss)
        p_value, single = min(1.0, len(affordable) * tests[model].p_loss), 100 * float(alone[:, model].mean())
        text = (
            f"on {split} the policy has {accuracy:.1f} % accuracy; {names[model]} alone, which costs no more, has "
            f"{single:.1f} % ({tests[model].n_gain:,} gained, {tests[model].n_loss:,} lost, p = {p_value:.2g})"
        )
        figures = {"accuracy": accuracy / 100, "single_accuracy": single / 100, "p_value": p_value}
        yield _guard("below-single-model", names[model], p_value <= LEVEL, text, **figures)


def _shift(policy: Policy, measures: Measures, calibration: Ints, labels: Ints, alone: Bools) -> Guard:
    """Check whether labels, or how often models are right, differ from those of calibration."""
    tests = {"labels": label_shift(calibration, labels)}
    for stage, right in zip(policy.answering, alone.T, strict=True):
        if stage.diagnostics is not None and stage.offsets is None:  # offsets favour the rows that they were fitted on
            share, n = stage.diagnostics.accuracy, policy.calibration.n
            fitted = Mean(share, (share * (1 - share)) ** 0.5, n)
            tests[f"the accuracy of {stage.name}"] = mean_difference(fitted, Mean.of(right)).p_value
    name = min(tests, key=lambda test: tests[test])
    p_value = min(1.0, len(tests) * tests[name])
    text = f"{policy.calibration.split} and {measures.split} differ most in {name} (p = {p_value:.2g})"
    return _guard("data-shift", None, p_value <= LEVEL, text, p_value=p_value)


def as_expected(expected: Measures | None, costs: Mean, split: str, budget: float | None, unit: str) -> Guard | None:
    """Check whether examples cost what was expected, by the two-sample z test.

    Args:
        expected: Results that the policy expects.
        costs: Costs of examples of the split.
        split: Name of the split.
        budget: Budget that the policy was fitted for.
        unit: Unit of all costs.

    Returns:
        The guard; None if the expected cost is unknown, or there are too few examples to tell.
    """
    if expected is None or costs.n < FEWEST_EXAMPLES:
        return None
    p_value = mean_difference(costs, Mean(expected.cost, expected.cost_deviation, expected.n)).p_value
    text = (
        f"an example costs {cost_text(costs.value, unit)} on {split} and {expected.cost:.4g} on {expected.split}, "
        f"with {'no budget' if budget is None else f'a budget of {budget:.4g}'} (p = {p_value:.2g})"
    )
    figures = {"cost": costs.value, "n": costs.n, "expected_cost": expected.cost, "expected_n": expected.n}
    return _guard("data-shift", None, p_value <= LEVEL, text, p_value=p_value, **figures)


def warn_of(guards: Iterable[Guard]) -> None:
    """Issue a GuardWarning for each guard that fires."""
    for guard in guards:
        if guard.fired:
            warn(f"{guard.name}: {guard.message}; see docs/how-to/guards.md", GuardWarning)


def require_quiet(guards: Sequence[Guard]) -> None:
    """Raise GuardError naming all guards that fire."""
    fired = tuple(guard for guard in guards if guard.fired)
    if fired:
        names = "".join(f"; and {guard.name}" for guard in fired[1:])
        raise GuardError(f"{fired[0].name}: {fired[0].message}{names}", fired)
