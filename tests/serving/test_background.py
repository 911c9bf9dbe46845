"""What a replica does again and again, in virtual time."""

import asyncio
import logging
from contextlib import suppress

import numpy as np
import pytest
from virtual_time import run_virtually

from cauc_ray.serving.service import repeat


def times_of(do, until_s):
    """Repeat something that is given the number of the time, each second, and return when it was done."""
    times = []

    async def once():
        times.append(asyncio.get_running_loop().time())
        await do(len(times))

    async def main():
        with suppress(TimeoutError):
            await asyncio.wait_for(repeat(once, 1.0), until_s)

    run_virtually(main())
    return times


@pytest.mark.parametrize("error", [RuntimeError("it broke"), asyncio.CancelledError()])
def test_what_fails_is_logged_and_tried_again_at_longer_intervals(error, caplog):
    """A call within it that was cancelled is a failure like others."""

    async def do(number):
        if number in (3, 4, 5) or number > 80:
            raise error

    with caplog.at_level(logging.ERROR):
        gaps = np.diff(times_of(do, until_s=1000.0))
    assert len({record.message for record in caplog.records}) >= 3
    assert gaps[[0, 5]] == pytest.approx(1.0, abs=0.01)
    assert gaps[2] < gaps[3] < gaps[4]
    assert gaps[-1] == pytest.approx(10.0, abs=0.01)
