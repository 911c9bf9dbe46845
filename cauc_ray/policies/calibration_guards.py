"""Guards on what a policy was calibrated on: too few examples, temperatures and confidences that say nothing."""

from __future__ import annotations

from collections.abc import Iterator

from cauc_ray.numbers.ranking import ranking
from cauc_ray.numbers.signs import CONFIDENCE
from cauc_ray.numbers.temperature import FitStatus
from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.cauc_rf import RFStage
from cauc_ray.policies.evidence import FittedOn, Guard
from cauc_ray.policies.policy import Stage

# With fewer, no accuracy is known to 5 points with 95 % confidence: (1.96 / 0.05) ** 2 / 4 = 384.1.
FEWEST_EXAMPLES = 385
# Two of such errors move a confidence between two options by up to 4.5 points: p (1 - p) ln (p / (1 - p)) is 0.224
# at most, and it is what a confidence changes by for a change of its temperature's logarithm.
LARGEST_RELATIVE_ERROR = 0.1


def few_examples(calibration: FittedOn) -> Guard:
    """Say whether calibration has too few examples for any share of them to be known well."""
    n, fired = calibration.n, calibration.n < FEWEST_EXAMPLES
    what = "fewer than" if fired else "no fewer than"
    says = (
        f"{calibration.split} has {n:,} examples, {what} the {FEWEST_EXAMPLES} by which an accuracy is known to 5 "
        "points (95 % confidence)"
    )
    figures = {"n": float(n), "fewest": float(FEWEST_EXAMPLES)}
    return Guard(name="few-examples", stage=None, fired=fired, says=says, figures=figures)


def temperature_guards(stage: Stage) -> Iterator[Guard]:
    """Say whether a stage's temperature is known well enough, and whether it is at a minimum at all."""
    name, fit = stage.name, stage.diagnostics
    statuses: list[tuple[str, str]] = [("temperature", fit.status)]
    if isinstance(stage, RFStage) and stage.fused and stage.pair_diagnostics is not None:
        pair = stage.pair_diagnostics
        statuses += [("alpha", pair.alpha_status), ("beta", pair.beta_status)]
    odd = [f"{number} is clamped, {_meaning(number, status)}" for number, status in statuses if status in _CLAMPED]
    found = "; ".join(odd) or "all fits converged"
    figures = {"temperature": stage.temperature}
    yield Guard(name="separable", stage=name, fired=bool(odd), says=f"{name}: {found}", figures=figures)
    if fit.standard_error is None:
        return
    relative = fit.standard_error / stage.temperature
    fired = relative > LARGEST_RELATIVE_ERROR
    says = (
        f"{name}: temperature {stage.temperature:.4g} ± {fit.standard_error:.2g} (standard error, "
        f"{100 * relative:.1f} %), {'more' if fired else 'no more'} than {100 * LARGEST_RELATIVE_ERROR:.0f} %"
    )
    figures |= {"standard_error": fit.standard_error, "relative_error": relative}
    yield Guard(name="temperature-uncertain", stage=name, fired=fired, says=says, figures=figures)


_CLAMPED = (FitStatus.SEPARABLE, FitStatus.UNINFORMATIVE)


def _meaning(number: str, status: str) -> str:
    if status == FitStatus.SEPARABLE:
        return "the calibration examples are all told apart"
    of = {"temperature": "its logits say", "alpha": "the stages before say", "beta": "it says"}[number]
    return f"{of} nothing of the labels" + ("" if number == "temperature" else " that the other does not")


def informative(name: str, confidences: Floats, correct: Bools, split: str) -> Guard | None:
    """Say whether a stage's confidence tells its right answers from its wrong ones at all.

    confidences: float (n,), what it stops by.   correct: bool (n,). None where all are right or all are wrong.
    """
    found = ranking(confidences, correct)
    if found is None:
        return None
    fired = found.p_value > 1 - CONFIDENCE
    word = "is not shown to rank" if fired else "ranks"
    says = (
        f"{name}: its confidence {word} right answers above wrong ones on {split} (area under the ROC curve "
        f"{found.area:.3f}, p = {found.p_value:.2g})"
    )
    figures = {"area": found.area, "p_value": found.p_value}
    return Guard(name="uninformative-confidence", stage=name, fired=fired, says=says, figures=figures)
