"""A fit by shards, and tasks, on a cluster one of whose nodes dies under them, in a process of its own.

Its argument is a folder with a table. The fit is done undisturbed, then again while the node dies; another comes before
the tasks, and dies under these. Prints what came of them.
"""

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path

import ray
from failing_tasks import slow
from ray.cluster_utils import Cluster

from cauc_ray.api.offline import fit, fit_shards
from cauc_ray.api.options import options_of
from cauc_ray.execution.tasks import Task, run_tasks
from jobs.faults.cluster import CHECKS

SHARDS = {"shards": 3, "resources": {"num_cpus": 1, "labels": {"tier": "edge"}}, "deadline_s": 400}
OPTIONS = options_of(fit).of({"models": ("m0", "m1", "m2"), "method": "rf", "budget": 9.0, **SHARDS})


def main() -> None:
    """Do all of it."""
    folder = Path(sys.argv[1])
    (folder / "tasks").mkdir()
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    add = partial(cluster.add_node, num_cpus=2, object_store_memory=10**8, labels={"tier": "edge"})
    nodes = [add(), add()]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

    def kill():
        cluster.remove_node(nodes.pop(), allow_graceful=False)

    def strike(n_passes):
        if n_passes == 4:
            killer = threading.Thread(target=kill)
            killer.start()
            killer.join()

    fits = [fit_shards(folder / "LOGITS", OPTIONS, on_pass) for on_pass in (lambda n_passes: None, strike)]
    report = {"policies": [policy.to_json() for policy, _ in fits], "nodes": len(set(fits[0][1].nodes))}
    nodes.append(add())
    tasks = [Task("a", str(n), partial(slow, 2.0, str(folder / "tasks" / str(n)))) for n in range(8)]
    outcomes = []
    for outcome in run_tasks(tasks, deadline_s=400):
        outcomes.append(outcome)
        if len(outcomes) == 2:
            while len(list((folder / "tasks").iterdir())) < 8:  # the last four have begun, on both nodes
                time.sleep(0.05)
            kill()
            nodes.append(add(wait=False))
    ray.shutdown()
    cluster.shutdown()
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    print(json.dumps({**report, "n": len(outcomes), "errors": errors, "attempts": [o.attempts for o in outcomes]}))


if __name__ == "__main__":
    main()
