"""What has been watched of a policy, beside what validation says of it, as plain numbers and as one line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cauc_ray.numbers.metrics import Share
from cauc_ray.policies.evidence import Reference, StageReference
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.watch import FALSE_ALARM_RATE, NEEDED, Watched
from cauc_ray.policies.watched_sums import StageSums

_SAYS = {
    "confidence": "stages and confidences come",
    "answers": "answers and the options next to them come",
    "calibration": "answers are right at their confidences",
    "accuracy": "answers are right",
    "agreement": "early answers agree with the last stage's",
}


def watch_report(policy: Policy, watched: Watched) -> dict[str, Any]:
    """Return what was seen, as JSON has it. Evidence is in powers of ten; the policy has a reference.

    What is measured on no row is null; intervals are of 95 %.
    """
    reference = policy.reference
    assert reference is not None
    n, n_labelled, n_compared = (
        sum(getattr(stage, what) for stage in watched.stages) for what in ("n", "n_outcomes", "n_compared")
    )
    whole = sum(watched.stages, StageSums())
    return {
        "policy_id": policy.id,
        "holds": watched.holds,
        "says": verdict(watched),
        "false_alarm_rate": FALSE_ALARM_RATE,
        "needed": NEEDED,
        "n": n,
        "n_labelled": n_labelled,
        "n_compared": n_compared,
        "cost_unit": policy.cost_unit,
        "cost": _cost(whole),
        "reference_cost": _reference_cost(reference),
        "features": [
            {
                "name": name,
                "holds": one.holds,
                "n": one.n,
                "evidence": one.log10 if one.n else None,
                "after": one.at,
                "since": one.since,
            }
            for name, one in watched.evidence.items()
        ],
        "stages": [
            _stage(sums, beside, n, reference.n) for sums, beside in zip(watched.stages, reference.stages, strict=True)
        ],
    }


def verdict(watched: Watched) -> str:
    """Say in one line whether a policy holds, and if not, what spoke against it first."""
    if watched.holds:
        return "holds"
    against = {name: one for name, one in watched.evidence.items() if not one.holds}
    # Of rows that a feature saw, these are the fewest; each counts its own.
    name = min(against, key=lambda each: against[each].at or 0)
    first = against[name]
    others = f"; {', '.join(each for each in against if each != name)} too" if len(against) > 1 else ""
    return (
        f"no longer holds: {_SAYS[name]} otherwise than on validation ({name}), seen after {first.at:,} examples, "
        f"from about example {(first.since or 0) + 1:,}; evidence 1e{first.log10:.1f}, {1 / FALSE_ALARM_RATE:g} needed"
        f"{others}"
    )


def _stage(sums: StageSums, reference: StageReference, n: int, n_reference: int) -> dict[str, Any]:
    answered, test = sum(reference.confidences), sums.calibration_test
    return {
        "name": reference.name,
        "n": sums.n,
        "answered": sums.n / n if n else None,
        "reference_answered": answered / n_reference,
        "confidence": sums.mean_confidence,
        "cost": _cost(sums),
        "reference_cost": reference.cost,
        "n_labelled": sums.n_outcomes,
        "accepted_accuracy": _share(sums.accuracy),
        "reference_accepted_accuracy": sum(reference.right) / answered if answered else None,
        "calibration_error": sums.calibration_error,
        "calibration_error_by_chance": sums.calibration_error_by_chance,
        "reference_calibration_error": reference.calibration_error,
        "z": None if test is None else test.z,
        "z_p_value": None if test is None else test.p_value,
        "n_compared": sums.n_compared,
        "agreement": _share(sums.agreement),
        "reference_agreement": reference.agreed / answered if answered else None,
    }


def _share(of: Share) -> list[float] | None:
    """Return a share and the ends of its interval."""
    return None if math.isnan(of.value) else [of.value, of.low, of.high]


def _cost(sums: StageSums) -> Sequence[float] | None:
    """Return a mean cost and the ends of its interval."""
    if (mean := sums.mean_cost) is None:
        return None
    return [mean[0], mean[0] - mean[1], mean[0] + mean[1]]


def _reference_cost(reference: Reference) -> float:
    return sum((stage.cost or 0.0) * sum(stage.confidences) for stage in reference.stages) / reference.n
