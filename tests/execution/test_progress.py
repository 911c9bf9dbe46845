"""Rates and the time left, from successive progress."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.execution.progress import ETA_WINDOW_S, RATE_WINDOW_S, RateMeter, RunProgress, StageProgress


def look(at, accepted=0, n_finished=0, n_rows=None, **stage):
    return RunProgress(at, n_rows, n_finished, (StageProgress("m", accepted=accepted, **{"replicas": 1, **stage}),))


# Steps between looks, and what happened in each: rows accepted, deferred and failed at either of two stages.
steps = st.lists(
    st.tuples(st.floats(0.01, 30), *[st.integers(0, 500)] * 5),
    min_size=1,
    max_size=40,
)


def looks(steps, start=1e9):
    """Return the progress of a run of two stages after each step, none of it committed yet."""
    at, counts, seen = start, [0] * 5, [RunProgress(start, 10**6, 0, (StageProgress("a", replicas=1),) * 2)]
    for dt, *more in steps:
        at, counts = at + dt, [count + n for count, n in zip(counts, more, strict=True)]
        small, deferred, failed, large, degraded = counts
        stages = (
            StageProgress("a", accepted=small, deferred=deferred, failed=failed, replicas=1),
            StageProgress("b", accepted=large, degraded=degraded, replicas=1),
        )
        seen.append(RunProgress(at, 10**6, 0, stages))
    return seen


def slow_rate(seen, count, window_s):
    """Return a count's growth since the last look that is a window old, or the first."""
    old = [look for look in seen if look.at <= seen[-1].at - window_s] or seen[:1]
    return (count(seen[-1]) - count(old[-1])) / (seen[-1].at - old[-1].at)


def ended(look):
    return sum(stage.accepted + stage.failed + stage.degraded for stage in look.stages)


def handled(place, look):
    stage = look.stages[place]
    return stage.accepted + stage.deferred + stage.failed


@given(steps)
def test_rates_are_what_a_slow_loop_over_all_looks_says(steps):
    seen, meter = looks(steps), RateMeter()
    for look in seen:
        rates = meter.add(look)
    assert rates.n_done == ended(seen[-1])
    assert rates.rows_per_s == pytest.approx(slow_rate(seen, ended, RATE_WINDOW_S))
    for place, rate in enumerate(rates.stage_rows_per_s):
        assert rate == pytest.approx(slow_rate(seen, partial(handled, place), RATE_WINDOW_S))
    per_s = slow_rate(seen, ended, ETA_WINDOW_S)
    assert rates.eta_s == (pytest.approx((10**6 - rates.n_done) / per_s) if per_s else None)


@given(st.floats(0.1, 5), st.integers(1, 1000), st.integers(2, 300))
def test_a_steady_run_ends_when_it_was_predicted(dt, per_look, n_looks):
    meter, n_rows = RateMeter(), per_look * n_looks
    for i in range(n_looks + 1):
        rates = meter.add(look(i * dt, accepted=i * per_look, n_rows=n_rows))
        assert rates.eta_s is None if i == 0 else rates.eta_s == pytest.approx((n_looks - i) * dt)
        assert rates.rows_per_s is None if i == 0 else rates.rows_per_s == pytest.approx(per_look / dt)


@given(
    earlier=st.integers(0, 10**5),
    steps=st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=50),
)
def test_rows_done_are_earlier_attempts_and_what_ended_since_committed_or_not(earlier, steps):
    meter, ended, committed = RateMeter(), 0, 0
    meter.add(look(0.0, n_finished=earlier))
    for at, (more, commit) in enumerate(steps, start=1):
        ended += more
        committed = ended if commit else committed
        assert meter.add(look(float(at), accepted=ended, n_finished=earlier + committed)).n_done == earlier + ended


def test_the_time_that_models_take_to_load_is_not_part_of_the_meter():
    meter = RateMeter()
    for at in range(50):
        assert meter.add(look(float(at), n_rows=100, replicas=0, starting=1)).rows_per_s is None
    rates = meter.add(look(50.0, accepted=25, n_rows=100))  # they have begun since the last look
    assert (rates.rows_per_s, rates.eta_s) == (25, 3)


def test_a_run_that_stands_still_has_no_end_in_sight_and_one_that_is_done_has():
    meter = RateMeter()
    for at in range(100):
        rates = meter.add(look(float(at), accepted=10, n_rows=100))
    assert (rates.rows_per_s, rates.eta_s) == (0, None)
    assert meter.add(look(100.0, accepted=100, n_rows=100)).eta_s == 0
    assert RateMeter().add(look(0.0, n_finished=100, n_rows=100)).eta_s == 0
    assert meter.add(look(101.0, accepted=101, n_rows=None)).eta_s is None


def test_a_clock_that_is_set_back_makes_no_rate_below_zero():
    meter = RateMeter()
    for at, accepted in ((100.0, 10), (101.0, 20), (50.0, 25), (51.0, 31)):
        rates = meter.add(look(at, accepted=accepted))
        assert rates.rows_per_s is None or rates.rows_per_s >= 0
    assert rates.rows_per_s == 6


def test_the_accepted_share_is_of_a_stages_answers():
    assert StageProgress("m", failed=3).accepted_share is None
    assert StageProgress("m", accepted=3, deferred=1, failed=5, degraded=7).accepted_share == 0.75
