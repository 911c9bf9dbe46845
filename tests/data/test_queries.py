import numpy as np
import pyarrow as pa
import pytest
from stored import write

from cauc_ray.data.queries import Texts, encoders, read_embeddings
from cauc_ray.errors import ConfigError, DataError

IDS = [f"e{row}" for row in range(6)]


def write_embedding(folder, vectors, ids=IDS, name="part-0"):
    lists = pa.array([None if vector is None else [float(x) for x in vector] for vector in vectors])
    write(
        folder / "embedding=enc" / "split=test" / f"{name}.parquet", pa.table({"example_id": ids, "embedding": lists})
    )


def test_embeddings_come_in_the_order_asked_for_from_any_number_of_files(tmp_path):
    vectors = np.random.default_rng(0).random((6, 3), dtype=np.float32)
    write_embedding(tmp_path, vectors[:2], IDS[:2], name="a")
    write_embedding(tmp_path, vectors[2:], IDS[2:], name="b")
    assert encoders(tmp_path) == ["enc"]
    for order in ([5, 0, 3], [0, 1, 2, 3, 4, 5]):
        found = read_embeddings(tmp_path, "enc", "test", [IDS[row] for row in order])
        assert found.dtype == np.float32
        assert (found == vectors[order]).all()


@pytest.mark.parametrize(
    ("vectors", "ids", "says"),
    [
        ([[1, 2]] * 5, IDS[:5], "'e5' is missing"),
        ([[1, 2]] * 7, [*IDS, "e2"], "'e2' is a duplicate"),
        ([*[[1, 2]] * 5, [1, 2, 3]], IDS, "'e5' has 3 numbers, 'e0' 2"),
        ([*[[1, 2]] * 5, [1, np.nan]], IDS, "'e5' is not finite"),
        ([*[[1, 2]] * 5, None], IDS, "'e5' has 0 numbers"),
        ([[]] * 6, IDS, "'e0' has 0 numbers"),
    ],
)
def test_embeddings_that_do_not_serve_are_refused_in_one_line(tmp_path, vectors, ids, says):
    write_embedding(tmp_path, vectors, ids)
    with pytest.raises(DataError, match=says) as told:
        read_embeddings(tmp_path, "enc", "test", IDS)
    assert "'enc'" in str(told.value)


def test_unknown_encoders_and_splits_are_named(tmp_path):
    write_embedding(tmp_path, [[1.0]] * 6)
    with pytest.raises(ConfigError, match=r"(?s)encoder 'enk'.*enc"):
        read_embeddings(tmp_path, "enk", "test", IDS)
    with pytest.raises(DataError, match="no such split"):
        read_embeddings(tmp_path, "enc", "validation", IDS)


def test_texts_are_found_by_id(tmp_path):
    file = write(tmp_path / "q.parquet", [{"example_id": name, "question": f"text {name}"} for name in IDS])
    null = write(tmp_path / "null.parquet", [{"example_id": "a", "question": "x"}, {"example_id": "b"}])
    assert Texts(file, "question").of(["e4", "e1"]) == ("text e4", "text e1")
    for path, column, example, says in (
        (file, "question", "other", "'other' is missing"),
        (file, "text", "e1", "column 'text' is missing; the file has example_id, question"),
        (null, "question", "b", "'b' has no text"),
    ):
        with pytest.raises(DataError, match=says):
            Texts(path, column).of([example])
