"""A service on real Ray Serve, two routers, asked over real HTTP and gRPC."""

import json
import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from asking import ask, asked, clients, http, in_force, outputs_of, put_policy, require_replay, until, until_answered
from replicas import replicas_of

import cauc_ray
from cauc_ray.errors import ConfigError
from cauc_ray.policies.trace import replay

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tritonclient.grpc as over_grpc
    from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(chain, ray_session):
    ports = {"host": "0.0.0.0", "port": 0, "grpc_port": 0}
    with cauc_ray.serve(chain.pool, chain.policies["rf"], **ports, name="six") as running:
        yield running


def test_answers_over_http_are_those_of_the_replay(chain, service):
    outputs, parameters = ask(service, chain.ids)
    require_replay(outputs, chain.expected("rf"))
    assert (parameters["policy_id"], parameters["degraded"]) == (chain.policies["rf"].id, False)


def test_an_unmodified_grpc_client_gets_the_replay_and_codes_for_what_is_refused(chain, service):
    """Through Serve's proxy: every call, refusals with their codes, deadlines; without Serve's own metadata."""

    def ids_of(ids):
        tensor = over_grpc.InferInput("example_id", [len(ids)], "BYTES")
        tensor.set_data_from_numpy(np.array([example.encode() for example in ids], dtype=object))
        return [tensor]

    with over_grpc.InferenceServerClient(service.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("six")
        assert client.get_server_metadata().name == "cauc-ray"
        assert [tensor.name for tensor in client.get_model_metadata("six").inputs] == ["example_id"]
        names = ("prediction", "confidence", "stage")
        result = client.infer("six", ids_of(chain.ids), outputs=list(map(over_grpc.InferRequestedOutput, names)))
        require_replay({name: result.as_numpy(name) for name in names}, chain.expected("rf"))
        row = ids_of(chain.ids[:1])
        for code, model, options in (
            ("NOT_FOUND", "seven", {}),
            ("INVALID_ARGUMENT", "six", {"parameters": {"max_stage": 9}}),
            ("DEADLINE_EXCEEDED", "six", {"client_timeout": 0.0005}),
        ):
            with pytest.raises(InferenceServerException) as error:
                client.infer(model, row, **options)
            assert error.value.status() == f"StatusCode.{code}"
            assert "Traceback" not in error.value.message()
        client.infer("six", row)


def asks_of(chain, service):
    """Return what asks for rows at random: when, which, and the status and content of the answer."""

    def asks(rng):
        rows, sent_at = rng.choice(len(chain.ids), 8, replace=False), time.monotonic()
        return sent_at, rows, *asked(service, chain.ids[rows])

    return asks


def test_a_policy_changes_on_all_replicas_without_a_failed_or_mixed_answer(chain, service):
    ids = {name: policy.id for name, policy in chain.policies.items()}
    expected = {ids[name]: chain.expected(name) for name in ids}
    changes = []
    with clients(asks_of(chain, service)) as answers:
        for name in ("base", "rf", "base", "rf"):
            until_answered(answers, 20)
            report = cauc_ray.set_policy(chain.policies[name], url=service.url)
            changes.append((time.monotonic(), ids[name]))
            assert (report["policy_id"], report["replicas"]) == (ids[name], 2)
        until_answered(answers, 20)
    assert {content["parameters"]["policy_id"] for *_, content in answers} == set(expected)
    for sent_at, rows, status, content in answers:
        assert status == 200, content
        policy_id = content["parameters"]["policy_id"]
        require_replay(outputs_of(content), expected[policy_id], rows)
        earlier = [policy for at, policy in changes if at < sent_at]
        later = [policy for at, policy in changes if at >= sent_at]
        # Once a policy is reported to be active, no replica answers by an earlier one.
        assert policy_id in {earlier[-1] if earlier else ids["rf"], *later[:1]}
    assert in_force(service) == ids["rf"]


def test_changes_of_a_known_version_are_made_once_and_in_force_at_whichever_router(chain, service):
    """Of clients that all raise the threshold that they have read, each raises it once: none is lost."""
    policy, n_clients = chain.policies["rf"], 4
    cauc_ray.set_policy(policy.with_threshold(0.25), url=service.url)

    def raise_it(_):
        status = 412
        while status == 412:  # nothing was written
            _, text, headers = http("GET", f"{service.url}/v2/models/six/policy")
            threshold = json.loads(text)["policy"]["threshold"] + 1 / 64
            status, content, _ = put_policy(service, {"threshold": threshold}, **{"If-Match": headers["ETag"]})
        assert status in (200, 409), content  # written, whether or not another came at once

    try:
        with ThreadPoolExecutor(n_clients) as threads:
            list(threads.map(raise_it, range(n_clients)))
        newest = policy.with_threshold(0.25 + n_clients / 64)
        assert {in_force(service) for _ in range(20)} == {newest.id}
        outputs, parameters = ask(service, chain.ids)
        assert parameters["policy_id"] == newest.id
        require_replay(outputs, replay(newest, chain.test))
    finally:
        cauc_ray.set_policy(policy, url=service.url)


def test_a_stage_replica_that_is_killed_costs_no_answer(chain, service):
    with clients(asks_of(chain, service)) as answers:
        until_answered(answers, 20)
        os.kill(replicas_of("stage:m1")[0], signal.SIGKILL)
        killed_at = time.monotonic()

        def is_back():
            return any(
                sent_at > killed_at and status == 200 and content["parameters"]["stage"]
                for sent_at, _, status, content in list(answers)
            )

        until(is_back)
    expected = chain.expected("rf")
    for _, rows, status, content in answers:
        if status == 503:  # on a busy machine another replica may take longer than requests wait for one
            assert "stage 'm1' is down" in content["error"] or "stage 'm1' has not answered" in content["error"]
            continue
        assert status == 200, content
        require_replay(outputs_of(content), expected, rows)
        assert not content["parameters"]["degraded"]


def test_a_policy_that_was_set_outlives_the_routers_that_took_it(chain, service):
    cauc_ray.set_policy(chain.policies["base"], url=service.url)
    try:
        killed = set(replicas_of("Router"))
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(set(replicas_of("Router")) - killed) == 2)
        until(lambda: http("GET", f"{service.url}/v2/health/ready")[0] == 200)
        for _ in range(10):
            assert ask(service, chain.ids[:4])[1]["policy_id"] == chain.policies["base"].id
    finally:
        cauc_ray.set_policy(chain.policies["rf"], url=service.url)


def test_a_serve_that_runs_already_is_left_alone(chain, service):
    with (
        pytest.raises(ConfigError, match="Ray Serve already runs on this cluster"),
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, name="another"),
    ):
        pass
    assert ask(service, chain.ids[:2])
