"""What a service answers over HTTP, asked in this process; the shell on Ray Serve has the same face."""

import gzip
import json
import re
import warnings

import jsonschema
import numpy as np
import pytest
from asking import ask, http, in_force, put_policy, refused, require_replay, until
from runs import MODELS

import cauc_ray
from cauc_ray.errors import PolicyError
from cauc_ray.policies.trace import replay
from cauc_ray.serving import elsewhere, inference
from cauc_ray.serving.stored import MemoryStore, StoreError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of gevent, which it brings along
    from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
    from tritonclient.utils import InferenceServerException


@pytest.fixture
def client(service):
    with InferenceServerClient(service.url.removeprefix("http://"), network_timeout=60, connection_timeout=60) as one:
        yield one


@pytest.mark.parametrize("binary", [False, True])
def test_an_unmodified_triton_client_gets_the_answers_of_the_replay(chain, client, binary):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("six")
    assert client.get_server_metadata()["name"] == "cauc-ray"
    metadata = client.get_model_metadata("six", chain.policies["rf"].id)
    assert metadata["parameters"]["stages"] == ",".join(MODELS)
    assert [one["name"] for one in metadata["inputs"]] == ["example_id"]
    ids = InferInput("example_id", [len(chain.ids)], "BYTES")
    ids.set_data_from_numpy(np.array([one.encode() for one in chain.ids], dtype=object), binary_data=binary)
    # In JSON, rows with fewer options cannot be padded with -inf.
    names = [one["name"] for one in metadata["outputs"] if binary or one["name"] != "logits"]
    requested = [InferRequestedOutput(name, binary_data=binary) for name in names]
    more = {"request_compression_algorithm": "gzip" if binary else None, "priority": int(binary)}
    result = client.infer("six", [ids], outputs=requested, request_id="7", **more)
    expected = chain.expected("rf")
    require_replay({name: result.as_numpy(name) for name in names}, expected)
    assert not result.as_numpy("degraded").any()
    assert [int(label) for label in result.as_numpy("prediction_label")] == expected.predictions.tolist()
    probabilities = result.as_numpy("probabilities")
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    assert np.array_equal(probabilities.max(axis=1), expected.confidences.astype(np.float32))
    if binary:
        logits = np.stack(chain.test.logits)[expected.stages, np.arange(len(chain.ids))]
        assert np.array_equal(result.as_numpy("logits"), logits)
    response = result.get_response()
    policy_id = chain.policies["rf"].id
    assert (response["id"], response["model_name"], response["model_version"]) == ("7", "six", policy_id)
    parameters = response["parameters"]
    assert parameters["policy_id"] == policy_id
    assert parameters["cost"] == pytest.approx(expected.costs.sum())
    assert (parameters["stage"], parameters["stages_called"]) == (2, "m0,m1,m2")
    with pytest.raises(InferenceServerException, match="unknown model 'seven'"):
        client.infer("seven", [ids])


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
        outputs, response = ask(service, deferred, parameters)
        assert (outputs["stage"] == last).all()
        assert outputs["cost"] == pytest.approx(costs[last])
        assert response["degraded"] is False
    until(lambda: 'outcome="capped"' in http("GET", f"{service.url}/metrics")[1].decode())
    for parameters, reason in (
        ({"max_stage": 3}, "max_stage must be 0 to 2 or one of m0, m1, m2, got 3"),
        ({"max_stage": True}, "max_stage"),
        ({"log": 0}, "log: input should be a valid boolean"),
        ({"max_cost": -1}, "max_cost: input should be greater than or equal to 0"),
        ({"max_cost": 0.5 * costs[0]}, "below the cost of the first stage"),
    ):
        inputs = [{"name": "example_id", "shape": [1], "datatype": "BYTES", "data": [chain.ids[0]]}]
        status, error = refused(service, {"inputs": inputs, "parameters": parameters})
        assert (status, reason in error) == (400, True), error


def test_rows_version_one_and_unknown_parameters_are_taken(chain, service):
    rows = [{"example_id": example} for example in chain.ids[:20]]
    body = {"rows": rows, "parameters": {"sequence_id": 7}, "outputs": [{"name": "prediction"}]}
    for path in ("six", "six/versions/1"):
        status, content, _ = http("POST", f"{service.url}/v2/models/{path}/infer", body)
        assert (status, json.loads(content)["outputs"][0]["data"]) == (
            200,
            chain.expected("rf").predictions[:20].tolist(),
        )
        assert http("GET", f"{service.url}/v2/models/{path}")[0] == 200


def test_malformed_requests_are_refused_with_a_4xx_in_one_line(chain, service):
    one = {"name": "example_id", "shape": [1], "datatype": "BYTES", "data": [chain.ids[0]]}
    for body, status, reason in (
        (b"\xff\xfe", 400, "JSON"),
        ({"inputs": [one, {**one, "name": "image"}]}, 400, "unknown input 'image'"),
        ({"inputs": [{**one, "data": ["nobody"]}]}, 422, "'nobody' is not in"),
        ({"inputs": [{**one, "shape": [5000], "data": ["a"] * 5000}]}, 413, "4096 rows"),
        (b"x" * 65_000_000, 413, "longer"),
    ):
        got, error = refused(service, body)
        assert (got, reason in error) == (status, True), (body, got, error)
    assert refused(service, b"{}", **{"Content-Encoding": "br"})[0] == 415
    assert refused(service, b"{}", **{"Inference-Header-Content-Length": "-1"})[0] == 400
    assert refused(service, b"{}", path="/v2/models/six/versions/2/infer")[0] == 404
    assert refused(service, b"[" * 1_000_000, path="/v2/models/six/feedback")[0] == 413
    assert "this service reads no text" in refused(service, b"[" * 1_000_000, path="/v1/decisions")[1]["message"]
    assert refused(service, None, path="/v2/nowhere", method="GET")[0] == 404
    assert refused(service, None, method="DELETE")[0] == 405
    assert ask(service, chain.ids[:1])  # it is as well as before


@pytest.mark.parametrize("fault", ["away", "damaged"])
def test_without_a_readable_store_no_request_is_answered_by_a_policy_that_may_be_replaced(
    chain, service, monkeypatch, fault
):
    def get(store, key):
        if fault == "away":
            raise StoreError("no route to host")
        return b"{"

    asked = {"inputs": [{"name": "example_id", "shape": [1], "datatype": "BYTES", "data": [chain.ids[0]]}]}
    policy_id = chain.policies["rf"].id
    feedback = {"policy_id": policy_id, "prediction": [0], "confidence": [0.5], "stage": [0], "label": [0]}
    bodies = {"infer": asked, "feedback": feedback, "policy": None, "watch": None}

    def statuses():
        url = f"{service.url}/v2/models/six"
        return {http("POST" if body else "GET", f"{url}/{path}", body)[0] for path, body in bodies.items()}

    assert statuses() == {200}
    with monkeypatch.context() as patch:
        patch.setattr(MemoryStore, "get", get)
        patch.setattr(MemoryStore, "put", lambda store, key, value, *, overwrite=True: False)
        until(lambda: statuses() == {503}, 30)
    until(lambda: statuses() == {200}, 30)


def test_requests_are_counted_and_their_ids_echoed(chain, service):
    body = {"inputs": [{"name": "example_id", "shape": [1], "datatype": "BYTES", "data": [chain.ids[0]]}]}
    _, _, headers = http("POST", f"{service.url}/v2/models/six/infer", body, **{"x-request-id": "my-own"})
    assert headers.get_all("x-request-id") == ["my-own"]
    assert http("POST", f"{service.url}/v2/models/six/infer", body)[2]["x-request-id"]
    text = http("GET", f"{service.url}/metrics")[1].decode()
    for name in ("requests_total", "rows_total", "call_seconds_count", "policy"):
        assert re.search(rf'^cauc_serve_{name}{{.*model="six".*}} [1-9]', text, re.M), name


def test_long_answers_are_compressed_for_clients_that_accept_it(chain, service):
    url = f"{service.url}/v2/models/six/infer"
    for n, accepted, expected in (
        (200, "gzip", "gzip"),
        (200, "deflate, gzip;q=0.5", "gzip"),
        (200, "gzip;q=0", None),
        (200, "br", None),
        (1, "gzip", None),
    ):
        inputs = [{"name": "example_id", "shape": [n], "datatype": "BYTES", "data": chain.ids[:n].tolist()}]
        status, content, headers = http("POST", url, {"inputs": inputs}, **{"Accept-Encoding": accepted})
        assert (status, headers["Content-Encoding"]) == (200, expected)
        text = gzip.decompress(content) if expected else content
        assert json.loads(text)["outputs"][0]["shape"] == [n]


def test_long_requests_are_read_and_written_in_another_process_alike(chain, service, monkeypatch):
    inputs = [{"name": "example_id", "shape": [len(chain.ids)], "datatype": "BYTES", "data": chain.ids.tolist()}]
    body = {
        "inputs": inputs,
        "outputs": [{"name": name} for name in ("prediction", "prediction_label", "probabilities")],
    }
    _, expected, _ = http("POST", f"{service.url}/v2/models/six/infer", body)
    monkeypatch.setattr(inference, "LONG_JSON", 100)
    monkeypatch.setattr(inference, "LONG_OUTPUT", 100)
    status, answer, _ = http("POST", f"{service.url}/v2/models/six/infer", body)
    assert status == 200
    assert json.loads(answer)["outputs"] == json.loads(expected)["outputs"]
    assert refused(service, {**body, "inputs": [{**inputs[0], "shape": [1]}]})[0] == 400
    monkeypatch.setattr(elsewhere.Elsewhere, "call_if", lambda self, is_long, *call: self.call(*call))
    feedback = {"policy_id": "p", "prediction": [0], "confidence": [0.5], "stage": [9], "label": [0]}
    assert refused(service, feedback, path="/v2/models/six/feedback") == (400, "stages are 0 to 2, got 9")
    for change in ({"threshold": "high"}, {"policy": {}}):
        assert refused(service, change, path="/v2/models/six/policy", method="PUT")[0] in (400, 409)


def test_the_openapi_description_lists_the_addresses_and_outputs_of_the_service(service):
    described = json.loads(http("GET", f"{service.url}/openapi.json")[1])
    assert "http://" not in json.dumps(described)
    outputs = json.loads(http("GET", f"{service.url}/v2/models/six")[1])["outputs"]
    named = described["components"]["schemas"]["NamedOutput"]["properties"]["name"]
    in_words = {"answer", "prompt_tokens", "completion_tokens"}
    of_options = [name for name in named["enum"] if name not in in_words]
    assert [one["name"] for one in outputs] == of_options
    for path, operations in described["paths"].items():
        url = service.url + path.format(name="six", version=in_force(service))
        status, _, headers = http("DELETE", url)
        assert (status, set(headers["Allow"].lower().split(", ")) - {"head"}) == (405, set(operations))
        if "get" in operations:
            schema = operations["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(json.loads(http("GET", url)[1]), {**schema, "components": described["components"]})


def test_a_budget_and_a_policy_with_a_threshold_change_the_policy_in_force(chain, service):
    policy = chain.policies["rf"]
    cheapest, largest = policy.stages[0].cost, sum(stage.cost for stage in policy.stages)
    try:
        for budget in (cheapest, (cheapest + largest) / 3):
            report = cauc_ray.set_policy(url=service.url, budget=budget)
            expected = policy.with_budget(budget)
            assert report["policy_id"] == expected.id
            outputs, _ = ask(service, chain.ids)
            assert np.array_equal(outputs["stage"], replay(expected, chain.test).stages)
        base = chain.policies["base"]
        report = cauc_ray.set_policy(base, url=service.url, threshold=2.0)
        outputs, _ = ask(service, chain.ids)
        assert (report["policy_id"], outputs["stage"].min()) == (base.with_threshold(2.0).id, 2)
        with pytest.raises(PolicyError, match="cheapest operating point"):
            cauc_ray.set_policy(url=service.url, budget=cheapest / 2)
        assert in_force(service) == report["policy_id"]
        for tag, status in (('"0-0"', 412), ("nonsense", 412), ("*", 200)):
            assert put_policy(service, {"threshold": 0.5}, **{"If-Match": tag})[0] == status
    finally:
        cauc_ray.set_policy(policy, url=service.url)
