"""The fewest replicas: no load above the most, a goal that is met and no longer met with one replica less."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.planning.sizing import MOST_LOAD, Trials, least_counts, sized
from cauc_ray.planning.stages import PlannedStage, RouterSeconds, loads, with_replicas
from cauc_ray.planning.timings import Timing


def stage(name, batch_size, per_call, per_row, deferral=0.0, wait_s=0.005):
    return PlannedStage(name, batch_size, wait_s, Timing(per_call, per_row, "saved"), deferral)


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


def test_there_are_as_many_routers_as_a_rate_needs_whatever_the_pool_allows():
    stages = [stage("s", 10, 0.01, 0.0)]
    router = Trials(stages, 1000.0, RouterSeconds(0.002, 0.004, replicas=1)).router
    assert router.replicas == 3  # 1000 x (2 ms + a tenth of 4 ms) are 2.4 s a second, of which each has 0.8
    assert router.load(stages, 1000.0) == pytest.approx(0.8)


@pytest.mark.soak("full")
def test_smaller_batches_are_advised_only_where_batches_have_rows_to_spare():
    lone, full = (sized(Trials([stage("s", 8, 0.5, 0.0)], rate), 0.1).out_of_reach for rate in (1e-3, 1e3))
    assert "batch_size" not in lone
    assert "batch_size" in full


@pytest.mark.soak("full")
def test_a_goal_is_met_and_not_with_one_replica_less_of_any_stage():
    rate = 50.0
    least = sized(Trials(CHAIN, rate), None)
    goal = 0.5 * least.simulation.latency.p99
    sizing = sized(Trials(CHAIN, rate), goal)
    assert sizing.out_of_reach is None
    assert sizing.meets(goal)
    assert not least.meets(goal)
    assert sum(sizing.counts) > sum(least.counts)
    for place, n in enumerate(sizing.counts):
        fewer = [*sizing.counts[:place], n - 1, *sizing.counts[place + 1 :]]
        if n > least.counts[place]:
            assert not Trials(CHAIN, rate).of(fewer).meets(goal)
