"""Checks of fitted policies for common problems; the policy file keeps the results (docs/how-to/guards.md)."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cauc_ray.errors import GuardError, GuardWarning
from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.intervals import CONFIDENCE, Mean, Signs, mean_difference, ranking, signs, signs_of
from cauc_ray.numbers.sweep import most_within
from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.cauc import BasePolicy, RFStage
from cauc_ray.policies.evidence import FittedOn, Guard, GuardName, Measures
from cauc_ray.policies.policy import Policy, Stage
from cauc_ray.policies.scored import DuoPolicy
from cauc_ray.policies.trace import Trace, answers_alone, replay

# With fewer, accuracies are not known to 5 points with 95 % confidence: (1.96 / 0.05) ** 2 / 4 = 384.1.
FEWEST_EXAMPLES = 385
# Two standard errors of this size change a confidence between two options by up to 4.5 points: its derivative in the
# logarithm of the temperature, p (1 - p) ln (p / (1 - p)), is at most 0.224.
LARGEST_RELATIVE_ERROR = 0.1
# The false alarm rate of the test of costs.
COST_LEVEL = 0.01


def look(policy: Policy, expected: Measures, trace: Trace, chain: Chain, calibration: Chain) -> tuple[Guard, ...]:
    """Check a policy at its threshold.

    expected: its measurements at that threshold.   trace: all steps on the measured examples.   calibration: the
    examples that it was fitted on, replayed for their cost unless they are the measured ones.
    """
    found = _guards(policy, expected, trace, chain, calibration)
    return tuple(guard for guard in found if guard is not None)


def _guards(
    policy: Policy, expected: Measures, trace: Trace, chain: Chain, calibration: Chain
) -> Iterator[Guard | None]:
    split, n_models, rows = expected.split, len(policy.answering), np.flatnonzero(chain.labelled)
    labels, stops = chain.labels[rows, None], trace.stops(policy.threshold)[rows]
    stepwise: Bools = trace.predictions[rows] == labels
    if n_models > 1:
        alone: Bools = answers_alone(policy, chain)[rows] == labels
        correct: Bools = stepwise[np.arange(len(rows)), stops]
        yield _against_largest(expected, float(chain.costs.means[-1]), policy.cost_unit)
        yield _below_single(policy, expected, chain, correct, alone)
        yield _worse_than_part(policy, expected, chain, correct)
        yield from _fusions_within_noise(policy, stepwise, alone, split)
        for index in _fusing(policy):
            reached = stops >= index
            yield _fusion_hurts(policy.answering[index].name, stepwise[reached, index], alone[reached, index], split)
    yield _few_examples(policy.calibration)
    for stage in policy.answering:
        yield from _temperature(stage)
        yield _calibration_worse(stage, policy.calibration)
    scores = trace.compared if policy.scored else trace.confidences
    for step, end in enumerate(policy.ends[:-1].tolist() if policy.one_threshold else ()):
        yield _informative(policy.models[end], scores[rows, step], stepwise[:, step], split)
    if calibration is not chain and n_models > 1:
        costs = replay(policy, calibration).costs
        yield as_expected(expected, Mean.of(costs), policy.calibration.split, policy.budget, policy.cost_unit)


def _guard(name: GuardName, stage: str | None, fired: bool, says: str, **figures: float) -> Guard:
    return Guard(
        name=name, stage=stage, fired=fired, says=says, figures={key: float(of) for key, of in figures.items()}
    )


def _against_largest(expected: Measures, of_largest: float, unit: str) -> Guard:
    """Compare a policy's mean cost with that of calling its last model on every example."""
    cost = expected.cost
    fired = cost > most_within(of_largest)
    times = f", {cost / of_largest:.2f} times as much" if of_largest > 0 else ""
    says = (
        f"the policy costs {'more' if fired else 'no more'} than always calling the largest model: on "
        f"{expected.split} {cost:.4g} {unit} per example against {of_largest:.4g}{times}"
    )
    return _guard("cost-above-largest", None, fired, says, cost=cost, largest_cost=of_largest)


def _below_single(policy: Policy, expected: Measures, chain: Chain, correct: Bools, alone: Bools) -> Guard | None:
    """Compare the policy with the best single model that costs no more; None if there is none.

    correct: bool (n,), of the policy's answers.   alone: bool (n, M), of the models' own.
    """
    costs = chain.costs.means[-len(policy.answering) :]
    cheap = [index for index, cost in enumerate(costs) if cost <= most_within(expected.cost)]
    if not cheap:
        return None
    best = max(cheap, key=lambda index: (alone[:, index].sum(), -index))
    found, name = signs_of(correct, alone[:, best]), policy.answering[best].name
    own, single = float(correct.mean()), float(alone[:, best].mean())
    says = (
        f"on {expected.split} the policy has {100 * own:.1f} % accuracy; {name} alone, which costs no more, "
        f"has {100 * single:.1f} % ({_words(found)})"
    )
    return _guard("below-single-model", name, own < single, says, accuracy=own, single_accuracy=single, **asdict(found))


def _worse_than_part(policy: Policy, expected: Measures, chain: Chain, correct: Bools) -> Guard | None:
    """Compare the policy with the best of the policies without one of its stages that cost no more.

    The threshold and all numbers of the other stages stay; a new fit of fewer models, or `--search`, may be better
    still. None for chains of one or two models, which below-single-model covers, and where another score decides, or
    an embedding is read.
    """
    indices, cost, split = range(len(policy.stages)), expected.cost, expected.split
    if len(indices) < 3 or policy.scored or policy.encoder is not None:
        return None
    parts = [
        replay(_without(policy, index), chain.of_models([other for other in indices if other != index]))
        for index in indices
    ]
    right = [part.predictions[chain.labelled] == chain.labels[chain.labelled] for part in parts]
    costs = [float(part.costs.mean()) for part in parts]
    cheap = [index for index in indices if costs[index] <= most_within(cost)]
    if not cheap:
        return None
    # Among equals the cheapest.
    index = min(cheap, key=lambda one: (-int(right[one].sum()), costs[one]))
    found, name = signs_of(correct, right[index]), policy.models[index]
    own, other = float(correct.mean()), float(right[index].mean())
    says = (
        f"on {split} the policy has {100 * own:.1f} % accuracy at {cost:.4g} {policy.cost_unit} per example; without "
        f"{name} it has {100 * other:.1f} % at {costs[index]:.4g} ({_words(found)})"
    )
    figures = {"accuracy": own, "part_accuracy": other, "cost": cost, "part_cost": costs[index], **asdict(found)}
    return _guard("worse-than-part", name, own < other, says, **figures)


def _without(policy: Policy, index: int) -> Policy:
    """Return the policy without a stage: RF's next stage restarts r if it becomes the first, Base's last is fused."""
    stages = [stage for other, stage in enumerate(policy.stages) if other != index]
    if isinstance(policy, BasePolicy):
        stages[-1] = stages[-1].model_copy(update={"fused": True})
    changes: dict[str, Any] = {"stages": tuple(stages)}
    if isinstance(policy.threshold, tuple):
        at = min(index, len(policy.threshold) - 1)
        changes["threshold"] = policy.threshold[:at] + policy.threshold[at + 1 :]
    return policy.model_copy(update=changes)


def _fusing(policy: Policy) -> list[int]:
    """Return the fused ones of the stages that answer: Base's and Duo's last, RF's later ones but those not fused."""
    if isinstance(policy, BasePolicy):
        return [len(policy.stages) - 1] if any(stage.fused for stage in policy.stages[:-1]) else []
    if policy.scored:
        return [len(policy.stages) - 1] if isinstance(policy, DuoPolicy) else []
    return [
        index
        for index, stage in enumerate(policy.answering)
        if index and not (isinstance(stage, RFStage) and not stage.fused)
    ]


def _fusions_within_noise(policy: Policy, fused: Bools, alone: Bools, split: str) -> Iterator[Guard]:
    """Check whether the gain of each fusion is significant.

    Base's complementarity rates are from calibration, whether fused or not; RF's fusions are measured on the split.
    fused: bool (n, M), whether the answer at each stage is right.   alone: bool (n, M), whether its model's own is.
    """
    if isinstance(policy, BasePolicy):
        for stage in policy.stages[:-1]:
            if stage.n_gain is None or stage.n_loss is None:
                continue
            found = signs(stage.n_gain, stage.n_loss, policy.calibration.n)
            says = (
                f"{stage.name}: it is {'fused' if stage.fused else 'not fused'} with {policy.models[-1]}; its "
                f"complementarity rate is {'within' if found.open else 'beyond'} its noise on "
                f"{policy.calibration.split} ({_words(found)})"
            )
            yield _guard("fusion-within-noise", stage.name, found.open, says, **asdict(found))
        return
    for index in _fusing(policy):
        found, name = signs_of(fused[:, index], alone[:, index]), policy.answering[index].name
        fired = found.n_gain + found.n_loss > 0 and not found.gains
        word = "breaks more than it fixes of" if found.loses else "is within its noise on" if fired else "fixes"
        says = f"{name}: fusion with the stages before {word} its answers on {split} ({_words(found)})"
        yield _guard("fusion-within-noise", name, fired, says, **asdict(found))


def _fusion_hurts(name: str, fused: Bools, alone: Bools, split: str) -> Guard | None:
    """Check whether a stage's fusion makes the answers to the n examples that reach it worse; None if none reach it."""
    if not len(fused):
        return None
    found = signs_of(fused, alone)
    word = "breaks more than it fixes of" if found.loses else "is not shown to break"
    says = f"{name}: fusion {word} its answers to the examples of {split} that reach it ({_words(found)})"
    return _guard("fusion-hurts", name, found.loses, says, **asdict(found))


def _few_examples(calibration: FittedOn) -> Guard:
    """Check whether calibration has too few examples for precise accuracies."""
    n, fired = calibration.n, calibration.n < FEWEST_EXAMPLES
    says = (
        f"{calibration.split} has {n:,} examples, {'fewer' if fired else 'no fewer'} than the {FEWEST_EXAMPLES} needed "
        "to know an accuracy to 5 points (95 % confidence)"
    )
    return _guard("few-examples", None, fired, says, n=n, fewest=FEWEST_EXAMPLES)


def _temperature(stage: Stage) -> Iterator[Guard]:
    """Check whether the fit of a stage's temperature converged, and whether the temperature is precise enough."""
    name, fit = stage.name, stage.diagnostics
    assert fit is not None
    statuses = [("temperature", fit.status)]
    if isinstance(stage, RFStage) and stage.fused and stage.pair_diagnostics is not None:
        pair = stage.pair_diagnostics
        statuses += [("alpha", pair.alpha_status), ("beta", pair.beta_status)]
    for guard_name, clamped_status in _CLAMPED.items():
        reasons = _REASONS[clamped_status]
        clamped = [f"{number} is clamped, {reasons[number]}" for number, status in statuses if status is clamped_status]
        says = f"{name}: {'; '.join(clamped) or f'no fit is {clamped_status}'}"
        yield _guard(guard_name, name, bool(clamped), says, temperature=stage.temperature)
    if fit.standard_error is None:
        return
    relative = fit.standard_error / stage.temperature
    fired = relative > LARGEST_RELATIVE_ERROR
    says = (
        f"{name}: temperature {stage.temperature:.4g} ± {fit.standard_error:.2g} (standard error, "
        f"{100 * relative:.1f} %), {'more' if fired else 'no more'} than {100 * LARGEST_RELATIVE_ERROR:.0f} %"
    )
    figures = {"standard_error": fit.standard_error, "relative_error": relative}
    yield _guard("temperature-uncertain", name, fired, says, temperature=stage.temperature, **figures)


def _calibration_worse(stage: Stage, calibration: FittedOn) -> Guard:
    """Check whether calibration raises a stage's calibration error on the rows that it was fitted on.

    The error of n rows is known to about 1 / sqrt(n): two standard errors of an accuracy of 50 %.
    """
    fit = stage.diagnostics
    assert fit is not None
    before, after = fit.calibration_error_before, fit.calibration_error_after
    margin = calibration.n**-0.5
    fired = after > before + margin
    says = (
        f"{stage.name}: calibration error {before:.3f} before and {after:.3f} after calibration on "
        f"{calibration.split}, {'' if fired else 'not '}higher by more than {margin:.3f}, its error on "
        f"{calibration.n:,} examples"
    )
    return _guard("calibration-worse", stage.name, fired, says, error_before=before, error_after=after)


_CLAMPED: dict[GuardName, FitStatus] = {
    "separable": FitStatus.SEPARABLE,
    "no-information": FitStatus.UNINFORMATIVE,
}
_REASONS = {
    FitStatus.SEPARABLE: dict.fromkeys(("temperature", "alpha", "beta"), "the calibration examples are separable"),
    FitStatus.UNINFORMATIVE: {
        "temperature": "its logits carry no information on the labels",
        "alpha": "the stages before add no information on the labels",
        "beta": "the model adds no information on the labels",
    },
}


def _informative(name: str, confidences: Floats, correct: Bools, split: str) -> Guard | None:
    """Check whether a stage's confidence ranks its right answers above its wrong ones.

    confidences: float (n,), compared with the threshold.   correct: bool (n,). None if all are right or all are wrong.
    """
    found = ranking(confidences, correct)
    if found is None:
        return None
    fired = found.p_value > 1 - CONFIDENCE
    says = (
        f"{name}: its confidence {'is not shown to rank' if fired else 'ranks'} right answers above wrong ones on "
        f"{split} (area under the ROC curve {found.area:.3f}, p = {found.p_value:.2g})"
    )
    return _guard("uninformative-confidence", name, fired, says, area=found.area, p_value=found.p_value)


def as_expected(expected: Measures | None, own: Mean, split: str, budget: float | None, unit: str) -> Guard | None:
    """Check whether examples cost what was expected, by the two-sample z test at COST_LEVEL.

    own: the costs of examples of the split. None if the expected cost or its deviation is unknown.
    """
    if expected is None:
        return None
    p_value = mean_difference(own, Mean(expected.cost, expected.cost_deviation, expected.n)).p_value
    fired = p_value <= COST_LEVEL
    says = (
        f"an example costs {own.value:.4g} {unit} on {split} and {expected.cost:.4g} on {expected.split}, "
        f"with {'no budget' if budget is None else f'a budget of {budget:.4g}'}: the difference is "
        f"{'larger than' if fired else 'within'} sampling error (p = {p_value:.2g})"
    )
    return _guard(
        "cost-shift",
        None,
        fired,
        says,
        cost=own.value,
        cost_deviation=own.deviation,
        n=own.n,
        expected_cost=expected.cost,
        expected_cost_deviation=expected.cost_deviation,
        expected_n=expected.n,
        p_value=p_value,
    )


def _words(found: Signs) -> str:
    """Return gains and losses in words."""
    return (
        f"{found.n_gain:,} gained, {found.n_loss:,} lost of {found.n:,}: {100 * found.rate:+.2f} points, 90 % interval "
        f"{100 * found.low:+.2f} to {100 * found.high:+.2f}, one-sided p = {min(found.p_gain, found.p_loss):.2g}"
    )


def warn_of(guards: Iterable[Guard]) -> None:
    """Issue a GuardWarning for each guard that warns, attributed to the caller's caller."""
    for guard in guards:
        if guard.fired:
            warnings.warn(f"{guard.name}: {guard.says}", GuardWarning, stacklevel=3)


def require_quiet(guards: Sequence[Guard]) -> None:
    """Raise GuardError naming all guards that warn."""
    fired = [guard for guard in guards if guard.fired]
    if not fired:
        return
    first, *others = fired
    names = (guard.name if guard.stage is None else f"{guard.name} ({guard.stage})" for guard in others)
    more = f"; and {', '.join(names)}" if others else ""
    raise GuardError(f"{first.name}: {first.says}{more}", tuple(fired))
