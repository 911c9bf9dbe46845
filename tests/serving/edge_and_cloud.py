"""Serve a cascade on an edge and a cloud node, deployed as a configuration over REST, in a process of its own.

The cloud node goes and comes back; the policy changes. What there was to see is written down.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

FAST_DETECTION = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}


def http(method, url, body=None):
    """Return the status and the content of one request; status 0 where nothing answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or "null")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def ask():
    """Ask for all rows and return the status and the answer."""
    tensor = {"name": "example_id", "shape": [len(IDS)], "datatype": "BYTES", "data": IDS}
    outputs = [{"name": name} for name in ("prediction", "stage", "degraded")]
    return http("POST", f"{MODEL}/infer", {"inputs": [tensor], "outputs": outputs})


def until(condition, deadline_s=180.0):
    """Ask until a response's parameters fulfil a condition; return that answer, and the statuses of all before it."""
    statuses, deadline = [], time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        status, answer = ask()
        statuses.append(status)
        if status == 200 and condition(answer["parameters"]):
            return answer, statuses
        time.sleep(0.1)
    raise TimeoutError(f"not within {deadline_s} s; the last answer was {str(answer)[:500]}")


def main() -> None:
    """Start the cluster, deploy, change, remove and add, and write report.json."""
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": DASHBOARD, "_system_config": FAST_DETECTION}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    edge = cluster.add_node(num_cpus=3, labels={"tier": "edge"})
    cloud = cluster.add_node(num_cpus=2, labels={"tier": "cloud"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    report = {"nodes": {"edge": edge.node_id, "cloud": cloud.node_id}}
    arguments = {"pool": str(FOLDER / "pool.yaml"), "policy": str(FOLDER / "rf.json"), "name": "two"}
    application = {"name": "two", "import_path": "cauc_ray.serving:build_app", "route_prefix": "/", "args": arguments}
    try:
        options = {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": PORT}}
        http("PUT", APPLICATIONS, {**options, "applications": [application]})
        report["first"], _ = until(lambda response: not response["degraded"])
        deployments = http("GET", APPLICATIONS)[1]["applications"]["two"]["deployments"]
        report["placement"] = {
            name: [replica["node_id"] for replica in deployment["replicas"]] for name, deployment in deployments.items()
        }
        http("PUT", f"{MODEL}/policy", {"policy": json.loads((FOLDER / "base.json").read_text())})
        before = report["first"]["parameters"]["policy_id"]
        report["changed"], report["until_changed"] = until(lambda response: response["policy_id"] != before)
        cluster.remove_node(cloud, allow_graceful=False)
        report["degraded"], report["until_degraded"] = until(lambda response: response["degraded"])
        report["without_cloud"] = [(status, answer["parameters"]["degraded"]) for status, answer in (ask(), ask())]
        cluster.add_node(num_cpus=2, labels={"tier": "cloud"})
        report["healed"], report["until_healed"] = until(lambda response: not response["degraded"])
    finally:
        (FOLDER / "report.json").write_text(json.dumps(report))
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    FOLDER, DASHBOARD, PORT = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    MODEL = f"http://127.0.0.1:{PORT}/v2/models/two"
    APPLICATIONS = f"http://127.0.0.1:{DASHBOARD}/api/serve/applications/"
    IDS = json.loads((FOLDER / "ids.json").read_text())
    main()
