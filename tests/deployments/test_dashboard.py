"""The dashboard's queries, held against the metrics that there are: their names, labels, and those of each result."""

import json
import re
import time
import urllib.request
from pathlib import Path

import numpy as np
import promql_parser as promql
import pytest
import ray

from cauc_ray.models.answers import Wire
from cauc_ray.policies.monitor import Evidence, StageSums, Watched
from cauc_ray.serving.metrics import METRICS, ServingMetrics
from cauc_ray.serving.on_serve import ray_metric

DASHBOARD = json.loads((Path(__file__).parents[2] / "deployments" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
PROCESS = "WorkerId"  # Ray adds it to every series: a result that keeps it has one line for each replica of the router
SERIES = {
    f"ray_{name}{suffix}": (kind, {*tags, PROCESS} | ({"le"} if suffix == "_bucket" else set()))
    for name, (kind, tags, _) in METRICS.items()
    for suffix in SUFFIXES[kind]
}


def parse(text):
    return promql.parse(text.replace("$__rate_interval", "1m"))


def series_in(text):
    """Return the selectors of an expression."""
    found = []
    promql.walk(parse(text), lambda node: found.append(node) if isinstance(node, promql.VectorSelector) else None)
    return found


def labels_of(node):
    """Return the labels of an expression's result, None for a number.

    Raises AssertionError for a label that a series lacks, and for two sides of an operator that cannot match.
    """
    match node:
        case promql.NumberLiteral():
            return None
        case promql.ParenExpr():
            return labels_of(node.expr)
        case promql.MatrixSelector():
            return labels_of(node.vector_selector)
        case promql.VectorSelector():
            _, labels = SERIES[node.name]
            assert {matcher.name for matcher in node.matchers.matchers} <= labels, str(node)
            return labels
        case promql.Call():
            return labels_of_call(node)
        case promql.AggregateExpr():
            kept = set(node.modifier.labels) if node.modifier else set()
            assert kept <= labels_of(node.expr), node.prettify()
            return kept
        case promql.BinaryExpr():
            return labels_of_pair(node)
    raise AssertionError(f"a {type(node).__name__} was not thought of: {node.prettify()}")


def labels_of_call(call):
    if call.func.name == "vector":
        return set()
    if call.func.name == "histogram_quantile":
        labels = labels_of(call.args[1])
        assert "le" in labels, call.prettify()
        return labels - {"le"}
    assert call.func.name in ("rate", "increase"), call.prettify()
    kind, labels = SERIES[call.args[0].vector_selector.name]
    assert kind != "gauge", call.prettify()
    return labels_of(call.args[0])


def labels_of_pair(pair):
    left, right = labels_of(pair.lhs), labels_of(pair.rhs)
    if left is None or right is None:
        return right if left is None else left
    if pair.modifier is None or pair.modifier.matching is None:
        assert left == right, pair.prettify()
        return left
    shared = set(pair.modifier.matching.labels)
    assert pair.modifier.card == promql.VectorMatchCardinality.ManyToOne
    assert shared <= left, pair.prettify()
    assert right == shared, pair.prettify()  # else there may be many on the side of the one
    return left


def targets():
    return [pytest.param(p, t, id=f"{p['title']}-{t['refId']}") for p in PANELS for t in p["targets"]]


def queries():
    """Return the expressions of the variables' queries and the label that each asks for."""
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    return [re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]["query"]).groups() for one in variables]


@pytest.mark.parametrize(("panel", "target"), targets())
def test_queries_ask_for_what_is_there_and_name_every_line(panel, target):
    labels = labels_of(parse(target["expr"]))
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == labels
    assert PROCESS not in labels
    assert ("le" in labels) == (panel["type"] == "heatmap")


@pytest.mark.parametrize(
    "wrong",
    [
        "sum(ray_cauc_serve_requests)",
        'sum(rate(ray_cauc_serve_requests_total{stage="a"}[1m]))',
        "sum(rate(ray_cauc_serve_queued_rows[1m]))",
        "histogram_quantile(0.5, sum by (stage) (rate(ray_cauc_serve_call_seconds_bucket[1m])))",
        "sum by (unit) (rate(ray_cauc_serve_cost_total[1m])) / sum(rate(ray_cauc_serve_requests_total[1m]))",
    ],
)
def test_wrong_queries_are_found(wrong):
    with pytest.raises((AssertionError, KeyError)):
        labels_of(parse(wrong))


def test_every_query_is_of_the_chosen_model_and_every_metric_is_shown():
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    selectors = [selector for expression in expressions for selector in series_in(expression)]
    for selector in selectors:
        assert ("model", "$model") in {(one.name, one.value) for one in selector.matchers.matchers}
    shown = {selector.name for selector in selectors}
    assert [name for name in METRICS if not any(one.startswith(f"ray_{name}") for one in shown)] == []


def test_variables_are_values_of_labels_and_all_are_used():
    for expression, label in queries():
        assert label in labels_of(parse(expression))
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"])))
    assert used - {"__rate_interval"} == names
    for panel in PANELS:
        assert {one["datasource"]["uid"] for one in (panel, *panel["targets"])} == {"${datasource}"}


class Teller:
    """Tells Ray one value of every metric, under the tags it has."""

    def tell(self):
        metrics = ServingMetrics(ray_metric, "some", ["small"], "USD")
        metrics.request(200, 0.7)
        metrics.rows(0, "accepted", 3)
        metrics.answered(0, np.array([0.7]), np.array([0.2]), 0.7)
        metrics.called(0, 3, 0.7, Wire(10, 20, 0.7))
        metrics.degraded(0, "timeout", 1)
        metrics.queued([2])
        metrics.shares({"before": 1.0})
        metrics.shares({"after": 0.9, "tried": 0.1})
        metrics.policy_rows("after", 3)
        metrics.policy_decision("promote", "rule")
        metrics.policy_change("taken")
        confidences, costs = np.array([0.7, 0.4]), np.array([0.2, 0.3])
        sums = StageSums.of_answers(confidences, costs) + StageSums.of_outcomes(confidences, costs > 0)
        sums += StageSums.of_agreements(costs > 0)
        metrics.watched(Watched((sums,), {"confidence": Evidence(2, 0.1)}))
        metrics.feedback(counted=2)
        metrics.shadowed(0, costs)
        metrics.shadow_rows("compared", 2)
        metrics.logged({"written": 2})
        metrics.policy_expired(False)
        metrics.report("taken", 10)
        metrics.edge("shop-17", 1e9, True, {"rows": {"small": {"accepted": 3}}})
        metrics.flush()


def scrape():
    """Return the labels of every series that Ray's node shows under the metrics' names."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = re.findall(r"^(ray_cauc_serve_\w+)\{(.*)\} ", page.read().decode(), flags=re.MULTILINE)
    return {name: set(re.findall(r'(\w+)="', tags)) for name, tags in lines}


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_series_have_the_names_and_labels_that_ray_gives_them():
    teller = ray.remote(num_cpus=0)(Teller).remote()
    try:
        ray.get(teller.tell.remote())
        deadline = time.monotonic() + 60
        while set(found := scrape()) < set(SERIES):
            assert time.monotonic() < deadline, set(SERIES) - set(found)
            time.sleep(0.3)
        for name, (_, labels) in SERIES.items():
            assert labels <= found[name], name
    finally:
        ray.kill(teller)
