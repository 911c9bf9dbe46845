"""A fit by shards and a run on a cluster of a head and four labelled nodes, in a process of its own.

Its argument is a folder with a table, a policy, a pool and an input. Each is done undisturbed, then again while the
second edge node dies; that node comes back before the next.
"""

import json
import sys
import threading
import time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from cauc_ray import run
from cauc_ray.api.options import FitOptions
from cauc_ray.api.sharding import fit_shards

MODELS = ("m0", "m1", "m2")
STRUCK = "struck"


def fit_on_shards(folder: Path, out: Path) -> None:
    """Fit by shards; leave a file behind once they have answered a few questions, and let the node die."""
    out.mkdir()

    def on_pass(n_passes: int) -> None:
        if n_passes == 4:
            (out / STRUCK).touch()
            time.sleep(0.5)

    shards = {"shards": 6, "resources": {"num_cpus": 1, "labels": {"tier": "edge"}}, "deadline_s": 120}
    options = FitOptions.of_all({"models": MODELS, "method": "rf", "budget": 9.0, **shards})
    found = fit_shards(folder / "logits", options, on_pass)
    found.policy.save(out / "policy.json")
    (out / "result.json").write_text(json.dumps({"nodes": found.shards.nodes}))


def run_cascade(folder: Path, out: Path) -> None:
    """Run the pool on the input."""
    run(folder / "pool.yaml", folder / "policy.json", folder / "input", out)
    (out / "result.json").touch()


JOBS = {"fit": fit_on_shards, "run": run_cascade}
# What shows that a job is at work.
STRIKES_AT = {"fit": STRUCK, "run": "ledger/*.parquet"}


def struck(cluster, node, out, pattern, struck_at):
    """Let a node die once a job has left something behind, and is not done."""
    while not any(out.glob(pattern)):
        time.sleep(0.01)
    cluster.remove_node(node, allow_graceful=False)
    struck_at.append(not (out / "result.json").exists())


def main() -> None:
    """Run each job undisturbed, then with a node that dies. Prints which node is which, and whether it died in time."""
    folder = Path(sys.argv[1])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    edge = [cluster.add_node(num_cpus=4, labels={"tier": "edge"}) for _ in range(2)]
    small = cluster.add_node(num_cpus=2, num_gpus=1, labels={"tier": "small-gpu"})
    large = cluster.add_node(num_cpus=2, num_gpus=2, labels={"tier": "large-gpu"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    tiers = {"edge": [node.node_id for node in edge], "small-gpu": [small.node_id], "large-gpu": [large.node_id]}
    died_in_time = {}
    try:
        for name, job in JOBS.items():
            job(folder, folder / name)
        for name, job in JOBS.items():
            out, struck_at = folder / f"{name}-struck", []
            strike = threading.Thread(target=struck, args=(cluster, edge[-1], out, STRIKES_AT[name], struck_at))
            strike.start()
            job(folder, out)
            strike.join(timeout=60)
            died_in_time[name] = struck_at
            edge[-1] = cluster.add_node(num_cpus=4, labels={"tier": "edge"})
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps({"tiers": tiers, "died_in_time": died_in_time}))


if __name__ == "__main__":
    main()
