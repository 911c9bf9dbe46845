"""Ray Datasets as inputs of runs."""

import logging
import time

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest

from cauc_ray.errors import DataError
from cauc_ray.execution.cluster import store_bytes

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

    return DatasetInput(dataset, "classification")


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
    assert opened.blocks(15).deadline_s is None  # its first block may take longer than one of a file
    before = lazy.context.execution_options, lazy.context.enable_progress_bars
    blocks = opened.blocks(15).blocks(0)
    next(blocks)
    options = lazy.context.execution_options  # while it is executed
    assert options.resource_limits.object_store_memory == int(STORE_SHARE * store_bytes())
    blocks.close()
    source = cloudpickle.loads(cloudpickle.dumps(opened.blocks(15)))
    assert source.n_groups == 1
    for read in (source, opened.blocks(15)):
        numbers, blocks = zip(*read.blocks(0), strict=True)
        assert numbers == (0, 1, 2)
        assert [len(block.example_ids) for block in blocks] == [15, 15, 10]
        assert [example for block in blocks for example in block.example_ids] == [f"e{row}" for row in range(40)]
        for block in blocks:
            rows = np.array([int(example[1:]) for example in block.example_ids])
            assert block.columns["image"].shape == (len(rows), 1, 2, 3)
            assert block.columns["image"][:, 0, 1, 2].tolist() == rows.tolist()
            assert block.labels.tolist() == (rows % 3).tolist()
            assert not block.unreadable
    assert (lazy.context.execution_options, lazy.context.enable_progress_bars) == before


@pytest.mark.slow
def test_datasets_that_do_not_serve_are_refused():
    data = ray_data()
    with pytest.raises(DataError, match="has no column 'example_id'; it has x, y"):
        dataset_input(data.from_items([{"x": 1, "y": 2}]))
    with pytest.raises(DataError, match="no rows"):
        dataset_input(data.from_arrow(pa.table({"example_id": pa.array([], pa.string())})))
    late = data.range(4).map_batches(lambda batch: {"x": batch["id"]})
    with pytest.raises(DataError, match="has no column 'example_id'; it has x"):
        list(dataset_input(late).blocks(4).blocks(0))
    broken = data.range(4).map_batches(lambda batch: {"example_id": batch["id"] / int("zero")})
    with pytest.raises(DataError, match=r"cannot be computed: ValueError: invalid literal .*'zero'") as caught:
        list(dataset_input(broken).blocks(4).blocks(0))
    assert "\n" not in str(caught.value)
