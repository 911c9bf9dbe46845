"""Refits: a policy's own rule and method on another chain over the same examples."""

from __future__ import annotations

from cauc_ray.errors import PolicyError
from cauc_ray.numbers.certificates import RiskLimit
from cauc_ray.numbers.chain import Chain
from cauc_ray.policies.methods import fit_policy
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.safe import fit_safe
from cauc_ray.policies.threshold import ThresholdRule


def refit(policy: Policy, calibration: Chain, validation: Chain | None) -> Policy:
    """Fit a policy by another one's rule, on a chain in which models were replaced.

    A threshold that was given stays; one that was chosen is chosen again, by the same rule; a safe policy is guarded
    again. Fits are deterministic: every number that does not depend on a replaced model stays equal to the bit.
    Raises PolicyError where the calibration examples are not those of the policy.
    """
    rule = _rule_of(policy, calibration)
    names = (policy.calibration.split, policy.validation.split if policy.validation else "validation")
    fit = fit_policy if policy.safe is None else fit_safe
    return fit(policy.method, calibration, validation, rule, names, calibrator=policy.calibrator_kind)


def _rule_of(policy: Policy, calibration: Chain) -> ThresholdRule:
    """Return the rule by which a policy's threshold came about."""
    if policy.calibration.examples_fingerprint != calibration.examples_fingerprint():
        raise PolicyError(
            f"{calibration.source} holds other calibration examples than the policy was fitted on; fit a new policy"
        )
    choice = policy.threshold_choice
    if choice.rule == "given":
        return ThresholdRule(threshold=policy.threshold)
    if choice.certificate is not None:
        return ThresholdRule(certify=RiskLimit(choice.certificate.risk, choice.certificate.confidence))
    return ThresholdRule(budget=policy.budget, objective=choice.objective or "accuracy")
