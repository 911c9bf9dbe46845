"""The cost of a model's call: declared, published with the model, or measured."""

from __future__ import annotations

import sys

import numpy as np

from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, batch_size
from cauc_ray.models.pool import CostSpec, StageSpec

MEASURED_UNIT = "GFLOPs"
# Padding, fused operations and counting conventions explain smaller ratios.
FAR = 1.25


def cost_unit(stage: StageSpec) -> str:
    """Return the unit of a stage's costs: as declared, as the model's own calls are billed, else GFLOPs."""
    if stage.cost is not None:
        return stage.cost.unit
    own: str | None = getattr(stage.model, "cost_unit", None)
    return own or MEASURED_UNIT


def model_cost(
    declared: CostSpec | None, facts: ModelFacts, measured_gflops: float | None, per_call: float | None
) -> float | None:
    """Return the cost of one example, None if unknown.

    declared: the pool's value; "auto" asks the model.   per_call: the mean of the calls' own costs, used if the pool
    has no value.   Without both, GFLOPs: published, else measured.
    """
    if declared is not None and declared.value is not None:
        return declared.value
    if declared is not None and declared.unit != MEASURED_UNIT:
        return facts.params_b
    if declared is None and per_call is not None:
        return per_call
    return facts.gflops if facts.gflops is not None else measured_gflops


def cost_far_off(stage: str, cost: float, measured: float | None) -> str | None:
    """Return a warning if a cost in GFLOPs is far from the measured one, else None."""
    if not measured or not cost or 1 / FAR <= cost / measured <= FAR:
        return None
    ratio = cost / measured
    habit = ""
    if 2 / FAR <= ratio <= 2 * FAR:
        habit = "; it may count a multiply-add as two operations instead of one"
    return f"stage {stage!r}: its cost of {cost:.4g} GFLOPs is {ratio:.2g} times the measured {measured:.4g}{habit}"


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


def measured_noise(model: Model, batch: Batch, together: Answers) -> float | None:
    """Return by how much a row's numbers depend on its neighbours, in units of the logits.

    That is the largest difference between the answers of a call and those of its first rows, each by itself. Returns
    None for a model that does not say in which precision it computes, as one of user code.
    """
    if model.facts.dtype is None:
        return None
    largest = 0.0
    for row in range(min(MEASURED_ROWS, batch_size(batch))):
        if row in together.failures:
            continue
        try:
            alone = model({name: column[row : row + 1].copy() for name, column in batch.items()})
        except Exception:  # the answers are valid; only the measurement is missing
            return None
        if not alone.failures:
            own = alone.logits[0][np.isfinite(alone.logits[0])]
            largest = max(largest, float(np.abs(own - together.logits[row, : len(own)]).max(initial=0.0)))
    return largest
