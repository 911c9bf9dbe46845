"""A real Prometheus: it reads the alert rules and scrapes services of both shells; the dashboard's panels have data."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import yaml
from asking import http, infer, outputs_of
from fleet_source import Key, Source, with_fleet
from runs import pool_of, python_model, saved_model, write_pool
from synthetic import chain

import cauc_ray
from cauc_ray.data.writing import write_logits
from cauc_ray.errors import PolicyError
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.threshold import ThresholdRule

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
RULES = DEPLOYMENTS / "chart" / "alerts.yaml"
DASHBOARD = json.loads((DEPLOYMENTS / "grafana.json").read_text())
DEADLINE_S = 120.0
N_SAME, N_OTHER = 300, 400

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus and promtool (apt-get install prometheus) are not here",
)


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules_and_the_configuration():
    promtool("check", "rules", RULES)
    promtool("check", "config", DEPLOYMENTS / "prometheus.yaml")


# By alert: series that make it fire and series that do not, as promtool's tests write them: start + step x times.
REQUESTS, ROWS = "ray_cauc_serve_requests_total", "ray_cauc_serve_rows_total"
BUCKET = "ray_cauc_serve_request_seconds_bucket"
FIRES = {
    "CaucRequestsFail": ({f'{REQUESTS}{{model="m",status="503"}}': 6, f'{REQUESTS}{{model="m",status="200"}}': 94}, {}),
    "CaucDegraded": (
        {f'{ROWS}{{model="m",stage="a",outcome="degraded"}}': 6, f'{ROWS}{{model="m",stage="b",outcome="capped"}}': 94},
        {},
    ),
    "CaucSlow": ({f'{BUCKET}{{model="m",le="{le}"}}': n for le, n in (("5", 98), ("10", 100), ("+Inf", 100))}, {}),
    "CaucRowsFail": (
        {f'{ROWS}{{model="m",stage="a",outcome="failed"}}': 2, f'{ROWS}{{model="m",stage="b",outcome="accepted"}}': 98},
        {"stage": "a"},
    ),
    "CaucPolicyDrifted": ({'ray_cauc_serve_watch_holds{model="m",WorkerId="1"}': None}, {}),
}


@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_where_it_should_and_not_on_a_healthy_service(alert, tmp_path):
    ill, labels = FIRES[alert]
    (severity,) = [one["labels"] for one in rules() if one["alert"] == alert]
    seen = {"model": "m", **labels, **severity}
    healthy = {name: None if step is None else (100 if step > 50 else 0) for name, step in ill.items()}
    if alert == "CaucSlow":
        healthy = dict.fromkeys(ill, 100)
    tests = []
    for series, expected in ((ill, [{"exp_labels": seen}]), (healthy, [])):
        drifted = "0x60" if expected else "1x60"
        values = {name: drifted if step is None else f"0+{step}x60" for name, step in series.items()}
        inputs = [{"series": name, "values": value} for name, value in values.items()]
        case = {"eval_time": "40m", "alertname": alert, "exp_alerts": expected}
        tests.append({"interval": "1m", "input_series": inputs, "alert_rule_test": [case]})
    # The texts are not pinned: promtool compares them unless the rules have none.
    bare = yaml.safe_load(RULES.read_text())
    for rule in bare["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(bare))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": tests}))
    promtool("test", "rules", tmp_path / "tests.yaml")


def rules():
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    return group["rules"]


def test_every_alert_is_tried_and_says_what_to_do():
    assert {rule["alert"] for rule in rules()} == {*FIRES, "CaucSilent"}  # that one below, on a service that ends
    assert all(set(rule["annotations"]) == {"summary", "description"} for rule in rules())


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
            rule.pop("for", None)  # there is no time to wait
        (folder / "alerts.yaml").write_text(yaml.safe_dump(hasty))
        config["rule_files"] = [str(folder / "alerts.yaml")]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
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
        return [(one["scrapeUrl"], one["lastError"]) for one in self.ask("targets")["activeTargets"]]

    def alerts(self):
        return {one["labels"]["alertname"] for one in self.ask("alerts")["alerts"]}

    def close(self):
        self.process.terminate()
        self.process.wait(30)
        self.log.close()


class Chain:
    """A watched pool of three stages, the last of which can be made to fail or to hang; and an edge before it.

    The service compares two policies and logs what it sees. The edge asks it for the last stage, follows a policy
    that is signed, and reports to it.
    """

    def __init__(self, folder):
        self.folder = folder
        same, other = chain(11, N_SAME), chain(12, N_OTHER, strengths=(0.0, 0.0, 0.5))
        self.ids = [*(f"same-{row}" for row in range(N_SAME)), *(f"other-{row}" for row in range(N_OTHER))]
        for stage, model in enumerate(same.models):
            logits = [*same.logits[stage], *other.logits[stage]]
            labels = np.concatenate([same.labels, other.labels])
            write_logits(
                folder / "LOGITS", model, "test", example_ids=self.ids, labels=labels, logits=logits, costs=None
            )
        self.labels = [*same.labels.tolist(), *other.labels.tolist()]
        fitting = (chain(13, 1500), chain(13, 1500, shift=1))
        self.policy = fit_rf(*fitting, ThresholdRule(budget=12.0))
        self.other = fit_rf(*fitting, ThresholdRule(budget=9.0))
        own = {name: str(folder / name) for name in ("fails", "hangs")}
        models = {name: saved_model(name) for name in same.models[:2]}
        models[same.models[2]] = python_model("saved_while", logits=str(folder / "LOGITS"), model=same.models[2], **own)
        self.pool = pool_of(folder, models, serving={"timeout_s": 1.0})
        content = yaml.safe_load(self.pool.read_text())
        serving = {"shadow": 0.5, "max_request_rows": 50, "log": {"to": str(folder / "seen"), "flush_s": 1}}
        serving["canary"] = {"decide": "by-hand"}
        content |= {"on_failure": "degrade", "serving": serving}
        self.pool.write_text(yaml.safe_dump(content))
        (folder / "edge").mkdir()

    @contextmanager
    def edge(self, service):
        """Run the edge before a service."""
        folder, source = self.folder / "edge", Source()
        key = Key(folder)
        source.files = key.signed(self.policy)
        models = {name: saved_model(name, self.folder / "LOGITS") for name in self.policy.models[:2]}
        models[self.policy.models[2]] = {"kind": "remote", "url": service.url, "model": "six"}
        stages = [{"name": name, "model": model} for name, model in models.items()]
        pool = write_pool(folder, stages, on_failure="degrade")
        report = f"{service.url}/v2/models/six/fleet"
        pool = with_fleet(pool, policy=f"{source.url}/policy.json", public_key="public.pem", report=report, every_s=0.5)
        try:
            with cauc_ray.serve(pool, self.policy, port=0, name="six", local=True) as edge:
                yield edge
        finally:
            source.close()

    def ask(self, service, start, stop):
        """Ask for rows and give feedback on their answers."""
        outputs = ("prediction", "confidence", "stage")
        status, content = infer(service.url, "six", {"example_id": self.ids[start:stop]}, outputs)
        if status == 200:
            said = {name: values.tolist() for name, values in outputs_of(content).items()}
            said |= {name: content["parameters"][name] for name in ("policy_id", "answer_id")}
            said["label"] = self.labels[start:stop]
            assert http("POST", f"{service.url}/v2/models/six/feedback", said)[0] == 200
        return status

    def cause(self, service, edge):
        """Have everything happen that the dashboard shows."""
        cauc_ray.set_policy(self.other, share=0.3, url=service.url)
        for start in range(0, len(self.ids), 20):
            assert self.ask(service, start, start + 20) == 200
        cauc_ray.set_policy(url=service.url, rollback=True)
        for start in range(0, 100, 20):
            assert self.ask(edge, start, start + 20) == 200
        for name in ("fails", "hangs"):
            (self.folder / name).touch()
            for start in range(0, 60, 20):
                self.ask(service, start, start + 20)
            (self.folder / name).unlink()
        assert self.ask(service, 0, 51) == 413
        assert infer(service.url, "six", {"example_id": ["not there"]})[0] == 422
        with pytest.raises(PolicyError):
            cauc_ray.set_policy(url=service.url, budget=1e-9)


def queries(model="six", stage=".+"):
    """Return each panel's queries as Grafana would send them."""
    found = {}
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            text = target["expr"].replace("$__rate_interval", "1m").replace("$model", model).replace("$stage", stage)
            found[f"{panel['title']} ({panel['type']} {target['refId']})"] = text
    return found


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while (left := condition()) and time.monotonic() < deadline:
        time.sleep(1.0)
    return left


def shown(chain, service, edge, prometheus):
    """Cause all that the dashboard shows, again and again, until every panel has data; return those that have none."""
    empty = {}

    def still_empty():
        chain.cause(service, edge)
        empty.clear()
        empty.update({name: text for name, text in queries().items() if not prometheus.query(text)})
        return empty

    return until(still_empty)


@pytest.fixture
def planted(tmp_path):
    return Chain(tmp_path)


def check(chain, service, edge, prometheus):
    """Every panel has data, the variables have values, and the active policy is the one that is shown."""
    assert shown(chain, service, edge, prometheus) == {}, prometheus.faults()
    edge.stop()

    def active():
        return {one["metric"]["policy"] for one in prometheus.query('ray_cauc_serve_policy{model="six"} == 1')}

    assert not until(lambda: active() != {chain.policy.id})  # a change is seen once it has been scraped
    cauc_ray.set_policy(chain.other, url=service.url)
    assert not until(lambda: active() != {chain.other.id})
    # Once, long before it is looked at: what is told once must not be forgotten.
    time.sleep(15.0)
    assert active() == {chain.other.id}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            expression, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
            found = prometheus.query(expression.replace("$model", "six"))
            assert {one["metric"].get(label) for one in found} >= {"six"} or label == "stage"
            assert found


def local(service):
    return service.url.removeprefix("http://")


@pytest.mark.slow
def test_a_service_without_ray_fills_every_panel_and_its_end_is_noticed(planted, tmp_path):
    with (
        cauc_ray.serve(planted.pool, planted.policy, port=0, name="six", local=True) as service,
        planted.edge(service) as edge,
        closing(Prometheus(tmp_path, local=[local(service), local(edge)])) as prometheus,
    ):
        check(planted, service, edge, prometheus)
        assert "CaucDegraded" in prometheus.alerts()
        assert "CaucSilent" not in prometheus.alerts()
        service.stop()
        assert not until(lambda: "CaucSilent" not in prometheus.alerts())


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_service_on_ray_fills_every_panel(planted, tmp_path):
    import ray

    nodes = [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
    with (
        cauc_ray.serve(planted.pool, planted.policy, port=0, name="six") as service,
        planted.edge(service) as edge,
        closing(Prometheus(tmp_path, nodes=nodes, local=[local(edge)])) as prometheus,
    ):
        check(planted, service, edge, prometheus)
