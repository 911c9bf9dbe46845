"""A service that watches its answers for drift: new rows raise no alarm, changed models do."""

import json
import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import synthetic
from asking import http, send_labels, until
from canaries import SavedRows
from replicas import replicas_of

import cauc_ray
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

# Rows of the same models as validation's, and of models whose first two have become worse.
N_SAME, N_OTHER = 800, 500


class Watched(SavedRows):
    """A saved chain of both kinds of rows, and policies for it."""

    def __init__(self, folder):
        self.same = synthetic.chain(11, N_SAME)
        super().__init__(folder, self.same, synthetic.chain(12, N_OTHER, strengths=(0.0, 0.0, 0.5)))
        fitting = (synthetic.chain(13, 1500), synthetic.chain(13, 1500, shift=1))
        self.policy = fit_rf(*fitting, ThresholdRule(budget=12.0))
        self.changed = fit_rf(*fitting, ThresholdRule(budget=9.0))

    @contextmanager
    def served(self, *, local):
        router = {"replicas": {"min": 2}, "resources": {"num_cpus": 0.5}}
        pool = self.pool(shadow=0.5, router=router)
        with cauc_ray.serve(pool, self.policy, port=0, name="six", local=local) as service:
            yield service

    def send_rows(self, service, start, end):
        """Ask for rows and send their labels; return what the service says of these."""
        return [self.send(service, rows)[1] for rows in np.arange(start, end).reshape(-1, 20)]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    return Watched(tmp_path_factory.mktemp("watched"))


def watch(service):
    """Return the status and content of the service's watch report."""
    status, text, _ = http("GET", f"{service.url}/v2/models/six/watch")
    return status, json.loads(text)


def watch_until(service, ready):
    """Return the service's watch report once it is ready."""
    content = {}

    def is_ready():
        nonlocal content
        status, content = watch(service)
        assert status == 200, content
        return ready(content)

    until(is_ready)
    return content


def test_new_rows_raise_no_alarm_a_new_policy_begins_anew_and_changed_models_are_announced(watched):
    with watched.served(local=True) as service:
        policy_id = watched.policy.id
        reports = watched.send_rows(service, 0, N_SAME)
        assert {(report["policy_id"], report["note"]) for report in reports} == {(policy_id, None)}
        assert sum(report["counted"] for report in reports) == N_SAME
        content = watch_until(
            service, lambda watch: watch["n"] == N_SAME == watch["n_labelled"] and watch["n_compared"]
        )
        expected = replay(watched.policy, watched.same)
        assert (content["valid"], content["verdict"], content["routers"]) == (True, "is valid", 1)
        assert content["policy_id"] == policy_id
        assert content["cost"][0] == pytest.approx(expected.costs.mean())
        correct = expected.predictions == watched.same.labels
        for place, stage in enumerate(content["stages"]):
            of_stage = expected.stages == place
            assert (stage["n"], stage["n_labelled"]) == (of_stage.sum(), of_stage.sum())
            assert stage["accepted_accuracy"][0] == pytest.approx(correct[of_stage].mean())
            assert stage["n_compared"] <= (0 if place == 2 else of_stage.sum())

        try:
            before, _ = watched.send(service, range(5), labelled=False)
            cauc_ray.set_policy(watched.changed, url=service.url)
            content = watch_until(service, lambda watch: watch["policy_id"] != policy_id)
            assert (content["valid"], content["n"], content["n_labelled"]) == (True, 0, 0)
            late = send_labels(service.url, "six", before, [0] * 5)
            assert (late["counted"], late["rows"]) == (0, 5)
            assert f"policy {watched.changed.id} is active" in late["note"]
            cauc_ray.set_policy(url=service.url, threshold=0.5)
            content = watch_until(service, lambda watch: watch["valid"] is None)
            assert "no reference to compare" in content["verdict"]
        finally:
            cauc_ray.set_policy(watched.policy, url=service.url)

        watched.send_rows(service, N_SAME, N_SAME + N_OTHER)
        content = watch_until(service, lambda watch: watch["valid"] is False)
        assert content["n"] <= N_OTHER
        assert content["verdict"].startswith("has drifted: ")


@pytest.mark.soak("faults")
def test_a_raised_alarm_outlives_the_routers_and_ends_with_the_policy(watched, ray_session):
    with watched.served(local=False) as service:
        watched.send_rows(service, N_SAME, N_SAME + N_OTHER)
        raised = watch_until(service, lambda watch: watch["valid"] is False)
        killed = set(replicas_of("Router"))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(set(replicas_of("Router")) - killed) == 2)
        until(lambda: watch(service)[0] == 200)
        content = watch_until(service, lambda watch: watch["routers"] == 2)
        assert (content["valid"], content["n"]) == (False, 0)
        assert content["verdict"].startswith("has drifted: ")
        drifted = {feature["name"] for feature in content["features"] if not feature["valid"]}
        assert drifted
        assert drifted <= {feature["name"] for feature in raised["features"] if not feature["valid"]}
        for policy in (watched.changed, watched.policy):
            cauc_ray.set_policy(policy, url=service.url)
            watch_until(service, lambda watch, policy_id=policy.id: watch["policy_id"] == policy_id and watch["valid"])
