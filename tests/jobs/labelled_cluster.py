"""Jobs on a cluster of a head and four labelled nodes, in a process of its own: its argument is a folder.

The folder holds the configs of jobs: NAME.yaml, and NAME-struck.yaml, under which the second edge node dies as soon as
what the config's `strikes_at` names is there; it comes back before the next job.
"""

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from jobs import calibrate, evaluate
from jobs.job import JobResult, JobRun, run
from jobs.progress import Progress

STRUCK = "struck"


class Striking(Progress):
    """Leaves a file behind once the shards have answered a few questions, and lets the node die."""

    folder: Path

    def report(self, done: int, total: int | None, unit: str) -> None:
        super().report(done, total, unit)
        if done == 4:
            (self.folder / STRUCK).touch()
            time.sleep(0.5)


def calibrate_until_struck(config: calibrate.CalibrateJob, job: JobRun) -> JobResult:
    progress = Striking("calibrate")
    progress.folder = job.folder
    return calibrate.work(config, replace(job, progress=progress))


JOBS = {"calibrate": replace(calibrate.JOB, work=calibrate_until_struck), "evaluate": evaluate.JOB}
# What shows that a job is at work.
STRIKES_AT = {"calibrate": STRUCK, "evaluate": "run/ledger/*.parquet"}


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
            assert run(job, folder / f"{name}.yaml", None) == 0
        for name, job in JOBS.items():
            out, struck_at = folder / f"{name}-struck", []
            strike = threading.Thread(target=struck, args=(cluster, edge[-1], out, STRIKES_AT[name], struck_at))
            strike.start()
            assert run(job, folder / f"{name}-struck.yaml", None) == 0
            strike.join(timeout=60)
            died_in_time[name] = struck_at
            edge[-1] = cluster.add_node(num_cpus=4, labels={"tier": "edge"})
    finally:
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps({"tiers": tiers, "died_in_time": died_in_time}))


if __name__ == "__main__":
    main()
