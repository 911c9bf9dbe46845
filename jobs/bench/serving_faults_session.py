"""Faults put into a service under load: the plan is the argument, as JSON, and so is what it prints of each kind."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray import serve

import cauc_ray
from cauc_ray.errors import CaucError, ExecutionError
from cauc_ray.front.serving import Service
from cauc_ray.policies.policy import Policy
from jobs.bench.cascades import THRESHOLD, planted_rows, write_pool, write_table
from jobs.bench.serving_cases import body_of
from jobs.bench.serving_faults_answers import AND, RIGHT, Judge, Struck, Truth, together
from jobs.bench.serving_load import Load, LoadResult, run_load
from jobs.faults.processes import actors

MODELS = ("small", "middle", "large")
DEFERRAL = (0.4, 0.5)
# The load is struck after this share of it; a fault that lasts does so for that share.
STRUCK_AT, LASTS = 0.25, 0.25
# A service may take so long until all is as it was, before the next fault.
HEALING_S = 90.0
OVERLOAD = 10
CHANGE_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Setup:
    """How the cascade is served.

    takes: seconds of a call of each stage.   batch: rows in one at most.   timeout_s: of each stage.
    """

    on_failure: str = "degrade"
    routers: int = 2
    takes: tuple[float, float, float] = (0.005, 0.01, 0.02)
    batch: int = 16
    timeout_s: float = 2.0
    max_queued_rows: int = 8192


@dataclass(slots=True)
class Scene:
    """What a fault is put into.   lasts_s: how long one that lasts does.   orders: where models look for files.

    beside: a load that the fault itself was.   changes: of the policy: begun and done, since the epoch, and its id.
    """

    service: Service
    policies: tuple[Policy, Policy]
    load: Load
    orders: Path
    lasts_s: float
    saturated_per_s: float = 0.0
    beside: LoadResult | None = None
    changes: list[tuple[float, float, str]] = field(default_factory=list)


Strike = Callable[[Scene], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    where: for people.   strike: does it, and returns when it is over.   lasts: a share of the plan's seconds.
    stretch: its load takes so many times the plan's seconds, where Serve takes long to mend things.
    """

    name: str
    where: str
    setup: str
    strike: Strike
    lasts: float = LASTS
    stretch: float = 1.0


def replicas_killed(deployment: str, *, every: bool) -> Strike:
    """Kill one replica of a deployment, or all at once."""

    def strike(scene: Scene) -> None:
        found = actors(f"ServeReplica:{scene.service.model}:{deployment}")
        _kill([process.pid for process in (found if every else found[:1])], deployment)

    return strike


def proxy_killed(scene: Scene) -> None:
    """Kill the process that listens."""
    _kill([process.pid for process in actors("ProxyActor")], "proxy")


def _kill(pids: Sequence[int], what: str) -> None:
    if not pids:
        raise ExecutionError(f"no process of {what} was found to be killed")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def ordered(fault: str, stage: str) -> Strike:
    """Have all replicas of a stage misbehave for a while."""

    def strike(scene: Scene) -> None:
        order = scene.orders / stage / fault
        order.touch()
        time.sleep(scene.lasts_s)
        order.unlink(missing_ok=True)

    return strike


def policy_changed(scene: Scene) -> None:
    """Change the policy every second, there and back."""
    ends = time.time() + scene.lasts_s
    for number in range(1, 10_000):
        began = time.time()
        if began > ends and number % 2:
            return
        policy = scene.policies[number % 2]
        # By its threshold alone: most of a policy's file is the record of its fit.
        cauc_ray.set_policy(url=scene.service.url, threshold=policy.threshold)
        done = time.time()
        scene.changes.append((began, done, policy.id))
        time.sleep(max(0.0, began + CHANGE_EVERY_S - done))


def overloaded(scene: Scene) -> None:
    """Ask ten times as much as the service can answer, whatever it says."""
    load = scene.load
    scene.beside = run_load(
        Load(
            load.url,
            load.bodies,
            0,
            scene.lasts_s,
            warm_up_s=0.0,
            per_s=OVERLOAD * scene.saturated_per_s,
            judge=load.judge,
        )
    )


SETUPS = {
    "degrade": Setup(),
    "fail": Setup(on_failure="fail"),
    "one router": Setup(routers=1),
    # Its first stage answers 10 rows a second, so that ten times as many are no trouble to the proxy; few may wait.
    "slow": Setup(takes=(0.2, 0.01, 0.02), batch=1, timeout_s=4.0, max_queued_rows=12),
}
KINDS = (
    Kind("replica-killed", "first stage, 1 of 2", "degrade", replicas_killed("stage:small", every=False)),
    Kind("replica-killed-last", "last stage, 1 of 2", "degrade", replicas_killed("stage:large", every=False)),
    Kind("replicas-killed", "last stage, both", "degrade", replicas_killed("stage:large", every=True)),
    Kind("replicas-killed-fail", "last stage, both", "fail", replicas_killed("stage:large", every=True)),
    Kind("router-killed", "router, 1 of 2", "degrade", replicas_killed("Router", every=False)),
    Kind("router-killed-alone", "router, the only one", "one router", replicas_killed("Router", every=True)),
    Kind("proxy-killed", "Serve's proxy", "degrade", proxy_killed, stretch=1.5),
    # What hangs stays so until it is replaced: soon over, this leaves time for that.
    Kind("replica-hangs", "last stage, 1 of 2", "degrade", ordered("hangs-once", "large"), lasts=0.1, stretch=1.5),
    Kind("stage-hangs", "last stage, both", "degrade", ordered("hangs", "large"), lasts=0.1, stretch=1.5),
    Kind("nan", "first stage, both", "degrade", ordered("nan", "small")),
    Kind("nan-last", "last stage, both", "degrade", ordered("nan", "large")),
    Kind("policy-changes", "every second", "degrade", policy_changed),
    Kind("overload", f"{OVERLOAD} times", "slow", overloaded),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.   seconds: of load for each kind."""

    kinds: tuple[str, ...]
    clients: int
    seconds: float
    rows: int


def strikes(plan: Plan, name: str, kinds: Sequence[Kind], folder: Path) -> Iterator[dict[str, Any]]:
    """Serve a setup, and yield what each kind of fault did to it."""
    setup = SETUPS[name]
    gaps = planted_rows(np.random.default_rng(0), plan.rows, DEFERRAL).gaps
    policy = write_table(folder / "LOGITS", {model: place + 1.0 for place, model in enumerate(MODELS)}, DEFERRAL)
    policies = policy.with_threshold(THRESHOLD), policy.with_threshold(0.0)
    judge = Judge({policy.id: Truth.of(policy, gaps) for policy in policies})
    for model in MODELS:
        (folder / "orders" / model).mkdir(parents=True)
    with cauc_ray.serve(pool_file(folder, setup), policies[0], port=0) as service:
        bodies = [body_of(row) for row in gaps.tolist()]
        for kind in kinds:
            load = Load(
                url=f"{service.url}/v2/models/{service.model}/infer",
                bodies=bodies,
                n_clients=plan.clients,
                seconds=kind.stretch * plan.seconds,
                warm_up_s=0.0,
                judge=judge,
            )
            scene = Scene(service, policies, load, folder / "orders", kind.lasts * plan.seconds)
            wait_until_well(scene, setup)
            struck = put_into(kind, scene, STRUCK_AT * plan.seconds)
            began_at = struck.load.began_at
            changes = [(began - began_at, done - began_at, policy_id) for began, done, policy_id in scene.changes]
            own = {"saturated_per_s": scene.saturated_per_s} if scene.beside is not None else {}
            own |= {"changes": len(changes), "outdated": struck.n_outdated(changes)} if changes else {}
            yield {"kind": kind.name, "where": kind.where, **struck.figures(), **own}


def put_into(kind: Kind, scene: Scene, at_s: float) -> Struck:
    """Make the load with a fault in its midst. Raises whatever the strike raises."""
    load = scene.load
    if kind.strike is overloaded:
        scene.saturated_per_s = run_load(Load(load.url, load.bodies, load.n_clients, 2.0, judge=load.judge)).per_s
    moments: list[float] = []
    failures: list[Exception] = []

    def strike() -> None:
        time.sleep(at_s)
        moments.append(time.time())
        try:
            kind.strike(scene)
        except Exception as error:
            failures.append(error)
        moments.append(time.time())

    thread = threading.Thread(target=strike)
    thread.start()
    result = run_load(load)
    thread.join()
    if failures:
        raise failures[0]
    whole = result if scene.beside is None else together(result, scene.beside)
    struck_at, over_at = (moment - result.began_at for moment in moments)
    return Struck(whole, struck_at, over_at)


def wait_until_well(scene: Scene, setup: Setup) -> None:
    """Wait until all replicas run and answers are whole. Raises ExecutionError where that does not come."""
    deadline = time.monotonic() + HEALING_S
    wanted = {"Router": setup.routers, **{f"stage:{model}": 2 for model in MODELS}}
    while time.monotonic() < deadline:
        with suppress(CaucError):
            if running(scene.service.model) == wanted and _all_right(scene):
                return
        time.sleep(0.2)
    raise ExecutionError(f"the service is not well: {running(scene.service.model)}")


def running(app: str) -> Mapping[str, int]:
    """Return how many replicas of each deployment run, and none that should not."""
    deployments = serve.status().applications[app].deployments
    return {
        name: sum(deployment.replica_states.values()) if set(deployment.replica_states) == {"RUNNING"} else -1
        for name, deployment in deployments.items()
    }


def _all_right(scene: Scene) -> bool:
    load = scene.load
    result = run_load(Load(load.url, load.bodies, load.n_clients, 0.5, warm_up_s=0.0, timeout_s=5.0, judge=load.judge))
    return all(kind == f"{RIGHT}{AND}{scene.policies[0].id}" for kind in result.kinds)


def pool_file(folder: Path, setup: Setup) -> Path:
    """Write the pool of a setup."""
    stages = [
        {
            "name": name,
            "model": {
                "kind": "python",
                "factory": "jobs.bench.models:troubled",
                "kwargs": {"column": f"gap{place}", "seconds_per_call": takes, "orders": str(folder / "orders" / name)},
            },
            "batch_size": setup.batch,
            "serving": {"timeout_s": setup.timeout_s},
            "replicas": {"min": 2},
            "resources": {"num_cpus": 0.1},
        }
        for place, (name, takes) in enumerate(zip(MODELS, setup.takes, strict=True))
    ]
    router = {"replicas": {"min": setup.routers}, "resources": {"num_cpus": 0.1}}
    serving = {"max_queued_rows": setup.max_queued_rows, "router": router}
    return write_pool(folder / "pool.yaml", stages, on_failure=setup.on_failure, serving=serving)


def main(argv: Sequence[str]) -> None:
    """Strike a service in each way of a plan."""
    plan = Plan(**json.loads(argv[0]))
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    for name in SETUPS:
        kinds = [kind for kind in KINDS if kind.setup == name and kind.name in plan.kinds]
        with tempfile.TemporaryDirectory() as folder:
            for found in strikes(plan, name, kinds, Path(folder)) if kinds else ():
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
