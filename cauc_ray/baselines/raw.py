"""Cascades of raw probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.scored import RawPolicy


def fit_margin(fitting: Fitting) -> Sequence[RawPolicy]:
    """Return Margin Sampling (Ramirez et al., COLM 2024), published for two models."""
    return [fitting.policy(RawPolicy, method="margin")]


def fit_max_probability(fitting: Fitting) -> Sequence[RawPolicy]:
    """Return the cascade of raw probabilities: CAUC without calibration or fusion, as a control."""
    return [fitting.policy(RawPolicy, method="max-probability")]


MARGIN = Method("margin", "cascade", fit_margin)
MAX_PROBABILITY = Method("max-probability", "control", fit_max_probability)
