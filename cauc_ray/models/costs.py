"""The cost of a model's call: declared, published with the model, or measured."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, batch_size
from cauc_ray.models.pool import CostSpec, StageSpec

MEASURED_UNIT = "GFLOPs"
# Padding, fused operations and counting conventions explain smaller ratios.
FAR = 1.25


def cost_unit(stage: StageSpec, reported: str | None = None) -> str:
    """Return the unit of a stage's costs: as declared, as the model's calls are billed, else GFLOPs.

    Args:
        stage: The stage.
        reported: Unit reported by the model's calls, used if nothing is declared.
    """
    if stage.cost is not None:
        return stage.cost.unit
    return stage.model.cost_unit or reported or MEASURED_UNIT


def model_cost(
    declared: CostSpec | None, facts: ModelFacts, measured_gflops: float | None, per_call: float | None
) -> float | None:
    """Return the cost of one example, None if unknown.

    Args:
        declared: The pool's value; "auto" asks the model.
        facts: Of the model, with its published GFLOPs.
        measured_gflops: The measured GFLOPs of an example, used if none are published.
        per_call: Mean cost that calls report, used if the pool has no value or declares that calls measure it.
    """
    if declared is not None and declared.value is not None:
        return declared.value
    is_per_call = declared is None or declared.is_round_trip
    if is_per_call and per_call is not None:
        return per_call
    if declared is not None and declared.unit != MEASURED_UNIT:
        return None if is_per_call else facts.params_b
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


# Enough rows for a mean where lengths differ; each is answered alone, without padding.
MEASURED_ROWS = 8


def measured(model: Model, batch: Batch, together: Answers | None = None) -> tuple[float | None, float | None]:
    """Measure a model on the first rows of a batch, each answered alone.

    A model that is neither in torch nor reports its precision is not called: its calls may be paid for.

    Args:
        model: The model.
        batch: Its input.
        together: Its answers to the whole batch.

    Returns:
        Mean GFLOPs of a row, None if torch counted none; a multiply-add counts as one operation, as in TorchVision's
        metadata and the paper's tables. And how much a row's logits depend on its neighbours: the largest difference
        from the answers of the whole call, None for a model that does not report its precision.
    """
    compares = together is not None and model.facts.dtype is not None
    if "torch" not in sys.modules and not compares:
        return None, None
    totals: list[float] = []
    off: list[float] = []
    for row in range(min(MEASURED_ROWS, batch_size(batch))):
        try:
            with _flops() as counter:
                alone = model({name: column[row : row + 1].copy() for name, column in batch.items()})
        except Exception:  # the answers are valid; only what is measured is missing, which raises where it is needed
            return None, None
        if not alone.failures:
            totals.append(counter.get_total_flops() / 2e9 if counter is not None else 0.0)
            if together is not None and compares and row not in together.failures:
                logits = alone.logits[0][np.isfinite(alone.logits[0])]
                off.append(float(np.abs(logits - together.logits[row, : len(logits)]).max(initial=0.0)))
    gflops = float(np.mean(totals)) if totals else 0.0
    return gflops or None, max(off, default=None)


def _flops() -> Any:
    """Return what counts operations, where torch is in use."""
    if "torch" not in sys.modules:
        return nullcontext()
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False)
