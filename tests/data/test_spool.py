"""Logits on disk, read back in blocks, are those of the table for any layout of its files."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.data.logits import LogitTable
from cauc_ray.data.spool import SpooledLogits, WantedRows
from cauc_ray.data.writing import logit_columns
from cauc_ray.errors import DataError

LAYOUTS = st.fixed_dictionaries(
    {
        "n": st.integers(1, 60),
        "n_files": st.integers(1, 4),
        "group": st.integers(1, 25),
        "ragged": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


def write(folder, layout):
    """Write a model's split in files and row groups of some size, in an order of its own. Returns its logits by id."""
    rng = np.random.default_rng(layout["seed"])
    n = layout["n"]
    rows = [rng.standard_normal(rng.integers(2, 7) if layout["ragged"] else 5).astype(np.float32) for _ in range(n)]
    order = rng.permutation(n)
    into = folder / "model=m" / "split=test"
    into.mkdir(parents=True)
    for number, places in enumerate(np.array_split(order, layout["n_files"])):
        ids = [f"e{place:03d}" for place in places]
        table = logit_columns(ids, np.zeros(len(ids), np.int32), [rows[place] for place in places], None)
        pq.write_table(table, into / f"part-{number}.parquet", row_group_size=layout["group"])
    return rows


@given(layout=LAYOUTS, data=st.data())
def test_blocks_and_single_rows_are_those_of_the_table(layout, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    rows = write(folder, layout)
    head = LogitTable(folder).read_head("m", "test")
    whole = LogitTable(folder).read_model("m", "test")
    chosen = np.array(data.draw(st.lists(st.integers(0, layout["n"] - 1), min_size=1, unique=True)))
    assert_holds(SpooledLogits(WantedRows("m", head.files, head.positions[chosen])), rows, whole, chosen, data)


def assert_holds(spool, rows, whole, chosen, data):
    assert spool.n_options.tolist() == [len(rows[place]) for place in chosen]
    assert spool.shape == (len(chosen), max(map(len, (rows[place] for place in chosen))))
    spool.width = whole.logits.shape[1]
    assert np.array_equal(spool[:], whole.logits[chosen])
    start = data.draw(st.integers(0, len(chosen)))
    stop = data.draw(st.integers(start, len(chosen)))
    if stop > start:
        assert np.array_equal(spool[start:stop], whole.logits[chosen[start:stop]])
    # A shard may have none of a sample's rows.
    places = np.array(data.draw(st.lists(st.integers(0, len(chosen) - 1))), dtype=np.int64)
    assert np.array_equal(spool[places], whole.logits[chosen[places]])


def test_files_that_have_changed_since_are_refused_and_those_without_wanted_rows_are_not_opened(tmp_path):
    """A shard may be read long after the ids: again, when its actor has died."""
    write(tmp_path, {"n": 20, "n_files": 2, "group": 5, "ragged": False, "seed": 0})
    head = LogitTable(tmp_path).read_head("m", "test")
    first, second = (file.path for file in head.files)
    rows = pq.read_table(second)
    pq.write_table(rows.take(np.arange(len(rows))[::-1]), second, row_group_size=5)
    with pytest.raises(DataError, match=r"part-1\.parquet has changed since"):
        SpooledLogits(WantedRows("m", head.files, head.positions))
    second.unlink()
    own = head.positions[head.positions < head.files[0].n_rows]
    assert len(SpooledLogits(WantedRows("m", head.files, own)).n_options) == pq.read_metadata(first).num_rows


def test_a_head_is_read_without_the_logits_and_refuses_what_the_table_refuses(tmp_path):
    write(tmp_path, {"n": 20, "n_files": 2, "group": 5, "ragged": True, "seed": 0})
    table = LogitTable(tmp_path)
    head, whole = table.read_head("m", "test"), table.read_model("m", "test")
    assert head.example_ids.equals(whole.example_ids)
    assert np.array_equal(head.labels, whole.labels)
    file = tmp_path / "model=m" / "split=test" / "part-0.parquet"
    read = pq.read_table(file)
    pq.write_table(pa.concat_tables([read, read.slice(0, 1)]), file)
    with pytest.raises(DataError, match="is a duplicate"):
        table.read_head("m", "test")
