"""Inputs that are larger than the memory of a driver or a controller."""

import gc
import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
import ray

from cauc_ray.data.blocks import InputBlock
from cauc_ray.execution.commits import Sink
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.run_controller import RunController
from cauc_ray.models.pool import StageSpec, load_pool

# Prints the most bytes that Arrow has had in its process after a run, and after one of eight times as many rows.
RUNS = """
import pathlib, sys
import pyarrow, ray, cauc_ray
from runs import numbered_input, python_pool, two_model_policy

folder = pathlib.Path(sys.argv[1])
ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
pool, most = python_pool(folder, batch_size=8192), []
for n in (50_000, 400_000):
    inputs = ray.get(ray.remote(numbered_input).remote(folder / str(n), n))  # whose memory does not count
    cauc_ray.run(pool, two_model_policy(), inputs, folder / f"out-{n}")
    most.append(pyarrow.default_memory_pool().max_memory())
print(*most)
"""


@pytest.mark.soak("full")
@pytest.mark.timeout(900)
def test_the_drivers_memory_does_not_grow_with_the_input(tmp_path):
    from runs import python  # not where the reading tasks import this module

    small, large = map(int, python("-c", RUNS, tmp_path, timeout=800).split())
    assert large < 3 * small


@dataclass(frozen=True)
class ManyBlocks:
    """Groups of 100 blocks of one row."""

    n_groups: int
    name: str = "the input"
    anywhere: bool = True
    deadline_s: float | None = None

    def blocks(self, group, seen=()):
        for number in range(100 * group, 100 * group + 100):
            yield number, InputBlock([f"row-{number}"], None, {"x": np.ones(1)}, 8)


class Allocated(Sink):
    """A sink that notes what this process has allocated each time that another 500 blocks are done."""

    commit_s, n_bytes = 60.0, 0

    def __init__(self):
        self.n_blocks, self.bytes = 0, []

    def add_call(self, call, result, extra): ...
    def commit(self): ...

    def add_block(self, block, example_ids, labels):
        self.n_blocks += 1
        if self.n_blocks % 500 == 0:
            gc.collect()
            self.bytes.append(tracemalloc.get_traced_memory()[0])


@pytest.mark.soak("full")
@pytest.mark.usefixtures("ray_session")
def test_the_controllers_memory_does_not_grow_with_the_blocks(tmp_path):
    """What it keeps of a block that is done, if only a digest of its ids, would be 160 bytes or more."""
    from runs import python_pool, two_model_policy  # as above

    stages = load_pool(python_pool(tmp_path, [("by_x", {})] * 2)).stages
    sink = Allocated()
    plan = RunPlan("run", stages, two_model_policy(), ManyBlocks(25), sink, 2500, 0, 1, {})
    label = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    tracemalloc.start()
    try:
        RunController(plan.stages, plan.policy, label).run(plan)
    finally:
        tracemalloc.stop()
    assert sink.n_blocks == 2500
    assert sink.bytes[-1] - sink.bytes[1] < 1500 * 60


@pytest.mark.parametrize("n_stages", [1, 3])
def test_the_queues_of_all_stages_fill_a_fifth_of_the_store_at_most(n_stages):
    model = {"kind": "python", "factory": "user_models:by_x"}
    stages = tuple(StageSpec(name=f"m{n}", model=model, replicas={"min": 1, "max": 4}) for n in range(n_stages))
    limits, _ = RunPlan("r", stages, None, None, None, None, 0, 64, None).limits(1e9)
    assert sum(at.queue_bytes for at in limits) <= 0.2 * 1e9
