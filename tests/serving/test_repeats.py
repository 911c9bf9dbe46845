"""What clients over a bad link need of a service: repeated requests, timeouts of their own, short answers."""

import gzip
import json
import threading

import numpy as np
import pytest
from asking import http, infer, until
from runs import python_pool, two_model_policy

import cauc_ray


@pytest.fixture
def serve(tmp_path):
    """Return a function that serves two models that note their calls; by x, times 1 and 5."""
    running = []

    def start(seconds=0.0, on_failure="fail", **serving):
        logs = [tmp_path / name for name in ("small.log", "large.log")]
        factories = [
            ("slow_by_x", {"seconds": s, "log": str(log)}) for s, log in zip((0.0, seconds), logs, strict=True)
        ]
        path = python_pool(tmp_path, factories, serving={"batch_wait_s": 0.0, **serving})
        path.write_text(f"{path.read_text()}on_failure: {on_failure}\ninputs: {{x: {{datatype: FP64}}}}\n")
        policy = two_model_policy()
        service = cauc_ray.serve(path, policy, port=0, local=True)
        running.append(service)
        return service.__enter__(), logs

    yield start
    for service in running:
        service.__exit__(None, None, None)


def body_of(x, **parameters):
    one = {"name": "x", "shape": [len(x)], "datatype": "FP64", "data": list(x)}
    return {"inputs": [one], "outputs": [{"name": "prediction"}, {"name": "stage"}], "parameters": parameters}


def ask(service, body, **headers):
    status, content, told = http("POST", f"{service.url}/v2/models/test/infer", body, **headers)
    return status, content, told


def n_calls(log):
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_a_request_with_the_key_of_another_gets_its_bytes_and_is_not_computed_again(serve):
    service, (small, _) = serve()
    key = {"Idempotency-Key": "one"}
    first = ask(service, body_of([9.0], timeout=9_000_000), **key)
    assert ask(service, body_of([9.0], timeout=4_000_000), **key)[:2] == first[:2]
    assert first[0] == 200
    assert n_calls(small) == 1
    status, content, _ = ask(service, body_of([8.0]), **key)
    assert (status, "another request" in json.loads(content)["error"]) == (422, True)
    assert ask(service, body_of([9.0]), **{"Idempotency-Key": "x" * 300})[0] == 400
    assert ask(service, body_of([9.0]), **{"Idempotency-Key": "two"})[1] != first[1]  # each has an answer_id
    assert n_calls(small) == 2


def test_requests_that_come_while_the_first_is_computed_join_it_also_when_its_client_has_gone(serve):
    service, (_, large) = serve(seconds=1.0)
    answers, gone = [], threading.Event()

    def asks():
        answers.append(ask(service, body_of([0.01]), **{"Idempotency-Key": "one"})[:2])

    def leaves():
        with pytest.raises(TimeoutError):
            http_and_leave(service, body_of([0.01]), "one")
        gone.set()

    threading.Thread(target=leaves).start()
    until(large.exists)
    assert gone.wait(30)
    askers = [threading.Thread(target=asks) for _ in range(3)]
    for one in askers:
        one.start()
    for one in askers:
        one.join()
    assert len({content for _, content in answers}) == 1
    assert {status for status, _ in answers} == {200}
    assert n_calls(large) == 1


def http_and_leave(service, body, key):
    """Send a request, and close the connection before there is an answer."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", int(service.url.rsplit(":", 1)[1]), timeout=0.5)
    try:
        connection.request("POST", "/v2/models/test/infer", json.dumps(body), {"Idempotency-Key": key})
        connection.getresponse()
    finally:
        connection.close()


def test_a_refused_request_may_be_repeated(serve):
    service, _ = serve()
    key = {"Idempotency-Key": "one"}
    bad = body_of([9.0], max_cost=0.0)
    assert ask(service, bad, **key)[0] == 400
    assert ask(service, body_of([9.0]), **key)[0] == 200


@pytest.mark.parametrize("on_failure", ["degrade", "fail"])
def test_a_request_s_own_timeout_ends_it_and_blames_no_stage(serve, on_failure):
    service, (_, large) = serve(seconds=1.2, on_failure=on_failure, timeout_s=5)
    status, content = infer(service.url, "test", {"x": [0.01]}, ["stage"], {"timeout": 800_000})
    if on_failure == "fail":
        assert (status, "the request's timeout" in content["error"]) == (503, True)
    else:
        assert (status, content["parameters"]["degraded"]) == (200, True)
        assert content["outputs"][0]["data"] == [0]
    assert large.exists()
    status, content = infer(service.url, "test", {"x": [0.01]}, ["stage"], {"timeout": 0})
    assert (status, content["outputs"][0]["data"]) == (200, [1])
    assert infer(service.url, "test", {"x": [0.01]}, (), {"timeout": -1})[0] == 400


def test_long_answers_are_compressed_for_those_who_take_it(serve):
    service, _ = serve()
    body = body_of(np.linspace(8, 9, 4000).tolist())
    for accepted in ("gzip", "deflate, gzip;q=0.5"):
        status, content, told = ask(service, body, **{"Accept-Encoding": accepted})
        assert (status, told["Content-Encoding"]) == (200, "gzip")
        assert json.loads(gzip.decompress(content))["outputs"][0]["shape"] == [4000]
    for headers in ({"Accept-Encoding": "gzip;q=0"}, {"Accept-Encoding": "br"}):
        status, content, told = ask(service, body, **headers)
        assert (status, told["Content-Encoding"]) == (200, None)
    assert ask(service, body_of([9.0]), **{"Accept-Encoding": "gzip"})[2]["Content-Encoding"] is None


def test_logits_are_those_of_the_model_that_answered(serve):
    service, _ = serve()
    status, content = infer(service.url, "test", {"x": [9.0, 0.01, -9.0]}, ["logits", "stage"])
    assert status == 200, content
    logits, stage = (np.array(one["data"]) for one in content["outputs"])
    assert logits.reshape(3, 2)[:, 1].tolist() == [0.0] * 3
    assert np.array_equal(logits.reshape(3, 2)[:, 0], np.array([9.0, 0.01, -9.0], np.float32))
    assert stage.tolist() == [0, 1, 0]
