"""Replica counts from the work that waits, against a simulated cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.execution.replicas import ENOUGH_S, IDLE_S, Change, StageLoad, scale


def load(live=1, least=1, most=4, *, backlog_s=0.0, starting=0, idle_s=0.0, **more):
    return StageLoad(live, starting, least, most, backlog_s, idle_s, **more)


NEEDY = [load(backlog_s=ENOUGH_S + 1), load(backlog_s=100.0), load(backlog_s=0.5)]
WAITING = load(starting=1, backlog_s=100.0)
# Stages, the replicas that wait for a place, and what changes.
CASES = {
    "missing replicas at once": ([load(0, 2), load(1, 3, starting=1)], 0, Change(start=(0, 0, 1))),
    "the neediest gets one more": (NEEDY, 0, Change(start=(1,))),
    "unless it has the most": ([load(most=1, backlog_s=100.0)], 0, Change()),
    "or was refused a place": ([NEEDY[0], load(backlog_s=100.0, refused=True)], 0, Change(start=(0,))),
    "nothing is known yet": ([load(2, backlog_s=None)], 0, Change()),
    "a full queue says more than its seconds": ([load(backlog_s=0.1, pressed=True)], 0, Change(start=(0,))),
    "unless nothing may leave it": ([load(backlog_s=100.0, pressed=True, held_back=True)], 0, Change()),
    "a place from one with little to do": ([load(2, backlog_s=1.0), WAITING], 1, Change(stop=(0,))),
    "only where one waits": ([load(2, backlog_s=1.0), WAITING], 0, Change(start=(1,))),
    "not from one as busy": ([load(2, backlog_s=90.0), WAITING], 1, Change()),
    "not the last one": ([load(1), WAITING], 1, Change()),
    "from one that is held back": (
        [load(2, backlog_s=100.0, held_back=True), load(starting=1, backlog_s=1.0)], 1, Change(stop=(0,)),
    ),
    "one that is idle goes": ([load(3, idle_s=IDLE_S), load()], 0, Change(stop=(0,))),
    "after a while": ([load(3, idle_s=IDLE_S / 2)], 0, Change()),
    "not the least": ([load(1, idle_s=IDLE_S)], 0, Change()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_replicas_go_where_the_work_is(case):
    loads, n_unplaced, change = CASES[case]
    assert scale(loads, n_unplaced=n_unplaced) == change


def test_nothing_moves_twice_at_once():
    assert scale([load(2, backlog_s=1.0), WAITING], n_unplaced=1, may_move=False).stop == ()


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
