"""The HTTP application's own: bodies as they come, and who may ask."""

import asyncio
import os
import select
import socket
import time
from contextlib import ExitStack, suppress

import pytest
from asking import edit_pool, infer
from hypothesis import given
from hypothesis import strategies as st
from runs import python_pool, two_model_policy
from starlette.datastructures import Headers
from virtual_time import run_virtually

import cauc_ray
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving import bodies, connections
from cauc_ray.serving.bodies import OpenBytes, read_body
from cauc_ray.serving.http_app import Tokens


def part(body, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_that_is_too_long_is_read_no_further():
    parts = iter([part(b"abcd"), part(b"e" * 64_000_000)])

    async def receive():
        return next(parts)

    with pytest.raises(RequestError) as caught:
        asyncio.run(read_body(receive, 3, int))
    assert caught.value.status == 413


@pytest.mark.parametrize("head", [b"", b"x" * 60_000])
def test_a_body_that_comes_slowly_is_not_waited_for_and_a_steady_one_is(head, monkeypatch):
    """Also one that begins fast."""

    async def read(n_bytes):
        sent = iter([head])

        async def receive():
            await asyncio.sleep(3.0)
            return part(next(sent, b"a" * n_bytes), more=asyncio.get_running_loop().time() < 40.0)

        return await read_body(receive, 10**6, int), asyncio.get_running_loop().time()

    with pytest.raises(RequestError, match="came within") as caught:
        run_virtually(read(100))
    assert caught.value.status == 408
    assert run_virtually(read(6000))[1] > 39.0


def test_requests_have_no_more_bytes_together_than_there_is_room_for_until_they_end(monkeypatch):
    """One alone may have as many as its limit."""
    monkeypatch.setattr(bodies, "OPEN_BYTES", 10)
    open_bytes = OpenBytes()
    with open_bytes.share() as first:
        first(8)
        with pytest.raises(RequestError, match="too many") as caught, open_bytes.share() as second:
            second(3)
        assert (caught.value.status, caught.value.retry_after_s is not None) == (429, True)
        with open_bytes.share() as second:
            second(2)
    with open_bytes.share() as alone:
        alone(50)


def is_closed(connection):
    try:
        return not connection.recv(10_000)
    except ConnectionResetError:
        return True


def test_connections_that_send_nothing_or_slowly_are_closed_and_others_served(tmp_path, monkeypatch):
    for module in (bodies, connections):
        monkeypatch.setattr(module, "SLOW_S", 0.5)
    pool = edit_pool(python_pool(tmp_path), serving={"keep_alive_s": 8})
    request = b"POST /v2/models/test/infer HTTP/1.1\r\nHost: x\r\n"
    with cauc_ray.serve(pool, two_model_policy(), port=0, local=True) as service, ExitStack() as stack:
        port = int(service.url.rpartition(":")[2])

        def held(content):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(content)
            return connection

        silent, *slow = held(b""), held(request), held(request + b"Content-Length: 1000\r\n\r\n")
        open_ones = {silent, *slow}
        while open_ones:
            open_ones -= set(filter(is_closed, select.select(open_ones, [], [], 0.2)[0]))
            for connection in slow:
                with suppress(OSError):
                    connection.sendall(b"a")
            assert infer(service.url, "test", {"x": [9.0]})[0] == 200
        asked = b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
        idle = held(asked)
        for _ in range(2):  # it is open for longer than headers are waited for
            received = b""
            while not received.endswith(b"}"):
                received += idle.recv(10_000)
            assert b"200 OK" in received
            time.sleep(1.0)
            idle.sendall(asked)
        while idle.recv(10_000):
            pass


tokens = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)


def asked_with(value):
    """Return headers as a server reads them from bytes."""
    return Headers(raw=[(b"authorization", value)])


def tokens_of(**variables):
    """Return the tokens of a service that is started with these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CAUC_TOKEN", "CAUC_POLICY_TOKEN"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        return Tokens()


@given(tokens, tokens, st.binary(max_size=12))
def test_only_the_token_is_let_in(token, guess, scheme):
    expected = tokens_of(CAUC_TOKEN=token, CAUC_POLICY_TOKEN="another")
    sent = os.fsencode(token).strip()
    if sent:
        expected.require(asked_with(b"Bearer " + sent), "CAUC_TOKEN")
        for bearer in (sent, b"another"):
            expected.require_reader(asked_with(b"bearer  " + bearer))
    values = [b"", b"Bearer", b"Bearer ", b"Bearer \t", scheme, b"Basic " + sent]
    if sent != os.fsencode(guess).strip():
        values.append(b"Bearer " + os.fsencode(guess))
    refusals = set()
    for headers in [*map(asked_with, values), Headers(raw=[])]:
        with pytest.raises(RequestError) as refused:
            expected.require(headers, "CAUC_TOKEN")
        refusals.add((refused.value.status, refused.value.message))
    assert len(refusals) == 1  # it reveals nothing of either token
    assert "CAUC_TOKEN" in refusals.pop()[1]


def test_a_blank_token_lets_nobody_in_and_none_everybody():
    for value in (b"Bearer", b"Bearer ", b"Bearer  \n"):
        with pytest.raises(RequestError):
            tokens_of(CAUC_TOKEN=" \n").require(asked_with(value), "CAUC_TOKEN")
    anybody, page = tokens_of(CAUC_TOKEN=""), Headers({"origin": "http://evil.example"})
    for headers in (Headers(), page):
        anybody.require(headers, "CAUC_TOKEN", "CAUC_POLICY_TOKEN")
    anybody.require_changer(Headers())
    with pytest.raises(RequestError) as refused:  # a page that somebody visits would reach services of their machine
        anybody.require_changer(page)
    assert refused.value.status == 403
    tokens_of(CAUC_POLICY_TOKEN="x").require_reader(Headers(raw=[]))
    token = os.fsdecode(b"\xff\xfe")  # it need not be UTF-8
    tokens_of(CAUC_TOKEN=token).require(asked_with(b"Bearer \xff\xfe"), "CAUC_TOKEN")
