"""What comes with the package to try it on."""

from __future__ import annotations

from pathlib import Path


def sample_logits() -> Path:
    """Return the path of a logit table of handwritten digits: two small networks, small and large.

    449 images for calibration, 449 for validation, 629 for test; costs are multiply-adds, in thousands.
    examples/sample_logits.py makes it.
    """
    return Path(__file__).parents[1] / "samples" / "digits"
