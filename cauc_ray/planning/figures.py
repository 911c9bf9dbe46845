"""A plan's figures: as `cauc plan --json` prints them, and as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cauc_ray.api.tables import add_row, amount, line, new_table, number, percent, print_table
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.resources import amounts_text
from cauc_ray.planning.simulation import SEED, simulate_backlog
from cauc_ray.planning.sizing import MOST_LOAD, Sizing, Trials, least_counts, most_rate, run_rows, sized
from cauc_ray.planning.stages import (
    EarlierRun,
    PlannedStage,
    RouterSeconds,
    Timing,
    loads,
    reaches,
    with_drift,
    with_replicas,
)
from cauc_ray.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Chain:
    """What is planned.

    trials: of the stages as they are served, one replica each.   router: what one takes, with as many as the pool
    allows.
    """

    specs: tuple[StageSpec, ...]
    policy: Policy
    timings: Sequence[Timing]
    trials: Trials
    router: RouterSeconds
    slo_p99_s: float | None

    @property
    def stages(self) -> tuple[PlannedStage, ...]:
        """Return the stages, one replica each."""
        return self.trials.stages

    @property
    def rate(self) -> float:
        """Return the requests a second."""
        return self.trials.rate


def plan_figures(chain: Chain, sizing: Sizing, earlier: EarlierRun | None) -> dict[str, Any]:
    """Return what a plan is: the goal, the stages, the latency, the totals."""
    simulation = sizing.simulation
    stages = _stage_figures(chain, sizing, earlier)
    total = sum(stage["cost"] for stage in stages)
    return {
        "rate": chain.rate,
        "slo_p99_s": chain.slo_p99_s,
        "holds": sizing.holds(chain.slo_p99_s),
        "out_of_reach": sizing.out_of_reach,
        "most_load": MOST_LOAD,
        "requests_per_s": simulation.rows_per_s,
        "latency_s": latency_figures(sizing),
        "router": _router_figures(chain),
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
        "holds": now.holds(chain.slo_p99_s),
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
    most = with_replicas(chain.stages, [spec.replicas.max for spec in chain.specs])
    least = with_replicas(chain.stages, [spec.replicas.min for spec in chain.specs])
    routers_rate = 1 / max(chain.router.load(most, 1.0), 1e-12)
    stages_rate, bottleneck = most_rate(most, 1.0)
    rate = MOST_LOAD * min(routers_rate, stages_rate)
    run = simulate_backlog(as_run, run_rows(as_run))
    return {
        "max_rate": rate,
        "max_rate_at_min": min(MOST_LOAD * routers_rate, most_rate(least)[0]),
        "saturated_rate": min(routers_rate, stages_rate),
        "bottleneck": most[bottleneck].name if stages_rate <= routers_rate else "router",
        "carries_rate": chain.rate <= rate,
        "run_rows_per_s": run.rows_per_s,
        "run_rows": run.n_arrived,
        "run_busy": {stage.stage.name: stage.busy for stage in run.stages},
    }


def latency_figures(sizing: Sizing) -> dict[str, float] | None:
    """Return the latency's mean, p50 and p99 in seconds, None where queues grow without end."""
    return None if sizing.latency is None else asdict(sizing.latency)


def resources(specs: Sequence[StageSpec], counts: Sequence[int]) -> dict[str, float]:
    """Return what replicas of stages occupy in all, by Ray's names."""
    total: dict[str, float] = {}
    for spec, n in zip(specs, counts, strict=True):
        for name, n_each in spec.resources.amounts.items():
            if n_each:
                total[name] = total.get(name, 0.0) + n * n_each
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


def _router_figures(chain: Chain) -> dict[str, Any]:
    needed = chain.trials.router
    return {
        "per_request_s": needed.per_request,
        "per_call_s": needed.per_call,
        "replicas": needed.replicas,
        "pool_replicas": chain.router.replicas,
        "load": needed.load(chain.stages, chain.rate),
    }


def _dearest_alone(chain: Chain, cost: float) -> dict[str, Any]:
    """Return what it takes to answer all requests by the most expensive stage.   cost: of a request in the cascade."""
    costs = [stage.cost for stage in chain.policy.stages]
    place = max(range(len(costs)), key=lambda at: (costs[at], at))
    alone = replace(chain.stages[place], deferral=0.0)
    (n,) = least_counts([alone], chain.rate)
    return {
        "name": alone.name,
        "replicas": n,
        "resources": resources([chain.specs[place]], [n]),
        "cost": costs[place],
        "relative_cost": cost / costs[place] if costs[place] > 0 else None,
    }


def show_plan(plan: Mapping[str, Any]) -> None:
    """Show a plan: its stages, what they occupy and cost, drift, and what the pool's own range can carry."""
    _stages(plan)
    _goal(plan)
    _resources(plan)
    _drift(plan)
    _range(plan)
    _sources(plan)


def _stages(plan: Mapping[str, Any]) -> None:
    unit = plan["total"]["cost_unit"]
    headings = ["stage", "reach", "requests/s", "replicas", "load", "busy", "batch (s)", "fill", "wait (s)"]
    title = f"{plan['pool']} at {amount(plan['rate'])} requests a second, policy {plan['policy_id']}"
    table = new_table(title, [*headings, f"cost ({unit})", "share"])
    for stage in plan["stages"]:
        add_row(
            table,
            stage["name"],
            percent(stage["reach"]),
            amount(stage["requests_per_s"]),
            f"{stage['replicas']:,}",
            percent(stage["load"]),
            percent(stage["busy"]),
            number(stage["batch_s"]),
            percent(stage["fill"]),
            "–" if stage["wait_s"] is None else f"{stage['wait_s']:.3g}",
            number(stage["cost"]),
            percent(stage["cost_share"]),
        )
    print_table(table)
    line(
        "load: of what full batches would let the replicas do; busy: of their time, in which batches that are not full "
        "take longer for each row"
    )


def _goal(plan: Mapping[str, Any]) -> None:
    goal = f"p99 within {plan['slo_p99_s']:g} s" if plan["slo_p99_s"] else "the rate"
    line(f"{goal} {'holds' if plan['holds'] else 'does not hold'}: {_latency(plan['latency_s'])}")
    if plan["out_of_reach"]:
        line(plan["out_of_reach"])


def _latency(latency: Mapping[str, float] | None) -> str:
    if latency is None:
        return "more and more requests wait"
    return f"latency p50 {latency['p50']:.3g} s, p99 {latency['p99']:.3g} s, mean {latency['mean']:.3g} s"


def _resources(plan: Mapping[str, Any]) -> None:
    router = plan["router"]
    line(
        f"router: {router['replicas']:,} at a load of {percent(router['load'])}; it takes "
        f"{1e3 * router['per_request_s']:.2f} ms a request and {1e3 * router['per_call_s']:.2f} ms a call"
    )
    for stage in plan["stages"]:
        line(f"{stage['name']}: {amounts_text(stage['resources'])} in all; each replica {stage['each']}")
    total, alone = plan["total"], plan["dearest_alone"]
    relative = "" if alone["relative_cost"] is None else f", {alone['relative_cost']:.2f} of the most expensive alone"
    line(
        f"in all {total['replicas']:,} replicas, {amounts_text(total['resources'])}; a request costs "
        f"{number(total['cost'])} {total['cost_unit']}{relative}"
    )
    line(
        f"every request at {alone['name']} alone: {alone['replicas']:,} replicas, {amounts_text(alone['resources'])}, "
        f"{number(alone['cost'])} {total['cost_unit']} a request"
    )


def _drift(plan: Mapping[str, Any]) -> None:
    names = [stage["name"] for stage in plan["stages"]]
    table = new_table(
        "if every deferral rate is", ["times", "the plan", "p99 (s)", *(f"load {n}" for n in names), "needed"]
    )
    for of in plan["drift"]:
        latency = of["latency_s"]
        add_row(
            table,
            f"{of['factor']:g} ×",
            "holds" if of["holds"] else "does not hold",
            "–" if latency is None else f"{latency['p99']:.3g}",
            *(percent(stage["load"]) for stage in of["stages"]),
            "out of reach" if of["out_of_reach"] else " + ".join(f"{stage['needed']:,}" for stage in of["stages"]),
        )
    print_table(table)


def _range(plan: Mapping[str, Any]) -> None:
    carried = plan["range"]
    line(
        f"the pool's replicas (max) carry {amount(carried['max_rate'])} requests a second at a load of "
        f"{percent(plan['most_load'])}, {amount(carried['saturated_rate'])} at most; the bottleneck is "
        f"{carried['bottleneck']!r}; as a run over {carried['run_rows']:,} rows, "
        f"{amount(carried['run_rows_per_s'])} rows a second"
    )


def _sources(plan: Mapping[str, Any]) -> None:
    for stage in plan["stages"]:
        seconds = stage["seconds"]
        batch = seconds["seconds"]
        source = "an earlier run's ledger" if seconds["source"] == "ledger" else "as the pool file declares"
        fit = f", {seconds['n_calls']:,} calls, off by {percent(seconds['error'])}" if seconds["n_calls"] else ""
        seen = stage["ledger_deferral"]
        defers = f"; defers {percent(stage['deferral'])}" + (
            f", in the ledger {percent(seen)}" if seen is not None else ""
        )
        line(
            f"{stage['name']}: a batch takes {batch['per_call']:.4g} s and {batch['per_row']:.4g} s a row "
            f"({source}{fit}){defers}"
        )
    simulated = plan["simulated"]
    line(
        f"simulated with seed {simulated['seed']}: {simulated['requests']:,} requests, "
        f"{simulated['window_s']:.3g} s of them measured; planned in {plan['elapsed_s']:.1f} s"
    )
