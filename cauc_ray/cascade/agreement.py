"""Whether a pool's stages are those that a policy was fitted for."""

from __future__ import annotations

from cauc_ray.errors import PolicyError
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.costs import UNNAMED_UNIT
from cauc_ray.policies.policy import Policy


def require_agreement(stages: tuple[StageSpec, ...], policy: Policy) -> None:
    """Raise PolicyError where a stage gives other logits than the policy was fitted on, or costs in another unit.

    Kinds that the policy's file does not record by model are not compared, nor are unnamed units.
    """
    for spec, fitted in zip(stages, policy.logit_kinds, strict=True):
        given = spec.model.answers_kind
        if fitted not in (None, given):
            raise PolicyError(
                f"stage {spec.name!r} returns logits of kind {given}; the policy was fitted on {fitted}: declare "
                "the right logit_kind in the stage's model, or fit a policy on such logits"
            )
        unit = spec.cost.unit if spec.cost is not None else None
        if unit is None and policy.costs == "per-call":
            unit = spec.model.cost_unit
        if unit is not None and policy.cost_unit not in (unit, UNNAMED_UNIT):
            raise PolicyError(
                f"the pool has the cost of stage {spec.name!r} in {unit}, the policy has costs in {policy.cost_unit}: "
                "give the pool's cost in the policy's unit or omit it, or fit a policy with costs in the pool's unit"
            )
