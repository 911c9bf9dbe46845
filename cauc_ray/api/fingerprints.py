"""What tells curves that were measured on one table from those of another of the same names and size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cauc_ray.numbers.chain import Chain


def fingerprints_of(calibration: Chain, validation: Chain, final: Chain) -> dict[str, Any]:
    """Return, as JSON has it, what a curve depends on besides its method.

    By what a split is for: digests of its examples with their labels, and of each model's logits, and the mean cost of
    each model's calls; and the unit of costs.
    """
    splits = {"calibration": calibration, "validation": validation, "final": final}
    return {"cost_unit": final.costs.unit, **{purpose: _of_split(chain) for purpose, chain in splits.items()}}


def _of_split(chain: Chain) -> dict[str, Any]:
    return {
        "examples": chain.examples_fingerprint(),
        "logits": {model: chain.logits_fingerprint(stage) for stage, model in enumerate(chain.models)},
        "costs": dict(zip(chain.models, chain.costs.means.tolist(), strict=True)),
    }


def difference(found: object, expected: Mapping[str, Any]) -> str | None:
    """Return in words what differs first between fingerprints in a file and those expected, None if nothing does."""
    if not isinstance(found, dict):
        return "it has no fingerprints of its table, so that nobody knows what it was measured on; make it again"
    for purpose, of_split in expected.items():
        there = found.get(purpose)
        if not isinstance(of_split, dict) or not isinstance(there, dict):
            if there != of_split:
                return f"its {purpose.replace('_', ' ')} is {there!r}, not {of_split!r}"
            continue
        what = next((what for what in of_split if there.get(what) != of_split[what]), None)
        if what is not None:
            return f"it was measured with other {what} ({purpose} split)"
    return None
