"""A service on real Ray Serve, asked over real HTTP."""

import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from asking import Chain, ask, asked, http, in_force, put_policy
from replicas import replicas_of

import cauc_ray
from cauc_ray.errors import ConfigError, ExecutionError
from cauc_ray.policies.trace import replay

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of gevent, which it brings along


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return Chain(tmp_path_factory.mktemp("service"))


@pytest.mark.slow
def test_a_token_that_routers_do_not_have_is_refused(chain, ray_session, monkeypatch):
    # The first of this file: Serve must not run yet.
    monkeypatch.setenv("CAUC_TOKEN", "s3cret")
    with pytest.raises(ConfigError, match="CAUC_TOKEN is set here, but not on the nodes"):
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, name="open")


@pytest.fixture(scope="module")
def service(chain, ray_session):
    with cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, name="six") as running:
        yield running


def test_a_policy_changes_on_all_replicas_without_a_failed_or_mixed_answer(chain, service):
    ids = {name: policy.id for name, policy in chain.policies.items()}
    expected = {ids[name]: chain.expected(name) for name in ids}
    answers, stop = [], threading.Event()

    def run(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            rows = rng.choice(len(chain.ids), 8, replace=False)
            asked_at = time.monotonic()
            answers.append((asked_at, rows, *ask(service, chain.ids[rows])))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    changed = []
    try:
        for name in ("base", "rf", "base", "rf"):
            time.sleep(0.5)
            told = cauc_ray.set_policy(chain.policies[name], url=service.url)
            changed.append((time.monotonic(), ids[name]))
            assert (told["policy_id"], told["replicas"]) == (ids[name], 2)
        time.sleep(0.5)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert {parameters["policy_id"] for *_, parameters in answers} == set(expected)
    for asked_at, rows, outputs, parameters in answers:
        own = expected[parameters["policy_id"]]
        assert np.array_equal(outputs["prediction"], own.predictions[rows])
        assert np.array_equal(outputs["stage"], own.stages[rows])
        earlier = [policy for at, policy in changed if at < asked_at]
        later = [policy for at, policy in changed if at >= asked_at]
        allowed = {earlier[-1] if earlier else ids["rf"], *later[:1]}
        assert parameters["policy_id"] in allowed  # once it is said to be in force, no replica answers by another
    assert in_force(service) == ids["rf"]


def in_force_everywhere(service):
    """Return the ids and versions of the policies that twenty requests find, at whichever replica."""
    found = [json.loads(http("GET", f"{service.url}/v2/models/six/policy")[1]) for _ in range(20)]
    return {(one["policy_id"], one["version"]) for one in found}


def test_of_policies_that_are_set_at_once_one_is_in_force_and_no_answer_claims_another(chain, service):
    """Whoever is told 200 was in force on all replicas; nobody takes a later change back."""
    policy = chain.policies["rf"]
    try:
        for start in range(3):
            mine = [policy.with_threshold(0.5 + (10 * start + number) / 256) for number in range(6)]
            with ThreadPoolExecutor(len(mine)) as pool:
                told = list(pool.map(lambda one: put_policy(service, {"policy": one.model_dump(mode="json")}), mine))
            assert {status for status, *_ in told} <= {200, 409}, told
            taken = {content["version"]: content["policy_id"] for status, content, _ in told if status == 200}
            assert taken
            assert set(taken.values()) <= {one.id for one in mine}
            for status, content, _ in told:
                assert status == 200 or list(content) == ["error"]
            newest = max(taken)
            assert in_force_everywhere(service) == {(taken[newest], newest)}
            outputs, parameters = ask(service, chain.ids)
            assert parameters["policy_id"] == taken[newest]
            of_newest = next(one for one in mine if one.id == taken[newest])
            assert np.array_equal(outputs["stage"], replay(of_newest, chain.test).stages)
    finally:
        cauc_ray.set_policy(policy, url=service.url)


@pytest.mark.slow
def test_a_replica_that_cannot_be_asked_delays_a_change_and_answers_by_no_other_policy(chain, service):
    """One router hangs: the change is made all the same, and what that router answers later is by it."""
    stopped = replicas_of("Router")[0]
    os.kill(stopped, signal.SIGSTOP)
    try:
        for _ in range(10):  # one of these may wait at the replica that is stopped
            try:
                told = json.load(
                    urllib.request.urlopen(
                        urllib.request.Request(
                            f"{service.url}/v2/models/six/policy",
                            json.dumps({"policy": chain.policies["base"].model_dump(mode="json")}).encode(),
                            method="PUT",
                        ),
                        timeout=15,
                    )
                )
                break
            except (TimeoutError, urllib.error.URLError):
                continue
        assert told["policy_id"] == chain.policies["base"].id
        assert told["replicas"] in (None, 1)  # 1 where Serve has given the other up meanwhile
    finally:
        os.kill(stopped, signal.SIGCONT)
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: ask(service, chain.ids[:2])[1]["policy_id"], range(40)))
        assert set(answers) == {chain.policies["base"].id}
    finally:
        cauc_ray.set_policy(chain.policies["rf"], url=service.url)


def test_a_stage_replica_that_is_killed_costs_no_answer(chain, service):
    expected = chain.expected("rf")
    answers, stop = [], threading.Event()

    def run(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            rows = rng.choice(len(chain.ids), 8, replace=False)
            answers.append((time.monotonic(), rows, *asked(service, chain.ids[rows])))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    killed = time.monotonic()
    os.kill(replicas_of("stage:m1")[0], signal.SIGKILL)
    try:
        while not any(
            at > killed and status == 200 and content["parameters"]["stage"] for at, _, status, content in list(answers)
        ):
            assert time.monotonic() < killed + 60
            time.sleep(0.1)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    for _, rows, status, content in answers:
        if status == 503:  # on a busy machine another replica may take longer than requests wait for one
            assert content == {"error": "stage 'm1' is down: it has no replica"}
            continue
        assert status == 200, content
        (predictions,) = (one["data"] for one in content["outputs"] if one["name"] == "prediction")
        assert np.array_equal(predictions, expected.predictions[rows])
        assert not content["parameters"]["degraded"]


def test_a_policy_that_was_set_outlives_the_replicas_that_took_it(chain, service):
    cauc_ray.set_policy(chain.policies["base"], url=service.url)
    try:
        old = replicas_of("Router")
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while len(new := set(replicas_of("Router")) - set(old)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert new
        for _ in range(10):
            _, parameters = ask(service, chain.ids[:4])
            assert parameters["policy_id"] == chain.policies["base"].id
    finally:
        cauc_ray.set_policy(chain.policies["rf"], url=service.url)


def test_a_serve_that_runs_already_is_left_alone(chain, service):
    with (
        pytest.raises(ExecutionError, match="Ray Serve already runs on this cluster"),
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, name="another"),
    ):
        pass
    assert ask(service, chain.ids[:2])
