"""Models of other servers: a strict stand-in for Triton, and the failures of servers and links."""

import contextlib
import json
import socket

import numpy as np
import pytest
from link import Link
from strict_server import LENGTH, LOGITS, METADATA, NUMBERS, TITLES, logits_of, strict_server

from cauc_ray.errors import CaucError, ConfigError, ExecutionError
from cauc_ray.models.pool import pool_of

INPUTS = {"numbers": "INPUT__0", "title": "TITLE"}


def remote(url, **settings):
    model = {"kind": "remote", "url": url, "model": "net", "inputs": INPUTS, "output": "OUTPUT__0", **settings}
    pool = {"name": "p", "task": "classification", "stages": [{"name": "large", "model": model}]}
    return pool_of(pool, None).stages[0].load()


def port_of(server):
    return int(server.url.rsplit(":", 1)[1])


def batch_of(n):
    numbers = np.arange(2.0 * n).reshape(n, 2) / 8
    return {"numbers": numbers, "title": np.array([f"né {row}" for row in range(n)], dtype=object), "other": np.ones(n)}


def expected_of(batch):
    return logits_of(batch["numbers"], batch["title"]).astype(np.float32)


@pytest.mark.parametrize(
    ("extensions", "speaks_binary", "formats"),
    [(["binary_tensor_data"], True, [True, True]), (None, True, [False, True]), (None, False, [False, False])],
)
def test_a_gateway_that_exposes_models_only_is_asked_in_json_until_it_answers_in_raw_bytes(
    extensions, speaks_binary, formats
):
    with strict_server(extensions=extensions, speaks_binary=speaks_binary) as server:
        model = remote(server.url)
        for n in (3, 4):
            assert np.array_equal(model(batch_of(n)).logits, expected_of(batch_of(n)))
    assert [LENGTH in headers for headers, _, _ in server.requests] == formats
    assert all(0 < parameters["timeout"] <= 30e6 for _, parameters, _ in server.requests)  # of 30 s


def test_the_limit_of_a_server_is_learned_once():
    """Triton with a max_batch_size rejects larger requests."""
    batch = batch_of(256)
    with strict_server(max_batch_size=8) as server:
        model = remote(server.url)
        assert np.array_equal(model(batch).logits, expected_of(batch))
        n_first = len(server.requests)
        assert n_first < 2 * 256 / 8 + 4 * 4  # each of four requests may learn it
        assert np.array_equal(model(batch).logits, expected_of(batch))
        assert len(server.requests) - n_first == 256 / 8


def answers_with(*fault):
    return {"faults": [fault] * 9}


def describes(**changes):
    return {"metadata": {**METADATA, **changes}}


@pytest.mark.parametrize(
    ("server", "settings", "error", "words"),
    [
        (answers_with(503, {}), {}, ExecutionError, "503: not now, 3 attempts"),
        (answers_with(503, {"Retry-After": "3600"}), {}, ExecutionError, "503: not now"),
        (answers_with(500, {}), {}, ExecutionError, "it fails on every row, 500: not now"),
        *((answers_with(status, {}), {}, ConfigError, f"{status}: not now") for status in (401, 404)),
        (answers_with(302, {"Location": "https://elsewhere"}), {}, ConfigError, "see https://elsewhere"),
        (answers_with(200, {}, b"<html>Welcome</html>"), {}, ExecutionError, "its answer cannot be read"),
        *(
            ({"answers": lambda *rows, of=of: logits_of(*rows)[of]}, {}, ExecutionError, "expected numbers of shape")
            for of in ((slice(1, None), slice(None)), (slice(None), 0), (slice(None), slice(0, 0)))
        ),
        (describes(outputs=[{**LOGITS, "name": "y"}]), {}, ConfigError, "has no output 'OUTPUT__0', only y"),
        (describes(outputs=[{**LOGITS, "datatype": "INT64"}]), {}, ConfigError, "INT64"),
        (describes(), {"inputs": {"numbers": "x"}}, ConfigError, "has no input 'x', only INPUT__0, TITLE"),
        (describes(inputs=[]), {"inputs": {}}, ConfigError, "inputs"),
        (describes(inputs=[{**NUMBERS, "shape": [4, 2]}, TITLES]), {}, ConfigError, "rows, -1, first"),
        (describes(), {"model": "nett"}, ConfigError, "unknown model"),
    ],
)
def test_a_server_that_fails_or_is_unlike_the_settings_is_one_line(server, settings, error, words):
    with strict_server(**server) as started, pytest.raises(CaucError) as raised:
        remote(started.url, retries=2, **settings)(batch_of(2))
    assert type(raised.value) is error
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("status", [400, 500])
def test_a_rejected_row_fails_alone_and_does_not_shrink_later_requests(status):
    batch = batch_of(20)
    with strict_server(refuses="né 7", status=status) as server:
        model = remote(server.url, max_rows=8)
        answers = model(batch)
        model(batch_of(6))
    assert list(answers.failures) == [7]
    assert "not now" in answers.failures[7]
    rest = np.arange(20) != 7
    assert np.array_equal(answers.logits[rest], expected_of(batch)[rest])
    assert server.n_rows == 19 + 6
    assert server.requests[-1][2] == 6


def test_a_server_that_rejects_everything_from_the_start_ends_the_call():
    with strict_server(faults=[(400, {})] * 99) as server, pytest.raises(ConfigError, match="400"):
        remote(server.url)(batch_of(64))


def test_values_that_a_tensor_does_not_take_are_failed_rows():
    batch = batch_of(6)
    batch["numbers"] = np.fromiter([*batch["numbers"][:3], None, [1.0, 2.0, 3.0], ["a", "b"]], dtype=object, count=6)
    batch["title"][0] = "\udce9"
    with strict_server() as server:
        answers = remote(server.url)(batch)
    assert sorted(answers.failures) == [0, 3, 4, 5]
    assert server.n_rows == 2


# Links.


def test_a_silent_connection_costs_an_attempt_not_the_call():
    with strict_server() as server, Link(port_of(server), seed=36, stall_share=0.5) as link:
        assert not remote(link.url, timeout_s=3)(batch_of(4)).failures
    assert link.n_connections > 1


def test_a_connection_whose_handshake_is_given_up_is_closed():
    """The server takes connections and says nothing: none may be left open for the collector of garbage."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(ExecutionError):
            remote(f"https://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.6, retries=0)(batch_of(2))
        server.settimeout(5.0)
        connection, _ = server.accept()
        with connection, contextlib.suppress(ConnectionResetError):
            connection.settimeout(5.0)
            while connection.recv(65536):
                pass


# Settings.


def test_secrets_come_from_the_environment_and_are_not_shown(monkeypatch):
    token, key = "s3cret-t0ken", "k3y-of-the-gateway"
    monkeypatch.setenv("CLOUD_TOKEN", f"{token}\n")
    monkeypatch.setenv("GATEWAY_KEY", key)
    echoes = (403, {}, json.dumps({"error": f"bad token {token} or key {key}"}).encode())
    settings = {"token_env": "CLOUD_TOKEN", "headers": {"api-key": "$GATEWAY_KEY", "Host": "net.models.example"}}
    with strict_server(faults=[echoes]) as server:
        model = remote(server.url, **settings)
        with pytest.raises(ConfigError) as raised:
            model(batch_of(1))
        assert token not in str(raised.value)
        assert key not in str(raised.value)
        assert not model(batch_of(1)).failures
    for headers, _, _ in server.requests:
        assert headers["Authorization"] == f"Bearer {token}"
        assert headers["api-key"] == key
        assert headers.get_all("Host") == ["net.models.example"]
    monkeypatch.setenv("GATEWAY_KEY", f"{key}€")  # a client's own message would show it
    with pytest.raises(ConfigError, match="GATEWAY_KEY") as raised:
        remote("https://h", **settings)
    assert key not in str(raised.value)


def test_a_proxy_of_the_environment_is_used_unless_the_host_is_excepted(monkeypatch):
    with strict_server() as server, strict_server() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for url in (server.url, "http://models.example:8000"):
            assert not remote(url)(batch_of(2)).failures
    assert (len(server.requests), len(proxy.requests)) == (1, 1)


def test_a_proxy_that_cannot_be_used_is_one_line(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "foo://user:pa55word@host")
    with pytest.raises(ConfigError, match="proxy") as raised:
        remote("http://models.example")
    assert "pa55word" not in str(raised.value)
