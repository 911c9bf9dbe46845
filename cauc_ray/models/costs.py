"""The cost of a model's call: declared, published with the model, or measured."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, batch_size
from cauc_ray.models.pool import CostSpec, StageSpec

MEASURED_UNIT = "GFLOPs"
# Padding, fused operations and counting conventions explain smaller ratios.
FAR = 1.25


def cost_unit(stage: StageSpec, reported: str | None = None) -> str:
    """Return the unit of a stage's costs: as declared, as the model's own calls are billed, else GFLOPs.

    reported: by calls, where nothing else tells.
    """
    if stage.cost is not None:
        return stage.cost.unit
    return stage.model.cost_unit or reported or MEASURED_UNIT


def model_cost(
    declared: CostSpec | None, facts: ModelFacts, measured_gflops: float | None, per_call: float | None
) -> float | None:
    """Return the cost of one example, None if unknown.

    declared: the pool's value; "auto" asks the model.   per_call: the mean of the calls' own costs, used if the pool
    has no value, or says that they measure it.   Without both, GFLOPs: published, else measured.
    """
    if declared is not None and declared.value is not None:
        return declared.value
    calls_tell = declared is None or declared.is_round_trip
    if calls_tell and per_call is not None:
        return per_call
    if declared is not None and declared.unit != MEASURED_UNIT:
        return None if calls_tell else facts.params_b
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


# Enough rows for a mean where lengths differ; each is answered alone, so that there is no padding.
MEASURED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """What the first rows of a batch show, each answered by itself; None where there is nothing to see.

    gflops: the mean of one row. A multiply-add counts as one operation, as in TorchVision's metadata and the paper's
    tables.   noise: by how much a row's numbers depend on its neighbours, in units of the logits: the largest
    difference from the answers of the whole call, of a model that says in which precision it computes.
    """

    gflops: float | None = None
    noise: float | None = None


def measured(model: Model, batch: Batch, together: Answers | None = None) -> Measured:
    """Measure a model on the first rows of a batch.   together: its answers to the whole of it.

    A model that is neither in torch nor says its precision is not asked: its calls may be paid for.
    """
    compares = together is not None and model.facts.dtype is not None
    if "torch" not in sys.modules and not compares:
        return Measured()
    totals: list[float] = []
    off: list[float] = []
    for row in range(min(MEASURED_ROWS, batch_size(batch))):
        try:
            with _flops() as counter:
                alone = model({name: column[row : row + 1].copy() for name, column in batch.items()})
        except Exception:  # the answers are valid; only what is measured is missing, which raises where it is needed
            return Measured()
        if not alone.failures:
            totals.append(counter.get_total_flops() / 2e9 if counter is not None else 0.0)
            if together is not None and compares and row not in together.failures:
                own = alone.logits[0][np.isfinite(alone.logits[0])]
                off.append(float(np.abs(own - together.logits[row, : len(own)]).max(initial=0.0)))
    gflops = float(np.mean(totals)) if totals else 0.0
    return Measured(gflops or None, max(off, default=None))


def _flops() -> Any:
    """Return what counts operations, where torch is in use."""
    if "torch" not in sys.modules:
        return nullcontext()
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)
