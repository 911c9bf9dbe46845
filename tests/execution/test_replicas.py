"""Replica counts from the work that waits, against a simulated cluster."""

from hypothesis import given
from hypothesis import strategies as st
from runs import pool_of, python_model

from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.patience import RunPatience
from cauc_ray.cascade.scheduler import Scheduler
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.replicas import Replicas, StageLoad, scale
from cauc_ray.models.pool import load_pool


def test_replicas_that_die_with_their_node_are_replaced_at_once(tmp_path, ray_session):
    """However many there are: only what dies by itself may be the model's doing, and is waited with."""
    pool = load_pool(pool_of(tmp_path, {"m": python_model("by_x")}, replicas={"min": 6}, resources={"num_cpus": 0}))
    plan = RunPlan("run", pool.stages, None, None, None, None, n_done=0, block_rows=32, done={})
    limits, open_rows = plan.limits(1e9)
    replicas = Replicas(pool.stages, None, 0.0)
    scheduler = Scheduler(limits, RunPatience(), Blame("row"), open_rows)
    for _ in range(3):
        for replica in list(replicas.by_number.values()):
            replica.node = "of a node that is gone"
            replicas.lost(replica, "its node died", 1.0)
        assert replicas.counts() == [(0, 0)]
        assert not replicas.rescale(scheduler, 1.0)
        assert replicas.counts() == [(0, 6)]
    assert replicas.dies_loading(0) is None
    replicas.close()


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
