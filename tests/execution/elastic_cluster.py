"""Run a cascade on a cluster whose three GPUs (none is real) two stages share, in a process of its own."""

import json
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import cauc_ray


def main() -> None:
    """Start a head without resources, an edge node and one with GPUs, run, and write down what there was to see."""
    folder = Path(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    edge = cluster.add_node(num_cpus=1, labels={"tier": "edge"}, resources={"licence": 1})
    cloud = cluster.add_node(num_cpus=4, num_gpus=3, labels={"tier": "cloud"})
    ray.init(address=cluster.address, log_to_driver=False)
    seen = []
    try:
        cauc_ray.run(
            folder / "pool.yaml",
            folder / "policy.json",
            folder / "input",
            folder / "out",
            on_progress=lambda at: seen.append([stage.replicas for stage in at.stages]),
        )
    finally:
        ray.shutdown()
        cluster.shutdown()
    found = {"nodes": {"edge": edge.node_id, "cloud": cloud.node_id}, "replicas": seen}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
