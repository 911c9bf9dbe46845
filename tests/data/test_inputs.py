import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cauc_ray.data.inputs import RunInput, column_to_numpy, concat_column
from cauc_ray.errors import DataError


def test_columns_come_as_models_read_them():
    assert column_to_numpy(pa.chunked_array([[1.5, 2.5]])).dtype == np.float64
    assert column_to_numpy(pa.chunked_array([["a", "b"]])).tolist() == ["a", "b"]
    assert column_to_numpy(pa.chunked_array([[b"\x00\x01"]]))[0] == b"\x00\x01"
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 3)
    assert column_to_numpy(pa.chunked_array([fixed])).tolist() == [[0, 1, 2], [3, 4, 5]]
    sliced = pa.chunked_array([fixed]).slice(1)
    assert column_to_numpy(sliced).tolist() == [[3, 4, 5]]
    ragged = column_to_numpy(pa.chunked_array([[[1, 2], [3]]]))
    assert ragged.dtype == object
    assert [row.tolist() for row in ragged] == [[1, 2], [3]]
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    assert column_to_numpy(pa.chunked_array([tensors])).shape == (2, 2, 3)


def test_blocks_of_even_and_ragged_lists_join():
    even, ragged = np.ones((2, 3)), np.empty(1, dtype=object)
    ragged[0] = np.ones(4)
    joined = concat_column([even, ragged])
    assert [len(row) for row in joined] == [3, 3, 4]
    assert concat_column([even, even]).shape == (4, 3)


def test_rows_come_in_order_of_files_and_in_blocks(tmp_path):
    for file in range(2):
        ids = [f"{file}-{row}" for row in range(5)]
        pq.write_table(pa.table({"example_id": ids, "label": list(range(5))}), tmp_path / f"{file}.parquet")
    blocks = list(RunInput(tmp_path).blocks(3))
    assert [len(b.example_ids) for b in blocks] == [3, 2, 3, 2]
    assert [e for b in blocks for e in b.example_ids] == [f"{f}-{r}" for f in range(2) for r in range(5)]
    assert blocks[1].labels.tolist() == [3, 4]


def test_inputs_that_do_not_serve_are_refused(tmp_path):
    with pytest.raises(DataError, match="there is no file"):
        RunInput(tmp_path / "absent.parquet")
    with pytest.raises(DataError, match=r"no \.parquet files"):
        RunInput(tmp_path)
    pq.write_table(pa.table({"id": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no column 'example_id'; it has id"):
        RunInput(tmp_path)
    pq.write_table(pa.table({"example_id": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"example_id": ["b"], "x": [1]}), tmp_path / "b.parquet")
    with pytest.raises(DataError, match="has the columns example_id, x, but"):
        RunInput(tmp_path)
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
    with pytest.raises(DataError, match=r"b\.parquet is not a readable Parquet file"):
        RunInput(tmp_path)
    pq.write_table(pa.table({"example_id": pa.array([], pa.string())}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"example_id": ["a", None]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet: a row has no example_id"):
        RunInput(tmp_path / "d.parquet")
    for label in ([-1], [-7], [1.5], ["cat"]):
        pq.write_table(pa.table({"example_id": ["a"], "label": label}), tmp_path / "e.parquet")
        with pytest.raises(DataError, match=r"e\.parquet: column 'label'"):
            list(RunInput(tmp_path / "e.parquet").blocks(10))
    pq.write_table(pa.table({"example_id": ["a", "b"], "label": [1.0, None]}), tmp_path / "e.parquet")
    (block,) = RunInput(tmp_path / "e.parquet").blocks(10)
    assert block.labels.tolist() == [1, -1]
    with pytest.raises(DataError, match="holds no rows"):
        RunInput(tmp_path / "c.parquet")
