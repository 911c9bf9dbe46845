"""Run cascades on a cluster of a head and two labelled nodes, in a process of its own: arguments are folders."""

import json
import sys
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
    try:
        for folder in map(Path, sys.argv[1:]):
            cauc_ray.run(folder / "pool.yaml", folder / "policy.json", folder / "input", folder / "out")
            assert ray.is_initialized()
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps({"edge": edge.node_id, "cloud": cloud.node_id}))


if __name__ == "__main__":
    main()
