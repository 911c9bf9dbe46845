"""A service that watches itself: new rows stay quiet, changed models do not. What several replicas do, on Ray Serve."""

import json
import os
import signal
import time

import numpy as np
import pytest
import synthetic
import yaml
from asking import ask, http
from replicas import replicas_of
from runs import saved_pool

import cauc_ray
from cauc_ray.data.writing import write_logits
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

# Rows of the same models as validation's, and of models whose first two have become worse.
N_SAME, N_OTHER = 800, 500
DEADLINE_S = 60.0


class Watched:
    """A saved chain of both kinds of rows, and its policy."""

    def __init__(self, folder):
        same = synthetic.chain(11, N_SAME)
        other = synthetic.chain(12, N_OTHER, strengths=(0.0, 0.0, 0.5))
        self.ids = {
            "same": [f"same-{row}" for row in range(N_SAME)],
            "other": [f"other-{row}" for row in range(N_OTHER)],
        }
        for stage, model in enumerate(same.models):
            write_logits(
                folder / "LOGITS",
                model,
                "test",
                example_ids=[*self.ids["same"], *self.ids["other"]],
                labels=np.concatenate([same.labels, other.labels]),
                logits=[*same.logits[stage], *other.logits[stage]],
                costs=None,
            )
        self.labels = dict(zip([*self.ids["same"], *self.ids["other"]], [*same.labels, *other.labels], strict=True))
        fitting = (synthetic.chain(13, 1500), synthetic.chain(13, 1500, shift=1))
        self.policy = fit_rf(*fitting, ThresholdRule(budget=12.0))
        self.other = fit_rf(*fitting, ThresholdRule(budget=9.0))
        self.same = same
        path = saved_pool(folder, serving={"batch_size": 16, "timeout_s": 20})
        content = yaml.safe_load(path.read_text())
        router = {"replicas": {"min": 2}, "resources": {"num_cpus": 0.5}}
        content["serving"] = {"shadow": 0.5, "router": router}
        path.write_text(yaml.safe_dump(content))
        self.pool = path


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("watched"))


@pytest.fixture(scope="module")
def service(watched):
    with cauc_ray.serve(watched.pool, watched.policy, port=0, name="six", local=True) as running:
        yield running


@pytest.fixture(scope="module")
def two_routers(watched, ray_session):
    with cauc_ray.serve(watched.pool, watched.policy, port=0, name="six") as running:
        yield running


def call(service, path, content=None):
    """Return the status and content of a request: GET, or POST of some JSON."""
    url, method = f"{service.url}/v2/models/six/{path}", "GET" if content is None else "POST"
    status, text, _ = http(method, url, content)
    return status, json.loads(text)


def feedback_of(service, ids):
    """Ask for rows; return what feedback says of the answers, all but the labels."""
    outputs, parameters = ask(service, ids, None, ("prediction", "confidence", "stage"))
    own = {name: parameters[name] for name in ("policy_id", "answer_id")}
    return {**own, **{name: values.tolist() for name, values in outputs.items()}}


def traffic(watched, service, ids, size=20):
    """Ask for rows and tell their labels, and return what the feedback was answered."""
    told = []
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        said = feedback_of(service, part)
        label = [int(watched.labels[one]) for one in part]
        status, content = call(service, "feedback", {**said, "label": label})
        assert status == 200, content
        told.append(content)
    return told


def seen(service, ready):
    """Return what is watched once that is as it should be, at the latest when time is over."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        status, content = call(service, "watch")
        assert status == 200, content
        if ready(content) or time.monotonic() > deadline:
            return content
        time.sleep(0.2)


def test_new_rows_are_quiet_another_policy_begins_anew_and_changed_models_are_announced(watched, service):
    policy_id = watched.policy.id
    told = traffic(watched, service, watched.ids["same"])
    assert {(one["policy_id"], one["says"]) for one in told} == {(policy_id, None)}
    assert sum(one["counted"] for one in told) == N_SAME
    content = seen(service, lambda content: content["n"] == N_SAME == content["n_labelled"] and content["n_compared"])
    expected = replay(watched.policy, watched.same)
    assert (content["holds"], content["says"], content["routers"]) == (True, "is valid", 1)
    assert content["policy_id"] == policy_id
    assert content["cost"][0] == pytest.approx(expected.costs.mean())
    correct = expected.predictions == watched.same.labels
    for place, stage in enumerate(content["stages"]):
        here = expected.stages == place
        assert (stage["n"], stage["n_labelled"]) == (here.sum(), here.sum())
        assert stage["accepted_accuracy"][0] == pytest.approx(correct[here].mean())
        assert stage["n_compared"] <= (0 if place == 2 else here.sum())

    try:
        said = feedback_of(service, watched.ids["same"][:5])
        cauc_ray.set_policy(watched.other, url=service.url)
        content = seen(service, lambda content: content["policy_id"] != policy_id)
        assert (content["holds"], content["n"], content["n_labelled"]) == (True, 0, 0)
        status, late = call(service, "feedback", {**said, "label": [0] * 5})
        assert (status, late["counted"], late["rows"]) == (200, 0, 5)
        assert f"policy {watched.other.id} is active" in late["says"]
        cauc_ray.set_policy(url=service.url, threshold=0.5)
        content = seen(service, lambda content: content["holds"] is None)
        assert "no reference to compare" in content["says"]
    finally:
        cauc_ray.set_policy(watched.policy, url=service.url)

    traffic(watched, service, watched.ids["other"])
    content = seen(service, lambda content: not content["holds"])
    assert content["holds"] is False
    assert content["n"] <= N_OTHER
    assert content["says"].startswith("has drifted: ")


@pytest.mark.slow
def test_a_raised_alarm_outlives_the_routers_and_ends_with_the_policy(watched, two_routers):
    policy_id = cauc_ray.set_policy(watched.other, url=two_routers.url)["policy_id"]
    cauc_ray.set_policy(watched.policy, url=two_routers.url)
    traffic(watched, two_routers, watched.ids["other"])
    raised = seen(two_routers, lambda content: content["holds"] is False)
    assert raised["holds"] is False
    before = replicas_of("Router")
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while len(set(replicas_of("Router")) - set(before)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    content = seen(two_routers, lambda content: content["routers"] == 2)
    assert (content["holds"], content["n"]) == (False, 0)
    assert content["says"].startswith("has drifted: ")
    kept = {one["name"] for one in content["features"] if not one["holds"]}
    assert kept
    assert kept <= {one["name"] for one in raised["features"] if not one["holds"]}

    cauc_ray.set_policy(watched.other, url=two_routers.url)
    content = seen(two_routers, lambda content: content["policy_id"] == policy_id)
    assert content["holds"] is True
    cauc_ray.set_policy(watched.policy, url=two_routers.url)
    content = seen(two_routers, lambda content: content["policy_id"] == watched.policy.id and content["holds"])
    assert content["holds"] is True


@pytest.mark.slow
def test_a_fleet_s_reports_to_any_router_are_shown_by_all_and_feedback_is_counted_once(watched, two_routers):
    before = seen(two_routers, lambda content: True)["n_labelled"]
    policy_id = call(two_routers, "policy")[1]["policy_id"]
    message = {"policy_id": policy_id, "prediction": [1], "confidence": [0.9], "stage": [2], "label": [1]}
    batch = {"id": "1", "messages": [message]}
    report = {"edge": "a", "life": "0", "policy_id": policy_id, "feedback": batch}
    for sequence in range(12):
        status, told = call(two_routers, "fleet", {**report, "sequence": sequence})
        assert (status, told["counted"]) == (200, None if sequence else 1)
    for _ in range(6):
        status, told = call(two_routers, "fleet")
        assert (status, told["edges"]["a"]["sequence"]) == (200, 11)
    assert seen(two_routers, lambda content: content["n_labelled"] > before)["n_labelled"] == before + 1
