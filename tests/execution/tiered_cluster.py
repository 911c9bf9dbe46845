"""Run cascades on a cluster of a head and two labelled nodes, in a process of its own: arguments are folders.

While the last of them runs, the node with GPUs is drained, as before a spot instance ends; nothing else ends it.
"""

import json
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import cauc_ray


def main() -> None:
    """Start a head without resources, an edge node and one with GPUs (none is real), run, and say which is which."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    edge = cluster.add_node(num_cpus=2, labels={"tier": "edge"}, resources={"licence": 1})
    cloud = cluster.add_node(num_cpus=4, num_gpus=3, labels={"tier": "cloud"})
    ray.init(address=cluster.address, log_to_driver=False)
    drained_at = []

    def drain(progress):
        """Announce the end of the node with GPUs, once rows have been answered there."""
        if progress.stages[0].accepted + progress.stages[0].deferred and not drained_at:
            preemption, deadline_ms = 2, int(1000 * (time.time() + 600))
            client = ray._raylet.GcsClient(address=cluster.address)
            accepted, why = client.drain_node(cloud.node_id, preemption, "a spot instance ends", deadline_ms)
            assert accepted, why
            drained_at.append(time.time())

    try:
        *folders, last = map(Path, sys.argv[1:])
        for folder in folders:
            cauc_ray.run(folder / "pool.yaml", folder / "policy.json", folder / "input", folder / "out")
            assert ray.is_initialized()
        cauc_ray.run(last / "pool.yaml", last / "policy.json", last / "input", last / "out", on_progress=drain)
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps({"edge": edge.node_id, "cloud": cloud.node_id, "drained_at": drained_at[0]}))


if __name__ == "__main__":
    main()
