"""What one request may ask for over HTTP: a timeout of its own, logits, a compressed answer."""

import gzip
import json
import threading

import numpy as np
import pytest
from asking import http, infer
from runs import python_pool, two_model_policy
from user_models import hanging

import cauc_ray


@pytest.fixture(scope="module")
def large():
    """Return the second model: it answers while `leave` is set."""
    hanging.entered, hanging.leave = threading.Event(), threading.Event()
    hanging.leave.set()
    yield hanging
    hanging.leave.set()


@pytest.fixture(scope="module")
def service(large, tmp_path_factory):
    path = python_pool(tmp_path_factory.mktemp("requests"), [("by_x", {}), ("hanging", {})])
    path.write_text(f"{path.read_text()}inputs: {{x: {{datatype: FP64}}}}\n")
    with cauc_ray.serve(path, two_model_policy(), port=0, local=True) as running:
        yield running


def post(service, x, **headers):
    """Return the status, body and headers of a request for rows x."""
    tensor = {"name": "x", "shape": [len(x)], "datatype": "FP64", "data": list(x)}
    body = {"inputs": [tensor], "outputs": [{"name": "prediction"}]}
    return http("POST", f"{service.url}/v2/models/test/infer", body, **headers)


def test_a_request_s_own_timeout_ends_it_and_leaves_the_stage_up(service, large):
    large.leave.clear()
    status, content = infer(service.url, "test", {"x": [0.01]}, ["stage"], {"timeout": 300_000})
    assert (status, "the request's timeout" in content["error"]) == (503, True)
    large.leave.set()
    status, content = infer(service.url, "test", {"x": [0.01]}, ["stage"], {"timeout": 0})
    assert (status, content["outputs"][0]["data"]) == (200, [1])
    assert infer(service.url, "test", {"x": [0.01]}, (), {"timeout": -1})[0] == 400


def test_long_answers_are_compressed_for_clients_that_accept_it(service):
    x = np.linspace(8, 9, 4000).tolist()
    for accepted in ("gzip", "deflate, gzip;q=0.5"):
        status, content, headers = post(service, x, **{"Accept-Encoding": accepted})
        assert (status, headers["Content-Encoding"]) == (200, "gzip")
        assert json.loads(gzip.decompress(content))["outputs"][0]["shape"] == [4000]
    for accepted in ("gzip;q=0", "br"):
        status, _, headers = post(service, x, **{"Accept-Encoding": accepted})
        assert (status, headers["Content-Encoding"]) == (200, None)
    assert post(service, [9.0], **{"Accept-Encoding": "gzip"})[2]["Content-Encoding"] is None


def test_logits_are_those_of_the_model_that_answered(service):
    status, content = infer(service.url, "test", {"x": [9.0, 0.01, -9.0]}, ["logits", "stage"])
    assert status == 200, content
    logits, stage = (np.array(output["data"]) for output in content["outputs"])
    assert np.array_equal(logits.reshape(3, 2), np.array([[9.0, 0.0], [0.01, 0.0], [-9.0, 0.0]], np.float32))
    assert stage.tolist() == [0, 1, 0]
