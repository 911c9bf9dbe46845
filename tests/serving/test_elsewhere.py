"""What would hold up a service's event loop is done in another process."""

import asyncio
import os
import signal

import pytest

from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.elsewhere import Elsewhere


@pytest.fixture
def elsewhere():
    one = Elsewhere()
    yield one
    one.close()


def test_a_process_that_ends_costs_its_own_request_and_no_other(elsewhere):
    async def main():
        pid = await elsewhere.call(os.getpid)
        with pytest.raises(RequestError) as ended:
            await elsewhere.call(os._exit, 1)
        return pid, ended.value.status, await elsewhere.call(os.getpid)

    pid, status, later = asyncio.run(main())
    assert status == 503
    assert later != pid


def test_a_call_that_nobody_waits_for_is_dropped_and_the_next_one_answered(elsewhere, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    async def main():
        first = asyncio.ensure_future(elsewhere.call(pipe.read_text))  # until the other end is closed
        with await asyncio.to_thread(pipe.open, "w"):  # which waits until the call has begun
            dropped = asyncio.ensure_future(elsewhere.call((tmp_path / "done").touch))
            await asyncio.sleep(0.1)
            dropped.cancel()
            await asyncio.sleep(0.1)
        await first
        return await elsewhere.call(os.getpid)

    assert asyncio.run(main())
    assert not (tmp_path / "done").exists()


def test_a_signal_that_stops_the_service_lets_it_finish(elsewhere):
    async def main():
        pid = await elsewhere.call(os.getpid)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        return pid, await elsewhere.call(os.getpid)

    pid, later = asyncio.run(main())
    assert pid == later


def test_what_prints_does_not_garble_results(elsewhere, capfd):
    async def main():
        await elsewhere.call(print, "something")
        return await elsewhere.call(os.getpid)

    assert asyncio.run(main())
