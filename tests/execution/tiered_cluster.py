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
    folders, drained_at = list(map(Path, sys.argv[1:])), []

    def drain(progress):
        """Announce the end of the node with GPUs, once rows of the last run have been answered there."""
        if folder is folders[-1] and progress.stages[0].handled and not drained_at:
            preemption, deadline_ms = 2, int(1000 * (time.time() + 600))
            client = ray._raylet.GcsClient(address=cluster.address)
            accepted, why = client.drain_node(cloud.node_id, preemption, "a spot instance ends", deadline_ms)
            assert accepted, why
            drained_at.append(time.time())

    try:
        for folder in folders:
            words = (folder / name for name in ("pool.yaml", "policy.json", "input", "out"))
            cauc_ray.run(*words, on_progress=drain)
            assert ray.is_initialized()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps({"edge": edge.node_id, "cloud": cloud.node_id, "drained_at": drained_at[0]}))


if __name__ == "__main__":
    main()
