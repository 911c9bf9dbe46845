"""CAUC Base (paper, algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence

from cauc_ray.policies.cauc import BasePolicy
from cauc_ray.policies.fitting import Fitting, base_of
from cauc_ray.policies.method import Method


def fit(fitting: Fitting) -> Sequence[BasePolicy]:
    """Fit Base, whose threshold without a budget is the last model's calibration accuracy (paper, eq. 5)."""
    return [base_of(fitting.calibration.chain, fitting.validation.chain, fitting.names)]


METHOD = Method("base", "ours", fit)
