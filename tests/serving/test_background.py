"""What a replica does again and again, in virtual time."""

import asyncio
import logging
from contextlib import suppress

import numpy as np
import pytest
from runs import python_pool, two_model_policy
from virtual_time import run_virtually

from cauc_ray.models.pool import load_pool
from cauc_ray.serving.local import LocalClient, MemoryStore
from cauc_ray.serving.policies_live import InForce, Member, PolicyChange
from cauc_ray.serving.service import Service, repeat


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
def test_failures_are_logged_and_retried_at_longer_intervals(error, caplog):
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


class Alone(Service):
    """The only replica of a service whose metrics are noted in a list."""

    def __init__(self, pool, policy, clients):
        self.noted = []

        def new_metric(name, *_):
            return lambda tags: lambda value: self.noted.append((name, tags, value))

        store = MemoryStore()
        super().__init__(
            "m", pool, InForce(Member.of(policy)), clients, store=store, new_metric=new_metric, life="1", name="alone"
        )

    async def ask_all(self, what):
        return [await getattr(self, what)()]

    async def n_loaded(self):
        return [1] * len(self.specs)


def test_gauges_are_set_repeatedly_also_after_a_change(tmp_path):
    """Ray forgets a gauge that is not: what is in force would be shown for a moment only."""
    pool, policy, newer = load_pool(python_pool(tmp_path)), two_model_policy(0.7), two_model_policy(0.9)
    clients = [LocalClient(spec, stage) for stage, spec in enumerate(pool.stages)]
    for client in clients:
        client.load(60.0)
    service = Alone(pool, policy, clients)

    def gauges():
        return [(tags["policy"], value) for name, tags, value in service.noted if name == "cauc_serve_policy"]

    async def until_set_twice(policy):
        while gauges().count((policy.id, 1)) < 2:
            await asyncio.sleep(0.05)

    async def main():
        async with asyncio.timeout(120):
            await service.check_health()
            await until_set_twice(policy)
            await service.set_policy(PolicyChange(policy=newer.model_dump(mode="json")))
            await until_set_twice(newer)

    asyncio.run(main())
    for client in clients:
        client.close()
    service.close()
    assert gauges().count((policy.id, 0)) == 1
    assert gauges()[-2:] == [(newer.id, 1)] * 2
