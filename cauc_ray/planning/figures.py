"""A plan's figures as `cauc plan --json` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cauc_ray.models.pool import StageSpec
from cauc_ray.planning.simulation import SEED
from cauc_ray.planning.sizing import (
    MOST_LOAD,
    Sizing,
    Trials,
    holds,
    least_counts,
    most_rate,
    run_of,
    run_rows,
    sized,
)
from cauc_ray.planning.stages import PlannedStage, RouterSeconds, loads, reaches, with_drift
from cauc_ray.planning.timings import EarlierRun, Timing
from cauc_ray.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Chain:
    """What is planned.

    stages: as they are served, one replica each.   router: what one takes, with as many as the pool allows.   rate:
    requests a second.
    """

    specs: tuple[StageSpec, ...]
    policy: Policy
    timings: Sequence[Timing]
    stages: tuple[PlannedStage, ...]
    router: RouterSeconds
    rate: float
    slo_p99_s: float | None


def plan_figures(chain: Chain, sizing: Sizing, earlier: EarlierRun | None) -> dict[str, Any]:
    """Return what a plan is: the goal, the stages, the latency, the totals."""
    simulation = sizing.simulation
    stages = _stage_figures(chain, sizing, earlier)
    total = sum(stage["cost"] for stage in stages)
    return {
        "rate": chain.rate,
        "slo_p99_s": chain.slo_p99_s,
        "holds": holds(sizing, chain.slo_p99_s),
        "out_of_reach": sizing.out_of_reach,
        "most_load": MOST_LOAD,
        "requests_per_s": simulation.rows_per_s,
        "latency_s": latency_figures(sizing),
        "router": _router_figures(chain, sizing),
        "stages": stages,
        "total": {
            "replicas": sum(sizing.counts),
            "resources": resources(chain.specs, sizing.counts),
            "cost": total,
            "cost_unit": chain.policy.cost_unit,
        },
        "dearest_alone": _dearest_alone(chain, total),
        "simulated": {
            "seed": SEED,
            "requests": simulation.n_arrived,
            "window_s": simulation.window_s,
            "calls": sum(stage.calls for stage in simulation.stages),
        },
    }


def drifted(chain: Chain, sizing: Sizing, factor: float) -> dict[str, Any]:
    """Return what becomes of a plan when every deferral rate is so many times what was expected."""
    stages = with_drift(sizing.stages, factor)
    trials = Trials(stages, chain.rate, chain.router)
    now, anew = trials.of(sizing.counts), sized(trials, chain.slo_p99_s)
    return {
        "factor": factor,
        "holds": holds(now, chain.slo_p99_s),
        "latency_s": latency_figures(now),
        "out_of_reach": anew.out_of_reach,
        "stages": [
            {"name": stage.name, "reach": reach, "load": load, "busy": of.busy, "replicas": stage.replicas, "needed": n}
            for stage, reach, load, of, n in zip(
                stages,
                reaches(stages).tolist(),
                loads(stages, chain.rate).tolist(),
                now.simulation.stages,
                anew.counts,
                strict=True,
            )
        ],
    }


def range_figures(chain: Chain, as_run: Sequence[PlannedStage]) -> dict[str, Any]:
    """Return what the pool's own range of replicas can carry, served and in a run over rows that are all there.

    as_run: the stages as a run has them, with the most replicas.
    """
    most = [stage.with_replicas(spec.replicas.max) for stage, spec in zip(chain.stages, chain.specs, strict=True)]
    least = [stage.with_replicas(spec.replicas.min) for stage, spec in zip(chain.stages, chain.specs, strict=True)]
    routers_rate = 1 / max(chain.router.load(most, 1.0), 1e-12)
    stages_rate, bottleneck = most_rate(most, 1.0)
    rate = MOST_LOAD * min(routers_rate, stages_rate)
    run = run_of(as_run)
    return {
        "max_rate": rate,
        "max_rate_at_min": min(MOST_LOAD * routers_rate, most_rate(least)[0]),
        "saturated_rate": min(routers_rate, stages_rate),
        "bottleneck": most[bottleneck].name if stages_rate <= routers_rate else "router",
        "carries_rate": chain.rate <= rate,
        "run_rows_per_s": run.rows_per_s,
        "run_rows": run_rows(as_run),
        "run_busy": {stage.name: stage.busy for stage in run.stages},
    }


def latency_figures(sizing: Sizing) -> dict[str, float] | None:
    """Return the latency's mean, p50 and p99 in seconds, None where queues grow without end."""
    latency = sizing.simulation.latency
    return None if latency is None or sizing.simulation.grows else asdict(latency)


def resources(specs: Sequence[StageSpec], counts: Sequence[int]) -> dict[str, float]:
    """Return what replicas of stages occupy in all, by Ray's names."""
    total: dict[str, float] = {}
    for spec, n in zip(specs, counts, strict=True):
        for name, amount in spec.resources.amounts.items():
            if amount:
                total[name] = total.get(name, 0.0) + n * amount
    return total


def _stage_figures(chain: Chain, sizing: Sizing, earlier: EarlierRun | None) -> list[dict[str, Any]]:
    reach = reaches(chain.stages).tolist()
    costs = [share * stage.cost for share, stage in zip(reach, chain.policy.stages, strict=True)]
    load = loads(sizing.stages, chain.rate).tolist()
    same = earlier is not None and earlier.policy_id == chain.policy.id
    return [
        {
            "name": stage.name,
            "reach": reach[place],
            "deferral": stage.deferral,
            "ledger_deferral": earlier.deferral[stage.name] if same and earlier is not None else None,
            "requests_per_s": chain.rate * reach[place],
            "replicas": stage.replicas,
            "least_replicas": least,
            "pool_replicas": spec.replicas.model_dump(),
            "load": load[place],
            "busy": of.busy,
            "fill": of.fill,
            "batch_size": stage.batch_size,
            "batch_wait_s": stage.batch_wait_s,
            "batch_s": stage.batch_s,
            "seconds": asdict(timing),
            "wait_s": of.wait_s,
            "waiting_rows": of.waiting_rows,
            "most_queued": of.most_queued,
            "resources": resources([spec], [stage.replicas]),
            "labels": spec.resources.labels,
            "each": str(spec.resources),
            "cost": costs[place],
            "cost_share": costs[place] / sum(costs) if sum(costs) > 0 else None,
        }
        for place, (stage, spec, timing, of, least) in enumerate(
            zip(
                sizing.stages,
                chain.specs,
                chain.timings,
                sizing.simulation.stages,
                least_counts(chain.stages, chain.rate),
                strict=True,
            )
        )
    ]


def _router_figures(chain: Chain, sizing: Sizing) -> dict[str, Any]:
    needed = Trials(sizing.stages, chain.rate, chain.router).router
    return {
        "per_request_s": needed.per_request,
        "per_call_s": needed.per_call,
        "replicas": needed.replicas,
        "pool_replicas": chain.router.replicas,
        "load": needed.load(sizing.stages, chain.rate),
    }


def _dearest_alone(chain: Chain, cost: float) -> dict[str, Any]:
    """Return what it takes to answer all requests by the most expensive stage.   cost: of a request in the cascade."""
    own = [stage.cost for stage in chain.policy.stages]
    place = max(range(len(own)), key=lambda at: (own[at], at))
    alone = replace(chain.stages[place], deferral=0.0)
    (n,) = least_counts([alone], chain.rate)
    return {
        "name": alone.name,
        "replicas": n,
        "resources": resources([chain.specs[place]], [n]),
        "cost": own[place],
        "relative_cost": cost / own[place] if own[place] > 0 else None,
    }
