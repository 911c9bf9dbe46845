"""Serve a cascade on an edge and a cloud node, deployed as a configuration over REST, in a process of its own.

The cloud node goes and comes back; the policy changes. What there was to see is written down.
"""

import json
import sys
from pathlib import Path

import ray
from asking import http, infer, until
from ray.cluster_utils import Cluster

from jobs.faults.cluster import CHECKS


def main(folder, dashboard, port):
    """Start the cluster, deploy, change, remove and add, and write report.json."""
    url, applications = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}/api/serve/applications/"
    ids = json.loads((folder / "ids.json").read_text())

    def ask():
        """Ask for all rows; return the status and the answer, status 0 where no service answers."""
        try:
            return infer(url, "two", {"example_id": ids}, ("prediction", "stage", "degraded"))
        except (OSError, ValueError) as error:
            return 0, str(error)

    def until_answered(condition):
        """Ask until a response's parameters fulfil a condition; return that answer, and the statuses so far."""
        answers = []

        def fulfils():
            answers.append(ask())
            status, answer = answers[-1]
            return status == 200 and condition(answer["parameters"])

        until(fulfils)
        return answers[-1][1], [status for status, _ in answers]

    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": dashboard, "_system_config": CHECKS}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    edge = cluster.add_node(num_cpus=3, labels={"tier": "edge"})
    cloud = cluster.add_node(num_cpus=2, labels={"tier": "cloud"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    report = {"nodes": {"edge": edge.node_id, "cloud": cloud.node_id}}
    arguments = {"pool": str(folder / "pool.yaml"), "policy": str(folder / "rf.json"), "name": "two"}
    application = {"name": "two", "import_path": "cauc_ray.serving:build_app", "route_prefix": "/", "args": arguments}
    options = {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": port}}
    try:
        body = {**options, "applications": [application]}
        http("PUT", applications, body, **{"Content-Type": "application/json"})
        report["first"], _ = until_answered(lambda response: not response["degraded"])
        deployments = json.loads(http("GET", applications)[1])["applications"]["two"]["deployments"]
        report["placement"] = {
            name: [replica["node_id"] for replica in deployment["replicas"]] for name, deployment in deployments.items()
        }
        http("PUT", f"{url}/v2/models/two/policy", {"policy": json.loads((folder / "base.json").read_text())})
        before = report["first"]["parameters"]["policy_id"]
        report["changed"], report["until_changed"] = until_answered(lambda response: response["policy_id"] != before)
        cluster.remove_node(cloud, allow_graceful=False)
        report["degraded"], report["until_degraded"] = until_answered(lambda response: response["degraded"])
        report["without_cloud"] = [(status, answer["parameters"]["degraded"]) for status, answer in (ask(), ask())]
        cluster.add_node(num_cpus=2, labels={"tier": "cloud"})
        report["healed"], report["until_healed"] = until_answered(lambda response: not response["degraded"])
    finally:
        (folder / "report.json").write_text(json.dumps(report))
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
