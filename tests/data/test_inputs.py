import os
import pickle
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stored import damage, values_of, write

from cauc_ray.data import text_files
from cauc_ray.data.blocks import column_to_numpy
from cauc_ray.data.datasets import DatasetSource, open_dataset
from cauc_ray.data.inputs import open_input
from cauc_ray.data.values import concat_column
from cauc_ray.errors import DataError
from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import write_parquet
from cauc_ray.numbers.chain import UNKNOWN_LABEL


def read(path, block_rows, done=()):
    """Return the blocks by number, of a source that went to another process, the last group first."""
    source = pickle.loads(pickle.dumps(open_input(path).source(block_rows)))
    blocks = {}
    for group in reversed(range(source.n_groups)):
        inside = list(source.blocks(group, done))
        assert [number for number, _ in inside] == sorted({number for number, _ in inside})
        assert not blocks or not inside or inside[-1][0] < min(blocks)
        blocks |= dict(inside)
    return dict(sorted(blocks.items()))


def ids(blocks):
    return [example for block in blocks.values() for example in block.example_ids]


@contextmanager
def parquet_folder(sizes, row_group_rows):
    """Write files of so many rows, named and numbered in order."""
    kinds = pa.schema([("example_id", pa.string()), ("label", pa.int32()), ("x", pa.list_(pa.float32()))])
    with tempfile.TemporaryDirectory() as folder:
        for number, n in enumerate(sizes):
            rows = [{"example_id": f"{number}-{row}", "label": row, "x": [number, row]} for row in range(n)]
            table = pa.Table.from_pylist(rows, kinds)
            write(Path(folder, f"{number:04}.parquet"), table, row_group_size=row_group_rows)
        yield Path(folder)


TEXT_ROW = st.builds(
    dict,
    n=st.integers(-(2**40), 2**40) | st.none(),
    x=st.floats(allow_nan=False, allow_infinity=False) | st.none(),
    t=st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=6) | st.none(),
    label=st.integers(0, 9) | st.none(),
)


@contextmanager
def text_folder(ending, sizes, rows):
    """Write files of so many rows, the first with a value in each column. Yields their folder, and one of Parquet."""
    first = {"n": 1, "x": 0.5, "t": "A1", "label": 0}
    with tempfile.TemporaryDirectory() as folder:
        made = [{"example_id": f"{row:03}", **(rows[row % len(rows)] if row else first)} for row in range(sum(sizes))]
        for number, n in enumerate(sizes):
            own, made = made[:n], made[n:]
            write(Path(folder, "text", f"{number}.{ending}"), own)
            kinds = [("example_id", pa.string()), ("n", pa.int64()), ("x", pa.float64()), ("t", pa.string())]
            table = pa.Table.from_pylist(own, pa.schema([*kinds, ("label", pa.int64())]))
            write(Path(folder, "tables", f"{number}.parquet"), table)
        yield Path(folder, "text"), Path(folder, "tables")


FIXED = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 3)
COLUMNS = [
    (pa.array([1.5, 2.5]), np.float64, [1.5, 2.5]),
    (pa.array(["a", None]), object, ["a", None]),
    (pa.array([True, None]), object, [True, None]),
    (pa.array([1.5, None]), np.float64, [1.5, pytest.approx(np.nan, nan_ok=True)]),
    (pa.array([2**53 + 1, None]), object, [2**53 + 1, pytest.approx(np.nan, nan_ok=True)]),
    (pa.array([b"\x00\x01"]), object, [b"\x00\x01"]),
    (FIXED, np.float32, [[0, 1, 2], [3, 4, 5]]),
    (FIXED.slice(1), np.float32, [[3, 4, 5]]),
    (pa.array([[1, 2], [3, 4]]), np.int64, [[1, 2], [3, 4]]),
    (pa.array([[1, 2], [3]]), object, [[1, 2], [3]]),
    (pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)), object, [[1.0, 2.0], None]),
    (pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((1, 2, 3), np.uint8)), np.uint8, [[[1] * 3] * 2]),
]


@pytest.mark.parametrize(("stored", "dtype", "expected"), COLUMNS)
def test_columns_come_as_models_read_them(stored, dtype, expected):
    column = column_to_numpy(pa.chunked_array([stored]))
    assert column.dtype == dtype
    assert [row.tolist() if isinstance(row, np.ndarray) else row for row in column] == expected


KINDS = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.string(): st.text(st.characters(codec="utf-8"), max_size=3),
    pa.timestamp("s"): st.integers(0, 2**31),
    pa.list_(pa.float32()): st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
def test_rows_do_not_depend_on_the_other_rows_of_their_blocks(kind, data):
    def read(values):
        return column_to_numpy(pa.chunked_array([pa.array(values, kind)]))

    rows = st.lists(st.tuples(KINDS[kind] | st.none(), st.booleans()), min_size=1, max_size=5)
    blocks = data.draw(st.lists(rows, min_size=1, max_size=3))
    parts = [read([value for value, _ in block])[np.array([wanted for _, wanted in block])] for block in blocks]
    found = concat_column([part for part in parts if len(part)] or parts)
    alone = concat_column([read([value for block in blocks for value, wanted in block if wanted])])
    assert str(found.tolist()) == str(alone.tolist())
    assert found.dtype == alone.dtype or not len(found)


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


@given(SIZES, st.integers(1, 12), st.integers(1, 7), st.sets(st.integers(0, 60)))
def test_rows_come_once_in_order_and_numbers_do_not_depend_on_what_is_done(sizes, row_group_rows, block_rows, done):
    with parquet_folder(sizes, row_group_rows) as folder:
        opened = open_input(folder)
        assert opened.n_rows == sum(sizes) == sum(opened.identity.values())
        blocks = read(folder, block_rows)
        assert list(blocks) == list(range(len(blocks)))
        assert ids(blocks) == [f"{file}-{row}" for file, size in enumerate(sizes) for row in range(size)]
        for block in blocks.values():
            values = [[int(part) for part in example.split("-")] for example in block.example_ids]
            assert block.columns["x"].tolist() == values
            assert block.columns["label"].tolist() == block.labels.tolist() == [row for _, row in values]
            assert 1 <= len(block.example_ids) <= block_rows
        left = read(folder, block_rows, done)
        assert ids(left) == ids(blocks)
        assert all("x" in block.columns for number, block in left.items() if number not in done)


def test_tables_are_read_by_path_or_uri_and_one_that_goes_costs_its_rows(folder):
    make_folder(folder / "tables")
    for number in range(2):
        table = pa.table({"example_id": [f"{number}-0", f"{number}-1"], "x": [number, number]})
        write_parquet(folder / "tables" / f"{number}.parquet", table)
    opened = open_input(str(folder / "tables"))
    assert opened.identity == {"0.parquet": 2, "1.parquet": 2}
    assert ids(read(str(folder / "tables"), 3)) == ["0-0", "0-1", "1-0", "1-1"]
    (folder / "tables" / "1.parquet").unlink()
    ((_, block),) = opened.source(4).blocks(0)
    assert block.may_return
    assert block.example_ids == ["0-0", "0-1", "1.parquet:row 0", "1.parquet:row 1"]


def test_of_blocks_that_are_done_only_ids_are_read():
    with parquet_folder([4] * 6, 2) as folder:  # 3 rows a block: one group of 8 blocks
        source = open_input(folder).source(3)
        assert source.n_groups == 1
        damage(folder / "0000.parquet", 0, 2)
        for gone in ("0001", "0005"):
            (folder / f"{gone}.parquet").unlink()
        damage(folder / "0002.parquet", 0, 0)
        blocks = dict(source.blocks(0, (0, 1, 2, 6, 7)))
        assert blocks[0].example_ids == ["0-0", "0-1", "0-2"]
        assert list(blocks[0].columns) == ["example_id"]
        # Block 3 needs rows 9 and on, which are in the second half of row group 0: that one was needed.
        assert [bool(blocks[number].unreadable) for number in (3, 4, 5)] == [True, False, False]


def test_columns_that_nobody_reads_are_left_where_they_are():
    with parquet_folder([4], 4) as folder:
        damage(folder / "0000.parquet", 0, 2)
        opened = open_input(folder)
        assert opened.columns == ["example_id", "label", "x"]
        ((_, block),) = opened.source(4, columns=frozenset({"example_id", "label", "y"})).blocks(0)
        assert block.unreadable is None
        assert list(block.columns) == ["example_id", "label"]
        ((_, block),) = opened.source(4).blocks(0)
        assert "cannot be read" in block.unreadable


def test_files_that_differ_in_types_share_a_block(tmp_path):
    first = {"example_id": ["a", "b"], "label": [1, 2], "x": pa.array([1, 2], pa.int32())}
    second = {"x": [1.5, 2.5], "label": [3.0, None], "example_id": pa.array(["c", "d"], pa.large_string())}
    for number, columns in enumerate((first, second)):
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    (block,) = read(tmp_path, 10).values()
    assert block.example_ids == ["a", "b", "c", "d"]
    assert block.columns["x"].tolist() == [1, 2, 1.5, 2.5]
    assert block.labels.tolist() == [1, 2, 3, -1]
    # Rows do not change with their neighbours.
    assert [b.columns["x"].dtype for b in read(tmp_path, 2).values()] == [block.columns["x"].dtype] * 2


@given(st.data(), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 1, 2]), st.sampled_from([b"\xff", b"\0"]))
def test_damage_costs_the_blocks_that_it_hits_and_no_others(data, row_group_rows, block_rows, column, byte):
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    with parquet_folder(sizes, row_group_rows) as folder:
        whole = read(folder, block_rows)
        source = open_input(folder).source(block_rows)
        file = data.draw(st.integers(0, len(sizes) - 1))
        row_group = data.draw(st.integers(0, (sizes[file] - 1) // row_group_rows))
        damage(folder / f"{file:04}.parquet", row_group, column, byte)
        rows = range(row_group * row_group_rows, min((row_group + 1) * row_group_rows, sizes[file]))
        hit = {f"{file}-{row}" for row in rows}
        blocks = dict(pair for group in range(source.n_groups) for pair in source.blocks(group))
        assert list(blocks) == list(whole)
        for number, block in blocks.items():
            true = whole[number].example_ids
            if not hit & set(true):
                assert block.unreadable is None
                assert block.columns["x"].tolist() == whole[number].columns["x"].tolist()
                assert block.example_ids == true
                continue
            assert f"{file:04}.parquet cannot be read in row group {row_group}: " in block.unreadable
            assert "\n" not in block.unreadable
            assert block.columns == {}
            assert block.example_ids == [
                re.sub(r"(\d+)-(\d+)", r"000\1.parquet:row \2", e) if e in hit else e for e in true
            ]


@pytest.mark.parametrize("labelled", [True, False])
def test_a_block_that_cannot_be_read_has_labels_where_the_input_has_any(tmp_path, labelled):
    """They are unknown; without them, what is written of such blocks would have other columns than the rest."""
    columns = {"example_id": ["a", "b", "c", "d"], "x": [1.0, 2.0, 3.0, 4.0]} | (
        {"label": [0, 1, 2, 3]} if labelled else {}
    )
    pq.write_table(pa.table(columns), tmp_path / "0.parquet", row_group_size=2)
    source = open_input(tmp_path).source(2)
    damage(tmp_path / "0.parquet", 0, 1)
    damaged, sound = dict(source.blocks(0)).values()
    assert damaged.unreadable is not None
    for block, known in ((damaged, [UNKNOWN_LABEL] * 2), (sound, [2, 3])):
        assert (block.labels.tolist() if labelled else block.labels) == (known if labelled else None)


CHANGES = {
    "fewer rows": lambda rows: rows.slice(0, 1),
    "other columns": lambda rows: rows.drop_columns(["x"]),
    "other order": lambda rows: rows.take([3, 2, 1, 0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_written_anew_after_the_start_end_the_reading(change):
    with parquet_folder([4, 4], 2) as folder:
        source = open_input(folder).source(4)
        file = folder / "0001.parquet"
        pq.write_table(CHANGES[change](pq.read_table(file)), file, row_group_size=2)
        with pytest.raises(DataError, match=r"0001\.parquet has changed since .* start a new run"):
            list(source.blocks(0))


def test_ids_of_any_type_are_compared_as_the_texts_that_were_committed(tmp_path):
    texts = ["café", "b"]
    for number, stored in enumerate((texts, [t.encode() for t in texts], pa.array(texts).dictionary_encode(), [1, 2])):
        pq.write_table(pa.table({"example_id": stored, "x": [1, 2]}), tmp_path / f"{number}.parquet")
        opened = open_input(tmp_path / f"{number}.parquet")
        blocks = read(opened.path, 2)
        assert ids(blocks) == (["1", "2"] if number == 3 else texts)
        assert ids(read(opened.path, 2, (0,))) == ids(blocks)


def test_a_damaged_row_group_is_decoded_up_to_the_damage(tmp_path):
    rows = [{"example_id": f"e{row}", "x": os.urandom(1000)} for row in range(1000)]
    pages = {"data_page_size": 10_000, "write_batch_size": 5, "use_dictionary": False, "write_page_checksum": True}
    file = write(tmp_path / "a.parquet", rows, **pages)
    source = open_input(file).source(100)
    meta = pq.read_metadata(file).row_group(0).column(1)
    with file.open("r+b") as opened:
        opened.seek(meta.data_page_offset + meta.total_compressed_size // 2)
        opened.write(b"damaged")
    blocks = dict(source.blocks(0))
    n_good = [block.unreadable is None for block in blocks.values()].index(False)
    assert n_good in (3, 4, 5)
    assert [block.unreadable is None for block in blocks.values()] == [True] * n_good + [False] * (10 - n_good)
    assert ids(blocks) == [f"e{row}" if row < n_good * 100 else f"a.parquet:row {row}" for row in range(1000)]


def test_text_that_is_not_utf8_is_damage(tmp_path):
    good = pa.table({"example_id": ["a", "b"], "text": ["x", "y"]})
    pq.write_table(good, tmp_path / "1.parquet")
    for column in ("example_id", "text"):
        text = {"example_id": pa.array([b"c", b"d"]), "text": pa.array([b"x", b"y"])}
        text[column] = pa.array([b"x", b"\xff\xfe"])
        bad = pa.table({name: pa.Array.from_buffers(pa.string(), 2, a.buffers()) for name, a in text.items()})
        pq.write_table(bad, tmp_path / "2.parquet")
        (block,) = read(tmp_path, 4).values()
        assert re.search(r"2\.parquet cannot be read in row group 0: .*UTF8", block.unreadable)
        assert block.example_ids == ["a", "b", "2.parquet:row 0", "2.parquet:row 1"]


IMAGE_FILES = ["b/2.PNG", "a.jpg", "b/c/1.webp", "b.tiff", "notes.txt", ".hidden.jpg", ".thumbs/1.jpg", "d/3.bmp"]


@pytest.fixture
def images(folder):
    for name in ("b/c", ".thumbs", "d"):
        make_folder(folder / name)
    for name in IMAGE_FILES:
        (folder / name).write_bytes(name.encode())
    return folder


def test_images_of_a_folder_come_as_their_bytes(images):
    names = ["a.jpg", "b.tiff", "b/2.PNG", "b/c/1.webp", "d/3.bmp"]
    for block_rows in (1, 2, 100):
        blocks = read(str(images), block_rows)
        assert ids(blocks) == names
        for block in blocks.values():
            assert block.columns["image"].tolist() == [name.encode() for name in block.example_ids]
            assert block.columns["example_id"].tolist() == block.example_ids
            assert block.labels is None
            assert block.n_bytes >= 2 * sum(map(len, block.example_ids))
    left = read(str(images), 1, (0, 4)).values()
    assert ["image" in block.columns for block in left] == [False, True, True, True, False]
    opened = open_input(str(images))
    assert (opened.n_rows, opened.row_bytes) == (5, sum(map(len, names)) / 5)
    assert ids(read(str(images / "b" / "2.PNG"), 10)) == ["2.PNG"]


@pytest.mark.parametrize("folder", ["local"], indirect=True)
def test_links_in_circles_pipes_and_parquet_beside_images(images):
    (images / "b" / "up").symlink_to(images)
    (images / "link.jpg").symlink_to(images / "a.jpg")
    (images / "nowhere.jpg").symlink_to(images / "absent.jpg")
    os.mkfifo(images / "pipe.jpg")
    (images / "folder.jpg").mkdir()
    (block,) = read(images, 100).values()
    found = dict(zip(block.example_ids, block.columns["image"], strict=True))
    assert sorted(found) == ["a.jpg", "b.tiff", "b/2.PNG", "b/c/1.webp", "d/3.bmp", "link.jpg", "nowhere.jpg"]
    assert (found["link.jpg"], found["nowhere.jpg"]) == (b"a.jpg", b"")
    pq.write_table(pa.table({"example_id": ["a"]}), images / "d" / "a.parquet")
    assert ids(read(images, 100)) == ["a"]


@pytest.fixture(params=["csv", "jsonl"])
def little_at_a_time(request, monkeypatch):
    """An ending of text files, of which a few rows are read at once."""
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 200)
    monkeypatch.setattr(text_files, "JSON_LETTERS", 100)
    return request.param


@given(
    st.lists(TEXT_ROW, min_size=1, max_size=30),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.integers(1, 7),
    st.sets(st.integers(0, 30)),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_files_give_the_rows_of_parquet_files(little_at_a_time, rows, sizes, block_rows, done):
    with text_folder(little_at_a_time, sizes, rows) as (text, tables):
        opened = open_input(text)
        assert list(opened.identity.values()) == sizes
        assert opened.n_rows == sum(sizes)
        blocks, expected = read(text, block_rows), read(tables, block_rows)
        assert ids(blocks) == ids(expected)
        for name in ("n", "x", "t", "label"):
            found, wanted = (
                concat_column([block.columns[name] for block in each.values()]) for each in (blocks, expected)
            )
            assert str(found.tolist()) == str(wanted.tolist())
        assert [block.labels.tolist() for block in read(text, 1).values()] == [
            block.labels.tolist() for block in read(tables, 1).values()
        ]
        left = read(text, block_rows, done)
        assert ids(left) == ids(blocks)
        assert all("x" in block.columns for number, block in left.items() if number not in done)


def test_a_column_has_one_type_over_all_of_a_file(tmp_path, little_at_a_time):
    kinds = {"null": [None] * 90, "whole": [1] * 90, "number": [1] * 89 + [0.5], "text": [1] * 89 + ["A1"]}
    kinds["number_late"] = [None] * 89 + [0.5]
    rows = [{"example_id": f"{row:03}", **{k: v[row] for k, v in kinds.items()}} for row in range(90)]
    file = write(tmp_path / f"x.{little_at_a_time}", rows)
    first, *_, last = read(file, 30).values()
    for block in (first, last):
        assert block.example_ids[0].startswith("0")  # ids are text: 007 is not 7
        assert [block.columns[k].dtype for k in kinds] == [object, np.int64, np.float64, object, np.float64]
    assert (first.columns["text"][0], last.columns["text"][-1]) == ("1", "A1")
    source = open_input(file).source(30, columns=frozenset({"example_id", "text"}))
    ((_, block), *_) = source.blocks(0)
    assert list(block.columns) == ["example_id", "text"]


def test_text_files_that_change_end_the_reading_and_those_that_go_cost_their_rows(tmp_path, little_at_a_time):
    for name in "ab":
        rows = [{"example_id": f"{name}{row}", "x": row} for row in range(4)]
        write(tmp_path / f"{name}.{little_at_a_time}", rows)
    source, file = open_input(tmp_path).source(3), tmp_path / f"b.{little_at_a_time}"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"0\n")
    with pytest.raises(DataError, match=r"b\.\w+ has changed since .* start a new run"):
        list(source.blocks(0))
    file.unlink()
    first, second, third = (block for _, block in source.blocks(0))
    assert (first.unreadable, second.may_return, third.may_return) == (None, True, True)
    assert second.example_ids == ["a3", f"{file.name}:row 0", f"{file.name}:row 1"]
    file.write_bytes(content)
    assert [block.unreadable for _, block in source.blocks(0)] == [None] * 3


REFUSED = [
    # Text files, before anything is read.
    (r"x\.csv is not a readable CSV file: .* a quote is not closed", {"x.csv": b'example_id\n"' + b"a,\n" * 100_000}),
    (r"x\.csv, row 1: the row has no example_id", {"x.csv": b"example_id,x\na,1\n,2\n"}),
    (r"x\.csv is not a readable CSV file: .*UTF8", {"x.csv": b"example_id,x\na,\xff\n"}),
    (r"x\.jsonl, row 1: the row has no example_id", {"x.jsonl": b'{"example_id": "a"}\n{"x": 1}\n'}),
    (r"b\.csv does not fit the files before it: ", {"a.csv": b"example_id,x\na,1", "b.csv": b"example_id,x\nb,A"}),
    (r"there are no tables \(\.parquet .*\) and no images \(\.jpg .*\) in ", {}),
    ("is not valid UTF-8; rename it", {os.fsdecode(b"\xff.jpg"): b"image"}),
    # Parquet files, by number.
    (r"0\.parquet: column 'example_id' \(list<", {0: {"example_id": [["a"]]}}),
    (r"0\.parquet: a row has no example_id", {0: {"example_id": ["a", None]}}),
    (r"has no rows", {0: {"example_id": pa.array([], pa.string())}}),
    (r"0\.parquet does not fit the other files: .* not in range", {0: {"x": [2**60 + 1]}, 1: {"x": [1.5]}}),
    (r"0\.parquet, row 1: column 'label' has negative", {0: {"label": [None, -3]}}),
    (r"0\.parquet, row 1: column 'label' \(double\)", {0: {"label": [1.0, 1.5]}}),
    (r"0\.parquet, row 0: column 'label' \(string\)", {0: {"label": ["cat"]}}),
    (r"0\.parquet, row 0: column 'example_id' \(binary\)", {0: {"example_id": [b"\xff0", b"b"]}}),
]


@pytest.mark.parametrize(("words", "files"), REFUSED)
def test_inputs_that_do_not_serve_are_refused_in_one_line(tmp_path, monkeypatch, words, files):
    monkeypatch.setattr(text_files, "BLOCK_BYTES", 100_000)
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
            continue
        ids = [f"{name}-{row}" for row in range(len(next(iter(content.values()))))]
        pq.write_table(pa.table({"example_id": ids, **content}), tmp_path / f"{name}.parquet")
    with pytest.raises(DataError, match=f"^.*{words}.*$"):
        read(tmp_path, 10) if 0 in files else open_input(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"x.csv": "age,plan\n1,a\n2,b\n3,a\n"}, ["x-0", "x-1", "x-2"]),
        ({"x.csv": "id,age\n007,1\n9,2\n", "y.csv": "id,age\n8,3\n"}, ["007", "9", "8"]),
        ({"a/x.csv": "age\n1\n2\n", "b/x.csv": "age\n3\n"}, ["a/x-0", "a/x-1", "b/x-0"]),
    ],
)
def test_rows_without_an_example_id_are_named_by_their_id_or_number(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = open_input(tmp_path).source(2, frozenset({"age"}))
    for done in ((), (0, 1)):
        blocks = dict(block for group in range(source.n_groups) for block in source.blocks(group, done))
        assert ids(dict(sorted(blocks.items()))) == expected


@pytest.mark.parametrize("files", [["texts.csv"], ["val.csv"], [f"train-0000{n}-of-00002.csv" for n in range(2)]])
def test_a_files_rows_without_ids_have_the_same_names_in_a_run_and_in_a_collection(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text("text,label\n" + "a,0\nb,1\n" * 2)
    path = tmp_path / files[0] if len(files) == 1 else tmp_path
    collected = values_of(open_dataset(DatasetSource(str(path), tabular=True)), "id")
    assert ids(read(path, 3)) == collected
    assert len(set(collected)) == 4 * len(files)


def test_labels_may_be_names_of_classes(tmp_path):
    (tmp_path / "x.csv").write_text("age,label\n1,stays\n2,leaves\n3,\n")
    source = open_input(tmp_path / "x.csv", ("leaves", "stays")).source(10)
    ((_, block),) = source.blocks(0)
    assert block.labels.tolist() == [1, 0, -1]
    (tmp_path / "x.csv").write_text("age,label\n1,stays\n2,goes\n")
    with pytest.raises(DataError, match="row 1: column 'label'"):
        list(open_input(tmp_path / "x.csv", ("leaves", "stays")).source(10).blocks(0))
