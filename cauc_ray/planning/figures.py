"""A plan's figures, as `cauc plan --json` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cauc_ray.models.pool import StageSpec
from cauc_ray.planning.simulation import SEED, simulate_backlog
from cauc_ray.planning.sizing import MOST_LOAD, Sizing, Trials, least_counts, most_rate, run_rows, sized
from cauc_ray.planning.stages import PlannedStage, loads, reaches, with_replicas
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
        "holds": sizing.holds(chain.slo_p99_s),
        "out_of_reach": sizing.out_of_reach,
        "most_load": MOST_LOAD,
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
        "dearest_alone": _alone_figures(chain, total),
        "simulated": {
            "seed": SEED,
            "requests": simulation.n_arrived,
            "window_s": simulation.window_s,
            "calls": sum(use.calls for use in simulation.stages),
        },
    }


def drift_figures(chain: PlannedChain, counts: Sequence[int], factor: float) -> dict[str, Any]:
    """Return what becomes of a plan when every deferral rate is so many times what was expected."""
    stages = [replace(stage, deferral=min(1.0, factor * stage.deferral)) for stage in chain.trials.stages]
    trials = Trials(stages, chain.trials.rate, chain.trials.router)
    now, anew = trials.of(counts), sized(trials, chain.slo_p99_s)
    columns = {
        "name": [stage.name for stage in stages],
        "reach": reaches(stages).tolist(),
        "load": loads(now.stages, trials.rate).tolist(),
        "busy": [use.busy for use in now.simulation.stages],
        "replicas": counts,
        "needed": anew.counts,
    }
    return {
        "factor": factor,
        "holds": now.holds(chain.slo_p99_s),
        "latency_s": _latency_figures(now),
        "out_of_reach": anew.out_of_reach,
        "stages": [dict(zip(columns, stage, strict=True)) for stage in zip(*columns.values(), strict=True)],
    }


def range_figures(chain: PlannedChain, as_run: Sequence[PlannedStage]) -> dict[str, Any]:
    """Return what the pool's own range of replicas can carry, served and in a run over rows that are all there.

    Args:
        chain: What is planned.
        as_run: The stages as a run has them, with the most replicas.
    """
    trials = chain.trials
    most = with_replicas(trials.stages, [spec.replicas.max for spec in chain.specs])
    least = with_replicas(trials.stages, [spec.replicas.min for spec in chain.specs])
    routers_rate = 1 / replace(trials.router, replicas=chain.most_routers).load(most, 1.0)
    stages_rate, bottleneck = most_rate(most, 1.0)
    saturated = min(routers_rate, stages_rate)
    run = simulate_backlog(as_run, run_rows(as_run))
    return {
        "max_rate": MOST_LOAD * saturated,
        "max_rate_at_min": MOST_LOAD * min(routers_rate, most_rate(least, 1.0)[0]),
        "saturated_rate": saturated,
        "bottleneck": most[bottleneck].name if stages_rate <= routers_rate else "router",
        "carries_rate": trials.rate <= MOST_LOAD * saturated,
        "run_rows_per_s": run.rows_per_s,
        "run_rows": run.n_arrived,
        "run_busy": {stage.name: use.busy for stage, use in zip(as_run, run.stages, strict=True)},
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
