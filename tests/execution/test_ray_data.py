"""Ray Datasets as inputs of runs, and inputs that have other rows when they are read again."""

import logging
import time

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import SOUND, answers_of, numbered_input, python_pool, ranked, two_model_policy
from stored import write

import cauc_ray
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution import runner
from cauc_ray.execution.cluster import store_bytes
from jobs.bench.processes import processes

# Ray Data's own context sets an option that Ray Data has deprecated.
pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    # The first execution starts processes of Ray Data's own, which Ray gives the lowest priority: on a machine that
    # is busy otherwise that took minutes.
    pytest.mark.timeout(900),
]


def ray_data():
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.WARNING)  # else its log is all that is seen of a test that fails
    return ray.data


def dataset_input(dataset):
    from cauc_ray.execution.ray_data import DatasetInput

    return DatasetInput(dataset)


def late_first(batch):
    """Answer for the first rows last: what is not kept in order comes in another."""
    rows = batch["id"]
    time.sleep(0.3 if rows[0] == 0 else 0)
    return {
        "example_id": np.array([f"e{row}" for row in rows]),
        "label": rows % 3,
        "image": np.ones((1, 2, 3), np.float32) * rows[:, None, None, None],
    }


@pytest.fixture
def lazy():
    return ray_data().range(40, override_num_blocks=4).map_batches(late_first, batch_size=None)


@pytest.mark.slow
def test_rows_come_in_order_in_blocks_with_tensors(lazy):
    from cauc_ray.execution.ray_data import STORE_SHARE

    opened = dataset_input(lazy)
    assert (opened.n_rows, opened.row_bytes) == (None, 0)
    assert opened.source(15).deadline_s is None  # its first block may take longer than one of a file
    before = lazy.context.execution_options, lazy.context.enable_progress_bars
    blocks = opened.source(15).blocks(0)
    next(blocks)
    options = lazy.context.execution_options  # while it is executed
    assert options.preserve_order
    assert options.resource_limits.object_store_memory == int(STORE_SHARE * store_bytes())
    assert options.resource_limits.cpu == np.inf
    blocks.close()
    source = cloudpickle.loads(cloudpickle.dumps(opened.source(15)))
    assert source.n_groups == 1
    for read in (source, opened.source(15)):
        numbers, blocks = zip(*read.blocks(0), strict=True)
        assert numbers == (0, 1, 2)
        assert [len(block.example_ids) for block in blocks] == [15, 15, 10]
        assert [example for block in blocks for example in block.example_ids] == [f"e{row}" for row in range(40)]
        for block in blocks:
            rows = np.array([int(example[1:]) for example in block.example_ids])
            assert block.columns["image"].shape == (len(rows), 1, 2, 3)
            assert block.columns["image"][:, 0, 1, 2].tolist() == rows.tolist()
            assert block.labels.tolist() == (rows % 3).tolist()
            assert block.unreadable is None
    assert (lazy.context.execution_options, lazy.context.enable_progress_bars) == before


def test_done_blocks_are_left_out_unconverted():
    labels = [-5] * 4 + [1] * 6
    data = ray_data().from_arrow(pa.table({"example_id": [str(row) for row in range(10)], "label": labels}))
    opened = dataset_input(data)
    assert opened.n_rows == 10
    assert opened.row_bytes > 1
    blocks = opened.source(4).blocks(0, [0])
    contents = {number: (block.example_ids, "label" in block.columns) for number, block in blocks}
    assert contents == {0: (list("0123"), False), 1: (list("4567"), True), 2: (list("89"), True)}
    with pytest.raises(DataError, match=r"other rows .*block 3.*start a new run"):
        list(opened.source(4).blocks(0, [0, 3]))
    with pytest.raises(DataError, match="the Ray dataset: column 'label' has negative numbers"):
        list(opened.source(4).blocks(0))


def test_datasets_that_do_not_serve_are_refused():
    data = ray_data()
    with pytest.raises(DataError, match="has no column 'example_id'; it has id, x"):
        dataset_input(data.from_items([{"x": 1, "id": 2}]))
    with pytest.raises(DataError, match="no rows"):
        dataset_input(data.from_arrow(pa.table({"example_id": pa.array([], pa.string())})))
    late = data.range(4).map_batches(lambda batch: {"x": batch["id"]})
    with pytest.raises(DataError, match="has no column 'example_id'; it has x"):
        list(dataset_input(late).source(4).blocks(0))
    broken = data.range(4).map_batches(lambda batch: {"example_id": batch["id"] / int("zero")})
    with pytest.raises(ExecutionError, match=r"cannot be computed: ValueError: invalid literal .*'zero'") as caught:
        list(dataset_input(broken).source(4).blocks(0))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ranked(["ray dataset", "csv", "parquet"], quick=0, slow=1))
def test_as_many_rows_in_another_order_are_not_resumed_with(tmp_path, kind):
    rows, policy, out = pq.read_table(numbered_input(tmp_path, 20_000)), two_model_policy(), tmp_path / "out"

    def as_input(rows):
        if kind == "ray dataset":
            return ray_data().from_arrow(rows)
        return write(tmp_path / f"x.{kind}", rows if kind == "parquet" else rows.to_pylist())

    pool = python_pool(tmp_path, [("gives_up_on", {"example": "row-18000"}), SOUND[1]], batch_size=256)
    with pytest.raises(ExecutionError, match="is down"):
        cauc_ray.run(pool, policy, as_input(rows), out)  # in the third block, once two are committed
    assert any((out / "predictions").iterdir())
    pool = python_pool(tmp_path, batch_size=256)
    with pytest.raises(DataError, match=r"returned other rows .* block \d+ .* other rows.* start a new run"):
        cauc_ray.run(pool, policy, as_input(rows[::-1]), out, resume=True)
    assert not (out / "summary.json").exists()
    assert cauc_ray.run(pool, policy, as_input(rows), out, resume=True)["n"] == len(answers_of(out)) == 20_000


def changing(flag):
    """Return what gives a Ray Dataset of numbers its rows: in another order once there is a file at a path."""

    def rows(batch):
        numbers = batch["id"][::-1] if flag.exists() else batch["id"]
        return {"example_id": np.array([f"row-{n}" for n in numbers], dtype=object), "x": numbers % 7 - 3.0}

    return rows


@pytest.mark.soak("faults")
def test_a_dataset_that_gives_other_rows_when_it_is_read_again_ends_the_run(tmp_path, monkeypatch):
    """The task is killed inside the input; the one that takes its place executes the dataset once more."""
    monkeypatch.setattr(runner, "BLOCK_ROWS", 64)
    pool = python_pool(tmp_path, [("slow_by_x", {"seconds": 0.1, "log": str(tmp_path / "log")}), ("by_x", {})])
    flag = tmp_path / "flag"
    dataset = ray_data().range(2560, override_num_blocks=4).map_batches(changing(flag), batch_size=None)
    killed = []

    def kill(progress):
        tasks = processes("read_blocks")
        if progress.n_finished >= 768 and tasks and not killed:
            flag.touch()
            killed.extend(tasks)
            for task in tasks:
                task.kill()

    with pytest.raises(DataError, match=r"Ray dataset returned other rows .*has other rows.*start a new run"):
        cauc_ray.run(pool, two_model_policy(), dataset, tmp_path / "out", on_progress=kill)
    assert killed
    assert len(answers_of(tmp_path / "out")) >= 768  # what was committed before stays, each row once
