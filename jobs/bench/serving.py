"""Measure the served cascade against hand-written Ray Serve compositions of the same sleeping stages, without a policy.

All sides of a case are deployed beside each other and take turns under the same load, made by closed-loop clients in
one process; every answer is checked. A ratio is of one turn of each side, close in time: the median over the turns is
given, and the range.
Cases: an ordinary cascade (our router against one that batches before each stage by hand, and against one that calls
stages per request), models of no time, and a large model slow enough to be the bottleneck with the cascade, too, whose
throughput is compared with the largest model's alone. The first two also behind Ray's HAProxy ingress.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cauc_ray.errors import ExecutionError
from jobs.bench.part import absent
from jobs.bench.serving_cases import CASES, FEW, MANY, ONE, SOME, Plan
from jobs.bench.serving_ratios import Turns, compare, tell, tell_turn

ROOT = Path(__file__).parents[2]
PROXY, HAPROXY = "proxy", "haproxy"
BEHIND = {PROXY: ("sleeping", "instant", "slow"), HAPROXY: ("sleeping", "instant")}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--few", type=int, default=16, help="clients where latency is compared")
    parser.add_argument("--some", type=int, default=48, help="clients of the slow model: enough that it never idles")
    parser.add_argument("--many", type=int, default=128, help="clients where throughput is compared")
    parser.add_argument("--seconds", type=float, default=4.0, help="what is measured of each turn")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds of load before that")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side")
    parser.add_argument("--deferral", type=float, default=0.3, help="share of the rows that the large model answers")
    parser.add_argument("--rows", type=int, default=2000, help="different requests")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which models to measure")
    parser.add_argument("--ingress", nargs="+", choices=BEHIND, default=list(BEHIND), help="what takes the requests")


def missing(options: argparse.Namespace) -> str | None:
    """Need Ray Serve, and the client that makes the load."""
    return absent("fastapi", "aiohttp")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure behind one ingress after the other."""
    results: dict[str, Any] = {}
    for ingress in options.ingress:
        cases = tuple(case for case in BEHIND[ingress] if case in options.cases)
        if not cases:
            continue
        plan = Plan(
            cases=cases,
            clients={ONE: 1, FEW: options.few, SOME: options.some, MANY: options.many},
            rows=options.rows,
            deferral=options.deferral,
            turns=options.turns,
            seconds=options.seconds,
            warm_up_s=options.warm_up,
        )
        print(f"-- behind Ray's {'HAProxy' if ingress == HAPROXY else 'own proxy'}", flush=True)
        turns: Turns = {}
        for turn in session_turns(plan, ingress):
            turns.setdefault((turn["case"], turn["load"]), {}).setdefault(turn["side"], []).append(turn)
            tell_turn(turn, plan.clients)
        results[ingress] = compare(turns)
        tell(results[ingress], plan.clients)
    return results


def session_turns(plan: Plan, ingress: str) -> Iterator[dict[str, Any]]:
    """Measure on a Serve instance of its own, and yield what each turn measured.

    Raises ExecutionError when the session ends before it is done.
    """
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="serving", dir="/tmp")))
        log = resources.enter_context((folder / "log").open("w+"))
        process = resources.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "jobs.bench.serving_session", json.dumps(asdict(plan))],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(haproxy_environment(folder) if ingress == HAPROXY else {})},
            )
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # Ray may write there, too
                yield json.loads(line)
        if process.wait():
            log.seek(0)
            last = (log.read().strip().splitlines() or ["?"])[-1]
            raise ExecutionError(f"the session behind {ingress} ended with {process.returncode}: {last}")


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


def free_ports(n: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(n)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
