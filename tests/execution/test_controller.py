"""The controller's logic against random stages, deaths and losses, without Ray."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cauc_ray.cascade.results import CallResult
from cauc_ray.execution.blocks import RESTARTS
from cauc_ray.execution.controller import Chunk, Controller
from cauc_ray.execution.stage_queue import (
    CALLS_PER_REPLICA,
    HOPELESS_DEATHS,
    HOPELESS_RENEWED,
    PROBES,
    TRIES,
    StageLimits,
)

seeds = st.integers(0, 2**32 - 1)
PLENTY = 10**9


def result(predictions, accepted, *, cost=1.0, failures=None):
    n = len(predictions)
    return CallResult(
        predictions=np.asarray(predictions, np.int32),
        confidences=np.full(n, 0.5),
        accepted=np.asarray(accepted, bool),
        costs=np.full(n, cost),
        started_at=0.0,
        compute_s=1.0,
        policy_s=0.0,
        device_s=None,
        node="here",
        failures=failures or {},
    )


def failed(reason):
    return CallResult.broken(0.0, "here", reason)


def limits(batch_size, *, batch_wait_s=1e9, queue_rows=PLENTY, queue_bytes=PLENTY):
    return StageLimits(batch_size, batch_wait_s, queue_rows, queue_bytes)


def one_block(stages, n, *, open_rows=PLENTY, replicas=1):
    """Return a controller with so many replicas of each stage and a block of n rows of a byte each."""
    controller = Controller(stages, open_rows)
    for stage in range(len(stages)):
        for number in range(replicas):
            controller.stages[stage].add_replica(10 * stage + number)
    controller.add_block(0, [Chunk(n, n)], now=0.0)
    return controller


class Simulation:
    """Stages whose answer to a row depends on the row alone; calls end in any order, replicas and objects get lost.

    poison: share of rows that a model fails on.   named: share of rows that a model names as ones it cannot answer.
    deadly: share of rows that kill their replica.   chaos: chance of a death, a loss or a pause before each event.
    turn_bad: share of the replicas, also of those started later, that fail every call from some call on, in one way.
    sick: calls, counted over each stage, during which all of its replicas fail.
    """

    def __init__(
        self, seed, n_stages, blocks, batch, n_replicas, *,
        poison=0.0, named=0.0, deadly=0.0, chaos=0.0, queue=PLENTY, turn_bad=0.0, sick=(0, 0),
    ):  # fmt: skip
        self.turn_bad, self.sick, self.n_calls, self.way = turn_bad, sick, [0] * n_stages, {}
        self.doubted, self.n_bad = {}, 0
        self.rng = np.random.default_rng(seed)
        self.n_stages, self.blocks, self.chaos = n_stages, list(blocks), chaos
        self.stops = [self.rng.integers(0, n_stages, n) for n in blocks]
        kinds = self.rng.random
        self.poisoned = [kinds(n) < poison for n in blocks]
        self.deadly = [kinds(n) < deadly for n in blocks]
        self.named = [kinds(n) < named for n in blocks]
        self.queue = queue
        self.controller = Controller([limits(batch, queue_rows=queue)] * n_stages, open_rows=PLENTY)
        self.batch, self.n_next = batch, 0
        self.replicas = {}
        for stage in range(n_stages):
            for _ in range(n_replicas):
                self.start(stage)
        self.calls, self.parcels, self.sizes = {}, {}, [[] for _ in range(n_stages)]
        self.finished, self.now, self.n_read = {}, 0.0, 0
        self.n_losses = 0

    def start(self, stage):
        self.replicas[self.n_next] = stage
        if self.rng.random() < self.turn_bad:
            self.way[self.n_next] = [int(self.rng.integers(3, 12)), str(self.rng.choice(["raises", "names", "dies"]))]
        self.controller.stages[stage].add_replica(self.n_next)
        self.n_next += 1

    def chunks(self, block):
        """Cut a block into chunks of up to seven rows."""
        sizes = [min(7, self.blocks[block] - start) for start in range(0, self.blocks[block], 7)]
        return [Chunk(n, 3 * n) for n in sizes]

    def put(self, block, numbers):
        for place, number in enumerate(numbers):
            if number is not None:
                first = 7 * place
                self.parcels[number] = [(block, first + i) for i in range(min(7, self.blocks[block] - first))]

    def run(self):
        for _ in range(100_000):
            self.replace_bad()
            if self.controller.finished:
                return self
            self.read()
            while (call := self.controller.next_call(self.now)) is not None:
                self.check(call)
                self.calls[call.id] = call
            wait = self.controller.wait_s(self.now)
            assert self.calls or self.controller.finished or wait is not None, "nothing can be sent"
            if self.rng.random() < self.chaos:
                self.disturb()
            if self.calls:
                self.end(self.calls.pop(int(self.rng.choice(list(self.calls)))))
            self.now += 1.0
        raise AssertionError("the run does not end")

    def read(self):
        while (block := self.controller.next_restart()) is not None:
            self.put(block, self.controller.add_again(block, self.chunks(block), self.now))
        while self.controller.wants_block() and self.n_read < len(self.blocks):
            self.put(self.n_read, self.controller.add_block(self.n_read, self.chunks(self.n_read), self.now))
            self.n_read += 1
        if self.n_read == len(self.blocks):
            self.controller.end_input()

    def rows_of(self, call):
        return [(rows.block, i) for rows in call.rows for i in rows.indices.tolist()]

    def check(self, call):
        assert 0 < len(call) <= self.batch
        assert self.replicas[call.replica] == call.stage
        assert call.probe or call.replica not in self.doubted  # what has failed is fed no more before it has answered
        if call.probe:
            assert not self.controller.stages[call.stage].calls_at(call.replica)[1:]
            return
        same = [c for c in self.calls.values() if c.replica == call.replica]
        assert len(same) < (1 if call.alone else CALLS_PER_REPLICA)
        assert not any(c.alone for c in same)
        assert len(set(self.rows_of(call))) == len(call)
        under_way = {row for c in self.calls.values() if not c.probe for row in self.rows_of(c)}
        assert not under_way & set(self.rows_of(call))
        for rows in call.rows:  # the object is there and has these rows where they are said to be
            kept = self.parcels[rows.parcel]
            assert [kept[place] for place in rows.places] == [(rows.block, i) for i in rows.indices.tolist()]

    def disturb(self):
        """A replica dies, or the data of a call is lost, or a call is put off."""
        kind = self.rng.integers(0, 3)
        if kind == 0:
            self.lose_replica(int(self.rng.choice(list(self.replicas))))
        elif self.calls and kind == 1 and self.n_losses < RESTARTS:
            self.n_losses += 1
            call = self.calls.pop(int(self.rng.choice(list(self.calls))))
            if call.probe:  # what was to be decided with it counts as the rows' fault
                self.doubted = {r: n for r, n in self.doubted.items() if self.replicas[r] != call.stage}
            self.take(self.controller.rows_lost(call.id, "gone", self.now))
        elif self.calls:
            call = self.calls.pop(int(self.rng.choice(list(self.calls))))
            self.controller.call_postponed(call.id, 2.0, self.now)

    def lose_replica(self, replica, *, own_fault=True):
        for call in self.controller.stages[self.replicas[replica]].calls_at(replica):
            del self.calls[call]
        stage = self.replicas.pop(replica)
        self.doubted.pop(replica, None)
        self.take(self.controller.replica_lost(stage, replica, "died", self.now, own_fault=own_fault))
        self.start(stage)

    def replace_bad(self):
        for stage in self.controller.stages:
            assert not stage.hopeless or any(map(np.any, self.deadly)) or self.chaos
            for replica in stage.take_bad():
                self.n_bad += 1
                self.lose_replica(replica, own_fault=False)

    def fails(self, call):
        """Return how the replica of a call fails it whatever its rows, None if it does not."""
        n = self.n_calls[call.stage] = self.n_calls[call.stage] + 1
        n_left, way = self.way.get(call.replica, (PLENTY, ""))
        if n_left < 0:
            return way
        return "raises" if self.sick[0] <= n < self.sick[1] else None

    def end(self, call):
        where = self.rows_of(call)
        known = self.controller.stages[call.stage].known_good is not None
        if (way := self.fails(call)) == "dies":
            self.calls[call.id] = call
            self.lose_replica(call.replica)
            return
        if way is not None:
            if known:
                self.doubted[call.replica] = call.id
            named = dict.fromkeys(range(len(call)), "NaN") if way == "names" else {}
            bad = result([0] * len(call), [False] * len(call), failures=named) if named else failed("no device")
            self.take(self.controller.call_ended(call.id, bad, self.now))
            return
        if any(self.deadly[block][i] and call.stage == self.stops[block][i] for block, i in where):
            self.calls[call.id] = call
            if (
                self.controller.stages[call.stage].calls_at(call.replica)[0] == call.id
            ):  # a call that waits kills nobody yet
                self.lose_replica(call.replica)
        elif any(self.poisoned[block][i] and call.stage == self.stops[block][i] for block, i in where):
            if known:
                self.doubted[call.replica] = call.id
            self.take(self.controller.call_ended(call.id, failed("poison"), self.now))
        else:
            self.sizes[call.stage].append(len(call))
            if call.replica in self.way:
                self.way[call.replica][0] -= 1
            named = {
                place: "unreadable"
                for place, (block, i) in enumerate(where)
                if self.named[block][i] and call.stage == self.stops[block][i]
            }
            if len(named) == len(call) and known:
                self.doubted[call.replica] = call.id
            elif call.id > self.doubted.get(call.replica, PLENTY) - 1:
                del self.doubted[call.replica]
            accepted = [self.stops[block][i] == call.stage for block, i in where]
            answers = [100 * block + i for block, i in where]
            deferred = [w for w, done in zip(where, accepted, strict=True) if not done]
            if deferred and not call.probe:
                self.parcels[call.output] = deferred
            accepted = [done and place not in named for place, done in enumerate(accepted)]
            self.take(self.controller.call_ended(call.id, result(answers, accepted, failures=named), self.now))

    def take(self, released):
        for parcel in released.parcels:
            del self.parcels[parcel]  # an object that nobody knows would be an error
        for block in released.blocks:
            assert block.block not in self.finished
            self.finished[block.block] = block


@given(
    seeds,
    st.integers(1, 4),
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 12),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.0, 0.1]),
    st.sampled_from([0.0, 0.0, 0.1]),
    st.sampled_from([0.0, 0.0, 0.1]),
    st.sampled_from([0.0, 0.0, 0.2]),
    st.sampled_from([PLENTY, 24]),
)
def test_every_row_ends_once_where_it_should_whatever_happens(
    seed, n_stages, blocks, batch, replicas, poison, named, deadly, chaos, queue
):
    run = Simulation(
        seed, n_stages, blocks, batch, replicas, poison=poison, named=named, deadly=deadly, chaos=chaos, queue=queue
    ).run()
    check_rows(run, blocks, n_stages, chaos=chaos)


def check_rows(run, blocks, n_stages, *, chaos=0.0):
    """Hold what became of every row of a simulation against what its model does with it."""
    assert sorted(run.finished) == list(range(len(blocks)))
    for number, n in enumerate(blocks):
        block, bad = run.finished[number], run.poisoned[number] | run.deadly[number] | run.named[number]
        assert set(np.flatnonzero(bad)) <= set(block.failures)
        if not chaos:  # three deaths by chance while a row is alone count against it, too
            assert set(block.failures) == set(np.flatnonzero(bad))
        good = np.ones(n, dtype=bool)
        good[list(block.failures)] = False
        assert (block.stages[good] == run.stops[number][good]).all()
        assert (block.stages[~good] == -1).all()
        assert (block.predictions[good] == 100 * number + np.arange(n)[good]).all()
        assert (block.costs[good] == run.stops[number][good] + 1).all()
        assert not block.degraded.any()
    # Nothing is kept that nobody needs, but for a row of each stage to probe replicas with.
    assert len(run.parcels) <= n_stages
    for at in run.controller.progress(["a"] * n_stages, [(0, 0)] * n_stages):
        assert at.queued == at.in_flight == 0


@given(
    seeds,
    st.integers(1, 3),
    st.lists(st.integers(5, 30), min_size=1, max_size=8),
    st.integers(1, 12),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.3, 0.6, 1.0]),
    st.sampled_from([(0, 0), (3, 40)]),
)
def test_no_row_pays_for_replicas_that_turn_bad(seed, n_stages, blocks, batch, replicas, poison, named, turn_bad, sick):
    """Every replica answers a few calls first; those started in place of bad ones may turn bad, too."""
    run = Simulation(
        seed, n_stages, blocks, batch, replicas, poison=poison, named=named, turn_bad=turn_bad, sick=sick
    ).run()
    check_rows(run, blocks, n_stages)


@settings(max_examples=20)
@given(seeds, st.integers(2, 4))
def test_deferred_rows_are_gathered_into_full_batches(seed, n_stages):
    run = Simulation(seed, n_stages, [37] * 30, batch=16, n_replicas=2).run()
    for sizes in run.sizes[1:]:
        # Only the input's end sends partial batches, when the stages before run dry.
        assert sum(size < 16 for size in sizes) <= 5


def test_a_partial_batch_waits_for_its_time_and_no_longer():
    controller = one_block([limits(10, batch_wait_s=5.0)] * 2, 10)
    call = controller.next_call(0.0)
    controller.call_ended(call.id, result(range(10), [True] * 6 + [False] * 4), now=1.0)
    assert controller.next_call(1.0) is None  # more input may come
    assert controller.wait_s(1.0) == pytest.approx(5.0)
    assert controller.next_call(5.9) is None
    assert len(controller.next_call(6.0)) == 4


def test_a_partial_batch_does_not_wait_when_nothing_can_be_added():
    controller = one_block([limits(10, batch_wait_s=5.0)] * 2, 3)
    assert controller.next_call(0.0) is None
    controller.end_input()
    call = controller.next_call(0.0)
    assert len(call) == 3
    controller.call_ended(call.id, result(range(3), [True, True, False]), now=0.0)
    assert len(controller.next_call(0.0)) == 1


def test_a_block_that_is_still_being_read_can_add_rows():
    controller = one_block([limits(10, batch_wait_s=5.0)], 3)
    controller.read_started()
    controller.end_input()
    assert controller.next_call(0.0) is None
    controller.read_ended()
    assert len(controller.next_call(0.0)) == 3


def test_the_last_rows_are_shared_out_among_the_replicas():
    controller = one_block([limits(100)], 40, replicas=4)
    controller.end_input()
    calls = [controller.next_call(0.0) for _ in range(2)]
    assert [len(call) for call in calls] == [25, 15]  # never less than a quarter of a batch, while there are rows
    assert len({call.replica for call in calls}) == 2


def test_reading_is_bounded_by_rows_and_bytes_but_never_stops():
    for bounds in ({"queue_rows": 5}, {"queue_bytes": 5}):
        controller = Controller([limits(10, batch_wait_s=0.0, **bounds)], open_rows=PLENTY)
        controller.stages[0].add_replica(0)
        assert controller.wants_block()
        controller.add_block(0, [Chunk(6, 6)], now=0.0)
        assert not controller.wants_block()
        call = controller.next_call(0.0)
        controller.call_ended(call.id, result(range(6), [True] * 6), now=0.0)
        assert controller.wants_block()
    controller = Controller([limits(10)], open_rows=5)
    controller.add_block(0, [Chunk(6, 6)], now=0.0)
    assert not controller.wants_block()


@pytest.mark.parametrize("bounds", [{"queue_rows": 10}, {"queue_bytes": 10}])
def test_a_full_queue_holds_the_stage_before_it_back(bounds):
    controller = Controller([limits(10), limits(10, **bounds)], open_rows=PLENTY)
    controller.stages[0].add_replica(0)
    controller.add_block(0, [Chunk(60, 60)], now=0.0)
    calls = [controller.next_call(0.0), controller.next_call(0.0)]
    assert controller.next_call(0.0) is None  # one computes, one waits
    controller.call_ended(calls[0].id, result(range(10), [False] * 10), now=0.0)
    assert controller.next_call(0.0) is None  # ten rows wait for a second stage without a replica
    assert controller.wait_s(0.0) is None  # and no time will change that
    controller.stages[1].add_replica(1)
    assert [controller.next_call(0.0).stage for _ in range(2)] == [1, 0]


def test_what_kills_its_replica_is_found_and_what_waits_behind_it_is_not_blamed():
    controller = one_block([limits(4)], 8)
    controller.end_input()
    first, second = controller.next_call(0.0), controller.next_call(0.0)
    controller.replica_lost(0, 0, "died", now=1.0)
    controller.stages[0].add_replica(1)
    alone, other = controller.next_call(1.0), None
    assert (len(alone), alone.alone, alone.attempt) == (4, True, 2) or not alone.alone
    if not alone.alone:  # the innocent one may go first; the suspect then waits for the replica to be empty
        assert controller.next_call(1.0) is None
        controller.call_ended(alone.id, result(range(4), [True] * 4), 1.0)
        alone, other = controller.next_call(1.0), alone
    assert alone.rows[0].indices.tolist() == first.rows[0].indices.tolist()
    if other is not None:
        assert other.rows[0].indices.tolist() == second.rows[0].indices.tolist()
    assert controller.next_call(1.0) is None  # nothing joins it


def test_a_row_that_always_kills_is_failed_after_a_few_deaths():
    controller = one_block([limits(1)], 1)
    controller.end_input()
    released = None
    for death in range(1 + TRIES):
        now = 100.0 * death
        assert controller.next_call(now) is not None
        released = controller.replica_lost(0, death, "died", now)
        controller.stages[0].add_replica(death + 1)
    (block,) = released.blocks
    assert block.failures == {0: (0, "died")}
    assert controller.finished


def test_a_row_that_is_lost_again_and_again_is_failed():
    controller = one_block([limits(1)], 1)
    controller.end_input()
    for restart in range(RESTARTS + 1):
        call = controller.next_call(float(restart))
        released = controller.rows_lost(call.id, "gone", float(restart))
        assert released.parcels == (call.rows[0].parcel,)
        if restart < RESTARTS:
            assert controller.next_restart() == 0
            controller.add_again(0, [Chunk(1, 1)], float(restart))
            assert controller.next_restart() is None
    assert released.blocks[0].failures == {0: (0, "gone")}


def test_rows_that_cannot_be_read_again_are_failed():
    controller = one_block([limits(4)], 4)
    controller.rows_lost(controller.next_call(0.0).id, "gone", 0.0)
    (block,) = controller.give_up(0, "unreadable").blocks
    assert block.failures == dict.fromkeys(range(4), (-1, "unreadable"))


def test_a_stage_that_is_down_is_left_out_and_the_rows_say_so():
    controller = one_block([limits(4)] * 2, 8)
    controller.end_input()
    first = controller.next_call(0.0)
    controller.call_ended(first.id, result([7, 8, 9, 10], [True, False, False, True], cost=2.0), 0.0)
    waiting = controller.next_call(0.0)
    assert waiting.stage == 0
    controller.stage_down(1)
    (block,) = controller.call_ended(waiting.id, result([1, 2, 3, 4], [False] * 4), 0.0).blocks
    assert block.predictions.tolist() == [7, 8, 9, 10, 1, 2, 3, 4]
    assert block.stages.tolist() == [0] * 8
    assert block.degraded.tolist() == [False, True, True, False, True, True, True, True]
    assert block.costs.tolist() == [2.0] * 4 + [1.0] * 4
    assert controller.finished


def test_a_stage_that_comes_back_is_used_again():
    controller = Controller([limits(2)] * 2, open_rows=PLENTY)
    controller.stages[0].add_replica(0)
    controller.stage_down(1)
    for block in range(2):
        controller.add_block(block, [Chunk(2, 2)], 0.0)
        call = controller.next_call(0.0)
        released = controller.call_ended(call.id, result([5, 5], [False, False]), 0.0)
        assert len(released.blocks) == (1 if block == 0 else 0)
        if block == 0:
            assert released.blocks[0].degraded.all()
            controller.stages[1].add_replica(1)
    assert controller.next_call(0.0).stage == 1


def test_a_replica_kept_free_for_a_suspect_takes_rows_again_once_the_suspect_is_gone():
    controller = one_block([limits(4)] * 2, 8, replicas=2)
    for call in [controller.next_call(0.0), controller.next_call(0.0)]:
        controller.call_ended(call.id, result(range(4), [False] * 4), 0.0)
    calls = {call.replica: call for call in (controller.next_call(0.0), controller.next_call(0.0))}
    assert set(calls) == {10, 11}
    controller.replica_lost(1, 10, "died", 0.0)
    assert controller.next_call(0.0) is None  # what 10 died of waits until 11 has nothing else
    controller.stage_down(1)
    controller.call_ended(calls[11].id, result(range(4), [True] * 4), 0.0)
    controller.stages[1].add_replica(12)
    controller.add_block(1, [Chunk(8, 8)], 0.0)
    for call in [controller.next_call(0.0), controller.next_call(0.0)]:
        controller.call_ended(call.id, result(range(4), [False] * 4), 0.0)
    assert {controller.next_call(0.0).replica for _ in range(2)} == {11, 12}


def fail_until_replaced(controller, now, **how):
    """Fail a stage's calls until its replica is found bad. Returns the time and the number of calls."""
    n = 0
    while not (bad := controller.stages[0].take_bad()) and not controller.stages[0].hopeless:
        call, now, n = controller.next_call(now), now + 10.0, n + 1
        if call is not None:
            controller.call_ended(call.id, failed("no device"), now)
        assert n < 1000
    for replica in bad:
        controller.replica_lost(0, replica, "bad", now, own_fault=False)
    return now, n


def test_a_stage_that_never_succeeds_is_hopeless_after_its_replica_was_replaced():
    controller = one_block([limits(16)], 200)
    now, _ = fail_until_replaced(controller, 0.0)
    assert not controller.stages[0].hopeless
    controller.stages[0].add_replica(1)
    now, n = fail_until_replaced(controller, now)
    assert controller.stages[0].hopeless
    assert n >= HOPELESS_RENEWED
    assert not controller.stages[0].failed  # no row is given up: nothing shows that it is to blame


def test_a_first_replica_that_only_fails_costs_no_row_where_the_next_one_works():
    controller = one_block([limits(16)], 40)
    controller.end_input()
    now, _ = fail_until_replaced(controller, 0.0)
    controller.stages[0].add_replica(1)
    blocks = ()
    while not controller.finished:
        now += 10.0
        call = controller.next_call(now)
        blocks += controller.call_ended(call.id, result(range(len(call)), [True] * len(call)), now).blocks
    assert not blocks[0].failures


def test_a_bad_replica_is_replaced_at_once_however_many_rows_wait():
    controller = one_block([limits(4)], 4000, replicas=2)
    good, bad = controller.next_call(0.0), controller.next_call(0.0)
    controller.call_ended(good.id, result(range(4), [True] * 4), 0.0)
    n_failed = 0
    at_bad = [bad]
    while not (found := controller.stages[0].take_bad()):
        at_bad += [c for c in iter(lambda: controller.next_call(1.0), None) if c.replica == bad.replica]
        controller.call_ended(at_bad.pop(0).id, failed("no device"), 1.0)
        n_failed += 1
    assert list(found) == [bad.replica]
    assert n_failed <= CALLS_PER_REPLICA + PROBES


def test_a_stage_whose_calls_alone_end_their_replicas_is_hopeless():
    controller = one_block([limits(1)], 60)
    alone = 0
    for death in range(100):
        assert controller.stages[0].hopeless is (alone >= HOPELESS_DEATHS)
        if controller.stages[0].hopeless:
            break
        alone += controller.next_call(100.0 * death).alone
        controller.replica_lost(0, death, "died", 100.0 * death)
        controller.stages[0].add_replica(death + 1)
    assert alone == HOPELESS_DEATHS


def test_many_replicas_that_are_killed_at_once_say_nothing_of_their_calls():
    controller = one_block([limits(1)], 60, replicas=3 * HOPELESS_DEATHS)
    for replica in range(3 * HOPELESS_DEATHS):
        assert controller.next_call(0.0).replica == replica
    for replica in range(3 * HOPELESS_DEATHS):
        controller.replica_lost(0, replica, "died", 0.0)
    assert not controller.stages[0].hopeless


def test_the_backlog_is_in_seconds_of_work():
    controller = one_block([limits(4)], 40)
    assert controller.stages[0].backlog_s is None
    call = controller.next_call(0.0)
    controller.call_ended(call.id, result(range(4), [True] * 4), 0.0)  # one second for four rows
    assert controller.stages[0].backlog_s == pytest.approx(9.0)
    controller.next_call(0.0)
    assert controller.stages[0].backlog_s == pytest.approx(8.5)


def test_a_replica_that_computes_for_too_long_is_overdue_and_one_that_was_idle_is_not():
    controller = one_block([limits(4)], 12)
    first, _ = controller.next_call(100.0), controller.next_call(100.0)
    assert controller.stages[0].overdue(10.0, 110.0) == []
    controller.call_ended(first.id, result(range(4), [True] * 4), 110.0)
    assert controller.stages[0].overdue(10.0, 120.0) == []  # the second has had the replica since 110
    assert controller.stages[0].overdue(10.0, 121.0) == [0]


def test_replicas_that_die_with_their_node_are_no_fault_of_a_row():
    controller = one_block([limits(1)], 1, replicas=8)
    for replica in range(7):
        assert controller.next_call(0.0).replica == replica
        assert not controller.replica_lost(0, replica, "its node died", 0.0, own_fault=False).blocks
    call = controller.next_call(0.0)
    assert (call.replica, call.failed_on, call.alone) == (7, (), False)
    (block,) = controller.call_ended(call.id, result([1], [True]), 0.0).blocks
    assert not block.failures
