"""CAUC Base, CAUC-RF and the methods compared with them: fitted from logits, stepped through by replay and run."""

# Policy.load knows the policy files of these, whichever module is asked for first.
from cauc_ray.policies.cascade_routing import CascadeRoutingPolicy
from cauc_ray.policies.cauc import BasePolicy, RFPolicy
from cauc_ray.policies.routers import RandomPolicy, RouterPolicy
from cauc_ray.policies.scored import DuoPolicy, FrugalGPTPolicy, PostHocEmbedPolicy, RawPolicy
from cauc_ray.policies.stacked import StackedPolicy

__all__ = [
    "BasePolicy",
    "CascadeRoutingPolicy",
    "DuoPolicy",
    "FrugalGPTPolicy",
    "PostHocEmbedPolicy",
    "RFPolicy",
    "RandomPolicy",
    "RawPolicy",
    "RouterPolicy",
    "StackedPolicy",
]
