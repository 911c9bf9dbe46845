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
    """Return the status and the content of one request."""
    try:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text else None
    except urllib.error.HTTPError as error:
        text = error.read()
        try:
            return error.code, json.loads(text)
        except ValueError:
            return error.code, text.decode()


class Watched:
    """A deployed service that is asked for rows."""

    def __init__(self, folder: Path, dashboard: str, port: int) -> None:
        self.folder, self.dashboard, self.url = folder, dashboard, f"http://127.0.0.1:{port}"
        self.ids = json.loads((folder / "ids.json").read_text())

    def deploy(self, config) -> int:
        """Put a configuration as `serve deploy` does; return the status."""
        return http("PUT", f"{self.dashboard}/api/serve/applications/", config)[0]

    def ask(self):
        """Ask for all rows and return (status, seconds, the answer)."""
        started = time.monotonic()
        tensor = {"name": "example_id", "shape": [len(self.ids)], "datatype": "BYTES", "data": self.ids}
        outputs = [{"name": name} for name in ("prediction", "stage", "degraded")]
        status, answer = http("POST", f"{self.url}/v2/models/two/infer", {"inputs": [tensor], "outputs": outputs})
        return status, time.monotonic() - started, answer

    def until(self, what, deadline_s=90.0):
        """Ask until an answer is what is waited for; return it, and the statuses and times of all before it."""
        seen, deadline = [], time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            try:
                status, took_s, answer = self.ask()
            except OSError as error:
                status, took_s, answer = 0, 0.0, str(error)
            seen.append([status, took_s])
            if status == 200 and what(answer["parameters"]):
                return answer, seen
            time.sleep(0.1)
        raise TimeoutError(f"not within {deadline_s} s; the last answer was {str(answer)[:500]}")

    def placement(self):
        """Return the nodes of each deployment's replicas."""
        _, details = http("GET", f"{self.dashboard}/api/serve/applications/")
        deployments = details["applications"]["two"]["deployments"]
        return {name: [one["node_id"] for one in own["replicas"]] for name, own in deployments.items()}

    def pids(self):
        """Return the process ids of all replicas."""
        _, details = http("GET", f"{self.dashboard}/api/serve/applications/")
        deployments = details["applications"]["two"]["deployments"]
        return sorted(one["pid"] for own in deployments.values() for one in own["replicas"])


def main() -> None:
    """Start the cluster, deploy, change, remove and add, and write found.json."""
    folder, dashboard_port, port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    policies = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("rf", "base", "other")}
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": dashboard_port}
    cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": FAST_DETECTION})
    edge = cluster.add_node(num_cpus=3, labels={"tier": "edge"})
    cloud = cluster.add_node(num_cpus=2, labels={"tier": "cloud"})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    found = {"nodes": {"edge": edge.node_id, "cloud": cloud.node_id}}
    service = Watched(folder, f"http://127.0.0.1:{dashboard_port}", port)

    def config():
        return {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [
                {
                    "name": "two",
                    "import_path": "cauc_ray.serving:build_app",
                    "route_prefix": "/",
                    "args": {"pool": str(folder / "pool.yaml"), "policy": str(folder / "rf.json"), "name": "two"},
                }
            ],
        }

    try:
        service.deploy(config())
        found["first"], _ = service.until(lambda told: not told["degraded"], 180)
        found["placement"] = service.placement()
        pids = service.pids()

        put = time.monotonic()
        policy_url = f"{service.url}/v2/models/two/policy"
        http("PUT", policy_url, {"policy": policies["base"]})
        found["changed"], found["while_changing"] = service.until(
            lambda told: told["policy_id"] != found["first"]["parameters"]["policy_id"]
        )
        found["change_s"] = time.monotonic() - put
        found["refused_put"] = http("PUT", policy_url, {"policy": policies["other"]})
        found["after_refusal"] = http("GET", policy_url)[1]["policy_id"]
        found["same_processes"] = service.pids() == pids

        cluster.remove_node(cloud, allow_graceful=False)
        found["degraded"], found["until_degraded"] = service.until(lambda told: told["degraded"])
        while_gone = [service.ask() for _ in range(10)]
        found["while_gone"] = [
            [status, took_s, answer["parameters"]["degraded"]] for status, took_s, answer in while_gone
        ]
        cluster.add_node(num_cpus=2, labels={"tier": "cloud"})
        found["healed"], found["until_healed"] = service.until(lambda told: not told["degraded"], 120)
    finally:
        (folder / "found.json").write_text(json.dumps(found))
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
