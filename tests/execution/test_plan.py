import pytest

from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.user_code import import_paths
from cauc_ray.models.pool import StageSpec

MODEL = {"kind": "python", "factory": "user_models:by_x"}


@pytest.mark.parametrize("n_stages", [1, 3])
def test_the_queues_of_all_stages_fill_a_fifth_of_the_store_at_most(n_stages):
    stages = tuple(StageSpec(name=f"m{n}", model=MODEL, replicas={"min": 1, "max": 4}) for n in range(n_stages))
    limits, _ = RunPlan(
        run_id="r",
        stages=stages,
        policy=None,
        source=None,
        sink=None,
        n_rows=None,
        n_done=0,
        block_rows=64,
        done=None,
        import_paths=import_paths([]),
    ).limits(1e9)
    assert sum(at.queue_bytes for at in limits) <= 0.2 * 1e9
