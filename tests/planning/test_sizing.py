"""The fewest replicas: no load above the most, a goal that is met and no longer met with one replica less."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.errors import ConfigError
from cauc_ray.planning.sizing import (
    MOST_LOAD,
    Trials,
    holds,
    least_counts,
    most_rate,
    run_of,
    run_rows,
    sized,
)
from cauc_ray.planning.stages import (
    BatchSeconds,
    PlannedStage,
    RouterSeconds,
    loads,
    reaches,
    with_drift,
    with_replicas,
)


def stage(name, batch_size, per_call, per_row, deferral=0.0, wait_s=0.005):
    return PlannedStage(name, batch_size, wait_s, BatchSeconds(per_call, per_row), deferral)


CHAIN = (
    stage("small", 8, 0.01, 0.002, 0.4),
    stage("middle", 4, 0.02, 0.01, 0.5),
    stage("large", 2, 0.05, 0.05),
)
chains = st.lists(
    st.builds(stage, st.text("abc"), st.integers(1, 64), st.floats(0, 1), st.floats(0.001, 0.5), st.floats(0, 1)),
    min_size=1,
    max_size=4,
)


@given(stages=chains, rate=st.floats(0.1, 1000.0))
def test_the_least_replicas_keep_every_load_within_the_most_and_one_less_would_not(stages, rate):
    counts = least_counts(stages, rate)
    assert (loads(with_replicas(stages, counts), rate) <= MOST_LOAD * (1 + 1e-9)).all()
    for place, n in enumerate(counts):
        if n > 1:
            fewer = with_replicas(stages, [*counts[:place], n - 1, *counts[place + 1 :]])
            assert loads(fewer, rate)[place] > MOST_LOAD * (1 - 1e-9)


@given(stages=chains, factor=st.floats(0.1, 3.0))
def test_drift_moves_every_rate_and_none_above_one(stages, factor):
    drifted = with_drift(stages, factor)
    assert [at.deferral for at in drifted] == [min(1.0, factor * at.deferral) for at in stages]
    assert [replace(at, deferral=own.deferral) for at, own in zip(drifted, stages, strict=True)] == stages


@given(stages=chains)
def test_the_highest_rate_fills_the_bottleneck_and_nothing_beyond(stages):
    rate, bottleneck = most_rate(stages)
    at = loads(stages, rate)
    assert at[bottleneck] == pytest.approx(MOST_LOAD)
    assert at.max() == at[bottleneck]


@pytest.mark.parametrize("allowed", [1, 50])
def test_there_are_as_many_routers_as_a_rate_needs_whatever_the_pool_allows(allowed):
    stages = [PlannedStage("s", 10, 0.0, BatchSeconds(0.01, 0.0), 0.0)]
    router = Trials(stages, 1000.0, RouterSeconds(0.002, 0.004, allowed)).router
    assert router.replicas == 3  # 1000 x (2 ms + a tenth of 4 ms) are 2.4 s a second, of which each has 0.8
    assert router.load(stages, 1000.0) == pytest.approx(0.8)


def test_a_rate_alone_takes_the_least_replicas():
    sizing = sized(Trials(CHAIN, 50.0), None)
    assert sizing.counts == tuple(least_counts(CHAIN, 50.0))
    assert sizing.out_of_reach is None
    assert holds(sizing, None)
    assert sizing.simulation.rows_per_s == pytest.approx(50.0, rel=0.03)


@pytest.mark.slow
def test_a_goal_is_met_and_not_with_one_replica_less_of_any_stage():
    rate = 50.0
    least = sized(Trials(CHAIN, rate), None)
    goal = 0.5 * least.simulation.latency.p99
    sizing = sized(Trials(CHAIN, rate), goal)
    assert sizing.out_of_reach is None
    assert holds(sizing, goal)
    assert not holds(least, goal)
    assert sum(sizing.counts) > sum(least.counts)
    for place, n in enumerate(sizing.counts):
        fewer = [*sizing.counts[:place], n - 1, *sizing.counts[place + 1 :]]
        if n > least.counts[place]:
            assert not holds(Trials(CHAIN, rate).of(fewer), goal)


@pytest.mark.slow
def test_a_goal_below_what_batches_take_is_out_of_reach_and_the_slowest_stage_is_named():
    sizing = sized(Trials(CHAIN, 50.0), 0.1)
    assert sizing.counts == tuple(least_counts(CHAIN, 50.0))
    assert "no number of replicas" in sizing.out_of_reach
    assert "batch_size of 'large'" in sizing.out_of_reach
    assert not holds(sizing, 0.1)


def test_too_few_replicas_do_not_hold():
    assert not holds(Trials(CHAIN, 400.0).of([1, 1, 1]), None)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(0.0, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_all_or_nothing_may_be_deferred(shares):
    stages = [replace(at, deferral=share) for at, share in zip(CHAIN, (*shares, 0.0), strict=True)]
    sizing = sized(Trials(stages, 20.0), 5.0)
    assert holds(sizing, 5.0)
    reached = reaches(stages)
    for of, reach in zip(sizing.simulation.stages, reached, strict=True):
        assert (of.calls > 0) == (reach > 0)
        assert (of.fill is None) == (reach == 0)
    assert run_of(sizing.stages).n_answered == run_rows(sizing.stages)


def test_no_plan_beyond_all_reason():
    with pytest.raises(ConfigError, match="replicas of stage 'large'"):
        least_counts(CHAIN, 1e9)


def test_a_run_comes_near_what_its_bottleneck_can_do():
    stages = with_replicas(CHAIN, [1, 2, 3])
    found = run_of(stages)
    assert found.n_answered == run_rows(stages)
    reached = np.array([of.rows for of in found.stages]) / found.n_answered
    assert reached == pytest.approx(reaches(stages), rel=0.1)
    bound = 1 / max(reached * [at.row_s / at.replicas for at in stages])
    assert 0.95 * bound < found.rows_per_s <= bound * (1 + 1e-9)
