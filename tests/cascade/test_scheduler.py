"""The scheduler against random stages, deaths and losses, in virtual time and without Ray."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.flow import RESTARTS
from cauc_ray.cascade.patience import CALLS_PER_REPLICA, CALLS_TO_GIVE_UP, RequestPatience, RunPatience
from cauc_ray.cascade.rows import CallResult, Owner
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage import DEATHS_TO_GIVE_UP, FAILURES_TO_REPLACE, StageLimits
from cauc_ray.models.answers import ModelFacts
from cauc_ray.serving.demand import OPEN_WINDOW_S, OpenRequests

seeds = st.integers(0, 2**32 - 1)
PLENTY = 10**9


@dataclass(eq=False)
class Source:
    """What holds rows: where each comes from.   users: how many pieces of rows point at it."""

    rows: list[tuple[int, int]] = field(default_factory=list)


def result(predictions, accepted, *, cost=1.0, failures=None, raised=()):
    n = len(predictions)
    accepted = np.asarray(accepted, bool)
    return CallResult(
        predictions=np.asarray(predictions, np.int32),
        confidences=np.full(n, 0.5),
        accepted=accepted,
        costs=np.full(n, cost),
        compute_s=1.0,
        failures=failures or {},
        raised=frozenset(raised),
    )


def failed(reason, fault="unknown"):
    return CallResult.broken(0.0, "here", reason, fault)


def limits(batch_size, *, batch_wait_s=1e9, queue_rows=PLENTY, queue_bytes=PLENTY):
    return StageLimits(batch_size, batch_wait_s, queue_rows, queue_bytes)


def run_of(stages, open_rows=PLENTY):
    """Return the scheduler of a run."""
    return Scheduler(stages, RunPatience(), Blame("row"), open_rows)


def next_call(scheduler, now):
    return next(scheduler.schedule(now), None)


def add_replica(scheduler, stage, replica):
    scheduler.replica_ready(stage, replica, 0.0)


def submit(scheduler, n, block=0, now=0.0):
    owner = Owner(block, n)
    scheduler.submit(owner, [Chunk(None, n, n)], now)
    return owner


def ended(scheduler, call, answer, now):
    """End a call, and return the owners that are done by it."""
    scheduler.call_ended(call, answer, Source(), now)
    return take(scheduler.done)


def take(owners):
    """Return what is in a list, and empty it."""
    taken = list(owners)
    owners.clear()
    return taken


def one_block(stages, n, *, open_rows=PLENTY, replicas=1):
    """Return a scheduler with so many replicas of each stage and a block of n rows of a byte each."""
    scheduler = run_of(stages, open_rows)
    for stage in range(len(stages)):
        for number in range(replicas):
            add_replica(scheduler, stage, 10 * stage + number)
    submit(scheduler, n)
    return scheduler


class Simulation:
    """Stages whose answer to a row depends on the row alone; calls end in any order, replicas and objects get lost.

    Args:
        poison: Share of rows that a model raises on.
        named: Share of rows that a model names as ones it cannot answer.
        deadly: Share of rows that kill their replica.
        chaos: Chance of a death, a loss or a pause before each event.
        turn_bad: Share of the replicas, also of later ones, that fail every call from some call on, in one way.
        sick: Calls, counted over each stage from its first answer on, during which all of its replicas fail.
    """

    def __init__(
        self, seed, n_stages, blocks, batch, n_replicas, *,
        poison=0.0, named=0.0, deadly=0.0, chaos=0.0, queue=PLENTY, turn_bad=0.0, sick=(0, 0),
    ):  # fmt: skip
        self.turn_bad, self.sick, self.n_calls, self.way = turn_bad, sick, [0] * n_stages, {}
        self.in_doubt, self.n_bad = set(), 0
        self.rng = np.random.default_rng(seed)
        self.n_stages, self.blocks, self.chaos = n_stages, list(blocks), chaos
        self.stops = [self.rng.integers(0, n_stages, n) for n in blocks]
        kinds = self.rng.random
        self.poisoned = [kinds(n) < poison for n in blocks]
        self.deadly = [kinds(n) < deadly for n in blocks]
        self.named = [kinds(n) < named for n in blocks]
        self.queue = queue
        self.scheduler = run_of([limits(batch, queue_rows=queue)] * n_stages)
        self.batch, self.n_next = batch, 0
        self.prepares = seed % 2 == 1
        for queue in self.scheduler.stages:
            queue.take_facts(ModelFacts("", prepares=self.prepares))
        self.replicas, self.has_good_row = {}, set()
        for stage in range(n_stages):
            for _ in range(n_replicas):
                self.start(stage)
        self.calls, self.sizes = [], [[] for _ in range(n_stages)]
        self.finished, self.now, self.n_read = {}, 0.0, 0
        self.n_losses = 0

    def start(self, stage):
        self.replicas[self.n_next] = stage
        if self.rng.random() < self.turn_bad:
            self.way[self.n_next] = [int(self.rng.integers(3, 12)), str(self.rng.choice(["raises", "names", "dies"]))]
        add_replica(self.scheduler, stage, self.n_next)
        self.n_next += 1

    def submit(self, block, restarts=0):
        """Submit a block in chunks of up to seven rows."""
        n = self.blocks[block]
        pieces = np.split(np.arange(n), range(7, n, 7))
        chunks = [Chunk(Source([(block, row) for row in rows.tolist()]), len(rows), 3 * len(rows)) for rows in pieces]
        self.scheduler.submit(Owner(block, n, restarts=restarts), chunks, self.now)

    def run(self):
        for _ in range(100_000):
            self.replace_bad()
            self.take_done()
            if self.scheduler.finished:
                for call in self.calls:  # nobody wants their rows any more
                    assert not any(rows.owner.live for rows in call.rows) or call.probe
                    self.scheduler.call_postponed(call, 0.0, self.now)
                return self
            self.read()
            while (call := next_call(self.scheduler, self.now)) is not None:
                self.check(call)
                self.calls.append(call)
            wait = self.scheduler.wait_s(self.now)
            assert self.calls or self.scheduler.finished or wait is not None, "nothing can be sent"
            if self.rng.random() < self.chaos:
                self.disturb()
            if self.calls:
                self.end(self.pick())
            self.now += 1.0
        raise AssertionError("the run does not end")

    def pick(self):
        return self.calls.pop(int(self.rng.integers(len(self.calls))))

    def read(self):
        while self.scheduler.lost:
            lost = self.scheduler.lost.pop()
            self.submit(lost.block, lost.restarts + 1)
        while self.scheduler.wants_block() and self.n_read < len(self.blocks):
            self.submit(self.n_read)
            self.n_read += 1
        if self.n_read == len(self.blocks):
            self.scheduler.end_input()

    def rows_of(self, call):
        return [(rows.owner.block, i) for rows in call.rows for i in rows.indices.tolist()]

    def check(self, call):
        assert 0 < len(call) <= self.batch
        assert self.replicas[call.replica] == call.stage
        for rows in call.rows:  # the source has these rows where they are said to be
            assert [rows.source.rows[position] for position in rows.positions] == [
                (rows.owner.block, i) for i in rows.indices.tolist()
            ]
        same = [one for one in self.calls if one.replica == call.replica]
        if call.probe:
            assert not same
            return
        assert call.replica not in self.in_doubt  # what has failed is fed no more before it has answered
        assert len(same) < (1 if call.isolated else CALLS_PER_REPLICA)
        assert not any(one.isolated for one in same)
        assert len(set(self.rows_of(call))) == len(call)
        under_way = {
            (rows.owner, i)
            for one in self.calls if not one.probe for rows in one.rows for i in rows.indices.tolist()
        }  # fmt: skip
        assert not under_way & {(rows.owner, i) for rows in call.rows for i in rows.indices.tolist()}

    def disturb(self):
        """A replica dies, or the data of a call is lost, or a call is put off."""
        kind = self.rng.integers(0, 3)
        if kind == 0:
            self.lose_replica(int(self.rng.choice(list(self.replicas))))
        elif self.calls and kind == 1 and self.n_losses < RESTARTS:
            self.n_losses += 1
            call = self.pick()
            if call.probe or call.good_row is not None:
                self.in_doubt -= {r for r in self.in_doubt if self.replicas[r] == call.stage}
            self.scheduler.rows_lost(call, "gone", self.now)
        elif self.calls:
            self.scheduler.call_postponed(self.pick(), 2.0, self.now)

    def lose_replica(self, replica, *, own_fault=True):
        self.calls = [call for call in self.calls if call.replica != replica]
        stage = self.replicas.pop(replica)
        self.in_doubt.discard(replica)
        self.scheduler.replica_lost(stage, replica, "died", self.now, own_fault=own_fault)
        self.start(stage)

    def replace_bad(self):
        for stage in self.scheduler.stages:
            assert not stage.never_succeeds or any(map(np.any, self.deadly)) or self.chaos
            for replica in stage.take_bad():
                self.n_bad += 1
                self.lose_replica(replica, own_fault=False)

    def fails(self, call):
        """Return how the replica of a call fails it whatever its rows, None if it does not."""
        has_answered = self.scheduler.stages[call.stage].known_good is not None
        n = self.n_calls[call.stage] = self.n_calls[call.stage] + has_answered
        n_left, way = self.way.get(call.replica, (PLENTY, ""))
        if n_left < 0:
            return way
        return "raises" if self.sick[0] <= n < self.sick[1] else None

    def end(self, call):
        """End a call as a worker does, which finds out by itself which rows fail."""
        rows = self.rows_of(call)
        if call.good_row is not None:
            self.has_good_row.add(call.replica)
        knows = call.probe or call.replica in self.has_good_row
        if (way := self.fails(call)) == "dies":
            self.lose_replica(call.replica)
            return
        if way is not None:
            if knows:
                self.in_doubt.add(call.replica)
            named = way == "names" and not knows  # a worker that knows a good row finds out
            failures = dict.fromkeys(range(len(call)), "NaN") if named else {}
            bad = result([0] * len(call), [False] * len(call), failures=failures)
            bad = bad if failures else failed("no device", "replica" if knows else "unknown")
            self.scheduler.call_ended(call, bad, None, self.now)
            return
        stops_here = [self.stops[block][i] == call.stage for block, i in rows]
        if any(self.deadly[block][i] and stops for (block, i), stops in zip(rows, stops_here, strict=True)):
            at_work = self.scheduler.stages[call.stage].replicas.calls_at(call.replica)[: 1 + self.prepares]
            self.calls.append(call)
            if call in at_work:  # a call that waits kills nobody yet, but one that is being prepared may
                self.lose_replica(call.replica)
            return
        marks = {"poison": self.poisoned, "unreadable": self.named}
        failures = {
            position: reason
            for reason, marked in marks.items()
            for position, ((block, i), stops) in enumerate(zip(rows, stops_here, strict=True))
            if marked[block][i] and stops
        }
        raised = [position for position, reason in failures.items() if reason == "poison"]
        if call.replica in self.way and len(failures) < len(call):
            self.way[call.replica][0] -= 1
        self.in_doubt.discard(call.replica)
        if len(failures) == len(call) and raised and not knows:
            self.scheduler.call_ended(call, failed("poison"), None, self.now)
            return
        if len(failures) < len(call):
            self.has_good_row.add(call.replica)
        self.sizes[call.stage].append(len(call))
        accepted = [stops and position not in failures for position, stops in enumerate(stops_here)]
        answers = [100 * block + i for block, i in rows]
        deferred = Source([row for row, stops in zip(rows, stops_here, strict=True) if not stops])
        answered = result(answers, accepted, failures=failures, raised=raised)
        self.scheduler.call_ended(call, answered, deferred, self.now)

    def take_done(self):
        while self.scheduler.done:
            owner = self.scheduler.done.pop()
            assert owner.block not in self.finished
            self.finished[owner.block] = owner


SHAPES = {
    "seed": seeds,
    "n_stages": st.integers(1, 4),
    "blocks": st.lists(st.integers(1, 30), min_size=1, max_size=8),
    "batch": st.integers(1, 12),
    "n_replicas": st.integers(1, 5),
    "poison": st.sampled_from([0.0, 0.0, 0.1]),
    "named": st.sampled_from([0.0, 0.0, 0.1]),
}


@given(
    simulation=st.builds(
        Simulation,
        **SHAPES,
        deadly=st.sampled_from([0.0, 0.0, 0.1]),
        chaos=st.sampled_from([0.0, 0.0, 0.2]),
        queue=st.sampled_from([PLENTY, 24]),
    )
)
def test_every_row_ends_once_where_it_should_whatever_happens(simulation):
    check_rows(simulation.run())


def check_rows(run):
    """Hold what became of every row of a simulation against what its model does with it."""
    assert sorted(run.finished) == list(range(len(run.blocks)))
    for number, n in enumerate(run.blocks):
        block, bad = run.finished[number], run.poisoned[number] | run.deadly[number] | run.named[number]
        assert set(np.flatnonzero(bad)) <= set(block.failures)
        if not run.chaos:  # three deaths by chance while a row is alone count against it, too
            assert set(block.failures) == set(np.flatnonzero(bad))
        good = np.ones(n, dtype=bool)
        good[list(block.failures)] = False
        assert (block.stages[good] == run.stops[number][good]).all()
        assert (block.stages[~good] == -1).all()
        assert (block.predictions[good] == 100 * number + np.arange(n)[good]).all()
        assert (block.costs[good] == run.stops[number][good] + 1).all()
        assert not block.degraded.any()
    for at in run.scheduler.stages:
        assert (at.n_waiting, at.waiting.n_bytes, at.in_flight, at.in_work) == (0, 0, 0, False)


@given(
    simulation=st.builds(
        Simulation,
        **SHAPES,
        turn_bad=st.sampled_from([0.3, 0.6, 1.0]),
        sick=st.sampled_from([(0, 0), (3, 40)]),
    )
)
def test_no_row_pays_for_replicas_that_turn_bad(simulation):
    """Every replica answers a few calls first; those started in place of bad ones may turn bad, too."""
    check_rows(simulation.run())


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_service_refuses_no_row_for_nan_before_another_replica_has_given_nan_too(works, n):
    """Neither replica has answered anything yet: whether it or the row is at fault is unknown."""
    scheduler = Scheduler([limits(n)], RequestPatience(lambda: False), Blame("input"))
    for replica in range(2):
        add_replica(scheduler, 0, replica)
    owner = submit(scheduler, n)
    first = next_call(scheduler, 0.0)
    assert not ended(
        scheduler, first, result([0] * n, [False] * n, failures=dict.fromkeys(range(n), "NaN"), raised=range(n)), 0.1
    )
    second = next_call(scheduler, 0.1)
    assert {first.replica, second.replica} == {0, 1}
    nan = {} if works else dict.fromkeys(range(n), "NaN")
    assert ended(scheduler, second, result([7] * n, [works] * n, failures=nan, raised=nan), 0.2) == [owner]
    assert owner.predictions.tolist() == [7 if works else -1] * n
    assert len(owner.failures) == (0 if works else n)


@settings(max_examples=20)
@given(seeds, st.integers(2, 4))
def test_deferred_rows_are_gathered_into_full_batches(seed, n_stages):
    run = Simulation(seed, n_stages, [37] * 30, batch=16, n_replicas=2).run()
    for sizes in run.sizes[1:]:
        # Only the input's end sends partial batches, when the stages before run dry.
        assert sum(size < 16 for size in sizes) <= 5


def test_a_partial_batch_waits_for_its_time_unless_nothing_can_be_added():
    scheduler = one_block([limits(10, batch_wait_s=5.0)] * 2, 10)
    call = next_call(scheduler, 0.0)
    ended(scheduler, call, result(range(10), [True] * 6 + [False] * 4), 1.0)
    assert next_call(scheduler, 1.0) is None  # more input may come
    assert scheduler.wait_s(1.0) == pytest.approx(5.0)
    assert next_call(scheduler, 5.9) is None
    assert len(next_call(scheduler, 6.0)) == 4

    scheduler = one_block([limits(10, batch_wait_s=5.0)], 3)
    scheduler.n_reads = 1  # a block that is still being read can add rows
    scheduler.end_input()
    assert next_call(scheduler, 0.0) is None
    scheduler.n_reads = 0
    assert len(next_call(scheduler, 0.0)) == 3


def test_the_last_rows_are_shared_out_among_the_replicas():
    scheduler = one_block([limits(100)], 40, replicas=4)
    scheduler.end_input()
    calls = [next_call(scheduler, 0.0) for _ in range(2)]
    assert [len(call) for call in calls] == [25, 15]  # never less than a quarter of a batch, while there are rows
    assert len({call.replica for call in calls}) == 2


@pytest.mark.parametrize(
    ("batch_s", "replicas", "expected"), [(0.001, 1, 80), (0.001, 4, 20), (0.006, 1, 30), (1, 1, 10)]
)
def test_batches_that_take_next_to_no_time_share_a_call(batch_s, replicas, expected):
    stage = StageLimits(10, 1e9, PLENTY, PLENTY, batches_per_call=8)
    scheduler = one_block([stage], 100, replicas=replicas)
    call = next_call(scheduler, 0.0)
    assert len(call) == 10  # nobody knows yet
    scheduler.call_ended(call, replace(result(np.zeros(10), np.ones(10)), compute_s=batch_s), Source(), 0.0)
    assert len(next_call(scheduler, 0.0)) == expected


def test_reading_is_bounded_by_rows_and_bytes_but_never_stops():
    for bounds in ({"queue_rows": 5}, {"queue_bytes": 5}):
        scheduler = run_of([limits(10, batch_wait_s=0.0, **bounds)])
        add_replica(scheduler, 0, 0)
        assert scheduler.wants_block()
        submit(scheduler, 6, 0)
        assert not scheduler.wants_block()
        call = next_call(scheduler, 0.0)
        ended(scheduler, call, result(range(6), [True] * 6), 0.0)
        assert scheduler.wants_block()
    scheduler = run_of([limits(10)], open_rows=5)
    submit(scheduler, 6, 0)
    assert not scheduler.wants_block()


@pytest.mark.parametrize("bounds", [{"queue_rows": 10}, {"queue_bytes": 10}])
def test_a_full_queue_holds_the_stage_before_it_back(bounds):
    scheduler = run_of([limits(10), limits(10, **bounds)])
    add_replica(scheduler, 0, 0)
    submit(scheduler, 60, 0)
    calls = [next_call(scheduler, 0.0), next_call(scheduler, 0.0)]
    assert next_call(scheduler, 0.0) is None  # one computes, one waits
    ended(scheduler, calls[0], result(range(10), [False] * 10), 0.0)
    assert next_call(scheduler, 0.0) is None  # ten rows wait for a second stage without a replica
    assert scheduler.wait_s(0.0) is None  # and no time will change that
    add_replica(scheduler, 1, 1)
    assert [next_call(scheduler, 0.0).stage for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("prepares", [False, True])
def test_what_may_have_killed_its_replica_is_isolated_and_what_waits_behind_it_is_not_blamed(prepares):
    scheduler = one_block([limits(4)], 16)
    scheduler.stages[0].take_facts(ModelFacts("", prepares=prepares))
    ended(scheduler, next_call(scheduler, 0.0), replace(result(range(4), [True] * 4), compute_s=1e-4), 0.0)
    # One is computed, one may be prepared; they are short, so one waits.
    calls = [next_call(scheduler, 0.0) for _ in range(3)]
    scheduler.replica_lost(0, 0, "died", 1.0)
    add_replica(scheduler, 0, 1)
    isolated, unblamed = [], []
    while (call := next_call(scheduler, 1.0)) is not None:
        (isolated if call.isolated else unblamed).append(call.rows[0].indices.tolist())
        if call.isolated:
            assert next_call(scheduler, 1.0) is None  # nothing joins it
        ended(scheduler, call, result(range(len(call)), [True] * len(call)), 1.0)
    rows = [call.rows[0].indices.tolist() for call in calls]
    assert isolated == rows[: 1 + prepares]
    assert [row for row in rows if row in unblamed] == rows[1 + prepares :]


def test_a_block_that_is_lost_again_and_again_is_failed():
    scheduler = one_block([limits(1)], 3)
    scheduler.end_input()
    for restart in range(RESTARTS + 1):
        call = next_call(scheduler, float(restart))
        waiting = next_call(scheduler, float(restart))
        scheduler.rows_lost(call, "gone", float(restart))
        done = take(scheduler.done)
        ended(scheduler, waiting, result([7], [True]), float(restart))  # nobody wants its answer any more
        if restart < RESTARTS:
            assert not scheduler.finished
            (lost,) = take(scheduler.lost)
            scheduler.submit(Owner(0, 3, restarts=lost.restarts + 1), [Chunk(None, 3, 3)], float(restart))
    (block,) = done
    assert block.failures == dict.fromkeys(range(3), (0, "gone"))
    assert scheduler.finished
    scheduler = one_block([limits(4)], 4)
    scheduler.rows_lost(next_call(scheduler, 0.0), "gone", 0.0)
    owner = Owner(0, 4, restarts=take(scheduler.lost)[0].restarts + 1)
    scheduler.end_input()
    scheduler.submit(owner, [Chunk(None, 1, 1)], 0.0, unreadable=dict.fromkeys((0, 2, 3), "unreadable"))
    (block,) = ended(scheduler, next_call(scheduler, 0.0), result([5], [True]), 0.0)
    assert block.failures == dict.fromkeys((0, 2, 3), (-1, "unreadable"))
    assert block.predictions.tolist() == [-1, 5, -1, -1]


def test_a_stage_that_is_down_is_left_out_and_the_rows_say_so():
    scheduler = one_block([limits(4)] * 2, 8)
    scheduler.end_input()
    first = next_call(scheduler, 0.0)
    ended(scheduler, first, result([7, 8, 9, 10], [True, False, False, True], cost=2.0), 0.0)
    waiting = next_call(scheduler, 0.0)
    assert waiting.stage == 0
    scheduler.stage_down(1, 0.0)
    (block,) = ended(scheduler, waiting, result([1, 2, 3, 4], [False] * 4), 0.0)
    assert block.predictions.tolist() == [7, 8, 9, 10, 1, 2, 3, 4]
    assert block.stages.tolist() == [0] * 8
    assert block.degraded.tolist() == [False, True, True, False, True, True, True, True]
    assert block.costs.tolist() == [2.0] * 4 + [1.0] * 4
    assert scheduler.finished


def test_a_replica_kept_free_for_a_suspect_takes_rows_again_once_the_suspect_is_gone():
    scheduler = one_block([limits(4)] * 2, 8, replicas=2)
    for call in [next_call(scheduler, 0.0), next_call(scheduler, 0.0)]:
        ended(scheduler, call, result(range(4), [False] * 4), 0.0)
    calls = {call.replica: call for call in (next_call(scheduler, 0.0), next_call(scheduler, 0.0))}
    assert set(calls) == {10, 11}
    scheduler.replica_lost(1, 10, "died", 0.0)
    assert next_call(scheduler, 0.0) is None  # what 10 died of waits until 11 has nothing else
    scheduler.stage_down(1, 0.0)
    ended(scheduler, calls[11], result(range(4), [True] * 4), 0.0)
    add_replica(scheduler, 1, 12)
    submit(scheduler, 8, 1)
    for call in [next_call(scheduler, 0.0), next_call(scheduler, 0.0)]:
        ended(scheduler, call, result(range(4), [False] * 4), 0.0)
    assert {next_call(scheduler, 0.0).replica for _ in range(2)} == {11, 12}


def test_a_stage_whose_calls_all_fail_is_given_up_after_its_replica_was_replaced():
    scheduler = one_block([limits(16)], 200)
    stage, now, n_failed = scheduler.stages[0], 0.0, 0
    for replacement in (1, 2):
        assert not stage.never_succeeds
        while not (bad := stage.take_bad()) and not stage.never_succeeds:
            call, now = next_call(scheduler, now), now + 10.0
            if call is not None:
                ended(scheduler, call, failed("no device"), now)
                n_failed += 1
            assert now < 10_000
        for replica in bad:
            scheduler.replica_lost(0, replica, "bad", now, own_fault=False)
            add_replica(scheduler, 0, replacement)
    assert stage.never_succeeds
    assert n_failed >= CALLS_TO_GIVE_UP
    assert not stage.failed  # no row is given up: nothing shows that it is to blame


def test_a_bad_replica_is_replaced_at_once_however_many_rows_wait():
    scheduler = one_block([limits(4)], 4000, replicas=2)
    good, bad = next_call(scheduler, 0.0), next_call(scheduler, 0.0)
    ended(scheduler, good, result(range(4), [True] * 4), 0.0)
    n_failed = 0
    at_bad = [bad]
    while not (replaced := scheduler.stages[0].take_bad()):
        at_bad += [call for call in iter(lambda: next_call(scheduler, 1.0), None) if call.replica == bad.replica]
        fault = "unknown" if scheduler.stages[0].known_good is None else "replica"
        ended(scheduler, at_bad.pop(0), failed("no device", fault), 1.0)
        n_failed += 1
    assert list(replaced) == [bad.replica]
    assert n_failed <= CALLS_PER_REPLICA + FAILURES_TO_REPLACE


def test_a_stage_is_given_up_after_deaths_with_one_call_at_a_time():
    scheduler = one_block([limits(1)], 60)
    isolated = 0
    for death in range(100):
        assert scheduler.stages[0].never_succeeds is (isolated >= DEATHS_TO_GIVE_UP)
        if scheduler.stages[0].never_succeeds:
            break
        isolated += next_call(scheduler, 100.0 * death).isolated
        scheduler.replica_lost(0, death, "died", 100.0 * death)
        add_replica(scheduler, 0, death + 1)
    assert isolated == DEATHS_TO_GIVE_UP


def test_deaths_of_many_replicas_at_once_or_with_their_nodes_accuse_no_call():
    n = 3 * DEATHS_TO_GIVE_UP
    scheduler = one_block([limits(1)], 60, replicas=n)
    assert [next_call(scheduler, 0.0).replica for _ in range(n)] == list(range(n))
    for replica in range(n):
        scheduler.replica_lost(0, replica, "died", 0.0)
    assert not scheduler.stages[0].never_succeeds

    scheduler = one_block([limits(1)], 1, replicas=8)
    for replica in range(7):
        assert next_call(scheduler, 0.0).replica == replica
        scheduler.replica_lost(0, replica, "its node died", 0.0, own_fault=False)
        assert not scheduler.done
    call = next_call(scheduler, 0.0)
    assert (call.replica, call.failed_on, call.isolated) == (7, (), False)
    (block,) = ended(scheduler, call, result([1], [True]), 0.0)
    assert not block.failures


def test_the_backlog_is_in_seconds_of_work():
    scheduler = one_block([limits(4)], 40)
    assert scheduler.stages[0].backlog_s is None
    call = next_call(scheduler, 0.0)
    ended(scheduler, call, result(range(4), [True] * 4), 0.0)  # one second for four rows
    assert scheduler.stages[0].backlog_s == pytest.approx(9.0)
    next_call(scheduler, 0.0)
    assert scheduler.stages[0].backlog_s == pytest.approx(8.5)


def test_a_replica_that_computes_for_too_long_is_overdue_and_one_that_was_idle_is_not():
    scheduler = one_block([limits(4)], 12)
    first, _ = next_call(scheduler, 100.0), next_call(scheduler, 100.0)
    assert scheduler.stages[0].replicas.overdue(10.0, 110.0) == []
    ended(scheduler, first, result(range(4), [True] * 4), 110.0)
    assert scheduler.stages[0].replicas.overdue(10.0, 120.0) == []  # the second has had the replica since 110
    assert scheduler.stages[0].replicas.overdue(10.0, 121.0) == [0]


def test_more_are_expected_while_fewer_are_open_than_lately():
    now = 0.0
    crowd = OpenRequests(lambda: now)
    crowd.came(1)
    assert not crowd.expects_more()  # a client that is alone
    crowd.came(4)
    assert not crowd.expects_more()  # all are here
    crowd.left(4)
    for _ in range(2):
        now += 0.6 * OPEN_WINDOW_S
        assert crowd.expects_more()
    now += 3 * OPEN_WINDOW_S
    assert not crowd.expects_more()  # no other client is left
