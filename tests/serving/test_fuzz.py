"""Hostile clients of one service: what they send is answered or refused, and harms nobody else."""

import json
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from hostile import (
    ANSWER_DEADLINE_S,
    INPUTS,
    MOST_BYTES,
    MOST_ROWS,
    Asked,
    post,
    read_answer,
    right_requests,
    wrong_requests,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import python_pool, two_model_policy

import cauc_ray

INFER, POLICY = "/v2/models/fuzzed/infer", "/v2/models/fuzzed/policy"
# A request costs what hundreds of calls of a function do: of a profile's examples these tests take so small a part.
MOST = settings.default.max_examples
some = settings(max_examples=max(10, MOST // 5), suppress_health_check=list(HealthCheck))
many = settings(max_examples=2 * MOST, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    pool = python_pool(tmp_path_factory.mktemp("fuzz"), [("sign_of_x", {}), ("sign_of_x", {})])
    content = yaml.safe_load(pool.read_text())
    content["inputs"] = INPUTS
    content["serving"] = {"max_request_rows": MOST_ROWS, "max_body_mb": MOST_BYTES / 1e6}
    for stage in content["stages"]:
        stage["serving"] = {"timeout_s": ANSWER_DEADLINE_S - 10}
    pool.write_text(yaml.safe_dump(content))
    with cauc_ray.serve(pool, two_model_policy(0.9), port=0, name="fuzzed", local=True) as running:
        yield running


@pytest.mark.slow
def test_every_address_does_what_the_openapi_page_says(service, tmp_path):
    """Schemathesis asks every address for what the page says and for what it does not, and checks the answers."""
    with urllib.request.urlopen(f"{service.url}/openapi.json", timeout=60) as answer:
        described = json.load(answer)
    # Of the model that there is, and of one that there is not.
    for operations in described["paths"].values():
        for parameter in (one for operation in operations.values() for one in operation.get("parameters", [])):
            if parameter["in"] == "path":
                names = {"name": ["fuzzed", "fuzzed", "fuzzed", "other"], "version": ["1", "1", "1", "2"]}
                parameter["schema"] = {"type": "string", "enum": names[parameter["name"]]}
    (tmp_path / "openapi.json").write_text(json.dumps(described))
    # JSON schema cannot say that shapes, data and lengths fit each other: what is as it says may still be refused.
    command = [
        Path(sys.executable).with_name("st"),
        "run",
        tmp_path / "openapi.json",
        "--url",
        service.url,
        "--no-color",
    ]
    command += ["--exclude-checks=positive_data_acceptance", "--warnings=off", "--continue-on-failure", "--no-shrink"]
    command += [f"--max-examples={max(3, MOST // 20)}", f"--max-response-time={ANSWER_DEADLINE_S}"]
    command += ["--generation-deterministic"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr


def require_answer(asked, headers, body):
    message, outputs = read_answer(headers, body)
    assert message["parameters"]["degraded"] is False
    assert message.get("id") == asked.document.get("id")
    named = [one["name"] for one in asked.document.get("outputs", ())] or [
        "prediction",
        "prediction_label",
        "confidence",
    ]
    assert list(outputs) == named
    expected = [int(x < 0) for x in asked.xs]
    if "prediction" in outputs:
        assert outputs["prediction"].tolist() == expected
    if "probabilities" in outputs:
        assert outputs["probabilities"].argmax(axis=1).tolist() == expected
    assert all(len(values) == len(expected) for values in outputs.values())


def require_sentence(headers, body):
    assert headers["content-type"] == "application/json"
    content = json.loads(body)
    assert list(content) == ["error"]
    assert 0 < len(content["error"]) < 600
    assert content["error"].isprintable()
    assert "Traceback" not in content["error"]


@many
@given(right_requests())
def test_what_is_right_is_answered_whatever_its_form(service, asked):
    status, headers, body, _ = post(service.url, INFER, asked)
    assert status == 200, body
    require_answer(asked, headers, body)


@many
@given(wrong_requests())
def test_what_is_wrong_is_refused_in_a_sentence(service, asked):
    status, headers, body, _ = post(service.url, INFER, asked)
    # Nothing here is the fault of a stage, or too much.
    assert status in (200, 400, 413, 415), body
    if status == 200:
        read_answer(headers, body)
    else:
        require_sentence(headers, body)


@some
@given(st.lists(wrong_requests(), min_size=6, max_size=6), st.lists(right_requests(), min_size=6, max_size=6))
def test_wrong_requests_do_not_disturb_right_ones_beside_them(service, wrong_ones, right_ones):
    answers = {}

    def send(place, asked):
        answers[place] = post(service.url, INFER, asked)

    pairs = enumerate(one for both in zip(wrong_ones, right_ones, strict=True) for one in both)
    threads = [threading.Thread(target=send, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * ANSWER_DEADLINE_S)
    for place, asked in enumerate(right_ones):
        status, headers, body, _ = answers[2 * place + 1]
        assert status == 200, body
        require_answer(asked, headers, body)


numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 1, 1e308, 5e-324, 10**400])
jsons = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def policy_changes(draw, policy):
    content = policy.model_dump(mode="json")
    place = content
    while True:
        key = draw(st.sampled_from(list(place) if isinstance(place, dict) else range(len(place))))
        if not (isinstance(place[key], dict | list) and place[key] and draw(st.booleans())):
            break
        place = place[key]
    place[key] = draw(jsons)
    change = {"policy": content} if draw(st.booleans()) else draw(st.fixed_dictionaries({"policy": jsons}))
    return change | draw(st.fixed_dictionaries({}, optional={"threshold": jsons, "budget": numbers}))


@some
@given(st.data())
def test_a_policy_from_a_hostile_client_is_refused_or_can_be_used(service, data):
    change = data.draw(policy_changes(two_model_policy(0.9)))
    asked = Asked({}, b"", None, body=json.dumps(change).encode())
    changed, headers, body, _ = post(service.url, POLICY, asked, "PUT")
    assert changed in (200, 400, 409), body
    try:
        if changed != 200:
            require_sentence(headers, body)
        status, headers, body, _ = post(service.url, INFER, data.draw(right_requests()))
        assert status == 200, body
        read_answer(headers, body)
    finally:
        if changed == 200:
            cauc_ray.set_policy(two_model_policy(0.9), url=service.url)


def test_files_of_the_server_are_no_policies(service, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(two_model_policy(0.5).to_json())
    status, headers, body, _ = post(
        service.url, POLICY, Asked({}, b"", None, body=json.dumps({"policy": str(path)}).encode()), "PUT"
    )
    assert status == 400
    require_sentence(headers, body)


def raw(service, sent, timeout=ANSWER_DEADLINE_S):
    """Return an open connection on which something was sent."""
    host, port = service.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=timeout)
    connection.sendall(sent)
    return connection


def head(path, length, *more):
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *more, "", ""]).encode()


ONE = Asked(
    {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1], "data": [-2.0]},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 1, 2], "data": [0, 0]},
            {"name": "note", "datatype": "BYTES", "shape": [1], "data": [""]},
        ]
    },
    b"",
    [-2.0],
).encode()


def test_clients_that_are_slow_or_go_away_keep_nobody_waiting(service, caplog):
    caplog.set_level(logging.INFO, logger="cauc_ray")
    whole = head(INFER, len(ONE.body)) + ONE.body
    slow = [raw(service, whole[: 20 + 5 * place]) for place in range(20)]
    leaving = [raw(service, whole if place % 2 else whole[:-10]) for place in range(40)]
    time.sleep(0.2)
    for leaves in leaving:
        leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # without a farewell
        leaves.close()
    for _ in range(5):
        status, headers, body, _ = post(service.url, INFER, ONE)
        assert status == 200
        require_answer(ONE, headers, body)
    for place, connection in enumerate(slow):
        with connection:
            connection.sendall(whole[20 + 5 * place :])
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    deadline = time.monotonic() + ANSWER_DEADLINE_S
    while '"status": 499' not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # They were no fault of the service.
    assert '"status": 500' not in caplog.text
    assert "Traceback" not in caplog.text


def test_requests_that_come_before_the_last_answer_are_answered_in_order(service):
    whole = head(INFER, len(ONE.body), "x-request-id: {}").decode() + ONE.body.decode()
    sent = "".join(whole.replace("x-request-id: {}", f"x-request-id: no-{place}") for place in range(5))
    got = b""
    with raw(service, sent.encode()) as connection:
        while got.count(b'"outputs"') < 5:
            part = connection.recv(100_000)
            assert part
            got += part
    order = [line.split(b"no-")[1].strip() for line in got.split(b"\r\n") if b"x-request-id: no-" in line]
    assert order == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize(
    ("start", "status"),
    [
        ("GET /v2/", 404),  # and no redirection to where the Host header says
        ("GET //v2", 404),
        ("GET /v2/models/%00%0d%0aX:%20y", 404),
        ("GET /v2/models/fuzzed/../fuzzed", 404),
        ("GET /v2/models/" + "a" * 30_000, 404),
        ("GET /v2/models/fuzzed/versions/%D9%A1", 404),
        ("OPTIONS " + INFER, 405),
        ("DELETE " + POLICY, 405),
    ],
)
def test_odd_addresses_and_methods_are_refused(service, start, status):
    with raw(service, f"{start} HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n".encode()) as connection:
        answer = b""
        while part := connection.recv(100_000):
            answer += part
    lines, _, body = answer.partition(b"\r\n\r\n")
    names = dict(line.lower().split(b": ", 1) for line in lines.split(b"\r\n")[1:])
    assert int(lines.split()[1]) == status
    assert names.get(b"x") != b"y"
    if status == 405:
        allowed = {INFER: {"post"}, POLICY: {"get", "head", "put"}}
        assert set(names[b"allow"].decode().split(", ")) == allowed[start.split()[1]]
    require_sentence({"content-type": names[b"content-type"].decode()}, body)
