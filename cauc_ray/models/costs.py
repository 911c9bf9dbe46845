"""The cost of a model's call: declared, published with the model, or measured."""

from __future__ import annotations

from cauc_ray.models.answers import ModelFacts
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
