"""What a replica does again and again, in virtual time."""

import asyncio
import logging
from itertools import pairwise

import pytest
from virtual_time import run_virtually

from cauc_ray.serving.background import repeat

HOUR_S = 3600.0


def times_of(do, until_s=HOUR_S, period_s=1.0):
    """Repeat something that is given the number of the time, and return when it was done."""
    times = []

    async def main():
        loop = asyncio.get_running_loop()

        async def once():
            times.append(loop.time())
            await do(len(times))

        task = asyncio.create_task(repeat(once, period_s))
        await asyncio.sleep(until_s)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtually(main())
    return times


@pytest.mark.parametrize("error", [RuntimeError("it broke"), KeyError("k"), asyncio.CancelledError()])
def test_what_fails_is_logged_and_goes_on(error, caplog):
    """A call within it that was cancelled is a failure like others."""

    async def do(number):
        if number in (3, 4, 5):
            raise error

    with caplog.at_level(logging.ERROR):
        times = times_of(do, until_s=100.0)
    assert len(times) > 80
    assert len({record.message for record in caplog.records}) == 3
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[0] == pytest.approx(1.0, abs=0.01)
    assert gaps[2] < gaps[3] < gaps[4]
    assert gaps[5] == pytest.approx(1.0, abs=0.01)


def test_what_always_fails_is_tried_again_and_again_at_longer_intervals():
    async def do(number):
        raise OSError("gone")

    times = times_of(do)
    assert HOUR_S / 20 < len(times) < HOUR_S / 5
