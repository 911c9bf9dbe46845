"""The controller's logic against random stages, without Ray."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cauc_ray.execution.controller import HOPELESS_ROWS, Controller, InputLimits, StageLimits
from cauc_ray.execution.messages import CallResult

seeds = st.integers(0, 2**32 - 1)


def result(predictions, accepted, *, cost=1.0, error=None):
    n = len(predictions)
    return CallResult(
        predictions=np.asarray(predictions, np.int32),
        confidences=np.full(n, 0.5),
        accepted=np.asarray(accepted, bool),
        costs=np.full(n, cost),
        started_at=0.0,
        compute_s=0.0,
        device_s=None,
        node="here",
        error=error,
    )


def failed(reason):
    return result([], [], error=reason)


class Simulation:
    """Stages whose answer to a row depends on the row alone; calls end in any order."""

    def __init__(self, seed, n_stages, block_sizes, batch_size, n_replicas, poison=0.0, open_batches=4):
        self.rng = np.random.default_rng(seed)
        self.n_stages, self.blocks = n_stages, list(block_sizes)
        self.stops = [self.rng.integers(0, n_stages, n) for n in block_sizes]
        self.poisoned = [self.rng.random(n) < poison for n in block_sizes]
        limits = [StageLimits(batch_size, 1e9, n_replicas)] * n_stages
        self.controller = Controller(limits, InputLimits(rows=open_batches * batch_size, n_bytes=10**9))
        self.batch_size, self.n_replicas = batch_size, n_replicas
        self.calls, self.states, self.sizes = {}, {}, [[] for _ in range(n_stages)]
        self.finished, self.now, self.max_in_flight = {}, 0.0, 0

    def run(self):
        n_read = 0
        for _ in range(100_000):
            if self.controller.finished:
                return self
            while self.controller.wants_block() and n_read < len(self.blocks):
                self.controller.add_block(n_read, self.blocks[n_read], 1, self.now)
                n_read += 1
            if n_read == len(self.blocks):
                self.controller.end_input()
            while (call := self.controller.next_call(self.now)) is not None:
                self.check(call)
                self.calls[call.id] = call
            assert self.calls or self.controller.finished, "nothing is under way and nothing can be sent"
            if self.calls:
                self.end(self.calls.pop(int(self.rng.choice(list(self.calls)))))
            self.now += 1.0
        raise AssertionError("the run does not end")

    def check(self, call):
        assert 0 < len(call) <= self.batch_size
        same = [c for c in self.calls.values() if (c.stage, c.replica) == (call.stage, call.replica)]
        assert len(same) < 2  # one computes, one waits
        for rows in call.rows:
            assert (rows.state is None) == (call.stage == 0)
            if rows.state is not None:  # the state is there, and each of its rows is used once
                kept = self.states[rows.state]
                assert [kept[place] for place in rows.state_rows] == [(rows.block, i) for i in rows.indices.tolist()]

    def end(self, call):
        where = [(rows.block, i) for rows in call.rows for i in rows.indices.tolist()]
        if any(self.poisoned[block][i] and call.stage == self.stops[block][i] for block, i in where):
            released = self.controller.call_ended(call.id, failed("poison"), self.now)
        else:
            self.sizes[call.stage].append(len(call))
            accepted = [self.stops[block][i] == call.stage for block, i in where]
            answers = [100 * block + i for block, i in where]
            self.states[call.id] = [w for w, done in zip(where, accepted, strict=True) if not done]
            released = self.controller.call_ended(call.id, result(answers, accepted), self.now)
        for state in released.states:
            del self.states[state]
        for block in released.blocks:
            assert block.block not in self.finished
            self.finished[block.block] = block


@settings(max_examples=80)
@given(
    seeds,
    st.integers(1, 4),
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.0, 0.1]),
)
def test_every_row_ends_once_where_it_should_in_any_order_of_events(seed, n_stages, blocks, batch, replicas, poison):
    run = Simulation(seed, n_stages, blocks, batch, replicas, poison).run()
    assert sorted(run.finished) == list(range(len(blocks)))
    for number, n in enumerate(blocks):
        block, bad = run.finished[number], run.poisoned[number]
        assert set(block.failures) == set(np.flatnonzero(bad))
        assert (block.stages[~bad] == run.stops[number][~bad]).all()
        assert (block.stages[bad] == -1).all()
        assert (block.predictions[~bad] == 100 * number + np.arange(n)[~bad]).all()
        assert (block.costs[~bad] == run.stops[number][~bad] + 1).all()
        assert all(stage == run.stops[number][row] for row, (stage, _) in block.failures.items())
    used_up = [state for state, rows in run.states.items() if rows]
    assert not used_up
    for at in run.controller.progress():
        assert at.queued == at.in_flight == 0


@settings(max_examples=20)
@given(seeds, st.integers(2, 4))
def test_deferred_rows_are_gathered_into_full_batches(seed, n_stages):
    run = Simulation(seed, n_stages, [37] * 30, batch_size=16, n_replicas=2, open_batches=64).run()
    for sizes in run.sizes[1:]:
        # With room for open rows only the input's end sends partial batches, when the stages before run dry.
        assert sum(size < 16 for size in sizes) <= 4


def test_a_partial_batch_waits_for_its_time_and_no_longer():
    controller = Controller([StageLimits(10, 5.0, 1)] * 2, InputLimits(100, 100))
    controller.add_block(0, 10, 1, now=0.0)
    call = controller.next_call(0.0)
    controller.call_ended(call.id, result(range(10), [True] * 6 + [False] * 4), now=1.0)
    assert controller.next_call(1.0) is None  # more input may come
    assert controller.wait_s(1.0) == pytest.approx(5.0)
    assert controller.next_call(5.9) is None
    assert len(controller.next_call(6.0)) == 4


def test_a_partial_batch_does_not_wait_when_nothing_can_be_added():
    controller = Controller([StageLimits(10, 5.0, 1)] * 2, InputLimits(100, 100))
    controller.add_block(0, 3, 1, now=0.0)
    assert controller.next_call(0.0) is None
    controller.end_input()
    call = controller.next_call(0.0)
    assert len(call) == 3
    controller.call_ended(call.id, result(range(3), [True, True, False]), now=0.0)
    assert len(controller.next_call(0.0)) == 1


def test_input_is_bounded_by_rows_and_bytes_but_never_stops():
    for limits in (InputLimits(rows=5, n_bytes=1000), InputLimits(rows=1000, n_bytes=5)):
        controller = Controller([StageLimits(10, 0.0, 1)], limits)
        assert controller.wants_block()
        controller.add_block(0, 6, 6, now=0.0)
        assert not controller.wants_block()
        call = controller.next_call(0.0)
        controller.call_ended(call.id, result(range(6), [True] * 6), now=0.0)
        assert controller.wants_block()


def test_a_stage_that_never_succeeds_is_hopeless_and_one_that_once_did_is_not():
    for succeeds in (False, True):
        controller = Controller([StageLimits(1, 0.0, 1)], InputLimits(100, 100))
        controller.add_block(0, 60, 1, now=0.0)
        if succeeds:
            controller.call_ended(controller.next_call(0.0).id, result([0], [True]), 0.0)
        for _ in range(HOPELESS_ROWS):
            assert not controller.hopeless(0)
            controller.call_ended(controller.next_call(0.0).id, failed("no"), 0.0)
        assert controller.hopeless(0) is not succeeds
