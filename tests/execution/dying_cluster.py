"""A run on a cluster whose node dies with the rows it holds, in a process of its own; prints what came of it."""

import json
import random
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

from jobs.faults.cascade import small_blocks, write_cascade
from jobs.faults.nodes import CHECKS
from jobs.faults.trial import Trial


def main() -> None:
    """Kill the node of the first two stages while rows that came from it wait for the last, which is slow."""
    folder = Path(sys.argv[1])
    small_blocks()
    cascade = write_cascade(folder, 960)
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 10**8, "_system_config": CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def node(tier):
        return cluster.add_node(wait=False, num_cpus=2, object_store_memory=10**8, labels={"tier": tier})

    edges = [node("edge")]
    node("cloud")
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    trial = Trial(cascade, folder, random.Random(0), 0.0)

    def strike():
        raylet = psutil.Process(edges[0].all_processes["raylet"][0].process.pid)
        workers = raylet.children(recursive=True)
        for process in (raylet, *workers):
            process.kill()
        edges.append(None)
        return True

    def replace(progress):
        if edges[-1] is None:
            edges[-1] = node("edge")

    def needs(tier):
        return {"resources": {"num_cpus": 0.5, "labels": {"tier": tier}}}

    def rows_wait_for_the_last():
        calls = trial.notes / "calls-2"
        return calls.exists() and calls.stat().st_size >= 2

    pool = trial.pool({2: {"seconds": 1.0}}, small=needs("edge"), middle=needs("edge"), large=needs("cloud"))
    with trial.striking(strike, after=rows_wait_for_the_last):
        wall_s = trial.run(pool, on_progress=replace)
    outcome = trial.outcome(wall_s)
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps({**asdict(outcome), "is_sound": outcome.is_sound}))


if __name__ == "__main__":
    main()
