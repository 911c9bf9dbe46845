"""The metrics that the dashboard names are those of a service, with the labels that panels use."""

import json
import re
from pathlib import Path

from cauc_ray.serving.observers.service_metrics import METRICS, PREFIX

DASHBOARD = json.loads((Path(__file__).parents[2] / "deployments" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
LABELS = {
    f"ray_{PREFIX}{name}{suffix}": {"model", *tags}
    for name, (kind, tags, _) in METRICS.items()
    for suffix in SUFFIXES[kind]
}


def test_panels_show_every_metric_of_the_chosen_model():
    selectors = [selector for text in EXPRESSIONS for selector in re.findall(r"(ray_\w+)\{(.*?)\}", text)]
    assert len(selectors) == sum(text.count("ray_") for text in EXPRESSIONS)
    for series, matchers in selectors:
        assert 'model="$model"' in matchers
        assert set(re.findall(r"(\w+)[=!]", matchers)) <= LABELS[series]
    assert [
        name for name in METRICS if not any(series.startswith(f"ray_{PREFIX}{name}") for series, _ in selectors)
    ] == []
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) == {*variables, "__rate_interval"}
    for panel in PANELS:
        assert {part["datasource"]["uid"] for part in (panel, *panel["targets"])} == {"${datasource}"}
