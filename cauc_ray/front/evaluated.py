"""An evaluation as JSON has it."""

from __future__ import annotations

from typing import Any

from cauc_ray.front.offline import Evaluation
from cauc_ray.numbers.metrics import Share, share


def evaluation_summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as `cauc evaluate --json` prints it."""
    policy, measures = evaluation.policy, evaluation.measures
    return {
        "method": policy.method,
        "policy_id": policy.id,
        "source": evaluation.chain.source,
        "n": measures.n,
        "n_labelled": measures.n_labelled,
        "accuracy": measures.accuracy.value if measures.accuracy else None,
        "accuracy_interval": _interval(measures.accuracy),
        "macro_f1": measures.macro_f1,
        "cost": measures.cost,
        "cost_unit": policy.cost_unit,
        "relative_cost": measures.relative_cost,
        "threshold": policy.threshold,
        "last_stage_avoided": 1 - measures.stages[-1].reached / measures.n,
        "stages": [
            {
                "name": stage.name,
                "reached": stage.reached,
                "answered": stage.answered,
                "accepted_accuracy": stage.accepted_accuracy.value if stage.accepted_accuracy.n else None,
                "accepted_accuracy_interval": _interval(stage.accepted_accuracy),
                "guarantees": None if guarantees is None else guarantees.as_json(),
            }
            for stage, guarantees in zip(measures.stages, evaluation.guarantees, strict=True)
        ],
        "early": _early(evaluation),
        "guards": [guard.model_dump() for guard in evaluation.guards],
    }


def _early(evaluation: Evaluation) -> dict[str, Any]:
    """Return how often answers given before the last stage are wrong, and what was certified of that, if it was."""
    inner = [stage.accepted_accuracy for stage in evaluation.measures.stages[:-1]]
    n = sum(answers.n for answers in inner)
    right = share(sum(round(answers.n * answers.value) for answers in inner if answers.n), n)
    certificate = evaluation.policy.threshold_choice.certificate
    return {
        "n": n,
        "coverage": n / evaluation.measures.n_labelled if evaluation.measures.n_labelled else None,
        "risk": 1 - right.value if n else None,
        "risk_interval": [1 - right.high, 1 - right.low] if n else None,
        "certified_risk": None if certificate is None else certificate.risk,
        "certified_confidence": None if certificate is None else certificate.confidence,
    }


def _interval(share: Share | None) -> list[float] | None:
    return [share.low, share.high] if share is not None and share.n else None
