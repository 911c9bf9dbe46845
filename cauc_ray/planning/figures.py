"""A plan's figures, as `cauc plan --json` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cauc_ray.models.pool import StageSpec
from cauc_ray.planning.sizing import MOST_LOAD, Sizing, Trials, least_counts, most_rate
from cauc_ray.planning.stages import loads, reaches, with_replicas
from cauc_ray.planning.timings import EarlierRun
from cauc_ray.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class PlannedChain:
    """What is planned.

    Attributes:
        specs: The stages as the pool has them.
        policy: The policy.
        trials: Simulations of the stages as they are served, at the rate.
        most_routers: Routers that the pool allows.
        slo_p99_s: The latency goal in seconds, None without one.
    """

    specs: tuple[StageSpec, ...]
    policy: Policy
    trials: Trials
    most_routers: int
    slo_p99_s: float | None


def plan_figures(chain: PlannedChain, sizing: Sizing, earlier: EarlierRun | None) -> dict[str, Any]:
    """Return what a plan is: the goal, the stages, the latency, the totals."""
    simulation, trials = sizing.simulation, chain.trials
    stages = _stage_figures(chain, sizing, earlier)
    total = sum(stage["cost"] for stage in stages)
    return {
        "rate": trials.rate,
        "slo_p99_s": chain.slo_p99_s,
        "meets_slo": sizing.meets(chain.slo_p99_s),
        "out_of_reach": sizing.out_of_reach,
        "most_load": MOST_LOAD,
        "range": range_figures(chain),
        "requests_per_s": simulation.rows_per_s,
        "latency_s": _latency_figures(sizing),
        "router": {
            "per_request_s": trials.router.per_request,
            "per_call_s": trials.router.per_call,
            "replicas": trials.router.replicas,
            "pool_replicas": chain.most_routers,
            "load": trials.router.load(trials.stages, trials.rate),
        },
        "stages": stages,
        "total": {
            "replicas": sum(sizing.counts),
            "resources": _resources(chain.specs, sizing.counts),
            "cost": total,
            "cost_unit": chain.policy.cost_unit,
        },
        "most_expensive_alone": _alone_figures(chain, total),
    }


def range_figures(chain: PlannedChain) -> dict[str, Any]:
    """Return the rate that the replicas of the pool can carry, and what bounds it."""
    trials = chain.trials
    most = with_replicas(trials.stages, [spec.replicas.max for spec in chain.specs])
    routers_rate = 1 / replace(trials.router, replicas=chain.most_routers).load(most, 1.0)
    stages_rate, bottleneck = most_rate(most)
    return {
        "max_rate": MOST_LOAD * min(routers_rate, stages_rate),
        "bottleneck": most[bottleneck].name if stages_rate <= routers_rate else "router",
    }


def _stage_figures(chain: PlannedChain, sizing: Sizing, earlier: EarlierRun | None) -> list[dict[str, Any]]:
    rate, reach = chain.trials.rate, reaches(sizing.stages).tolist()
    load, least = loads(sizing.stages, rate).tolist(), least_counts(sizing.stages, rate)
    costs = [share * stage.cost for share, stage in zip(reach, chain.policy.stages, strict=True)]
    deferral = earlier.deferral if earlier is not None and earlier.policy_id == chain.policy.id else {}
    return [
        {
            **asdict(stage),
            **asdict(use),
            "reach": reach[place],
            "ledger_deferral": deferral.get(stage.name),
            "requests_per_s": rate * reach[place],
            "least_replicas": least[place],
            "pool_replicas": spec.replicas.model_dump(),
            "load": load[place],
            "batch_s": stage.batch_s,
            "resources": _resources([spec], [stage.replicas]),
            "labels": spec.resources.labels,
            "each": str(spec.resources),
            "cost": costs[place],
            "cost_share": costs[place] / sum(costs) if sum(costs) > 0 else None,
        }
        for place, (stage, spec, use) in enumerate(
            zip(sizing.stages, chain.specs, sizing.simulation.stages, strict=True)
        )
    ]


def _latency_figures(sizing: Sizing) -> dict[str, float] | None:
    """Return the latency's mean, p50 and p99 in seconds, None where queues grow without bound."""
    return None if sizing.latency is None else asdict(sizing.latency)


def _alone_figures(chain: PlannedChain, cost: float) -> dict[str, Any]:
    """Return what the most expensive stage takes to answer all requests.   cost: of a request in the cascade."""
    costs = [stage.cost for stage in chain.policy.stages]
    place = max(range(len(costs)), key=lambda at: (costs[at], at))
    alone = chain.trials.stages[place]
    (n,) = least_counts([alone], chain.trials.rate)
    return {
        "name": alone.name,
        "replicas": n,
        "resources": _resources([chain.specs[place]], [n]),
        "cost": costs[place],
        "relative_cost": cost / costs[place] if costs[place] > 0 else None,
    }


def _resources(specs: Sequence[StageSpec], counts: Sequence[int]) -> dict[str, float]:
    """Return what replicas of stages occupy in all, by Ray's names."""
    total: dict[str, float] = {}
    for spec, n in zip(specs, counts, strict=True):
        for name, n_each in spec.resources.amounts.items():
            if n_each:
                total[name] = total.get(name, 0.0) + n * n_each
    return total
