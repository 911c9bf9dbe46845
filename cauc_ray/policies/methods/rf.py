"""CAUC-RF (paper, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence

from cauc_ray.policies.cauc import RFPolicy
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting, rf_of
from cauc_ray.policies.method import Method
from cauc_ray.policies.methods.base import fit as base_policies


def fit(fitting: Fitting) -> Sequence[RFPolicy]:
    """Fit RF, whose threshold is the best on validation, within the budget if there is one (paper, eq. 11)."""
    return [rf_of(fitting.calibration.chain, fitting.validation.chain, fitting.names)]


def fit_shared(fitting: Fitting) -> Family:
    """Fit RF at Base's thresholds: the paper's two policies share a routing schedule."""
    base = Family(base_policies(fitting), fitting.validation)
    policies = [policy.model_copy(update={"threshold": base.default}) for policy in fit(fitting)]
    return Family(policies, fitting.validation, chooser=base)


METHOD = Method("rf", "ours", fit)
SHARED = Method("rf-shared", "ours", fit_shared, unpublished="is rf at the threshold of base")
