"""A model of the chain by itself."""

from __future__ import annotations

from collections.abc import Sequence

from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.scored import RawPolicy


def fit_single(fitting: Fitting, model: int) -> Sequence[RawPolicy]:
    """Return one model of the chain alone, by its index."""
    return [fitting.policy(RawPolicy, [model], method="single")]
