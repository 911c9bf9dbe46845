"""How a policy came about, and the commands that make it and this report again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cauc_ray.data.logits import LogitTable
from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.policies.cauc_base import BaseStage
from cauc_ray.policies.cauc_rf import RFStage
from cauc_ray.policies.policy import Policy
from cauc_ray.reporting.finding import Found

METHOD_NAMES = {"base": "CAUC Base", "rf": "CAUC-RF"}


@dataclass(frozen=True, slots=True)
class Origin:
    """How a policy came about.   fit, evaluate, report: commands; fit takes a budget in place of the policy's."""

    method: str
    threshold: str
    fit: str
    fit_at_budget: str
    evaluate: str
    report: str


def trace_origin(found: Found, folder: Path, split: str) -> Origin:
    """Say how a policy came about."""
    policy, file = found.policy, found.policy_name
    given, how = _chain_options(policy)
    evaluate = ["cauc", "evaluate", str(found.logits), "--policy", file, "--split", split]
    report = ["cauc", "report", str(folder), "--policy", file, "--logits", str(found.logits)]
    if split != "test":
        report += ["--split", split]
    return Origin(
        method=METHOD_NAMES.get(policy.method, policy.method),
        threshold=_threshold_in_words(policy),
        fit=shlex.join([*_fit_command(found, given), *how, *_rule_options(policy), "-o", file]),
        fit_at_budget=shlex.join(
            [*_fit_command(found, policy.models), *_objective(policy), "-o", "policy.json", "--budget"]
        ),
        evaluate=shlex.join(evaluate),
        report=shlex.join(report),
    )


def _fit_command(found: Found, models: Sequence[str]) -> list[str]:
    policy = found.policy
    command = ["cauc", "fit", str(found.logits), "--models", ",".join(models), "--method", policy.method]
    if (calibrator := getattr(policy, "calibrator", "temperature")) != "temperature":
        command += ["--calibrator", calibrator]
    info = LogitTable(found.logits).info
    declared = {} if info is None else {model.name: model.cost for model in info.models}
    if (
        policy.models == tuple(models)
        and policy.costs == "per-model"
        and any(declared.get(stage.name) != stage.cost for stage in policy.stages)
    ):
        command += ["--costs", ",".join(repr(stage.cost) for stage in policy.stages)]
    if policy.calibration.split != "calibration":
        command += ["--calibration-split", policy.calibration.split]
    if policy.validation is not None and policy.validation.split != "validation":
        command += ["--validation-split", policy.validation.split]
    return command


def _chain_options(policy: Policy) -> tuple[Sequence[str], list[str]]:
    """Return the models that were given to the fit, and what made a part of them the policy's."""
    if policy.search is not None:
        return policy.search.pool, ["--search"]
    if policy.safe is not None:
        return policy.safe.models, ["--safe"]
    return policy.models, []


def _rule_options(policy: Policy) -> list[str]:
    choice = policy.threshold_choice
    if choice.certificate is not None:
        at = choice.certificate
        return ["--certify", f"risk<={at.risk:g}@{at.confidence:g}"]
    if choice.rule == "given":
        return ["--threshold", repr(policy.threshold)]
    if policy.budget is not None:
        return [*_objective(policy), "--budget", repr(policy.budget)]
    return _objective(policy)


def _objective(policy: Policy) -> list[str]:
    objective = policy.threshold_choice.objective
    return [] if objective in (None, "accuracy") else ["--objective", objective]


def _threshold_in_words(policy: Policy) -> str:
    choice = policy.threshold_choice
    quality = choice.objective or "accuracy"
    if choice.certificate is not None:
        at = choice.certificate
        return (
            f"certified on {choice.split}: with {100 * at.confidence:g} % confidence at most {100 * at.risk:g} % of "
            f"the answers given before the last stage are wrong ({at.n_wrong:,} of {at.n_accepted:,} were)"
        )
    return {
        "reference-accuracy": f"the last model's accuracy on {choice.split}, the paper's own choice",
        "best": f"the best {quality} on {choice.split}",
        "budget": f"the best {quality} on {choice.split} within a budget of {policy.budget or 0:g} {policy.cost_unit}",
        "given": "given by hand",
    }.get(choice.rule, choice.rule)


def temperature_in_words(stage: BaseStage | RFStage) -> str:
    """Return a stage's temperature with its standard error, and whether the fit was clamped."""
    at = stage.diagnostics
    error = "" if at.standard_error is None else f" ± {at.standard_error:.2g}"
    clamped = "" if at.status is FitStatus.CONVERGED else f" ({at.status})"
    return f"{stage.temperature:.4g}{error}{clamped}"
