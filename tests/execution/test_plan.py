import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.errors import ConfigError
from cauc_ray.execution.plan import RunPlan, Shard, sharded
from cauc_ray.execution.user_code import import_paths
from cauc_ray.models.pool import StageSpec

MODEL = {"kind": "python", "factory": "user_models:by_x"}


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=3))
def test_controllers_share_all_replicas_and_each_has_one_of_every_stage(count, ranges):
    stages = tuple(
        StageSpec(name=f"m{place}", model=MODEL, replicas={"min": least, "max": max(count, least + more)})
        for place, (least, more) in enumerate(ranges)
    )
    chains = sharded(stages, count)
    assert len(chains) == count
    for place, stage in enumerate(stages):
        shares = [chain[place].replicas for chain in chains]
        assert sum(share.max for share in shares) == stage.replicas.max
        assert sum(share.min for share in shares) == max(count, stage.replicas.min)
        assert all(1 <= share.min <= share.max for share in shares)
        assert max(share.max for share in shares) - min(share.max for share in shares) <= 1


def test_the_queues_of_all_controllers_fill_a_fifth_of_the_store_at_most():
    stages = tuple(StageSpec(name=name, model=MODEL, replicas={"min": 1, "max": 4}) for name in ("m0", "m1"))
    for count in (1, 4):
        shares = [
            RunPlan(
                run_id="r",
                stages=chain,
                policy=None,
                source=None,
                sink=None,
                n_rows=None,
                n_done=0,
                block_rows=64,
                import_paths=import_paths([]),
                shard=Shard(number, count),
            ).limits(1e9)[0]
            for number, chain in enumerate(sharded(stages, count))
        ]
        assert sum(at.queue_bytes for limits in shares for at in limits) <= 0.2 * 1e9


def test_more_controllers_than_replicas_are_refused():
    stages = (StageSpec(name="m0", model=MODEL, replicas={"min": 1, "max": 2}),)
    with pytest.raises(ConfigError, match="3 controllers need a replica of every stage each; stage 'm0' may have 2"):
        sharded(stages, 3)
