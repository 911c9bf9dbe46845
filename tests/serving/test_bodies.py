import asyncio

import pytest

from cauc_ray.serving import http_app
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.http_app import CLIENT_GONE, Bodies


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


def test_a_body_is_read_to_its_end():
    assert asyncio.run(Bodies().read(sending(part(b"ab"), part(b"c", more=False)), 3)) == b"abc"


def test_a_body_that_is_too_long_is_read_no_further_than_twice_the_limit():
    for messages in ((part(b"abcd", more=False),), (part(b"abcd"), part(b"efg"))):
        with pytest.raises(RequestError) as caught:
            asyncio.run(Bodies().read(sending(*messages), 3))
        assert caught.value.status == 413


def test_a_client_that_goes_away_before_it_has_sent_all_is_no_fault_of_the_service():
    with pytest.raises(RequestError, match="went away") as caught:
        asyncio.run(Bodies().read(sending(part(b"ab"), {"type": "http.disconnect"}), 3))
    assert caught.value.status == CLIENT_GONE


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
