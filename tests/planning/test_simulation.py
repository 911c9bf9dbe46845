"""The simulation against formulas of queueing theory, the served cascade, and what must always hold."""

import asyncio

import numpy as np
import pytest
from fake_stages import Counts, a_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain
from virtual_time import run_virtually

from cauc_ray.cascade.bundles import gathered
from cauc_ray.cascade.rows import CallResult
from cauc_ray.planning.simulation import Window, simulate_arrivals, simulate_trace
from cauc_ray.planning.stages import PlannedStage, RouterSeconds, loads
from cauc_ray.planning.timings import Timing
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.serving.cascade import Cascade

DATA = chain(3, n=240)
POLICY = fit_rf(DATA, DATA, ThresholdRule(threshold=0.8))


def stage(batch_size=1, replicas=1, *, per_call=0.0, per_row=0.0, wait_s=0.0, deferral=0.0):
    return PlannedStage("s", batch_size, wait_s, Timing(per_call, per_row, "saved"), deferral, replicas)


THREE = [
    stage(8, 2, per_call=0.02, per_row=0.001, wait_s=0.02, deferral=0.6),
    stage(8, 2, per_call=0.02, per_row=0.01, wait_s=0.02, deferral=0.5),
    stage(8, 2, per_call=0.05, per_row=0.02, wait_s=0.02),
]
chains = st.lists(
    st.builds(
        stage,
        st.integers(1, 9),
        st.integers(1, 4),
        per_call=st.floats(0.0, 0.3),
        per_row=st.floats(0.001, 0.1),
        wait_s=st.floats(0.0, 0.5),
        deferral=st.floats(0.0, 1.0),
    ),
    min_size=1,
    max_size=3,
)


class Sleeping:
    """A stage of a service: a call waits at its replica for its turn."""

    def __init__(self, place, planned):
        self.place, self.seconds = place, planned.seconds
        self.turns = [asyncio.Lock() for _ in range(planned.replicas)]
        self.sizes = []

    async def answer(self, call, on_begin=None):
        answered_by = gathered(call.parts, call.bundles)["answered_by"]
        n, takes = len(answered_by), self.seconds.of(len(answered_by))
        self.sizes.append(n)
        async with self.turns[int(call.replica)]:
            await asyncio.sleep(takes)
        accepted = answered_by == self.place
        nothing = np.zeros(n)
        result = CallResult(nothing.astype(np.int32), nothing, accepted, nothing, 0.0, takes, 0.0, None, "here")
        return result, np.zeros((n - int(accepted.sum()), 1))


def served(stages, times, answered_by):
    """Send requests to the real cascade in virtual time; return their latencies, float (n,), and the calls' sizes."""
    latency = np.zeros(len(times))
    pool = a_pool(DATA.models, batch_wait_s=stages[0].batch_wait_s, timeout_s=1e6, max_queued_rows=10**6)

    async def request(cascade, place):
        await asyncio.sleep(times[place])
        await cascade.answer(POLICY, {"answered_by": answered_by[place : place + 1]}, 1)
        latency[place] = asyncio.get_running_loop().time() - times[place]

    async def main():
        clients = [Sleeping(place, at) for place, at in enumerate(stages)]
        cascade = Cascade(pool.stages, pool, clients, [Counts([spec.name for spec in pool.stages])])
        for place, at in enumerate(stages):
            cascade.replicas(place, [str(number) for number in range(at.replicas)])
        await asyncio.gather(*(request(cascade, place) for place in range(len(times))))
        return [client.sizes for client in clients]

    return latency, run_virtually(main())


def test_a_trace_is_served_as_by_the_real_cascade():
    # Where requests queue, a call that goes a microsecond later changes those after it: at a higher load rel is 0.03.
    (rng, n), (load, rel) = (np.random.default_rng(3), 1000), (0.3, 0.005)
    times = np.cumsum(rng.exponential(float(loads(THREE, 1.0).max()) / load, n))
    answered_by = rng.choice(3, n, p=[0.4, 0.3, 0.3]).astype(np.int8)
    latency, sizes = served(THREE, times, answered_by)
    result = simulate_trace(THREE, times, answered_by, Window(0.0, times[-1] + 100.0))
    assert result.latency.n == n
    assert result.latency.mean == pytest.approx(latency.mean(), rel=rel)
    assert result.latency.p99 == pytest.approx(np.percentile(latency, 99), rel=rel)
    for use, batches in zip(result.stages, sizes, strict=True):
        assert use.calls == pytest.approx(len(batches), rel=rel)
        assert use.rows == sum(batches)


@settings(max_examples=25)
@given(stages=chains, rate=st.floats(0.5, 200.0), seed=st.integers(0, 99))
def test_no_row_is_lost_and_no_replica_computes_two_calls_at_once(stages, rate, seed):
    result = simulate_arrivals(stages, rate, seed=seed, window=Window(1.0, 4.0))
    assert result.n_arrived == result.n_answered + result.n_left
    assert result.rows_per_s * result.window_s <= result.n_answered + 1e-6
    for at, of in zip(stages, result.stages, strict=True):
        assert 0.0 <= of.busy <= 1.0
        assert of.fill is None or 0.0 < of.fill <= 1.0
        assert of.rows <= of.calls * at.batch_size
    if result.latency is not None:
        quickest = min(np.cumsum([at.seconds.of(1) for at in stages]))
        assert result.latency.p50 >= quickest - 1e-9
        assert result.latency.p50 <= result.latency.p99
    assert result == simulate_arrivals(stages, rate, seed=seed, window=Window(1.0, 4.0))


@pytest.mark.soak("full")
def test_one_replica_and_single_rows_are_an_m_d_1_queue():
    load, service_s, n = 0.5, 0.02, 16_000
    window = Window(100.0, 100.0 + n * service_s / load)
    result = simulate_arrivals([stage(per_call=service_s)], load / service_s, window=window)
    # Pollaczek and Khinchine, for a service that does not vary.
    waits_s = load * service_s / (2 * (1 - load))
    assert result.stages[0].wait_s == pytest.approx(waits_s, rel=0.06)
    assert result.latency.mean == pytest.approx(service_s + waits_s, rel=0.03)
    assert result.stages[0].busy == pytest.approx(load, rel=0.02)
    assert not result.grows


@pytest.mark.soak("full")
def test_a_routers_seconds_come_on_top_and_what_comes_meanwhile_waits():
    stages, window, first = [stage(4, per_call=1.0)], Window(0.0, 9.0), np.zeros(2, np.int8)
    router, times = RouterSeconds(per_request=0.2, per_call=0.05), np.array([0.0, 0.05])
    alone = simulate_trace(stages, times[:1], first[:1], window, router=router)
    assert alone.latency.mean == pytest.approx(1.0 + 0.2 + 0.05)
    # The first is sent at 0.1 s and answered at 1.25; the second waits until then: the time of calls is not known yet.
    both = simulate_trace(stages, times, first, window, router=router)
    assert both.latency.mean == pytest.approx((1.25 + 2.4 - 0.05) / 2)
    busy = simulate_arrivals([stage(8, 4, per_call=0.01)], 100.0, router=RouterSeconds(0.012))
    assert busy.grows  # the replicas have time, the router has none
    assert not simulate_arrivals([stage(8, 4, per_call=0.01)], 100.0, router=RouterSeconds(0.012, replicas=2)).grows


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_queue_grows_where_the_load_is_more_than_all_capacity(factor):
    chain = [stage(8, 2, per_row=0.01, wait_s=0.01, deferral=0.5), stage(4, 2, per_row=0.02, wait_s=0.01)]
    rate = factor / float(loads(chain, 1.0).max())
    result = simulate_arrivals(chain, rate)
    assert result.grows == (factor > 1)
    assert result.rows_per_s == pytest.approx(min(1.0, 1 / factor) * rate, rel=0.05)
