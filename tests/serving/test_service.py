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
import synthetic
import yaml
from replicas import replicas_of
from runs import MODELS, saved_pool

import cauc_ray
from cauc_ray.errors import ConfigError, ExecutionError, PolicyError
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of gevent, which it brings along
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException


class Chain:
    """A saved chain, two policies for it and where they are served."""

    def __init__(self, folder):
        chains = synthetic.write_table(folder / "LOGITS", n=200, ragged=True)
        self.test = chains["test"]
        self.ids = np.array([f"test-{example}" for example in self.test.example_ids])
        self.policies = {
            "rf": fit_rf(chains["calibration"], chains["validation"], ThresholdRule()),
            "base": fit_base(chains["calibration"], chains["validation"]),
        }
        self.other = fit_rf(synthetic.chain(strengths=(1.0, 2.4)), rule=ThresholdRule(threshold=0.8))
        path = saved_pool(folder, serving={"batch_size": 16, "timeout_s": 20})
        content = yaml.safe_load(path.read_text())
        content["serving"] = {"router": {"replicas": {"min": 2}, "resources": {"num_cpus": 0.5}}}
        path.write_text(yaml.safe_dump(content))
        self.pool = path

    def expected(self, name):
        return replay(self.policies[name], self.test)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return Chain(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def service(chain, ray_session):
    with cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, name="six") as running:
        yield running


@pytest.fixture
def client(service):
    with InferenceServerClient(service.url.removeprefix("http://"), network_timeout=60, connection_timeout=60) as one:
        yield one


def http(method, url, body=None, **headers):
    """Return the status, the body and the headers of one request."""
    body = json.dumps(body).encode() if isinstance(body, dict | list) else body
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method), timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def ask(service, ids, *args, **headers):
    """Ask for rows as JSON and return the outputs by name, and the response's parameters."""
    status, content = asked(service, ids, *args, **headers)
    assert status == 200, content
    return {output["name"]: np.array(output["data"]) for output in content["outputs"]}, content["parameters"]


def asked(service, ids, parameters=None, outputs=("prediction", "stage", "cost", "confidence"), **headers):
    """Ask for rows as JSON and return the status and the content, whatever they are."""
    inputs = [{"name": "example_id", "shape": [len(ids)], "datatype": "BYTES", "data": list(ids)}]
    body = {"inputs": inputs, "outputs": [{"name": name} for name in outputs], "parameters": parameters or {}}
    status, text, _ = http("POST", f"{service.url}/v2/models/six/infer", body, **headers)
    return status, json.loads(text)


def refused(service, body, path="/v2/models/six/infer", method="POST", **headers):
    """Ask for what cannot be had, and return the status and the sentence that says why."""
    status, text, _ = http(method, f"{service.url}{path}", body, **headers)
    content = json.loads(text)
    assert list(content) == ["error"], content
    assert "\n" not in content["error"]
    assert "Traceback" not in content["error"]
    return status, content["error"]


@pytest.mark.parametrize("binary", [False, True])
def test_an_unmodified_triton_client_gets_the_answers_of_the_replay(chain, client, binary):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("six")
    assert client.get_server_metadata()["name"] == "cauc-ray"
    metadata = client.get_model_metadata("six", "1")
    assert [one["name"] for one in metadata["inputs"]] == ["example_id"]
    ids = InferInput("example_id", [len(chain.ids)], "BYTES")
    ids.set_data_from_numpy(np.array([one.encode() for one in chain.ids], dtype=object), binary_data=binary)
    names = [one["name"] for one in metadata["outputs"]]
    wanted = [InferRequestedOutput(name, binary_data=binary) for name in names]
    compression = "gzip" if binary else None
    result = client.infer("six", [ids], outputs=wanted, request_id="7", request_compression_algorithm=compression)
    expected = chain.expected("rf")
    assert np.array_equal(result.as_numpy("prediction"), expected.predictions)
    assert np.array_equal(result.as_numpy("stage"), expected.stages)
    assert np.array_equal(result.as_numpy("confidence"), expected.confidences.astype(np.float32))
    assert np.array_equal(result.as_numpy("cost"), expected.costs.astype(np.float32))
    assert not result.as_numpy("degraded").any()
    assert [int(label) for label in result.as_numpy("label")] == expected.predictions.tolist()
    probabilities = result.as_numpy("probabilities")
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    assert np.array_equal(probabilities.max(axis=1), expected.confidences.astype(np.float32))
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("7", "six", "1")
    parameters = response["parameters"]
    assert parameters["policy_id"] == chain.policies["rf"].id
    assert parameters["cost"] == pytest.approx(expected.costs.sum())
    assert (parameters["stage"], parameters["stages_called"]) == (2, "m0,m1,m2")
    with pytest.raises(InferenceServerException, match="there is no model 'seven'"):
        client.infer("seven", [ids])


def test_requests_of_many_clients_at_once_are_answered_as_the_replay_does(chain, service):
    expected = chain.expected("rf")
    answers = [None] * 40

    def run(number):
        rows = np.arange(number * 5, number * 5 + 5)
        answers[number] = rows, *ask(service, chain.ids[rows])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rows, outputs, parameters in answers:
        assert np.array_equal(outputs["prediction"], expected.predictions[rows])
        assert np.array_equal(outputs["stage"], expected.stages[rows])
        assert parameters["cost"] == pytest.approx(expected.costs[rows].sum())


def test_a_request_may_carry_its_own_cap(chain, service):
    policy, expected = chain.policies["rf"], chain.expected("rf")
    costs = np.cumsum([stage.cost for stage in policy.stages])
    deferred = chain.ids[expected.stages == 2][:10]
    for parameters, last in (
        ({"max_stage": 0}, 0),
        ({"max_stage": "m1"}, 1),
        ({"max_cost": float(costs[1])}, 1),
        ({"max_cost": float(costs[1]) * 0.999}, 0),
        ({"max_cost": 1e9, "max_stage": 1}, 1),
    ):
        outputs, told = ask(service, deferred, parameters)
        assert (outputs["stage"] == last).all()
        assert outputs["cost"] == pytest.approx(costs[last])
        assert told["degraded"] is False
    for parameters, says in (
        ({"max_stage": 3}, "max_stage is 0 to 2, or one of m0, m1, m2, not 3"),
        ({"max_stage": "m9"}, "max_stage is 0 to 2"),
        ({"max_stage": True}, "max_stage is 0 to 2"),
        ({"max_cost": -1}, "max_cost is a number of at least 0"),
        ({"max_cost": 0.5 * costs[0]}, "below the cost of the first stage"),
        ({"max_cots": 1}, "unknown parameter 'max_cots'"),
    ):
        inputs = [{"name": "example_id", "shape": [1], "datatype": "BYTES", "data": [chain.ids[0]]}]
        status, error = refused(service, {"inputs": inputs, "parameters": parameters})
        assert (status, says in error) == (400, True), error


def test_what_is_malformed_gets_a_sentence_and_a_4xx(chain, service):
    one = {"name": "example_id", "shape": [1], "datatype": "BYTES", "data": [chain.ids[0]]}
    for body, status, says in (
        (b"", 400, "JSON"),
        (b"\xff\xfe", 400, "JSON"),
        ({"inputs": []}, 400, "inputs"),
        ({"inputs": [{**one, "name": "image"}]}, 400, "example_id"),
        ({"inputs": [one, {**one, "name": "image"}]}, 400, "unknown input 'image'"),
        ({"inputs": [{**one, "datatype": "FP32", "data": [1.0]}]}, 400, "BYTES"),
        ({"inputs": [{**one, "shape": [0], "data": []}]}, 400, "rows"),
        ({"inputs": [{**one, "data": ["nobody"]}]}, 422, "'nobody' is not in"),
        ({"inputs": [one], "outputs": [{"name": "logits"}]}, 400, "no output 'logits'"),
        ({"inputs": [{**one, "shape": [5000], "data": ["a"] * 5000}]}, 413, "4096 rows"),
    ):
        got, error = refused(service, body)
        assert (got, says in error) == (status, True), (body, got, error)
    assert refused(service, b"x" * 65_000_000)[0] == 413
    assert refused(service, b"{}", **{"Content-Encoding": "br"})[0] == 415
    assert refused(service, b"{}", **{"Inference-Header-Content-Length": "-1"})[0] == 400
    assert refused(service, b"{}", path="/v2/models/six/versions/2/infer")[0] == 404
    assert refused(service, None, path="/v2/nowhere", method="GET")[0] == 404
    assert refused(service, None, method="DELETE")[0] == 405
    assert ask(service, chain.ids[:1])  # it is as well as before


def test_the_request_id_is_echoed(chain, service):
    body = {"inputs": [{"name": "example_id", "shape": [1], "datatype": "BYTES", "data": [chain.ids[0]]}]}
    _, _, headers = http("POST", f"{service.url}/v2/models/six/infer", body, **{"x-request-id": "my-own"})
    assert headers.get_all("x-request-id") == ["my-own"]
    _, _, headers = http("POST", f"{service.url}/v2/models/six/infer", body)
    assert headers["x-request-id"]


def test_the_openapi_page_needs_no_other_server(service):
    status, page, _ = http("GET", f"{service.url}/docs")
    text = page.decode()
    assert status == 200
    assert "http://" not in text
    assert "https://" not in text
    for asset in ("swagger-ui-bundle.js", "swagger-ui.css"):
        path = next(part for part in text.split('"') if part.endswith(asset))
        assert http("GET", f"{service.url}{path}")[0] == 200
    schema = json.loads(http("GET", f"{service.url}/openapi.json")[1])
    assert "/v2/models/{name}/infer" in schema["paths"]


def in_force(service):
    return json.loads(http("GET", f"{service.url}/v2/models/six/policy")[1])["policy_id"]


def test_a_policy_changes_on_all_replicas_without_a_failed_or_mixed_answer(chain, service):
    ids = {name: policy.id for name, policy in chain.policies.items()}
    expected = {ids[name]: chain.expected(name) for name in ids}
    answers, stop = [], threading.Event()

    def run(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            rows = rng.choice(len(chain.ids), 8, replace=False)
            asked = time.monotonic()
            answers.append((asked, rows, *ask(service, chain.ids[rows])))

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
    for asked, rows, outputs, parameters in answers:
        own = expected[parameters["policy_id"]]
        assert np.array_equal(outputs["prediction"], own.predictions[rows])
        assert np.array_equal(outputs["stage"], own.stages[rows])
        earlier = [policy for at, policy in changed if at < asked]
        later = [policy for at, policy in changed if at >= asked]
        allowed = {earlier[-1] if earlier else ids["rf"], *later[:1]}
        assert parameters["policy_id"] in allowed  # once it is said to be in force, no replica answers by another
    assert in_force(service) == ids["rf"]


def test_a_budget_and_a_threshold_change_the_policy_in_force(chain, service):
    policy = chain.policies["rf"]
    cheapest, dearest = policy.stages[0].cost, sum(stage.cost for stage in policy.stages)
    try:
        for budget in (cheapest, (cheapest + dearest) / 3):
            told = cauc_ray.set_policy(url=service.url, budget=budget)
            wanted = policy.with_budget(budget)
            assert told["policy_id"] == wanted.id
            outputs, _ = ask(service, chain.ids)
            assert np.array_equal(outputs["stage"], replay(wanted, chain.test).stages)
        told = cauc_ray.set_policy(url=service.url, threshold=2.0)
        outputs, _ = ask(service, chain.ids)
        assert (outputs["stage"] == 2).all()
        with pytest.raises(PolicyError, match="cheapest operating point"):
            cauc_ray.set_policy(url=service.url, budget=cheapest / 2)
        assert in_force(service) == told["policy_id"]
    finally:
        cauc_ray.set_policy(policy, url=service.url)


def test_a_policy_that_does_not_fit_is_refused_and_the_old_one_stays(chain, service):
    before = in_force(service)
    with pytest.raises(PolicyError, match="the policy is for m0, m1; what runs is m0, m1, m2"):
        cauc_ray.set_policy(chain.other, url=service.url)
    content = chain.policies["rf"].model_dump(mode="json")
    for body in (
        {"policy": {**content, "format": "cauc-policy/9"}},
        {"policy": {**content, "cost_unit": "USD"}},
        {"x": 1},
        {},
        [],
    ):
        status, error = refused(service, body, path="/v2/models/six/policy", method="PUT")
        assert status in (400, 409), error
    with pytest.raises(ConfigError, match="give a policy"):
        cauc_ray.set_policy(url=service.url)
    assert in_force(service) == before


def put_policy(service, content, **headers):
    """Ask for a change of the policy; return the status, the content and the tag of the version."""
    status, text, told = http("PUT", f"{service.url}/v2/models/six/policy", content, **headers)
    return status, json.loads(text), told["ETag"]


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


def test_changes_of_a_known_version_are_made_once(chain, service):
    """Of clients that all raise the threshold that they have read, each raises it once: none is lost."""
    policy, n_clients = chain.policies["rf"], 4
    cauc_ray.set_policy(policy.with_threshold(0.25), url=service.url)

    def raise_it(_):
        n_lost = 0
        while True:
            _, text, headers = http("GET", f"{service.url}/v2/models/six/policy")
            threshold = json.loads(text)["policy"]["threshold"] + 1 / 64
            status, content, _ = put_policy(service, {"threshold": threshold}, **{"If-Match": headers["ETag"]})
            if status == 412:  # nothing was written
                assert "\n" not in content["error"]
                n_lost += 1
                continue
            assert status in (200, 409), content  # written, whether or not another came at once
            return n_lost

    try:
        with ThreadPoolExecutor(n_clients) as pool:
            list(pool.map(raise_it, range(n_clients)))
        content = json.loads(http("GET", f"{service.url}/v2/models/six/policy")[1])
        assert content["policy"]["threshold"] == 0.25 + n_clients / 64
        for tag, status in (('"0-0"', 412), ("nonsense", 412), ("*", 200)):
            assert put_policy(service, {"threshold": 0.5}, **{"If-Match": tag})[0] == status
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


@pytest.mark.slow
def test_a_writer_that_dies_leaves_one_complete_policy(chain, service):
    policy = chain.policies["rf"]
    mine = [policy.with_threshold(0.5 + number / 256) for number in range(8)]

    def put(one):
        try:
            return put_policy(service, {"policy": one.model_dump(mode="json")})
        except (OSError, ValueError):  # the connection ended with the replica, or Serve's proxy says so in no JSON
            return None

    try:
        with ThreadPoolExecutor(len(mine)) as pool:
            told = [pool.submit(put, one) for one in mine]
            os.kill(replicas_of("Router")[0], signal.SIGKILL)
            told = [one.result() for one in told]
        last = cauc_ray.set_policy(mine[0], url=service.url)
        assert in_force_everywhere(service) == {(mine[0].id, last["version"])}
        assert all(content["version"] < last["version"] for status, content, _ in filter(None, told) if status == 200)
    finally:
        cauc_ray.set_policy(policy, url=service.url)


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


def test_what_cannot_be_served_is_told_in_one_line(chain, ray_session, tmp_path):
    with (
        pytest.raises(ConfigError, match="cannot listen at"),
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=1 << 17),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="part of URLs"),
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, name="a/b"),
    ):
        pass


def test_a_serve_that_runs_already_is_left_alone(chain, service):
    with (
        pytest.raises(ExecutionError, match="Ray Serve runs on this cluster already"),
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, name="another"),
    ):
        pass
    assert ask(service, chain.ids[:2])


def test_stages_are_named_in_order(chain, service):
    assert json.loads(http("GET", f"{service.url}/v2/models/six")[1])["parameters"]["stages"] == ",".join(MODELS)
