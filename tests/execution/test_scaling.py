"""Replica counts from the work that waits, against a simulated cluster."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.execution.scaling import ENOUGH_S, IDLE_S, StageLoad, scale

QUIET = StageLoad(live=1, starting=0, least=1, most=4, backlog_s=0.0, idle_s=0.0)


def test_missing_replicas_are_started_at_once():
    loads = [replace(QUIET, live=0, least=2), replace(QUIET, live=1, starting=1, least=3)]
    assert scale(loads, n_unplaced=0).start == (0, 0, 1)


def test_the_neediest_stage_gets_one_more():
    loads = [replace(QUIET, backlog_s=ENOUGH_S + 1), replace(QUIET, backlog_s=100.0), replace(QUIET, backlog_s=0.5)]
    assert scale(loads, n_unplaced=0).start == (1,)
    assert scale([replace(load, most=1) for load in loads], n_unplaced=0).start == ()
    loads[1] = replace(loads[1], refused=True)  # there was no place for it a moment ago
    assert scale(loads, n_unplaced=0).start == (0,)


def test_a_stage_of_which_nothing_is_known_yet_is_left_as_it_is():
    assert scale([replace(QUIET, backlog_s=None, live=2)], n_unplaced=0) == scale([QUIET], n_unplaced=0)


def test_a_full_queue_says_more_than_its_seconds_unless_nothing_may_leave_it():
    pressed = replace(QUIET, backlog_s=0.1, pressed=True)
    assert scale([pressed], n_unplaced=0).start == (0,)
    assert scale([replace(pressed, held_back=True, backlog_s=100.0)], n_unplaced=0).start == ()


def test_a_stage_that_is_held_back_can_give_and_nothing_moves_twice_at_once():
    loads = [replace(QUIET, live=2, backlog_s=100.0, held_back=True), replace(QUIET, starting=1, backlog_s=1.0)]
    assert scale(loads, n_unplaced=1).stop == (0,)
    assert scale(loads, n_unplaced=1, may_move=False).stop == ()


def test_a_replica_that_finds_no_place_gets_one_from_a_stage_with_little_to_do():
    needy = replace(QUIET, starting=1, backlog_s=100.0)
    assert scale([replace(QUIET, live=2, backlog_s=1.0), needy], n_unplaced=1).stop == (0,)
    assert scale([replace(QUIET, live=2, backlog_s=1.0), needy], n_unplaced=0).stop == ()
    # Not from one that is as busy, nor the last one, nor one that is itself growing.
    assert scale([replace(QUIET, live=2, backlog_s=90.0), needy], n_unplaced=1).stop == ()
    assert scale([replace(QUIET, live=1, backlog_s=0.0), needy], n_unplaced=1).stop == ()


def test_an_idle_replica_is_let_go_after_a_while_but_not_the_least():
    idle = replace(QUIET, live=3, idle_s=IDLE_S)
    assert scale([idle, QUIET], n_unplaced=0).stop == (0,)
    assert scale([replace(idle, idle_s=IDLE_S / 2)], n_unplaced=0).stop == ()
    assert scale([replace(idle, live=1)], n_unplaced=0).stop == ()


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 4), st.floats(0, 300)), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_places_go_to_who_needs_them_and_counts_stay_in_their_range(stages, spare_places):
    """A cluster of fixed size; work is done as time goes by, one second a step."""
    ranges = [(least, least + more) for least, more, _ in stages]
    work = [seconds for *_, seconds in stages]
    places = sum(least for least, _ in ranges) + spare_places
    live, unplaced, idle = [least for least, _ in ranges], [0] * len(stages), [0.0] * len(stages)
    moves = 0
    for _ in range(600):
        for stage in range(len(stages)):
            while unplaced[stage] and sum(live) < places:
                unplaced[stage], live[stage] = unplaced[stage] - 1, live[stage] + 1
            work[stage] = max(0.0, work[stage] - live[stage])
            idle[stage] = idle[stage] + 1 if not work[stage] else 0.0
        loads = [
            StageLoad(live[s], unplaced[s], *ranges[s], backlog_s=work[s], idle_s=idle[s]) for s in range(len(stages))
        ]
        change = scale(loads, n_unplaced=sum(unplaced))
        for stage in change.start:
            unplaced[stage] += 1
        for stage in change.stop:
            live[stage] -= 1
            moves += 1
        for (least, most), n, waiting in zip(ranges, live, unplaced, strict=True):
            assert least <= n
            assert n + waiting <= most
        assert sum(unplaced) <= 1
    assert not any(work)  # nobody starves
    assert moves <= 40  # and replicas do not go to and fro
