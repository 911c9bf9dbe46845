import gzip
import io
import os
import pickle
import re
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import damage, dataset, questions, rows_of, values_of, write

from cauc_ray.data import sources, streams
from cauc_ray.data.columns import column_to_numpy
from cauc_ray.data.datasets import DatasetSpec, open_dataset, open_input
from cauc_ray.data.values import concat_column
from cauc_ray.errors import CaucWarning, DataError
from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import write_parquet
from cauc_ray.numbers.chain import UNKNOWN_LABEL


def opened(path, task="classification", labels=None, **columns):
    return open_input(DatasetSpec(str(path), task, columns, labels=labels))


def blocks_of(source, done=()):
    """Return the blocks by number, of a source that went to another process, the last group first."""
    source, blocks = pickle.loads(pickle.dumps(source)), {}
    for group in reversed(range(source.n_groups)):
        inside = dict(source.blocks(group, done))
        assert not blocks or not inside or max(inside) < min(blocks)
        blocks |= inside
    return dict(sorted(blocks.items()))


def read(path, block_rows, done=()):
    return blocks_of(opened(path).blocks(block_rows), done)


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


FIXED = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 3)
COLUMNS = [
    (pa.array([True, None]), object, [True, None]),
    (pa.array([1.5, None]), np.float64, [1.5, pytest.approx(np.nan, nan_ok=True)]),
    (pa.array([2**53 + 1, None]), object, [2**53 + 1, pytest.approx(np.nan, nan_ok=True)]),
    (FIXED, np.float32, [[0, 1, 2], [3, 4, 5]]),
    (FIXED.slice(1), np.float32, [[3, 4, 5]]),
    (pa.array([[1, 2], [3, 4]]), np.int64, [[1, 2], [3, 4]]),
    (pa.array([[1, None], [3, 4]]), object, [[1, None], [3, 4]]),
    (pa.array([{"a": 1}, {"a": None}]), object, [{"a": 1}, {"a": None}]),
    (pa.array([["a"], None]), object, [["a"], None]),
    (pa.array([b"a", None, b""]), object, [b"a", None, b""]),
    (pa.array([b"ab", None], pa.binary(2)), object, [b"ab", None]),
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
    pa.struct([("a", pa.int64())]): st.fixed_dictionaries({"a": st.integers(0, 9) | st.none()}),
    pa.list_(pa.int64()): st.lists(st.integers(0, 9) | st.none(), max_size=3),
    pa.list_(pa.float32()): st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@given(data=st.data())
def test_rows_do_not_depend_on_the_other_rows_of_their_blocks(kind, data):
    def read(values):
        return column_to_numpy(pa.chunked_array([pa.array(values, kind)]))

    rows = st.lists(st.tuples(KINDS[kind] | st.none(), st.booleans()), min_size=1, max_size=5)
    blocks = data.draw(st.lists(rows, min_size=1, max_size=3))
    parts = [read([value for value, _ in block])[np.array([chosen for _, chosen in block])] for block in blocks]
    cut = concat_column([part for part in parts if len(part)] or parts)
    alone = concat_column([read([value for block in blocks for value, chosen in block if chosen])])
    assert str(cut.tolist()) == str(alone.tolist())
    assert cut.dtype == alone.dtype or not len(cut)


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
def test_damage_costs_the_rows_of_its_row_group_and_no_others(data, row_group_rows, block_rows, column, byte):
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    with parquet_folder(sizes, row_group_rows) as folder:
        whole, source = read(folder, block_rows), opened(folder).blocks(block_rows)
        file = data.draw(st.integers(0, len(sizes) - 1))
        row_group = data.draw(st.integers(0, (sizes[file] - 1) // row_group_rows))
        damage(folder / f"{file:04}.parquet", row_group, column, byte)
        hit = {f"{file}-{row}" for row in range(row_group * row_group_rows, (row_group + 1) * row_group_rows)}
        blocks = blocks_of(source)
        assert list(blocks) == list(whole)
        for number, block in blocks.items():
            expected = whole[number]
            lost = np.array([example in hit for example in expected.example_ids])
            assert sorted(block.unreadable) == np.flatnonzero(lost).tolist()
            for position, reason in block.unreadable.items():
                assert re.fullmatch(rf".*{file:04}.parquet cannot be read in row group {row_group}: .*", reason)
                example = block.example_ids[position]
                assert example == expected.example_ids[position] if column else f"{file:04}.parquet, row " in example
            assert np.array(block.example_ids)[~lost].tolist() == np.array(expected.example_ids)[~lost].tolist()
            assert block.labels.tolist() == np.where(lost, UNKNOWN_LABEL, expected.labels).tolist()
            if not lost.all():
                assert block.columns["x"].tolist() == expected.columns["x"][~lost].tolist()


def test_text_that_is_not_utf8_is_damage(tmp_path):
    text = pa.Array.from_buffers(pa.string(), 2, pa.array([b"x", b"\xff\xfe"]).buffers())
    write(tmp_path / "2.parquet", pa.table({"example_id": ["c", "d"], "text": text}))
    (block,) = read(tmp_path, 4).values()
    assert re.search(r"2\.parquet cannot be read in row group 0: .*UTF8", block.unreadable[1])
    assert block.example_ids == ["c", "d"]


def test_images_of_a_folder_come_as_their_bytes(folder):
    names = ["a.jpg", "b.tiff", "b/2.PNG", "b/c/1.webp", "d/3.bmp"]
    for name in (*names, "notes.txt", ".hidden.jpg", ".thumbs/1.jpg"):
        make_folder((folder / name).parent)
        (folder / name).write_bytes(name.encode())
    rows = opened(folder, "image-classification")
    for block_rows in (1, 2, 100):
        blocks = blocks_of(rows.blocks(block_rows))
        assert ids(blocks) == names
        for block in blocks.values():
            assert block.columns["image"].tolist() == [name.encode() for name in block.example_ids]
            assert block.labels is None
    assert (rows.n_rows, rows.row_bytes) == (5, sum(map(len, names)) / 5)
    assert ids(read(folder / "b" / "2.PNG", 10)) == ["2.PNG"]


def test_links_in_circles_pipes_and_parquet_next_to_images(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("a.jpg", "b/2.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    (tmp_path / "link.jpg").symlink_to(tmp_path / "a.jpg")
    (tmp_path / "nowhere.jpg").symlink_to(tmp_path / "absent.jpg")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "folder.jpg").mkdir()
    (block,) = read(tmp_path, 100).values()
    contents = dict(zip(block.example_ids, block.columns["image"], strict=True))
    assert contents == {"a.jpg": b"a.jpg", "b/2.jpg": b"b/2.jpg", "link.jpg": b"a.jpg", "nowhere.jpg": None}
    pq.write_table(pa.table({"example_id": ["a"]}), tmp_path / "b" / "a.parquet")
    assert ids(read(tmp_path, 100)) == ["a"]


@pytest.fixture
def little_at_a_time(monkeypatch):
    """A few rows of text files are read at once."""
    monkeypatch.setattr(streams, "BLOCK_BYTES", 200)
    monkeypatch.setattr(streams, "JSON_CHARS", 100)


@pytest.mark.usefixtures("little_at_a_time")
@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_column_has_one_type_over_all_of_a_file(tmp_path, ending):
    kinds = {"null": [None] * 90, "whole": [1] * 90, "number": [1] * 89 + [0.5], "text": [1] * 89 + ["A1"]}
    kinds |= {"number_late": [None] * 89 + [0.5], "yes": [True, False] * 45}
    rows = [{"example_id": f"{row:03}", **{k: v[row] for k, v in kinds.items()}} for row in range(90)]
    file = write(tmp_path / f"x.{ending}", rows)
    first, *_, last = read(file, 30).values()
    for block in (first, last):
        assert block.example_ids[0].startswith("0")  # ids are text: 007 is not 7
        assert [block.columns[k].dtype for k in kinds] == [object, np.int64, np.float64, object, np.float64, bool]
    assert (first.columns["text"][0], last.columns["text"][-1]) == ("1", "A1")


@pytest.mark.usefixtures("little_at_a_time")
@pytest.mark.parametrize("order", [[0], [3, 2, 1, 0]], ids=["fewer rows", "another order"])
@pytest.mark.parametrize(
    ("folder", "ending"),
    [("local", "parquet"), ("s3", "parquet"), ("local", "csv"), ("local", "jsonl")],
    indirect=["folder"],
)
def test_files_that_change_end_the_reading_and_those_that_go_cost_their_rows(
    folder, tmp_path, monkeypatch, ending, order
):
    def put(name, numbers):
        rows = [{"example_id": f"{name}{row}", "x": row} for row in numbers]
        file = write(tmp_path / f"rows.{ending}", rows, **({"row_group_size": 2} if ending == "parquet" else {}))
        (place / f"{name}.{ending}").write_bytes(file.read_bytes())

    monkeypatch.setattr(sources, "CONTENT_BYTES", 0)  # small ones are fetched at once
    place = folder / "input"
    make_folder(place)
    put("a", range(4))
    put("b", range(4))
    source, identity = opened(place).blocks(3), opened(place).identity
    put("b", order)
    with pytest.raises(DataError, match=r"b\.\w+ has changed since"):
        list(source.blocks(0))
    assert opened(place).identity != identity
    (place / f"b.{ending}").unlink()
    for _ in range(2 if ending == "parquet" else 1):
        first, second, third = (block for _, block in source.blocks(0))
        assert (first.unreadable, second.may_return, third.may_return) == ({}, True, True)
        assert second.example_ids[0] == "a3"
        (place / f"b.{ending}").write_bytes(b"half a copy, which may soon be whole")


def stored(write):
    """Return what a function writes into a file."""
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def write_stream(sink):
    with pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE)


CSV = "example_id,x,text,label\n007,1,NA,b\n8,2,é,a\n9,,;,\n"
ROWS = [{"example_id": i, "x": x, "text": t, "label": y} for i, x, t, y in
        (("007", 1, "NA", "b"), ("8", 2, "é", "a"), ("9", None, ";", None))]  # fmt: skip
LINES = "".join(f"{__import__('json').dumps(row)}\n" for row in ROWS)
TABLE = pa.Table.from_pylist(ROWS)
FORMATS = {
    "x.csv": CSV.encode(),
    "x.CSV": CSV.encode("utf-8-sig"),
    "x.csv.gz": gzip.compress(CSV.encode()),
    "x.csv.zst": pa.compress(CSV.encode(), "zstd", asbytes=True),
    "utf16.csv": CSV.encode("utf-16"),
    "x.tsv": CSV.replace(",", "\t").encode(),
    "semicolon.csv": CSV.replace(";", "!").replace(",", ";").replace("!", '";"').encode(),
    "x.jsonl": LINES.encode(),
    "array.json": f"[{LINES.strip()}]".replace("\n", ",\n").encode(),
    "x.feather": stored(lambda sink: feather.write_feather(TABLE, sink, chunksize=2)),
    "stream.arrow": stored(write_stream),
    "x.orc": stored(lambda sink: orc.write_table(TABLE, sink)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_a_run_and_a_collection_the_same_rows(tmp_path, name):
    (tmp_path / name).write_bytes(FORMATS[name])
    spec = DatasetSpec(str(tmp_path / name), "classification", labels=("a", "b"))
    for source in (open_input(spec).blocks(2), open_dataset(spec, "all").blocks(2)):
        blocks = blocks_of(source)
        assert ids(blocks) == ["007", "8", "9"]
        assert concat_column([block.columns["x"] for block in blocks.values()]).tolist()[:2] == [1, 2]
        assert [t for block in blocks.values() for t in block.columns["text"]] == ["NA", "é", ";"]
        assert [n for block in blocks.values() for n in block.labels] == [1, 0, UNKNOWN_LABEL]


def test_folders_of_other_programs_are_read_as_these_do(tmp_path):
    """Names in `_` and `.` are skipped at every level; key=value folders are columns; part files are one piece."""
    for year, n in ((2023, 3), (2024, 2)):
        for part in range(2):
            rows = {"x": range(n), "label": [0] * n}
            write(tmp_path / f"year={year}" / "kind=a%20b" / f"part-{part:05}.parquet", pa.table(rows))
    for junk in ("_temporary/0/part-00000.parquet", "year=2023/_tmp/x.parquet", "year=2023/.crc/x.parquet"):
        write(tmp_path / junk, pa.table({"x": [9], "label": [0]}))
    (tmp_path / "_SUCCESS").touch()
    spec = DatasetSpec(str(tmp_path), "classification")
    collected = open_dataset(spec, "all")
    for source in (open_input(spec).blocks(4), collected.blocks(4)):
        columns = [block.columns for block in blocks_of(source).values()]
        assert [year for block in columns for year in block["year"]] == [2023] * 6 + [2024] * 4
        assert {kind for block in columns for kind in block["kind"]} == {"a b"}
    assert sum(open_dataset(spec).split_sizes.values()) == 10


NAMES = ("1", "2", "3")
NO_LABEL = "rows have a label that is neither an option's number"
LABELS = [
    # Without names: numbers or letters.
    (None, [0, 1, 2, None], [0, 1, 2, -1]),
    (None, ["A", "b", "C", None], [0, 1, 2, -1]),
    (None, [0.0, 1.0, 2.0, None], [0, 1, 2, -1]),
    *[(None, [0, 1, bad, None], NO_LABEL) for bad in (-2, 1.5, 2**40)],
    *[(None, ["a", "b", bad, None], NO_LABEL) for bad in ("cat", "1.5", "²", "-2")],
    # Names come before positions, positions before letters.
    (NAMES, [1, 3, None], [0, 2, -1]),
    (NAMES, ["3", "1.0", ""], [2, 0, -1]),
    (NAMES, [2.0, None, 3.0], [1, -1, 2]),
    (NAMES, [0, 1, 2], "since these are numbers"),
    (("1", "0"), [0, 1, 1], [1, 0, 0]),
    (("stays", "goes"), ["goes", None, "stays"], [1, -1, 0]),
    (("stays", "goes"), [1, 0, -1], [1, 0, -1]),
    (("b", "a"), ["a", "b", "a"], [1, 0, 1]),
    (("false", "true"), [True, False, None], [1, 0, -1]),
    (("stays", "goes"), ["left", "goes", "went"], "'left' \\(1\\), 'went' \\(1\\)"),
    (("stays", "goes"), [5, 5, 0], "5 \\(2\\)"),
]


@pytest.mark.parametrize(("names", "values", "expected"), LABELS)
def test_labels_are_names_or_positions_alike_in_runs_and_collections(tmp_path, names, values, expected):
    table = pa.table({"x": range(len(values)), "y": values})
    spec = DatasetSpec(str(write(tmp_path / "x.parquet", table)), "classification", {"label": "y"}, labels=names)
    if isinstance(expected, list):
        for rows in (open_input(spec), open_dataset(spec, "all")):
            (block,) = blocks_of(rows.blocks(9)).values()
            assert block.labels.tolist() == expected
            assert sorted(block.columns) == ["example_id", "x"]
        return
    with pytest.raises(DataError, match=f"{expected}.*--skip-unknown-labels"):
        open_dataset(spec, "all")
    with pytest.raises(DataError, match="row"):
        blocks_of(open_input(spec).blocks(9))
    with pytest.warns(CaucWarning, match="left out"):
        assert open_dataset(replace(spec, skip_unknown_labels=True), "all").n_rows < len(values)


def test_no_label_is_warned_of_at_once_with_the_columns(tmp_path):
    write(tmp_path / "x.csv", [{"age": 1, "category": "a"}] * 4)
    with pytest.warns(CaucWarning, match="no row has a label.*age, category.*--columns label="):
        open_dataset(DatasetSpec(str(tmp_path / "x.csv"), "classification"))


IMAGE = b"\x89PNG and no image"
IMAGE_COLUMNS = {
    "structs": [{"bytes": IMAGE, "path": "gone.png"}, {"bytes": None, "path": "a.png"}, None],
    "paths": ["a.png", "sub/b.png", None],
}


@pytest.mark.parametrize("kind", IMAGE_COLUMNS)
def test_images_of_tables_are_bytes_or_files_next_to_the_table(folder, kind):
    make_folder(folder / "sub")
    for name in ("a.png", "sub/b.png"):
        (folder / name).write_bytes(IMAGE)
    table = pa.table({"picture": IMAGE_COLUMNS[kind], "label": [0, 1, 0]})
    write_parquet(folder / "x.parquet", table)
    spec = DatasetSpec(str(folder / "x.parquet"), "image-classification", {"image": "picture"})
    for rows in (open_input(spec), open_dataset(spec, "all")):
        (block,) = blocks_of(rows.blocks(9)).values()
        assert block.columns["image"].tolist() == [IMAGE, IMAGE, None]


FIVE = questions(5)
OTHER_TYPES = [{**row, "label": [1]} for row in questions(5, 5)]
WITHOUT_CHOICES = b'{"question": "?", "label": 0}\n' * 5
MIXED = b'{"question": {"a": 1}, "choices": ["a"]}\n' * 4
# What a run and a collection refuse: the words of the line, and files by name, with content or rows of questions.
REFUSED = [
    (r"x\.csv is not a readable CSV file: .* a quote is not closed", {"x.csv": b'id\n"' + b"a,\n" * 100_000}),
    (r"x\.csv is not a readable CSV file: .*must be UTF-8 .*iconv", {"x.csv": b"question,choices\na,\xff\n"}),
    (r"x\.csv is not a readable CSV file: .*Expected 2 columns, got 1", {"x.csv": b"question,choices\na\n"}),
    (r"x\.csv has two columns named 'question'", {"x.csv": b"question,question\na,b\n"}),
    (r"has no rows", {"x.csv": b"question,choices\n"}),
    (r"x\.csv\.gz cannot be decompressed", {"x.csv.gz": gzip.compress(CSV.encode())[:-9]}),
    (r"x\.json, line 1: not JSON", {"x.json": b'{\n"a": 1}'}),
    (r"x\.json, item 1: expected a JSON object, got a int", {"x.json": b'[{"question": "?"}, 3]'}),
    (r"x\.jsonl has half a surrogate pair", {"x.jsonl": b'{"question": "\\ud800"}'}),
    (r"x\.jsonl.* column 'question' has type struct<.*>, expected text", {"x.jsonl": MIXED}),
    (r"row \d: choices must be a JSON list .* 'a or b'", {"x.csv": b"question,choices\n" + b"?,a or b\n" * 4}),
    (r"1\.parquet does not fit the files before it: ", {"val/0.parquet": FIVE, "val/1.parquet": OTHER_TYPES}),
    (r"have different formats", {"val/0.csv": FIVE, "val/1.jsonl": FIVE}),
    (r"columns question, but .*0\.par", {"val/0.parquet": FIVE, "val/1.parquet": [{"question": "?"}]}),
    (r"is a Delta table.*ray.data", {"_delta_log/0.json": b"{}", "a.parquet": FIVE}),
    (r"is a Iceberg table.*ray.data", {"metadata/v1.metadata.json": b"{}", "data/a.parquet": FIVE}),
    (r"0\.parquet, row 0: the row has no example_id", {"0.parquet": [{**row, "id": None} for row in FIVE]}),
    (r"the column of example ids has type list<", {"0.parquet": [{**row, "id": ["a"]} for row in FIVE]}),
    (r"the column of example ids \(binary\)", {"0.parquet": [{**row, "id": b"\xff"} for row in FIVE]}),
]
# What only a collection refuses, which needs labels, ids and splits.
REFUSED_AS_DATASET = [
    (r"x\.jsonl has no column 'choices'; it has question, label.*--columns", {"x.jsonl": WITHOUT_CHOICES}),
    (r"a partition 'few' of at least four rows", {"few.jsonl": FIVE[:3]}),
    (r"row 5: example id 'q1' is a duplicate of .*, row 1", {"x.jsonl": [*FIVE, FIVE[1]]}),
    (r"has no .parquet, .jsonl or .csv files and no folders of images", {}),
    (r"both named as partition 'validation'", {"val.jsonl": FIVE, "validation.jsonl": FIVE}),
    (r"has 1 of the 2 files of 'val", {"val-00001-of-00002.parquet": FIVE}),
    (r"is mixed: train.parquet and images have", {"train.parquet": FIVE, "images/a/1.jpg": b"", "images/b/1.jpg": b""}),
    (r"test contains images directly; put each into", {"test/1.jpg": b"", "train/1.jpg": b""}),
    (r"test.jsonl has no column 'question'", {"validation.jsonl": FIVE, "test.jsonl": [{"image": [1, 2]}] * 5}),
]
REFUSED_AS_INPUT = [
    (r"no tables \(\.parquet .*\) and no images \(\.jpg .*\) in ", {"notes.txt": b""}),
    ("is not valid UTF-8; rename it", {os.fsdecode(b"\xff.jpg"): b"image"}),
    (
        r"row 0: label 3, counted from 0, is outside its 3",
        {"0.parquet": [{**row, "label": 3} for row in FIVE]},
    ),
]
DOORS = {
    "run": lambda spec: blocks_of(open_input(spec).blocks(10)),
    "collect": lambda spec: blocks_of(open_dataset(spec).blocks(10)),
}


@pytest.mark.parametrize(
    ("door", "words", "files"),
    [
        *(("run", *case) for case in REFUSED + REFUSED_AS_INPUT),
        *(("collect", *case) for case in REFUSED + REFUSED_AS_DATASET),
    ],
)
@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")
def test_rows_that_cannot_be_read_are_refused_in_one_line(tmp_path, monkeypatch, door, words, files):
    monkeypatch.setattr(streams, "BLOCK_BYTES", 100_000)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            write(tmp_path / name, content)
    with pytest.raises(DataError, match=f"^.*{words}.*$"):
        DOORS[door](DatasetSpec(str(tmp_path), "multiple-choice"))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"x.csv": "age,plan,label\n1,a,0\n2,b,0\n3,a,0\n"}, ["x-0", "x-1", "x-2"]),
        ({"x.csv": "id,age,label\n007,1,0\n9,2,0\n", "y.csv": "id,age,label\n8,3,0\n"}, ["007", "9", "8"]),
        ({"x.csv": "example_id,age,label\n7,1,0\n"}, ["7"]),
        ({"x.csv": "id,age,example_id,label\n1,1,007,0\n"}, ["007"]),
        ({"a/x.csv": "age,label\n1,0\n2,0\n", "b/x.csv": "age,label\n3,0\n"}, ["a/x-0", "a/x-1", "b/x-0"]),
        ({f"train-0000{n}-of-00002.csv": "age,label\n1,0\n" for n in range(2)}, ["train-0", "train-1"]),
    ],
)
def test_rows_without_an_example_id_are_named_by_their_id_or_number_in_runs_and_collections(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    path = tmp_path / next(iter(files)) if len(files) == 1 else tmp_path
    assert ids(blocks_of(opened(path).blocks(2, frozenset({"age"})))) == expected
    assert values_of(dataset(path, task="classification", split="all"), "id") == expected


def test_ids_that_several_partitions_have_are_told_apart(tmp_path):
    for name in ("validation", "test"):
        write(tmp_path / f"{name}.jsonl", questions(6))
    with pytest.warns(CaucWarning, match="validation and test have example ids in common"):
        opened_dataset = open_dataset(DatasetSpec(str(tmp_path), "multiple-choice"))
    assert {row["id"] for row in rows_of(opened_dataset, "test")} == {f"test-q{n}" for n in range(6)}


@pytest.mark.parametrize("whole_bytes", [0, sources.CONTENT_BYTES])  # up to which files are fetched whole
@pytest.mark.parametrize(("n_files", "n_rows", "group_rows"), [(12, 40, 10), (3, 400, 400)])
def test_few_requests_are_made_to_a_store(s3, tmp_path, monkeypatch, whole_bytes, n_files, n_rows, group_rows):
    """At most twice those of pyarrow.dataset for a run, three times for a collection of two models."""
    from moto.s3.responses import S3Response
    from pyarrow import dataset as arrow_dataset
    from pyarrow.fs import FileSystem, copy_files

    requests = []
    for method in ("get_object", "head_object"):
        answer = getattr(S3Response, method)
        monkeypatch.setattr(
            S3Response, method, lambda *args, _f=answer, **more: requests.append(1) or _f(*args, **more)
        )
    monkeypatch.setattr(sources, "CONTENT_BYTES", whole_bytes)
    for file in range(n_files):
        ids = [f"{file}-{row}" for row in range(n_rows)]
        table = pa.table({"id": ids, "x": [0.5] * n_rows, "label": [0] * n_rows})
        write(tmp_path / "input" / f"part-{file:05}.parquet", table, row_group_size=group_rows)
    filesystem, place = FileSystem.from_uri(s3)[0], f"bucket/{tmp_path.name}"
    copy_files(str(tmp_path / "input"), place, destination_filesystem=filesystem)
    spec = DatasetSpec(f"s3://{place}", "classification")

    def collect_two():
        rows = open_dataset(spec)
        for _ in range(2):
            blocks_of(rows.blocks(64, with_inputs=True))

    def n_requests(work):
        requests.clear()
        work()
        return len(requests)

    n_of_pyarrow = n_requests(lambda: arrow_dataset.dataset(place, filesystem=filesystem).to_table())
    assert n_requests(lambda: blocks_of(open_input(spec).blocks(64))) <= 2 * n_of_pyarrow
    assert n_requests(collect_two) <= 3 * n_of_pyarrow
