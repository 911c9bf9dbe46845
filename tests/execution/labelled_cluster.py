"""Run a cascade on a cluster of a head and two labelled nodes, in a process of its own: arguments are folders."""

import json
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

import cauc_ray


def main() -> None:
    """Start the cluster, run, and write down which node is which."""
    folder = Path(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = {tier: cluster.add_node(num_cpus=2, labels={"tier": tier}) for tier in ("edge", "cloud")}
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        cauc_ray.run(folder / "pool.yaml", folder / "policy.json", folder / "input", folder / "out")
        assert ray.is_initialized()
    finally:
        ray.shutdown()
        cluster.shutdown()
    (folder / "nodes.json").write_text(json.dumps({tier: node.node_id for tier, node in nodes.items()}))


if __name__ == "__main__":
    main()
