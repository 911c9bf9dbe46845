"""Limits of deferral and of money, in virtual time: what may go on, and what becomes of the rest."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.cascade.allowance import HOUR_S, Allowance
from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.patience import RunPatience
from cauc_ray.cascade.rows import CallResult, Owner
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage import StageLimits

PRICES = (0.001, 0.01, 0.1)


class Cascade:
    """Three stages, of which each defers a share of its rows, drawn at random."""

    def __init__(self, deferred, seed=0, **limits):
        self.now, self.rng, self.deferred = 0.0, np.random.default_rng(seed), deferred
        allowance = Allowance(PRICES, clock=lambda: self.now, **limits)
        stages = [StageLimits(8, 0.0, 10**6, 10**9)] * len(PRICES)
        self.scheduler = Scheduler(stages, RunPatience(), Blame("row"), allowance=allowance)
        for stage in range(len(PRICES)):
            self.scheduler.replica_ready(stage, stage, 0.0)
        self.usd, self.n_rows, self.calls = 0.0, 0, []

    def submit(self, n):
        """Take n rows, and return their owner; nothing has answered them yet."""
        owner = Owner(self.n_rows, n)
        self.n_rows += n
        self.scheduler.submit(owner, [Chunk(None, n, n)], 0.0)
        return owner

    def go_on(self, in_flight=1):
        """Answer calls in any order until nothing is left to do; in_flight: calls open at a time."""
        while (new := list(self.scheduler.schedule(0.0))) or self.calls:
            self.calls += new
            while len(self.calls) >= in_flight or (self.calls and not new):
                self.end(self.calls.pop(int(self.rng.integers(len(self.calls)))))
                new = []

    def end(self, call):
        n, last = len(call), call.stage == len(PRICES) - 1
        accepted = np.full(n, last) | (self.rng.random(n) >= self.deferred)
        self.usd += n * PRICES[call.stage]
        costs = np.full(n, PRICES[call.stage])
        result = CallResult(np.full(n, call.stage, np.int32), np.full(n, 0.5), accepted, costs)
        self.scheduler.call_ended(call, result, None, 0.0)


def n_late(owner):
    return int((owner.stages > 0).sum())


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(0, 1), st.integers(1, 4), st.integers(0, 99))
def test_a_run_spends_no_more_than_its_limit_and_the_rest_keep_their_answer(sizes, share, in_flight, seed):
    limit = sum(sizes) * (PRICES[0] + share * sum(PRICES[1:]))
    cascade = Cascade(0.7, seed, max_usd=limit, period="run")
    owners = [cascade.submit(n) for n in sizes]
    cascade.go_on(in_flight)
    assert cascade.usd <= limit * (1 + 1e-9)
    assert all((owner.stages >= 0).all() for owner in owners)  # degraded, and answered
    limited = sum(int(owner.degraded.sum()) for owner in owners)
    assert not limited or cascade.usd + PRICES[-1] > limit - PRICES[-1]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.floats(0, 1), st.integers(0, 99))
def test_no_more_rows_are_deferred_than_the_rate_allows_at_any_time(sizes, rate, seed):
    cascade, owners = Cascade(0.9, seed, max_deferral_rate=rate, period="run"), []
    for n in sizes:
        owners.append(cascade.submit(n))
        cascade.go_on()
        assert sum(map(n_late, owners)) <= rate * cascade.n_rows * (1 + 1e-9)
    free = Cascade(0.9, seed, max_deferral_rate=1.0, period="run")
    owner = free.submit(sum(sizes))
    free.go_on()
    assert not owner.degraded.any()


def test_each_hour_begins_anew():
    limit = 10 * sum(PRICES)
    cascade = Cascade(1.0, max_usd=limit)
    for hour in range(3):
        cascade.now, before = hour * HOUR_S + 10.0, cascade.usd
        early = cascade.submit(20)
        cascade.go_on()
        assert n_late(early) > 5
        late = cascade.submit(5)
        cascade.go_on()
        assert late.degraded.all()
        # Calls of the first stage are always made.
        assert limit - PRICES[-1] < cascade.usd - before <= limit + 5 * PRICES[0] + 1e-9


def test_a_service_defers_its_first_rows_too():
    cascade = Cascade(1.0, max_deferral_rate=0.3, fewest_rows=100)
    owners = [cascade.submit(1) for _ in range(200)]
    cascade.go_on()
    assert [n_late(owner) for owner in owners[:10]] == [1] * 10
    assert sum(map(n_late, owners)) == 60


def test_a_pool_that_does_not_degrade_fails_such_rows():
    cascade = Cascade(1.0, max_deferral_rate=0.5, period="run", trouble="error")
    owner = cascade.submit(20)
    cascade.go_on()
    assert not owner.degraded.any()
    assert len(owner.failures) == 20 - n_late(owner) > 0
    assert "limits" in next(iter(owner.failures.values()))[1]
