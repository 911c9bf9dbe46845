"""Turns of the serving part on one Serve instance: its plan is the argument, as JSON, and so is what it prints.

In a process of its own, since Ray's environment chooses the ingress before Serve is imported.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions

from cauc_ray.execution.session import ray_session
from jobs.bench.serving import free_ports
from jobs.bench.serving_cases import CASES, OURS, OURS_LARGEST, CascadeFiles, Case, Plan, plant_requests, write_cascade
from jobs.bench.serving_load import Load, LoadResult, run_load
from jobs.bench.serving_rivals import hand_written

# No line of a log for each request, on any side.
QUIET = {"enable_access_log": False}


def turns(plan: Plan, name: str, port: int) -> Iterator[dict[str, Any]]:
    """Deploy a case's sides beside each other, let them take turns, and yield what each turn measured."""
    case, requests = CASES[name], plant_requests(plan.rows, plan.deferral)
    with tempfile.TemporaryDirectory() as folder:
        files = write_cascade(Path(folder), case, requests, plan.deferral)
        targets = [
            serve.RunTarget(application(side, case, files), side, f"/{side}", logging_config=QUIET)
            for side in case.sides
        ]
        serve.run_many(targets)
        loads = {
            (load, side): Load(
                url=f"http://127.0.0.1:{port}/{side}/v2/models/bench/infer",
                bodies=requests.bodies,
                n_clients=plan.clients[load],
                seconds=plan.seconds,
                warm_up_s=plan.warm_up_s,
                judge=requests.judge(side),
            )
            for load, sides in case.loads.items()
            for side in sides
        }
        for load, sides in case.loads.items():
            for turn in range(plan.turns):
                # The second of a pair has the other's heat and garbage: each side is it in its turn.
                for side in sides if turn % 2 == 0 else reversed(sides):
                    result = run_load(loads[load, side])
                    yield {"case": name, "load": load, "side": side, **figures(result)}
        for side in case.sides:
            serve.delete(side)


def application(side: str, case: Case, files: CascadeFiles) -> Application:
    """Return the application of a side."""
    if side not in (OURS, OURS_LARGEST):
        return hand_written(side, case)
    from cauc_ray.serving import ServingArgs, build_app

    policy = files.cascade if side == OURS else files.largest
    return build_app(ServingArgs(pool=str(files.pool), policy=str(policy)))


def figures(result: LoadResult) -> dict[str, Any]:
    """Return what a turn measured."""
    return {
        "per_s": result.per_s,
        "p50_s": result.latency_quantile(0.5),
        "p99_s": result.latency_quantile(0.99),
        "n": len(result),
        "counts": {kind: n for (_, kind), n in result.counts().items()},
    }


def main(argv: Sequence[str]) -> None:
    """Make the turns of all cases."""
    plan = Plan(**json.loads(argv[0]))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    [port] = free_ports(1)
    with ray_session(None, 8):
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        try:
            for name in plan.cases:
                for found in turns(plan, name, port):
                    print(json.dumps(found), flush=True)
        finally:
            serve.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
