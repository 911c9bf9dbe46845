"""The metrics that the dashboard names are those that Ray exports of a service, with the labels that panels use."""

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray

from cauc_ray.serving.metrics import METRICS
from cauc_ray.serving.on_serve import ray_metric

DASHBOARD = json.loads((Path(__file__).parents[2] / "deployments" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
LABELS = {f"ray_{name}{suffix}": set(tags) for name, (kind, tags, _) in METRICS.items() for suffix in SUFFIXES[kind]}


def test_panels_show_every_metric_of_the_chosen_model():
    selectors = [selector for text in EXPRESSIONS for selector in re.findall(r"(ray_\w+)\{(.*?)\}", text)]
    assert len(selectors) == sum(text.count("ray_") for text in EXPRESSIONS)
    for series, matchers in selectors:
        assert 'model="$model"' in matchers
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= LABELS[series]
    assert [name for name in METRICS if not any(series.startswith(f"ray_{name}") for series, _ in selectors)] == []
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) == {*variables, "__rate_interval"}
    for panel in PANELS:
        assert {part["datasource"]["uid"] for part in (panel, *panel["targets"])} == {"${datasource}"}


class Exporter:
    """Reports one value of every metric to Ray."""

    def export(self):
        for name, (kind, tags, description) in METRICS.items():
            ray_metric(name, kind, tags, description, [1.0])(dict.fromkeys(tags, "some"))(1.0)


def scraped_labels():
    """Return the labels of every series of a service that this node of Ray exports."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=60) as page:
        lines = re.findall(r"^(ray_cauc_serve_\w+)\{(.*)\} ", page.read().decode(), flags=re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', tags)) for name, tags in lines}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_ray_exports_the_names_and_labels_that_panels_use():
    exporter = ray.remote(num_cpus=0)(Exporter).remote()
    try:
        ray.get(exporter.export.remote())
        deadline = time.monotonic() + 120
        while LABELS.keys() - (labels := scraped_labels()).keys():
            assert time.monotonic() < deadline, LABELS.keys() - labels.keys()
            time.sleep(0.3)
        for series, expected in LABELS.items():
            assert expected | ({"le"} if series.endswith("_bucket") else set()) <= labels[series], series
    finally:
        ray.kill(exporter)
