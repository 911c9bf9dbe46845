"""The HTTP application's own: bodies as they come, and who may ask."""

import asyncio
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving import http_app
from cauc_ray.serving.http_app import CLIENT_GONE, Bodies, authorize, token_of


def sending(*messages):
    """Return what receives these messages of a connection, or raises them."""
    coming = iter(messages)

    async def receive():
        message = next(coming)
        if isinstance(message, Exception):
            raise message
        return message

    return receive


def part(body, more=True):
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([part(b"abcd", more=False)], 413),
        ([part(b"abcd"), part(b"efg")], 413),  # and is read no further than twice the limit
        ([part(b"ab"), {"type": "http.disconnect"}], CLIENT_GONE),
    ],
)
def test_a_body_is_read_to_its_end_or_refused(messages, status):
    assert asyncio.run(Bodies().read(sending(part(b"ab"), part(b"c", more=False)), 3)) == b"abc"
    with pytest.raises(RequestError) as caught:
        asyncio.run(Bodies().read(sending(*messages), 3))
    assert caught.value.status == status


def test_a_body_that_does_not_come_is_not_waited_for_in_vain(monkeypatch):
    monkeypatch.setattr(http_app, "BODY_S", 0.05)

    async def receive():
        await asyncio.sleep(0.02)
        return part(b"a")

    with pytest.raises(RequestError, match="not arrive") as caught:
        asyncio.run(Bodies().read(receive, 1000))
    assert caught.value.status == 408


def test_no_more_is_read_at_once_than_there_is_room_for(monkeypatch):
    """A body that comes slowly holds its room; one alone may be as long as its limit."""
    monkeypatch.setattr(http_app, "READING_BYTES", 10)

    async def main():
        bodies, goes_on = Bodies(), asyncio.Event()
        slow = iter([part(b"x" * 8), part(b"", more=False)])

        async def receive():
            message = next(slow)
            if not message["more_body"]:
                await goes_on.wait()
            return message

        first = asyncio.create_task(bodies.read(receive, 100))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="too many") as caught:
            await bodies.read(sending(part(b"abc", more=False)), 100)
        goes_on.set()
        return caught.value, await first, await bodies.read(sending(part(b"y" * 50, more=False)), 100)

    error, first, alone = asyncio.run(main())
    assert (error.status, error.retry_after_s is not None) == (429, True)
    assert (first, alone) == (b"x" * 8, b"y" * 50)


tokens = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)


def asked_with(value):
    """Return headers as a server reads them from bytes."""
    return Headers(raw=[(b"authorization", value)])


def in_environment(token):
    os.environ["CAUC_TEST_TOKEN"] = token
    try:
        return token_of("CAUC_TEST_TOKEN")
    finally:
        del os.environ["CAUC_TEST_TOKEN"]


@given(tokens, tokens, st.binary(max_size=12))
def test_only_the_token_is_let_in(token, guess, scheme):
    expected = in_environment(token)
    sent = os.fsencode(token).strip()
    if sent:
        authorize(asked_with(b"Bearer " + sent), expected)
        authorize(asked_with(b"bearer  " + sent), None, b"another", expected)
    values = [b"", b"Bearer", b"Bearer ", b"Bearer \t", scheme, b"Basic " + sent]
    if sent != os.fsencode(guess).strip():
        values.append(b"Bearer " + os.fsencode(guess))
    refusals = set()
    for headers in [*map(asked_with, values), Headers(raw=[])]:
        with pytest.raises(RequestError) as refused:
            authorize(headers, expected)
        refusals.add((refused.value.status, refused.value.message))
    assert len(refusals) == 1  # it reveals nothing of either token


def test_a_blank_token_lets_nobody_in_and_none_everybody():
    for value in (b"Bearer", b"Bearer ", b"Bearer  \n"):
        with pytest.raises(RequestError):
            authorize(asked_with(value), in_environment(" \n"))
    authorize(Headers(raw=[]), in_environment(""), token_of("CAUC_TEST_NO_TOKEN"))
    authorize(asked_with(b"Bearer \xff\xfe"), in_environment(os.fsdecode(b"\xff\xfe")))  # it need not be UTF-8
