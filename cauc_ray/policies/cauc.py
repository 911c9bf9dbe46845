"""CAUC Base and CAUC-RF as methods among the others."""

from __future__ import annotations

from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.method import Fitted, Fitting, Steered
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import PolicyCascade


def fit_cauc_base(fitting: Fitting) -> Fitted:
    """Fit Base, whose threshold without a budget is the last model's calibration accuracy (paper, eq. 5)."""
    policy = fit_base(fitting.calibration.chain)
    return Steered(PolicyCascade(policy), fitting.validation, given=policy.threshold)


def fit_cauc_rf(fitting: Fitting) -> Fitted:
    """Fit RF, whose threshold is the best on validation, within the budget where there is one (paper, eq. 11)."""
    policy = fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))
    return Steered(PolicyCascade(policy), fitting.validation)
