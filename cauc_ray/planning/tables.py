"""A plan as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cauc_ray.api.tables import add_row, amount, line, new_table, number, percent, print_table
from cauc_ray.models.resources import amounts_text


def show_plan(found: Mapping[str, Any]) -> None:
    """Show a plan: its stages, what they occupy and cost, drift, and what the pool's own range can carry."""
    _stages(found)
    _goal(found)
    _resources(found)
    _drift(found)
    _range(found)
    _sources(found)


def _stages(found: Mapping[str, Any]) -> None:
    unit = found["total"]["cost_unit"]
    headings = ["stage", "reach", "requests/s", "replicas", "load", "busy", "batch (s)", "fill", "wait (s)"]
    title = f"{found['pool']} at {amount(found['rate'])} requests a second, policy {found['policy_id']}"
    table = new_table(title, [*headings, f"cost ({unit})", "share"])
    for stage in found["stages"]:
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


def _goal(found: Mapping[str, Any]) -> None:
    goal = f"p99 within {found['slo_p99_s']:g} s" if found["slo_p99_s"] else "the rate"
    line(f"{goal} {'holds' if found['holds'] else 'does not hold'}: {_latency(found['latency_s'])}")
    if found["out_of_reach"]:
        line(found["out_of_reach"])


def _latency(latency: Mapping[str, float] | None) -> str:
    if latency is None:
        return "more and more requests wait"
    return f"latency p50 {latency['p50']:.3g} s, p99 {latency['p99']:.3g} s, mean {latency['mean']:.3g} s"


def _resources(found: Mapping[str, Any]) -> None:
    router = found["router"]
    line(
        f"router: {router['replicas']:,} at a load of {percent(router['load'])}; here it takes "
        f"{1e3 * router['per_request_s']:.2f} ms a request and {1e3 * router['per_call_s']:.2f} ms a call"
    )
    for stage in found["stages"]:
        line(f"{stage['name']}: {amounts_text(stage['resources'])} in all; each replica {stage['each']}")
    total, alone = found["total"], found["dearest_alone"]
    relative = "" if alone["relative_cost"] is None else f", {alone['relative_cost']:.2f} of the most expensive alone"
    line(
        f"in all {total['replicas']:,} replicas, {amounts_text(total['resources'])}; a request costs "
        f"{number(total['cost'])} {total['cost_unit']}{relative}"
    )
    line(
        f"every request at {alone['name']} alone: {alone['replicas']:,} replicas, {amounts_text(alone['resources'])}, "
        f"{number(alone['cost'])} {total['cost_unit']} a request"
    )


def _drift(found: Mapping[str, Any]) -> None:
    names = [stage["name"] for stage in found["stages"]]
    table = new_table(
        "if every deferral rate is", ["times", "the plan", "p99 (s)", *(f"load {n}" for n in names), "needed"]
    )
    for of in found["drift"]:
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


def _range(found: Mapping[str, Any]) -> None:
    own = found["range"]
    line(
        f"the pool's replicas (max) carry {amount(own['max_rate'])} requests a second at a load of "
        f"{percent(found['most_load'])}, {amount(own['saturated_rate'])} at most; the bottleneck is "
        f"{own['bottleneck']!r}; as a run over {own['run_rows']:,} rows, {amount(own['run_rows_per_s'])} rows a second"
    )


def _sources(found: Mapping[str, Any]) -> None:
    for stage in found["stages"]:
        seconds = stage["seconds"]
        own = seconds["seconds"]
        told = {"ledger": "an earlier run's ledger", "measured": "measured now", "saved": "as the saved stage is told"}
        fit = f", {seconds['n_calls']:,} calls, off by {percent(seconds['error'])}" if seconds["n_calls"] else ""
        seen = stage["ledger_deferral"]
        defers = f"; defers {percent(stage['deferral'])}" + (
            f", in the ledger {percent(seen)}" if seen is not None else ""
        )
        line(
            f"{stage['name']}: a batch takes {own['per_call']:.4g} s and {own['per_row']:.4g} s a row "
            f"({told[seconds['source']]}{fit}){defers}"
        )
    simulated = found["simulated"]
    line(
        f"simulated with seed {simulated['seed']}: {simulated['requests']:,} requests, "
        f"{simulated['window_s']:.3g} s of them measured; planned in {found['elapsed_s']:.1f} s"
    )
