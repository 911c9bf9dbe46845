"""Stacked cascades, beyond the paper."""

from __future__ import annotations

from collections.abc import Sequence

from cauc_ray.policies.candidates import StackedFits
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.search import fit_sub_chains
from cauc_ray.policies.stacked import StackedPolicy


def fit(fitting: Fitting) -> Sequence[StackedPolicy]:
    """Fit a stacked cascade, and CAUC-RF if cross-validation chooses another one."""
    return StackedFits(fitting.calibration, fitting.validation, fitting.names).candidates()


def _note(fitting: Fitting) -> str:
    return "" if fitting.calibration.embeddings is None else fitting.calibration.embedding_note


METHOD = Method("stacked", "ours", fit, note=_note)
AUTO = Method("auto", "ours", fit_sub_chains, note=_note)
