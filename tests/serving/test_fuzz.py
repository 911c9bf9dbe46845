"""Hostile clients of one service: what they send is answered or refused, and harms nobody else."""

import http.client
import json
import logging
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from asking import edit_pool, until
from asking import http as ask
from hypothesis import settings
from runs import python_pool, two_model_policy

import cauc_ray

INFER, POLICY = "/v2/models/fuzzed/infer", "/v2/models/fuzzed/policy"
MOST_BYTES, DEADLINE_S = 200_000, 120
# A request costs what hundreds of calls of a function do: of a profile's examples these tests take so small a part.
MOST = settings.default.max_examples
TEXT = json.dumps(
    {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1], "data": [-2.0]},
            {"name": "pixels", "datatype": "UINT8", "shape": [1, 1, 2], "data": [[[0, 0]]]},
            {"name": "note", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 6}},
        ],
        "outputs": [{"name": "prediction"}, {"name": "degraded"}],
        "parameters": {"max_stage": "large", "max_cost": 1e6},
    }
).encode()
BODY, LENGTH = TEXT + b"\2\0\0\0ab", {"Inference-Header-Content-Length": str(len(TEXT))}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    pool = python_pool(tmp_path_factory.mktemp("fuzz"), [("sign_of_x", {}), ("sign_of_x", {})])
    pixels = {"datatype": "UINT8", "shape": [-1, 2]}
    inputs = {"x": {"datatype": "FP32"}, "pixels": pixels, "note": {"datatype": "BYTES"}}
    edit_pool(pool, inputs=inputs, serving={"max_request_rows": 64, "max_body_mb": MOST_BYTES / 1e6})
    with cauc_ray.serve(pool, two_model_policy(0.9), port=0, name="fuzzed", local=True) as running:
        yield running


@pytest.mark.soak("full")
def test_every_address_does_what_the_openapi_page_says(service, tmp_path):
    """Schemathesis asks every address for what the page says and for what it does not, and checks the answers."""
    with urllib.request.urlopen(f"{service.url}/openapi.json", timeout=60) as answer:
        described = json.load(answer)
    # Of the model of the service, and of an unknown one.
    for name, values in (("name", ["fuzzed", "fuzzed", "fuzzed", "other"]), ("version", ["1", "1", "1", "2"])):
        described["components"]["parameters"][name]["schema"] = {"type": "string", "enum": values}
    page = tmp_path / "openapi.json"
    page.write_text(json.dumps(described))
    # JSON schema cannot express that shapes, data and lengths fit each other: what is as it says may still be refused.
    command = [Path(sys.executable).with_name("st"), "run", page, "--url", service.url, "--no-color"]
    command += ["--exclude-checks=positive_data_acceptance", "--warnings=off", "--continue-on-failure", "--no-shrink"]
    command += [f"--max-examples={max(3, MOST // 20)}", f"--max-response-time={DEADLINE_S}"]
    command += ["--generation-deterministic"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr


def require_sentence(headers, body):
    assert headers["content-type"] == "application/json"
    content = json.loads(body)
    assert list(content) == ["error"]
    assert 0 < len(content["error"]) < 600
    assert content["error"].isprintable()
    assert "Traceback" not in content["error"]


def raw(service, sent):
    """Return an open connection on which something was sent."""
    host, port = service.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
    connection.sendall(sent)
    return connection


def test_clients_that_leave_are_no_fault_of_the_service(service, caplog):
    caplog.set_level(logging.INFO, logger="cauc_ray")
    lines = [f"POST {INFER} HTTP/1.1", "Host: x", f"Content-Length: {len(BODY)}"]
    whole = "\r\n".join([*lines, *map(": ".join, LENGTH.items()), "", ""]).encode() + BODY

    def one_is_missed():
        for sent in (whole, whole[:-10]):
            with raw(service, sent) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        return '"status": 499' in caplog.text

    until(one_is_missed)
    status, body, _ = ask("POST", service.url + INFER, BODY, **LENGTH)
    assert status == 200, body
    assert [one["data"] for one in json.loads(body)["outputs"]] == [[1], [False]]
    assert '"status": 500' not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("start", "status"),
    [
        ("GET /v2/", 404),  # and no redirection to where the Host header says
        ("GET /v2/models/%00%0d%0aX:%20y", 404),
        ("GET /v2/models/fuzzed/../fuzzed", 404),
        ("GET /v2/models/" + "a" * 30_000, 404),
        ("OPTIONS " + INFER, 405),
    ],
)
def test_odd_addresses_and_methods_are_refused(service, start, status):
    with raw(service, f"{start} HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n".encode()) as connection:
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, answer.headers.get("x")) == (status, None)
        require_sentence(answer.headers, answer.read())
