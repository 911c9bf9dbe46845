"""The predictions table: one row per example that a cascade answered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Floats, Ints


def predictions_table(
    example_ids: Sequence[str] | pa.Array,
    predictions: Ints,
    confidences: Floats,
    stages: Ints,
    costs: Floats,
    labels: Ints | None,
) -> pa.Table:
    """Return the predictions as design says: one row per example, with its label where labels are known.

    example_ids: str (N,).   predictions: int (N,).   confidences: float (N,).   stages: int (N,), which one
    answered, 0 the cheapest.   costs: float (N,), of all calls made.   labels: int (N,) or None.
    """
    columns = {
        "example_id": pa.array(example_ids, pa.string()),
        "prediction": pa.array(predictions.astype(np.int32)),
        "confidence": pa.array(confidences.astype(np.float32)),
        "stage": pa.array(stages.astype(np.int8)),
        "cost": pa.array(costs.astype(np.float32)),
    }
    if labels is not None:
        columns["label"] = pa.array(labels.astype(np.int32), mask=labels == UNKNOWN_LABEL)
    return pa.table(columns)
