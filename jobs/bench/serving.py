"""Measure the served cascade against a hand-written Ray Serve composition of the same stages, without a policy.

Both sides of a case are deployed next to each other and take turns under the same load, made by closed-loop clients in
one process; every answer is checked. A ratio is of one turn of each side, close in time: the median over the turns is
given, and the range. Cases: an ordinary cascade, and models of no time, of which what is left is what serving takes.
Behind Ray's own proxy and behind its HAProxy ingress.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from cauc_ray.errors import ExecutionError
from jobs.bench.children import free_ports, printed
from jobs.bench.part import absent
from jobs.bench.serving_cases import CASES, FEW, MANY, ONE, OURS, Plan

PROXY, HAPROXY = "proxy", "haproxy"
FIGURES = ("per_s", "p50_s", "p99_s")

Turn: TypeAlias = dict[str, Any]
# By case and load, then by side; as a session printed them.
Turns: TypeAlias = dict[tuple[str, str], dict[str, list[Turn]]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--few", type=int, default=16, help="clients where latency is compared")
    parser.add_argument("--many", type=int, default=128, help="clients where throughput is compared")
    parser.add_argument("--seconds", type=float, default=4.0, help="what is measured of each turn")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds of load before that")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side")
    parser.add_argument("--deferral", type=float, default=0.3, help="share of the rows that the large model answers")
    parser.add_argument("--rows", type=int, default=2000, help="different requests")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which models to measure")
    parser.add_argument(
        "--ingress", nargs="+", choices=(PROXY, HAPROXY), default=[PROXY, HAPROXY], help="what takes the requests"
    )


def missing(options: argparse.Namespace) -> str | None:
    """Need Ray Serve, and the client that makes the load."""
    return absent("fastapi", "aiohttp")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure behind one ingress after the other."""
    results: dict[str, Any] = {}
    plan = Plan(
        cases=options.cases,
        clients={ONE: 1, FEW: options.few, MANY: options.many},
        rows=options.rows,
        deferral=options.deferral,
        turns=options.turns,
        seconds=options.seconds,
        warm_up_s=options.warm_up,
    )
    for ingress in options.ingress:
        print(f"-- behind Ray's {'HAProxy' if ingress == HAPROXY else 'own proxy'}", flush=True)
        turns: Turns = {}
        for turn in session_turns(plan, ingress):
            turns.setdefault((turn["case"], turn["load"]), {}).setdefault(turn["side"], []).append(turn)
            tell_turn(turn, plan.clients)
        results[ingress] = compare(turns)
        tell(results[ingress], plan.clients)
    return results


def session_turns(plan: Plan, ingress: str) -> Iterator[Turn]:
    """Measure on a Serve instance of its own, and yield what each turn measured.

    In a process of its own, since Ray's environment chooses the ingress before Serve is imported.
    Raises ExecutionError when the session ends before it is done.
    """
    with tempfile.TemporaryDirectory(prefix="serving", dir="/tmp") as folder:
        env = haproxy_environment(Path(folder)) if ingress == HAPROXY else None
        yield from printed(sys.executable, "-m", "jobs.bench.serving_session", json.dumps(asdict(plan)), env=env)


def haproxy_environment(folder: Path) -> dict[str, str]:
    """Return what makes Serve use HAProxy: its files and ports are its own, so that two can run on a machine."""
    stats, metrics = free_ports(2)
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
        "METRICS_SOCKET_PATH": "metrics.sock",
    }
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        **{f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()},
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "1",  # no request is under way when the session ends
    }


def compare(turns: Turns) -> dict[str, Any]:
    """Return each case's medians and the ratios of our turns to the others. Raises ExecutionError for wrong answers."""
    found: dict[str, Any] = {}
    for (case, load), by_side in turns.items():
        of_load: dict[str, Any] = {side: summary(own, side) for side, own in by_side.items()}
        for side, theirs in by_side.items():
            if side != OURS:
                pairs = list(zip(by_side[OURS], theirs, strict=True))
                of_load[f"to_{side}"] = {
                    name: spread([own[name] / other[name] for own, other in pairs]) for name in FIGURES
                }
        found.setdefault(case, {})[load] = of_load
    return found


def summary(turns: Sequence[Turn], side: str) -> dict[str, Any]:
    """Return a side's figures under one load."""
    counts = sum((Counter(turn["counts"]) for turn in turns), Counter[str]())
    if counts["wrong"]:
        raise ExecutionError(f"{side}: {counts['wrong']} of {counts.total()} answers were wrong")
    return {name: spread([turn[name] for turn in turns]) for name in FIGURES} | {"counts": dict(counts)}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the range."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def tell_turn(turn: Turn, clients: Mapping[str, int]) -> None:
    """Print a turn as it ends."""
    n, counts = clients[turn["load"]], ", ".join(f"{n} {kind}" for kind, n in sorted(turn["counts"].items()))
    print(
        f"{turn['case']:>8}, {n:>3} clients, {turn['side']:>9}: {turn['per_s']:6.1f} requests/s, "
        f"p50 {turn['p50_s'] * 1e3:6.1f} ms, p99 {turn['p99_s'] * 1e3:6.1f} ms ({counts})",
        flush=True,
    )


def tell(found: Mapping[str, Any], clients: Mapping[str, int]) -> None:
    """Print the ratios behind one ingress."""
    for case, by_load in found.items():
        for load, of_load in by_load.items():
            for side in [side for side in of_load if f"to_{side}" in of_load]:
                ratios = [
                    f"{name} {value['median']:.2f} times ({value['least']:.2f}–{value['most']:.2f})"
                    for name, value in of_load[f"to_{side}"].items()
                ]
                print(f"{case}, {clients[load]} clients, {OURS} against {side} by hand: {', '.join(ratios)}")
