"""The simulation gathers batches as the parts do that it stands for: the served cascade and the run's scheduler."""

import asyncio
import heapq
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from lanes import Counts, a_pool
from synthetic import chain
from told_models import worker_of
from virtual_time import run_virtually

from cauc_ray.cascade.parcels import Parcel
from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.rows import Owner
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage_queue import StageLimits
from cauc_ray.front.planning.simulation import Window, simulate_arrivals, simulate_backlog
from cauc_ray.front.planning.stages import BatchSeconds, PlannedStage, loads
from cauc_ray.models.answers import Answers
from cauc_ray.policies.fitting import ThresholdRule, fit_rf
from cauc_ray.policies.trace import replay
from cauc_ray.serving.cascade import Cascade

PLENTY = 10**12
DATA = chain(3, n=240)
POLICY = fit_rf(DATA, DATA, ThresholdRule(threshold=0.8))
STOPS = replay(POLICY, DATA).stages
BATCH = 8


def deferral(place):
    """Return the share of the rows at a stage that the policy sends on."""
    return float((place < STOPS).sum() / (place <= STOPS).sum())


class Sleeping:
    """A stage with replicas: a call waits at its own for its turn."""

    def __init__(self, place, planned):
        self.place, self.seconds = place, planned.seconds
        self.turns = [asyncio.Lock() for _ in range(planned.replicas)]
        self.sizes = []
        column = f"logits{place}"
        self.worker = worker_of(lambda batch: Answers(np.array(batch[column], np.float32)), place)

    async def answer(self, call, on_begin=None):
        parcels = [Parcel(one) for one in call.parcels]
        n = sum(map(len, call.parts))
        self.sizes.append(n)
        takes = self.seconds.of(n)
        async with self.turns[int(call.replica)]:
            await asyncio.sleep(takes)
        result, goes_on = self.worker.decide(call.parts, parcels, policies=call.policies, carries_columns=False)
        return replace(result, compute_s=takes), goes_on.state

    def share(self, columns):
        return None


def served(stages, rate, n, seed):
    """Send n requests to the real cascade in virtual time; return their latencies, float (n,), and the calls' sizes."""
    rng = np.random.default_rng(seed)
    arrives, rows = np.cumsum(rng.exponential(1 / rate, n)), rng.integers(0, len(STOPS), n)
    latency = np.zeros(n)
    pool = a_pool(DATA.models, batch_wait_s=stages[0].batch_wait_s, timeout_s=1e6, max_queued_rows=10**6)
    counted = [{"replicas": {"min": at.replicas, "max": at.replicas}} for at in stages]
    specs = [
        spec.model_copy(update={"replicas": type(spec.replicas).model_validate(own["replicas"])})
        for spec, own in zip(pool.stages, counted, strict=True)
    ]

    async def request(cascade, place):
        await asyncio.sleep(arrives[place])
        row = rows[place : place + 1]
        columns = {"row": row, **{f"logits{at}": own[row] for at, own in enumerate(DATA.logits)}}
        await cascade.answer(POLICY, columns, 1)
        latency[place] = asyncio.get_running_loop().time() - arrives[place]

    async def main():
        clients = [Sleeping(place, at) for place, at in enumerate(stages)]
        cascade = Cascade(specs, pool, clients, Counts())
        for place, at in enumerate(stages):
            cascade.replicas(place, [str(number) for number in range(at.replicas)])
        await asyncio.gather(*(request(cascade, place) for place in range(n)))
        return [client.sizes for client in clients]

    return latency, run_virtually(main())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "load"),
    [(2, 0.8), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 0.25), (2, 0.5), (3, 0.9)))],
)
def test_served_requests_wait_and_are_gathered_as_in_the_real_cascade(replicas, load):
    seconds = [BatchSeconds(0.02, 0.001), BatchSeconds(0.02, 0.01), BatchSeconds(0.05, 0.02)]
    stages = [PlannedStage(f"m{place}", BATCH, 0.02, of, deferral(place), replicas) for place, of in enumerate(seconds)]
    rate, n = load / float(loads(stages, 1.0).max()), 5000
    real = [served(stages, rate, n, seed=seed) for seed in range(2)]
    found = [simulate_arrivals(stages, rate, seed=seed, window=Window(0.0, n / rate)) for seed in range(4)]
    latency = np.concatenate([own for own, _ in real])
    assert np.mean([one.latency.mean for one in found]) == pytest.approx(latency.mean(), rel=0.06)
    assert np.mean([one.latency.p50 for one in found]) == pytest.approx(np.percentile(latency, 50), rel=0.08)
    assert np.mean([one.latency.p99 for one in found]) == pytest.approx(np.percentile(latency, 99), rel=0.1)
    for place in range(len(stages)):
        sizes = np.concatenate([of[place] for _, of in real])
        assert np.mean([one.stages[place].fill for one in found]) == pytest.approx(sizes.mean() / BATCH, rel=0.04)
        assert np.mean([one.stages[place].calls for one in found]) == pytest.approx(len(sizes) / 2, rel=0.04)


def controlled(stages, n, seed):
    """Run the real scheduler over n rows in virtual time; return when the last call ended, and the calls' sizes."""
    rng = np.random.default_rng(seed)
    limits = [StageLimits(at.batch_size, at.batch_wait_s, at.queue_rows or PLENTY, PLENTY) for at in stages]
    scheduler = Scheduler(limits, PLENTY)
    for place, at in enumerate(stages):
        for number in range(at.replicas):
            scheduler.stages[place].add_replica(1000 * place + number)
    scheduler.submit(Owner(0, n), [Chunk(None, n, n)], now=0.0)
    scheduler.end_input()
    now, numbers, events, sizes, free = 0.0, count(), [], [[] for _ in stages], {}
    while not scheduler.finished:
        while (call := scheduler.next_call(now)) is not None:
            sizes[call.stage].append(len(call))
            ends = max(now, free.get(call.replica, 0.0)) + stages[call.stage].seconds.of(len(call))
            free[call.replica] = ends
            heapq.heappush(events, (ends, next(numbers), call))
        wait_s = scheduler.wait_s(now)
        if wait_s is not None and (not events or now + wait_s < events[0][0]):
            now += max(wait_s, 1e-9)
            continue
        now, _, call = heapq.heappop(events)
        accepted = rng.random(len(call)) >= stages[call.stage].deferral
        scheduler.ended(call, answered(accepted), None, now)
    return now, sizes


def answered(accepted):
    n = len(accepted)
    return CallResult(
        predictions=np.zeros(n, np.int32),
        confidences=np.full(n, 0.5),
        accepted=accepted,
        costs=np.ones(n),
        started_at=0.0,
        compute_s=1.0,
        policy_s=0.0,
        device_s=None,
        node="here",
    )


def planned(batch, replicas, per_call, per_row, share, queue_rows=None, wait_s=1.0):
    return PlannedStage("s", batch, wait_s, BatchSeconds(per_call, per_row), share, replicas, queue_rows)


@pytest.mark.parametrize("n", [1, 7, 100, 1003])
@pytest.mark.parametrize(
    "stages",
    [
        [planned(16, 3, 0.1, 0.01, 0.0)],
        [planned(16, 2, 0.1, 0.01, 1.0), planned(5, 3, 0.0, 0.05, 0.0, 80)],
        [planned(8, 4, 0.01, 0.001, 1.0), planned(32, 1, 0.3, 0.02, 1.0, 256), planned(4, 2, 0.0, 0.1, 0.0, 128, 0.05)],
    ],
)
def test_a_run_in_which_nothing_is_left_to_chance_is_that_of_the_real_controller(stages, n):
    ended, sizes = controlled(stages, n, seed=0)
    found = simulate_backlog(stages, n)
    assert found.window_s == pytest.approx(ended, rel=1e-6)
    for of, own in zip(found.stages, sizes, strict=True):
        assert (of.calls, of.rows) == (len(own), sum(own))


@pytest.mark.parametrize("shares", [(0.5, 0.4), (0.1, 0.9)])
def test_a_run_that_defers_by_lot_takes_as_long_as_with_the_real_controller(shares):
    stages = [
        planned(32, 1, 0.05, 0.004, shares[0]),
        planned(16, 2, 0.05, 0.01, shares[1], 256),
        planned(8, 3, 0.0, 0.05, 0.0, 192),
    ]
    n = 20_000
    ended, sizes = controlled(stages, n, seed=1)
    found = simulate_backlog(stages, n)
    assert found.window_s == pytest.approx(ended, rel=0.04)
    for of, own, at in zip(found.stages, sizes, stages, strict=True):
        assert of.calls == pytest.approx(len(own), rel=0.04)
        assert of.fill == pytest.approx(np.mean(own) / at.batch_size, rel=0.03)
