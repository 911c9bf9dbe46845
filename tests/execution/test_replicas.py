"""Replica counts from the work that waits, against a simulated cluster."""

from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.execution.replicas import StageLoad, scale


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
