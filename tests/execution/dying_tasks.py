"""Tasks on a cluster whose only worker node dies under them, in a process of its own; prints what came of them."""

import json
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import ray
from failing_tasks import slow
from ray.cluster_utils import Cluster

from cauc_ray.execution.tasks import Task, run_tasks
from jobs.faults.cluster import CHECKS


def main() -> None:
    """Kill the node while tasks run there, and put another in its place."""
    folder = Path(sys.argv[1])
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8, "_system_config": CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(num_cpus=2, object_store_memory=10**8)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    def kill():
        while len(list(folder.iterdir())) < 3:  # two are done, the next has begun
            time.sleep(0.05)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            process.kill()
        cluster.add_node(wait=False, num_cpus=2, object_store_memory=10**8)

    tasks = [Task("a", str(number), partial(slow, 1.0, str(folder / str(number)))) for number in range(6)]
    outcomes = []
    for outcome in run_tasks(tasks, deadline_s=100):
        outcomes.append(outcome)
        if len(outcomes) == 2:
            kill()
    ray.shutdown()
    cluster.shutdown()
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    print(json.dumps({"n": len(outcomes), "errors": errors, "attempts": [o.attempts for o in outcomes]}))


if __name__ == "__main__":
    main()
