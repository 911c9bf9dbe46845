"""The simulation against formulas of queueing theory, against one of single requests, and what must always hold."""

import heapq

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cauc_ray.errors import ConfigError
from cauc_ray.front.planning.simulation import Window, settled_window, simulate_arrivals, simulate_backlog
from cauc_ray.front.planning.stages import BatchSeconds, PlannedStage, loads, reaches, with_drift, with_replicas


def stage(batch_size=1, replicas=1, *, per_call=0.0, per_row=0.0, wait_s=0.0, deferral=0.0, queue_rows=None):
    return PlannedStage("s", batch_size, wait_s, BatchSeconds(per_call, per_row), deferral, replicas, queue_rows)


chains = st.lists(
    st.builds(
        stage,
        st.integers(1, 9),
        st.integers(1, 4),
        per_call=st.floats(0.0, 0.3),
        per_row=st.floats(0.001, 0.1),
        wait_s=st.floats(0.0, 0.5),
        deferral=st.floats(0.0, 1.0),
        queue_rows=st.one_of(st.none(), st.integers(20, 60)),
    ),
    min_size=1,
    max_size=3,
)


@given(stages=chains, rate=st.floats(0.5, 200.0), seed=st.integers(0, 99), calls_each=st.sampled_from([1, 2]))
def test_no_row_is_lost_and_no_replica_computes_two_calls_at_once(stages, rate, seed, calls_each):
    found = simulate_arrivals(stages, rate, seed=seed, window=Window(2.0, 12.0), calls_each=calls_each)
    assert found.n_arrived == found.n_answered + found.n_left
    assert found.rows_per_s * found.window_s <= found.n_answered + 1e-6
    for at, of in zip(stages, found.stages, strict=True):
        assert 0.0 <= of.busy <= 1.0
        assert of.fill is None or 0.0 < of.fill <= 1.0
        assert of.rows <= of.calls * at.batch_size
    if found.latency is not None:
        quickest = min(np.cumsum([at.seconds.of(1) for at in stages]))
        assert found.latency.p50 >= quickest - 1e-9
        assert found.latency.p50 <= found.latency.p99


@given(stages=chains, n=st.integers(1, 400))
def test_a_backlog_ends_answered_not_before_any_stage_could_have_done_its_share(stages, n):
    found = simulate_backlog(stages, n)
    assert (found.n_answered, found.n_left) == (n, 0)
    reached = n
    for at, of in zip(stages, found.stages, strict=True):
        assert of.rows == reached
        reached = round(at.deferral * reached)
    for at, of in zip(stages, found.stages, strict=True):
        busy_s = at.seconds.per_call * of.calls + at.seconds.per_row * of.rows
        assert found.window_s >= busy_s / at.replicas - 1e-9
        assert of.busy == pytest.approx(busy_s / (at.replicas * found.window_s))


@given(stages=chains, seed=st.integers(0, 9))
def test_what_is_drawn_by_lot_comes_from_the_seed_alone(stages, seed):
    window = Window(1.0, 5.0)
    assert simulate_arrivals(stages, 40.0, seed=seed, window=window) == simulate_arrivals(
        stages, 40.0, seed=seed, window=window
    )


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.6, 0.3, 0.85])
def test_one_replica_and_single_rows_are_an_m_d_1_queue(load):
    service_s = 0.02
    found = simulate_arrivals([stage(per_call=service_s)], load / service_s, window=Window(100.0, 100.0 + 5000 / load))
    # Pollaczek and Khinchine, for a service that does not vary.
    waits_s = load * service_s / (2 * (1 - load))
    assert found.stages[0].wait_s == pytest.approx(waits_s, rel=0.05)
    assert found.latency.mean == pytest.approx(service_s + waits_s, rel=0.03)
    assert found.stages[0].busy == pytest.approx(load, rel=0.02)
    assert not found.grows


def slow_queue(rng, stages, rate, n):
    """Follow single requests through replicas fed from one queue per stage; return the latency of each, float (n,)."""
    arrived = np.cumsum(rng.exponential(1 / rate, n))
    at, now, latency = np.arange(n), arrived.copy(), np.zeros(n)
    for one in stages:
        at = at[np.argsort(now[at], kind="stable")]
        free = [0.0] * one.replicas
        heapq.heapify(free)
        for row in at:
            starts = max(now[row], heapq.heappop(free))
            now[row] = starts + one.seconds.of(1)
            heapq.heappush(free, now[row])
        going = rng.random(len(at)) < one.deferral
        latency[at[~going]] = now[at[~going]] - arrived[at[~going]]
        at = at[going]
    return latency


@pytest.mark.parametrize(
    ("stages", "rate"),
    [
        ([stage(replicas=4, per_call=0.1)], 34.0),
        ([stage(replicas=2, per_call=0.02, deferral=0.4), stage(replicas=5, per_row=0.12)], 85.0),
        (
            [stage(per_row=0.01, deferral=0.5), stage(per_row=0.01, deferral=0.5), stage(replicas=2, per_call=0.05)],
            80.0,
        ),
    ],
    ids=["m/d/4", "two stages", "three stages"],
)
def test_single_rows_and_several_replicas_are_as_request_by_request(stages, rate):
    n = 60_000
    latency = slow_queue(np.random.default_rng(5), stages, rate, n)[n // 10 :]
    found = simulate_arrivals(stages, rate, window=Window(0.1 * n / rate, n / rate), calls_each=1).latency
    assert found.mean == pytest.approx(latency.mean(), rel=0.05)
    assert found.p50 == pytest.approx(np.percentile(latency, 50), rel=0.05)
    assert found.p99 == pytest.approx(np.percentile(latency, 99), rel=0.12)


@settings(max_examples=30)
@given(stages=chains)
def test_a_long_backlog_comes_near_its_bottlenecks_bound_and_never_above(stages):
    assume(float(reaches(stages)[-1]) > 0.05)
    n = int(300 * max(at.batch_size * at.replicas for at in stages) / reaches(stages)[-1])
    found = simulate_backlog([*stages[:-1], with_drift(stages[-1:], 0.0)[0]], n)
    reached = np.array([of.rows for of in found.stages]) / n
    bound = 1 / max(reached * [at.row_s / at.replicas for at in stages])
    assert found.rows_per_s <= bound * (1 + 1e-9)
    # A queue that is bounded is that of a run: eight batches or more for each replica.
    if all(at.queue_rows is None for at in stages):
        assert found.rows_per_s > 0.9 * bound


@given(stages=chains, place=st.integers(0, 2), more=st.integers(1, 5))
def test_a_backlog_without_bounded_queues_is_done_no_later_with_more_replicas_of_the_only_stage(stages, place, more):
    at = stages[place % len(stages)]
    few = simulate_backlog([at], 500)
    many = simulate_backlog([at.with_replicas(at.replicas + more)], 500)
    # The last rows are shared out into smaller batches, each of which has a call's seconds.
    assert many.window_s <= few.window_s + at.batch_s + 1e-9


def test_latency_falls_as_replicas_are_added():
    chain = [stage(4, per_call=0.02, per_row=0.01, wait_s=0.01, deferral=0.5), stage(2, per_row=0.05, wait_s=0.01)]
    rate = 60.0
    p99 = [
        simulate_arrivals(with_replicas(chain, [n, n]), rate, window=Window(20.0, 320.0)).latency.p99
        for n in (2, 3, 4, 8)
    ]
    assert p99 == sorted(p99, reverse=True)


@pytest.mark.parametrize("factor", [0.8, 0.95, 1.05, 1.5])
def test_a_queue_grows_where_the_load_is_more_than_all_capacity(factor):
    chain = [stage(8, 2, per_row=0.01, wait_s=0.01, deferral=0.5), stage(4, 2, per_row=0.02, wait_s=0.01)]
    rate = factor / float(loads(chain, 1.0).max())
    found = simulate_arrivals(chain, rate)
    assert found.grows == (factor > 1)
    if factor > 1:
        assert found.rows_per_s < 0.99 * rate
    else:
        assert found.rows_per_s == pytest.approx(rate, rel=0.03)


def test_requests_wait_for_each_other_no_longer_than_they_may():
    # So many replicas that one is always idle: nothing but the gathering keeps a request from its call.
    found = simulate_arrivals([stage(1000, 50, per_call=0.05, wait_s=0.2)], 100.0, window=Window(10.0, 110.0))
    assert 0.05 <= found.latency.p99 <= 0.2 + 0.05 + 1e-9
    assert found.stages[0].rows > found.stages[0].calls


def test_a_request_that_is_alone_waits_for_nobody():
    found = simulate_arrivals([stage(8, per_call=0.001, wait_s=5.0)], 0.05, window=Window(100.0, 20_000.0))
    assert found.latency.p50 == pytest.approx(0.001)


def test_a_window_holds_what_figures_need_and_refuses_what_no_memory_holds():
    chain = [stage(4, per_row=0.01, deferral=0.5), stage(4, 3, per_row=0.05)]
    window = settled_window(chain, 20.0)
    found = simulate_arrivals(chain, 20.0)
    assert found.window_s == window.last - window.first
    assert found.latency.n >= 15_000
    with pytest.raises(ConfigError, match="cannot be simulated"):
        settled_window([stage(4, 10**6, per_row=60.0)], 1e6)


@pytest.mark.slow
def test_a_million_requests_a_second_on_more_than_a_thousand_replicas():
    chain = [
        stage(256, 299, per_call=0.01, per_row=0.0002, wait_s=0.005, deferral=0.3),
        stage(128, 622, per_call=0.02, per_row=0.0015, wait_s=0.005, deferral=0.25),
        stage(64, 419, per_call=0.03, per_row=0.004, wait_s=0.005),
    ]
    found = simulate_arrivals(chain, 1e6)
    assert found.n_arrived > 3_000_000
    assert found.n_arrived == found.n_answered + found.n_left
    assert found.rows_per_s == pytest.approx(1e6, rel=0.005)
    for of, load in zip(found.stages, loads(chain, 1e6), strict=True):
        assert of.busy == pytest.approx(load, rel=0.02)  # batches are as good as full
    # So many replicas leave nothing to wait for: what takes time is a request's way through its stages' batches.
    assert found.latency.p99 == pytest.approx(sum(at.batch_s for at in chain), rel=0.03)
