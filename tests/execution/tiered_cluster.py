"""Run cascades on a cluster of a head and two labelled nodes, in a process of its own: arguments are folders.

While the first starts, others hold the places of its first two stages, until the first stage has taken another. While
the second runs, the node with GPUs is drained, as before a spot instance ends; nothing else ends it.
"""

import json
import sys
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import cauc_ray


@ray.remote
class Holder:
    """Holds what it asks for."""


def main() -> None:
    """Start a head without resources, an edge node and one with GPUs (none is real), run, and say which is which."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    edge = cluster.add_node(num_cpus=2, labels={"tier": "edge"}, resources={"licence": 1})
    cloud = cluster.add_node(num_cpus=4, num_gpus=3, labels={"tier": "cloud"})
    ray.init(address=cluster.address, log_to_driver=False)
    folders, holders, drained_at = list(map(Path, sys.argv[1:])), [], []

    def drain(progress):
        """Announce the end of the node with GPUs, once rows have been answered there; the first stage then moves."""
        if progress.stages[0].handled and not drained_at:
            preemption, deadline_ms = 2, int(1000 * (time.time() + 600))
            client = ray._raylet.GcsClient(address=cluster.address)
            accepted, why = client.drain_node(cloud.node_id, preemption, "a spot instance ends", deadline_ms)
            assert accepted, why
            drained_at.append(time.time())
        elif drained_at and progress.stages[0].starting:
            (folders[1] / "slow-m0").unlink(missing_ok=True)

    def give_way(progress):
        """End those who hold places, once the first stage has found another."""
        if progress.stages[0].replicas:
            for holder in holders:
                ray.kill(holder)
            holders.clear()

    def hold(tier, **resources):
        holders.append(Holder.options(label_selector={"tier": tier}, **resources).remote())
        ray.get(holders[-1].__ray_ready__.remote())

    try:
        for folder, on_progress in zip(folders, (give_way, drain), strict=True):
            if on_progress is give_way:
                hold("edge", num_cpus=0, resources={"licence": 1})
                hold("cloud", num_cpus=3)
            words = (folder / name for name in ("pool.yaml", "policy.json", "input", "out"))
            cauc_ray.run(*words, on_progress=on_progress)
            assert ray.is_initialized()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps({"edge": edge.node_id, "cloud": cloud.node_id, "drained_at": drained_at[0]}))


if __name__ == "__main__":
    main()
