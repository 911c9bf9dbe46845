"""The death of nodes: those of a cluster of several on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from jobs.faults import processes
from jobs.faults.trial import Outcome, Trial

N_NODES = 3
# A dead node is noticed after about so many seconds; Ray's own setting would take fifteen.
NOTICED_S = 2.0
CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}


class Nodes:
    """A cluster of a head without room for stages and some nodes, on whose CPUs the stages fit twice but for one."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8}
        self._cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": CHECKS})
        self._nodes: list[Any] = [self._node() for _ in range(N_NODES)]
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level="ERROR")

    def close(self) -> None:
        """End the cluster."""
        ray.shutdown()
        self._cluster.shutdown()

    def kill_one(self, trial: Trial) -> bool:
        """Kill the raylet, and with it the object store, and all workers of a node that a stage is on."""
        trial.rng.shuffle(self._nodes)
        for node in self._nodes:
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            workers = raylet.children(recursive=True)
            if not {p.pid for p in workers} & {p.pid for p in processes.actors("StageWorker")}:
                continue
            raylet.kill()
            for worker in workers:
                with suppress(psutil.Error):
                    worker.kill()
            self._nodes.remove(node)
            return True
        return False

    def mend(self) -> None:
        """Have as many nodes as at first. Ray starts them from the main thread only."""
        while len(self._nodes) < N_NODES:
            self._nodes.append(self._node())

    def _node(self) -> Any:
        return self._cluster.add_node(wait=False, num_cpus=2, object_store_memory=2 * 10**8)


def node_killed(nodes: Nodes, *, replaced: bool) -> Callable[[Trial], Outcome]:
    """Kill a node, whose rows begin anew from the input; the others have room, or another comes."""

    def put_into(trial: Trial) -> Outcome:
        options = {"on_progress": lambda progress: nodes.mend()} if replaced else {}
        with trial.striking(lambda: nodes.kill_one(trial)):
            wall_s = trial.run(trial.pool(), **options)
        nodes.mend()
        time.sleep(NOTICED_S)
        return trial.outcome(wall_s)

    return put_into
