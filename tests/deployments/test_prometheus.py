"""A real Prometheus: it reads the alert rules and scrapes services of both shells; the dashboard's panels have data."""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import ray
import yaml
from asking import http, infer, outputs_of, until
from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE
from runs import pool_of, python_model, saved_model, write_pool
from synthetic import chain

import cauc_ray
from cauc_ray.data.writing import write_logits
from cauc_ray.errors import PolicyError
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from jobs.bench.processes import free_port

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
RULES = DEPLOYMENTS / "chart" / "alerts.yaml"
DASHBOARD = json.loads((DEPLOYMENTS / "grafana.json").read_text())
DEADLINE_S = 240.0
N_SAME, N_SHIFTED = 300, 400

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool (apt-get install prometheus) are not installed",
)


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_the_configuration_which_reads_rays_list_of_nodes():
    promtool("check", "rules", RULES)
    promtool("check", "config", DEPLOYMENTS / "prometheus.yaml")
    job, _ = yaml.safe_load((DEPLOYMENTS / "prometheus.yaml").read_text())["scrape_configs"]
    (path,) = job["file_sd_configs"][0]["files"]
    assert Path(path).name == PROMETHEUS_SERVICE_DISCOVERY_FILE


def series(name, **labels):
    return "ray_cauc_serve_" + name + "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


REQUESTS = [series("requests_total", model="m", status=status) for status in ("503", "200")]
DEGRADED = [
    series("rows_total", model="m", stage=stage, outcome=o) for stage, o in (("a", "degraded"), ("b", "capped"))
]
FAILED = [series("rows_total", model="m", stage=stage, outcome=o) for stage, o in (("a", "failed"), ("b", "accepted"))]
SLOW = [series("request_seconds_bucket", model="m", le=le) for le in ("5", "10", "+Inf")]
# By alert: series, their values minute by minute (start + step x times) when it fires and when it does not, its labels.
ALERTS = {
    "CaucRequestsFail": (REQUESTS, ["0+6x60", "0+94x60"], ["0x60", "0+100x60"], {}),
    "CaucDegraded": (DEGRADED, ["0+6x60", "0+94x60"], ["0x60", "0+100x60"], {}),
    "CaucSlow": (SLOW, ["0+98x60", "0+100x60", "0+100x60"], ["0+100x60"] * 3, {}),
    "CaucRowsFail": (FAILED, ["0+2x60", "0+98x60"], ["0x60", "0+100x60"], {"stage": "a"}),
    "CaucPolicyDrifted": ([series("watch_valid", model="m", WorkerId="1")], ["0x60"], ["1x60"], {}),
}


def alert_rules():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_fires_on_ill_series_and_not_on_healthy_ones(alert, tmp_path):
    names, ill, healthy, labels = ALERTS[alert]
    rule, tests = alert_rules()[alert], []
    for values, expected in ((ill, [{"exp_labels": {"model": "m", **labels, **rule["labels"]}}]), (healthy, [])):
        inputs = [{"series": name, "values": text} for name, text in zip(names, values, strict=True)]
        case = {"eval_time": "40m", "alertname": alert, "exp_alerts": expected}
        tests.append({"interval": "1m", "input_series": inputs, "alert_rule_test": [case]})
    del rule["annotations"]  # promtool would compare their text
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "tested", "rules": [rule]}]}))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool("test", "rules", tmp_path / "tests.yaml")


def test_every_alert_has_a_case_and_texts():
    assert alert_rules().keys() == {*ALERTS, "CaucSilent"}  # CaucSilent fires on a service that ends, below
    assert all(rule["annotations"].keys() == {"summary", "description"} for rule in alert_rules().values())


# --- scraped ---


class Prometheus:
    """A Prometheus that scrapes each second, by deployments/prometheus.yaml with other addresses."""

    def __init__(self, folder, nodes=(), local=()):
        config = yaml.safe_load((DEPLOYMENTS / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        (folder / "nodes.json").write_text(json.dumps([{"targets": list(nodes), "labels": {}}]))
        jobs = {job["job_name"]: job for job in config["scrape_configs"]}
        jobs["ray"]["file_sd_configs"][0]["files"] = [str(folder / "nodes.json")]
        jobs["local"]["static_configs"] = [{"targets": list(local)}]
        hasty = yaml.safe_load(RULES.read_text())
        for rule in hasty["groups"][0]["rules"]:
            rule.pop("for", None)  # fires at once
        (folder / "alerts.yaml").write_text(yaml.safe_dump(hasty))
        config["rule_files"] = [str(folder / "alerts.yaml")]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}/api/v1"
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=self.log,
            stderr=self.log,
        )

    def ask(self, path, **query):
        with urllib.request.urlopen(f"{self.url}/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression):
        return self.ask("query", query=expression)["result"]

    def faults(self):
        """Return what keeps it from scraping."""
        return [(target["scrapeUrl"], target["lastError"]) for target in self.ask("targets")["activeTargets"]]

    def alerts(self):
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"]}

    def close(self):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


class Chain:
    """A watched pool of three stages, the last of which can be made to fail or to hang; and an edge before it.

    The service compares two policies and logs its rows. The edge asks it for the last stage.
    """

    def __init__(self, folder):
        self.folder = folder
        same, shifted = chain(11, N_SAME), chain(12, N_SHIFTED, strengths=(0.0, 0.0, 0.5))
        self.ids = [*(f"same-{row}" for row in range(N_SAME)), *(f"shifted-{row}" for row in range(N_SHIFTED))]
        self.labels = [*same.labels.tolist(), *shifted.labels.tolist()]
        for stage, model in enumerate(same.models):
            logits, labels = [*same.logits[stage], *shifted.logits[stage]], np.array(self.labels)
            write_logits(
                folder / "LOGITS", model, "test", example_ids=self.ids, labels=labels, logits=logits, costs=None
            )
        splits = (chain(13, 1500), chain(13, 1500, shift=1))
        self.policy = fit_rf(*splits, ThresholdRule(budget=12.0))
        self.candidate = fit_rf(*splits, ThresholdRule(budget=9.0))
        models = {name: saved_model(name) for name in same.models[:2]}
        switches = {name: str(folder / name) for name in ("fails", "hangs")}
        last = same.models[2]
        models[last] = python_model("saved_while", logits=str(folder / "LOGITS"), model=last, **switches)
        self.pool = pool_of(folder, models, serving={"timeout_s": 1.0})
        serving = {"shadow": 0.5, "max_request_rows": 50, "log": {"to": str(folder / "seen"), "flush_s": 1}}
        serving["canary"] = {"decide": "by-hand"}
        content = yaml.safe_load(self.pool.read_text()) | {"on_failure": "degrade", "serving": serving}
        self.pool.write_text(yaml.safe_dump(content))
        (folder / "edge").mkdir()

    @contextmanager
    def edge(self, service):
        """Run the edge before a service."""
        models = {name: saved_model(name, self.folder / "LOGITS") for name in self.policy.models[:2]}
        models[self.policy.models[2]] = {"kind": "remote", "url": service.url, "model": "six"}
        stages = [{"name": name, "model": model} for name, model in models.items()]
        pool = write_pool(self.folder / "edge", stages, on_failure="degrade")
        with cauc_ray.serve(pool, self.policy, port=0, name="six", local=True) as edge:
            yield edge

    def ask(self, service, start, stop):
        """Ask for rows, and give feedback on their answers if there are any."""
        outputs = ("prediction", "confidence", "stage")
        status, content = infer(service.url, "six", {"example_id": self.ids[start:stop]}, outputs)
        if status == 200:
            feedback = {name: values.tolist() for name, values in outputs_of(content).items()}
            feedback |= {name: content["parameters"][name] for name in ("policy_id", "answer_id")}
            feedback["label"] = self.labels[start:stop]
            assert http("POST", f"{service.url}/v2/models/six/feedback", feedback)[0] == 200
        return status

    def cause(self, service, edge):
        """Cause everything that the dashboard shows, unless the machine is too busy to answer in time."""
        cauc_ray.set_policy(self.candidate, share=0.3, url=service.url)
        for start in range(0, len(self.ids), 20):
            self.ask(service, start, start + 20)
        cauc_ray.set_policy(url=service.url, rollback=True)
        for start in range(0, 100, 20):
            self.ask(edge, start, start + 20)
        for switch in ("fails", "hangs"):
            (self.folder / switch).touch()
            for start in range(0, 60, 20):
                self.ask(service, start, start + 20)
            (self.folder / switch).unlink()
        assert self.ask(service, 0, 51) == 413
        assert infer(service.url, "six", {"example_id": ["absent"]})[0] == 422
        with pytest.raises(PolicyError):
            cauc_ray.set_policy(url=service.url, budget=1e-9)


def panels():
    """Return (query as Grafana would send it, labels that the legend names) by panel."""
    values = {"$__rate_interval": "1m", "$model": "six", "$stage": ".+"}
    by_title = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            query = re.sub("|".join(map(re.escape, values)), lambda name: values[name[0]], target["expr"])
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            by_title[f"{panel['title']} ({panel['type']} {target['refId']})"] = query, labels
    return by_title


def address_of(service):
    return service.url.removeprefix("http://")


@pytest.mark.soak("full")
@pytest.mark.parametrize("local", [True, False], ids=["without Ray", "on Ray"])
def test_a_service_fills_every_panel_and_its_end_is_noticed(request, tmp_path, local):
    """Every panel has data, variables have values, and the active policy is shown."""
    chain, nodes = Chain(tmp_path), []
    if not local:
        request.getfixturevalue("ray_session")
        nodes = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    with (
        cauc_ray.serve(chain.pool, chain.policy, port=0, name="six", local=local) as service,
        chain.edge(service) as edge,
        closing(Prometheus(tmp_path, nodes, map(address_of, (service, edge) if local else (edge,)))) as prometheus,
    ):
        deadline, empty = time.monotonic() + DEADLINE_S, dict(panels())
        while empty:
            assert time.monotonic() < deadline, (empty, prometheus.faults())
            chain.cause(service, edge)
            empty = {title: query for title, (query, _) in panels().items() if not prometheus.query(query)}
        for title, (query, labels) in panels().items():
            assert all(line["metric"].keys() == labels for line in prometheus.query(query)), title
        for variable in DASHBOARD["templating"]["list"]:
            if variable["type"] == "query":
                expression, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
                values = {line["metric"].get(label) for line in prometheus.query(expression.replace("$model", "six"))}
                assert values == ({"six"} if label == "model" else set(chain.policy.models))
        edge.stop()

        def active():
            return {line["metric"]["policy"] for line in prometheus.query('ray_cauc_serve_policy{model="six"} == 1')}

        until(lambda: active() == {chain.policy.id})  # a change is visible once it has been scraped
        cauc_ray.set_policy(chain.candidate, url=service.url)
        until(lambda: active() == {chain.candidate.id})
        if local:
            assert "CaucDegraded" in prometheus.alerts()
            assert "CaucSilent" not in prometheus.alerts()
            service.stop()
            until(lambda: "CaucSilent" in prometheus.alerts())
