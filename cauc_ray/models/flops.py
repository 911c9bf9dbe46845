"""The floating-point operations of a model, counted by torch while it answers."""

from __future__ import annotations

import sys

import numpy as np

from cauc_ray.models.answers import Batch, Model, batch_size

# Enough rows for a mean where lengths differ; each is counted alone, so that no padding is.
MEASURED_ROWS = 8


def measured_gflops(model: Model, batch: Batch) -> float | None:
    """Return the GFLOPs of one example: the mean over the first rows of a batch, each answered by itself.

    A multiply-add counts as one operation, as in TorchVision's metadata and the paper's tables. Returns None
    where torch is not in use, has seen no operation that it can count, or cannot follow the model.
    """
    if "torch" not in sys.modules:
        return None
    from torch.utils.flop_counter import FlopCounterMode

    totals: list[float] = []
    for row in range(min(MEASURED_ROWS, batch_size(batch))):
        try:
            with FlopCounterMode(display=False) as counter:
                answers = model({name: column[row : row + 1].copy() for name, column in batch.items()})
        except Exception:  # the answers are valid; only the count is missing, which raises where it is needed
            return None
        if not answers.failures:
            totals.append(counter.get_total_flops() / 2e9)
    mean = float(np.mean(totals)) if totals else 0.0
    return mean or None
