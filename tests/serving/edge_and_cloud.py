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
    """Ask for all rows and return (status, seconds, the answer)."""
    started = time.monotonic()
    tensor = {"name": "example_id", "shape": [len(IDS)], "datatype": "BYTES", "data": IDS}
    outputs = [{"name": name} for name in ("prediction", "stage", "degraded")]
    status, answer = http("POST", f"{MODEL}/infer", {"inputs": [tensor], "outputs": outputs})
    return status, time.monotonic() - started, answer


def until(what, deadline_s=180.0):
    """Ask until an answer is what is waited for; return it, and the statuses of all before it."""
    statuses, deadline = [], time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        status, _, answer = ask()
        statuses.append(status)
        if status == 200 and what(answer["parameters"]):
            return answer, statuses
        time.sleep(0.1)
    raise TimeoutError(f"not within {deadline_s} s; the last answer was {str(answer)[:500]}")


def main() -> None:
    """Start the cluster, deploy, change, remove and add, and write found.json."""
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": DASHBOARD, "_system_config": FAST_DETECTION}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    edge = cluster.add_node(num_cpus=3, labels={"tier": "edge"})
    cloud = cluster.add_node(num_cpus=2, labels={"tier": "cloud"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found = {"nodes": {"edge": edge.node_id, "cloud": cloud.node_id}}
    arguments = {"pool": str(FOLDER / "pool.yaml"), "policy": str(FOLDER / "rf.json"), "name": "two"}
    application = {"name": "two", "import_path": "cauc_ray.serving:build_app", "route_prefix": "/", "args": arguments}
    try:
        options = {"proxy_location": "HeadOnly", "http_options": {"host": "127.0.0.1", "port": PORT}}
        http("PUT", APPLICATIONS, {**options, "applications": [application]})
        found["first"], _ = until(lambda told: not told["degraded"])
        deployments = http("GET", APPLICATIONS)[1]["applications"]["two"]["deployments"]
        found["placement"] = {name: [one["node_id"] for one in own["replicas"]] for name, own in deployments.items()}
        http("PUT", f"{MODEL}/policy", {"policy": json.loads((FOLDER / "base.json").read_text())})
        before = found["first"]["parameters"]["policy_id"]
        found["changed"], found["while_changing"] = until(lambda told: told["policy_id"] != before)
        cluster.remove_node(cloud, allow_graceful=False)
        found["degraded"], found["until_degraded"] = until(lambda told: told["degraded"])
        while_gone = [ask() for _ in range(10)]
        found["while_gone"] = [
            [status, took_s, answer["parameters"]["degraded"]] for status, took_s, answer in while_gone
        ]
        cluster.add_node(num_cpus=2, labels={"tier": "cloud"})
        found["healed"], found["until_healed"] = until(lambda told: not told["degraded"])
    finally:
        (FOLDER / "found.json").write_text(json.dumps(found))
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    FOLDER, DASHBOARD, PORT = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    MODEL = f"http://127.0.0.1:{PORT}/v2/models/two"
    APPLICATIONS = f"http://127.0.0.1:{DASHBOARD}/api/serve/applications/"
    IDS = json.loads((FOLDER / "ids.json").read_text())
    main()
