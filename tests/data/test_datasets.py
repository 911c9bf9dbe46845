import csv
import json
import os
import pickle
import shutil
import string
import tempfile
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.data.datasets import Dataset, DatasetSource, open_dataset
from cauc_ray.errors import ConfigError, DataError

DATA = Path(__file__).parents[3] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real data (../shared/data) is not here")


def dataset(path, seed=0, **columns) -> Dataset:
    return open_dataset(DatasetSource(str(path), columns, seed))


def rows_of(opened, split, rows=1000, done=frozenset()):
    """Every row of a split as a dict, with its label, and the numbers of the blocks."""
    blocks = list(opened.blocks(split, rows, done))
    found = []
    for _, block in blocks:
        for place, example in enumerate(block.example_ids):
            row = {name: column[place] for name, column in block.columns.items()}
            assert row.pop("example_id") == example
            label = None if block.labels is None else int(block.labels[place])
            found.append({"id": example, "label": label, **row})
    return found


def questions(n, first=0):
    return [
        {"id": f"q{i}", "question": f"what is {i}?", "choices": [f"{i}", "none", "both"], "label": i % 3}
        for i in range(first, first + n)
    ]


def write(path, rows):
    """Write rows as the file's name says; in CSV choices are JSON lists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            for row in rows:
                cells = {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}
                writer.writerow({k: "" if v is None else v for k, v in cells.items()})
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_images(folder, classes, n=3):
    """Write n files for each class; their bytes say where they lie, no image is ever decoded."""
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            (folder / name / f"{i}.JPG").write_bytes(f"{folder.name}/{name}/{i}".encode())


texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=8
)  # csv knows no NUL, and reads \r\n as \n
question_rows = st.lists(
    st.fixed_dictionaries(
        {
            "question": texts | st.none(),
            "choices": st.lists(texts, min_size=2, max_size=5) | st.none(),
            "context": texts | st.none(),
            "label": st.sampled_from([0, 1, None]),
        }
    ),
    min_size=4,
    max_size=12,
)


@given(question_rows)
def test_every_format_gives_the_same_rows(rows):
    rows = [{"id": str(place), **row} for place, row in enumerate(rows)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for ending in ("parquet", "jsonl", "json", "csv"):
            path = write(Path(folder) / f"x.{ending}", rows)
            found.append(rows_of(dataset(path), "all", 3))
    assert found[0] == found[1] == found[2] == found[3]
    for row, read in zip(rows, found[0], strict=True):
        assert read == {**row, "label": -1 if row["label"] is None else row["label"]}


LAYOUTS = {
    "calibration validation test": ("calibration", "validation", "test"),
    "validation test": ("validation", "validation", "test"),
    "val test dev": ("validation", "validation", "test"),
    "train validation": ("train", "train", "validation"),
    "train test": ("train", "train", "test"),
    "train": ("train", "train", "train"),
    "questions": ("questions", "questions", "questions"),
}
SIZES = {"train": 60, "validation": 31, "val": 31, "test": 40, "calibration": 10, "dev": 5, "questions": 41}


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_partitions_of_a_folder_become_disjoint_splits(tmp_path, layout, ending):
    published = {}
    for name in layout.split():
        rows = [{**row, "id": f"{name}-{row['id']}"} for row in questions(SIZES[name])]
        published["validation" if name == "val" else name] = [row["id"] for row in rows]
        write(tmp_path / f"{name}.{ending}", rows)
    opened = dataset(tmp_path)
    ids = {split: [row["id"] for row in rows_of(opened, split, 7)] for split in opened.split_sizes}
    assert {split: len(found) for split, found in ids.items()} == opened.split_sizes
    assert list(ids) == ["calibration", "validation", "test"]
    assert max(Counter(chain.from_iterable(ids.values())).values()) == 1
    for (split, found), partition in zip(ids.items(), LAYOUTS[layout], strict=True):
        assert found == [each for each in published[partition] if each in set(found)], split  # in the file's order

    sizes = opened.split_sizes
    if "calibration" not in layout:
        assert 0 <= sizes["calibration"] - sizes["validation"] <= 1
    if "train " in layout:
        tested = layout.split()[1]
        assert ids["test"] == published[tested]
        assert sizes["calibration"] + sizes["validation"] == SIZES[tested]
    elif " " in layout:
        assert ids["test"] == published["test"]
        assert set(published["validation"]) >= set(ids["validation"])
    else:
        assert sum(sizes.values()) == SIZES[layout]
        assert abs(sizes["test"] - SIZES[layout] / 2) <= 1

    same, other = dataset(tmp_path), dataset(tmp_path, seed=1)
    for split in ids:
        assert [row["id"] for row in rows_of(same, split)] == ids[split]
    if "calibration" not in layout:
        assert [row["id"] for row in rows_of(other, "validation")] != ids["validation"]
    assert same.fingerprint == opened.fingerprint != other.fingerprint


def test_a_train_set_smaller_than_the_test_set_is_used_up(tmp_path):
    write(tmp_path / "train.jsonl", questions(9))
    write(tmp_path / "test.jsonl", questions(30))
    assert dataset(tmp_path).split_sizes == {"calibration": 5, "validation": 4, "test": 30}


@pytest.fixture(scope="module")
def row_groups_of_four(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "x.parquet"
    pq.write_table(pa.Table.from_pylist(questions(45)), path, row_group_size=4)
    return path


@given(rows=st.integers(1, 50), done=st.sets(st.integers(0, 45)))
def test_blocks_that_are_done_change_nothing_of_the_others(row_groups_of_four, rows, done):
    opened = dataset(row_groups_of_four)
    for split in ("calibration", "test", "all"):
        every = dict(opened.blocks(split, rows))
        left = dict(opened.blocks(split, rows, done))
        assert list(every) == list(range(-(-sum(len(b.example_ids) for b in every.values()) // rows)))
        assert all(len(block.example_ids) == rows for block in list(every.values())[:-1])
        assert left.keys() == every.keys() - done
        for number, block in left.items():
            assert block.example_ids == every[number].example_ids
            assert block.labels.tolist() == every[number].labels.tolist()
            assert block.columns["question"].tolist() == every[number].columns["question"].tolist()


def test_row_groups_and_shards_are_one_sequence_of_rows(tmp_path):
    rows = questions(50)
    whole = write(tmp_path / "whole" / "validation.parquet", rows)
    table = pq.read_table(whole)
    (tmp_path / "cut").mkdir()
    for shard, (start, end) in enumerate([(0, 17), (17, 18), (18, 50)]):
        name = f"validation-{shard:05}-of-00003.parquet"
        pq.write_table(table.slice(start, end - start), tmp_path / "cut" / name, row_group_size=5)
    shutil.copytree(tmp_path / "cut", tmp_path / "deep" / "validation")
    expected = {split: rows_of(dataset(whole), split, 6) for split in ("calibration", "validation", "test", "all")}
    assert expected["all"] == rows
    for folder in ("whole", "cut", "deep"):
        for split, found in expected.items():
            assert rows_of(dataset(tmp_path / folder), split, 6) == found
    (tmp_path / "cut" / "validation-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match="has 2 of the 3 files of 'validation'"):
        dataset(tmp_path / "cut")


def test_row_groups_that_nobody_wants_are_not_read(tmp_path):
    path = tmp_path / "x.parquet"
    rows = [{"id": i, "image": bytes([i]) * 2000, "label": 0} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=10, compression="none", use_dictionary=False)
    images = pq.ParquetFile(path).metadata.row_group(0).column(1)
    damaged = bytearray(path.read_bytes())
    start = images.data_page_offset
    damaged[start : start + images.total_compressed_size] = b"\xff" * images.total_compressed_size
    path.write_bytes(damaged)
    opened = dataset(path)
    left = rows_of(opened, "all", 10, done={0})
    assert [row["id"] for row in left] == [str(i) for i in range(10, 40)]
    assert all(row["image"] == bytes([int(row["id"])]) * 2000 for row in left)
    with pytest.raises(DataError, match=r"x\.parquet cannot be read"):
        rows_of(opened, "all", 10)


def test_labels_are_numbers_or_letters(tmp_path):
    def labels(values, ending="jsonl"):
        rows = [{**row, "label": value} for row, value in zip(questions(len(values)), values, strict=True)]
        return [row["label"] for row in rows_of(dataset(write(tmp_path / f"x.{ending}", rows)), "all")]

    assert labels([0, 1, 2, None]) == labels(["A", "b", "C", None]) == labels(["0", " 1", "2 ", ""]) == [0, 1, 2, -1]
    assert labels([0.0, 1.0, 2.0, None]) == labels([0, "B", "c", None]) == labels(["0.0", "1.0", "2.0", ""], "csv")
    assert labels([-1, 0, 0, -1]) == [-1, 0, 0, -1]
    assert labels([None] * 4) == [-1] * 4
    for bad in ("cat", "1.5", "²", "-2", -2, 1.5, 2**40):
        with pytest.raises(DataError, match=r"x\.jsonl, row 2: label .* is neither the number of an option"):
            labels([0, 1, bad, None])
    with pytest.raises(DataError, match=r"x\.jsonl, row 3: label 3, counted from 0, is outside its 3 choices"):
        labels(["a", "b", "c", "d"])
    with pytest.raises(DataError, match="the column of labels holds bool"):
        labels([True, False, True, False])


def test_csv_cells_are_text_and_empty_ones_null(tmp_path):
    cells = 'id,question,choices,label\r\n007,"1\n2","[""NA"", ""2013-06-05""]",""\r\n08,,,1\r\n'
    (tmp_path / "x.csv").write_bytes(("\ufeff" + cells + '9,"",,b\r\n\r\n010,NA,"[""a"",""b""]",A\r\n').encode())
    found = rows_of(dataset(tmp_path / "x.csv"), "all")
    assert [row["id"] for row in found] == ["007", "08", "9", "010"]
    assert [row["question"] for row in found] == ["1\n2", None, None, "NA"]
    assert [row["choices"] for row in found] == [["NA", "2013-06-05"], None, None, ["a", "b"]]
    assert [row["label"] for row in found] == [-1, 1, 1, 0]


def test_rows_without_labels_have_none(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "label"} for row in questions(4)]
    (_, block), *_ = dataset(write(tmp_path / "x.jsonl", rows)).blocks("all", 10)
    assert block.labels is None
    assert "label" not in block.columns


def test_texts_and_lists_of_every_type_are_read(tmp_path):
    choices = [["1", "2"]] * 4
    kinds = [
        pa.large_list(pa.large_string()),
        pa.list_(pa.string(), 2),
        pa.list_view(pa.string()),
        pa.list_(pa.string_view()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
    ]
    columns = [pa.array(choices, kind) for kind in kinds] + [pa.array([[1, 2]] * 4), pa.array(['["1", "2"]'] * 4)]
    questions = [pa.array(["?"] * 4, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    questions.append(questions[0].dictionary_encode())
    for place, column in enumerate(columns):
        question = questions[place % len(questions)]
        label = pa.array(["A", "b", "1", None], question.type) if place else pa.array([0, 1, 1, None], pa.uint8())
        pq.write_table(pa.table({"question": question, "choices": column, "label": label}), tmp_path / "x.parquet")
        found = rows_of(dataset(tmp_path / "x.parquet"), "all", 3)
        assert [row["choices"] for row in found] == choices, column.type
        assert [(row["question"], row["label"]) for row in found] == [("?", 0), ("?", 1), ("?", 1), ("?", -1)]


def test_columns_are_named_and_gathered(tmp_path):
    rows = [
        {"nr": i, "stem": f"q{i}", "opa": "x", "opb": "y", "opc": None if i else "z", "opd": None, "key": "B"}
        for i in range(4)
    ]
    names = {"question": "stem", "choices": "opa+opb+opc+opd", "label": "key", "example_id": "nr"}
    for ending in ("parquet", "jsonl", "csv"):
        opened = dataset(write(tmp_path / f"x.{ending}", rows), **names)
        found = rows_of(opened, "all")
        assert [row["choices"] for row in found] == [["x", "y", "z"], ["x", "y"], ["x", "y"], ["x", "y"]]
        assert [(row["id"], row["question"], row["label"]) for row in found] == [(str(i), f"q{i}", 1) for i in range(4)]
    # An option that is missing before others would move those to other letters: it stays, as no text.
    rows = [{**row, "opb": None, "opc": "z", "key": "C"} for row in rows]
    found = rows_of(dataset(write(tmp_path / "x.jsonl", rows), **names), "all")
    assert found[0]["choices"] == ["x", None, "z"]
    with pytest.raises(DataError, match=r"no column 'root' for question; it has nr, stem, .* --columns"):
        dataset(tmp_path / "x.jsonl", **{**names, "question": "root"})
    with pytest.raises(DataError, match="no column 'opx' for choices"):
        dataset(tmp_path / "x.jsonl", **{**names, "choices": "opa+opx"})
    with pytest.raises(ConfigError, match="unknown column to read 'questoin'; did you mean 'question'"):
        dataset(tmp_path / "x.jsonl", questoin="stem")


def test_ids_are_the_files_or_made(tmp_path):
    bare = [{"question": "?", "choices": ["a", "b"], "other": i} for i in range(5)]
    assert [row["id"] for row in rows_of(dataset(write(tmp_path / "v.jsonl", bare)), "all", 2)] == [
        f"v-{i}" for i in range(5)
    ]
    both = [{**row, "id": i, "example_id": 10 + i} for i, row in enumerate(bare)]
    assert [row["id"] for row in rows_of(dataset(write(tmp_path / "v.parquet", both)), "all")] == [
        str(10 + i) for i in range(5)
    ]
    texts = [{**row, "id": f"00{i}"} for i, row in enumerate(bare)]
    assert [row["id"] for row in rows_of(dataset(write(tmp_path / "v.csv", texts)), "all")][:2] == ["000", "001"]
    for ending in ("parquet", "jsonl", "csv"):
        twice = write(tmp_path / f"t.{ending}", [*texts, {**texts[3], "id": "001"}])
        with pytest.raises(DataError, match=r"row 5: example id '001' is a duplicate of that at .*, row 1"):
            dataset(twice)
        null = write(tmp_path / f"n.{ending}", [*texts, {**texts[3], "id": None}])
        with pytest.raises(DataError, match="row 5: the row has no example_id"):
            dataset(null)
    with pytest.raises(DataError, match="the column of example ids holds double"):
        dataset(write(tmp_path / "f.jsonl", [{**row, "id": 0.5 + i} for i, row in enumerate(bare)]))


def test_rows_with_nulls_pass_through(tmp_path):
    rows = [{"question": "?", "choices": ["a", "b"], "label": 0}, {"question": None, "choices": None, "label": 1}] * 2
    found = rows_of(dataset(write(tmp_path / "x.parquet", rows)), "all")
    assert [(row["question"], row["choices"]) for row in found] == [("?", ["a", "b"]), (None, None)] * 2
    images = {
        "bytes": pa.array([b"a", None, b"c", None]),
        "fixed": pa.array([b"ab", None, b"cd", None], pa.binary(2)),
        "struct": pa.array([{"bytes": b"a", "path": None}, None, {"bytes": b"c", "path": "x.png"}, {"bytes": None}]),
        "lists": pa.array([[1, 2], None, [3, 4], None]),
        "fixed lists": pa.array([[1, 2], None, [3, 4], None], pa.list_(pa.uint8(), 2)),
    }
    for name, column in images.items():
        pq.write_table(pa.table({"image": column, "label": [0, 1, 2, 3]}), tmp_path / "x.parquet")
        found = [row["image"] for row in rows_of(dataset(tmp_path / "x.parquet"), "all")]
        assert [image is None for image in found] == [False, True, False, True], name
        assert found[0] in (b"a", b"ab") if "list" not in name else found[0].tolist() == [1, 2]


def test_images_stay_as_they_are_stored(tmp_path):
    (tmp_path / "a.png").write_bytes(b"from its file")
    column = [{"bytes": b"a", "path": "a.png"}, {"bytes": None, "path": str(tmp_path / "a.png")}] * 2
    pq.write_table(pa.table({"image": column}), tmp_path / "x.parquet")
    found = [row["image"] for row in rows_of(dataset(tmp_path / "x.parquet"), "all")]
    assert found == [b"a", b"from its file"] * 2
    arrays = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
    pq.write_table(pa.table({"image": pa.FixedShapeTensorArray.from_numpy_ndarray(arrays)}), tmp_path / "x.parquet")
    (_, block), *_ = dataset(tmp_path / "x.parquet").blocks("all", 10)
    assert block.columns["image"].dtype == np.uint8
    assert (block.columns["image"] == arrays).all()
    with pytest.raises(DataError, match="column 'image' holds string; images are bytes or arrays"):
        rows_of(dataset(write(tmp_path / "x.csv", [{"image": "a.png", "label": 0}] * 4)), "all")


def test_class_folders_are_labels(tmp_path):
    classes = ["zebra", "Ant", "bee", "train"]
    write_images(tmp_path, classes)
    (tmp_path / "bee" / "notes.txt").write_text("no image")
    (tmp_path / "bee" / ".hidden.jpg").write_text("no image")
    opened = dataset(tmp_path)
    assert opened.task == "image-classification"
    found = rows_of(opened, "all", 5)
    assert [row["id"] for row in found] == sorted(f"{name}/{i}.JPG" for name in classes for i in range(3))
    assert {row["id"].split("/")[0]: row["label"] for row in found} == {"Ant": 0, "bee": 1, "train": 2, "zebra": 3}
    assert all(row["image"].decode() == f"{tmp_path.name}/{row['id'].removesuffix('.JPG')}" for row in found)
    assert sum(opened.split_sizes.values()) == len(found) == 12
    for ending in ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "PNG"):
        (tmp_path / "cow").mkdir(exist_ok=True)
        (tmp_path / "cow" / f"{ending}.{ending}").write_bytes(b"")
    assert sum(dataset(tmp_path).split_sizes.values()) == 12 + 8


def test_partitions_above_class_folders(tmp_path):
    write_images(tmp_path / "x" / "val", ["a", "b", "c"], 5)
    write_images(tmp_path / "x" / "test", ["b", "c"], 4)
    for root in (tmp_path, tmp_path / "x"):  # a folder that holds but one folder is looked through
        opened = dataset(root)
        assert opened.split_sizes == {"calibration": 8, "validation": 7, "test": 8}
        labels = {row["id"].split("/")[0]: row["label"] for row in rows_of(opened, "test")}
        assert labels == {"b": 1, "c": 2}  # as in val, where there is an a
        with pytest.raises(ConfigError, match="unknown split 'all'"):
            opened.blocks("all", 5)
    assert rows_of(opened, "test")[0]["image"] == b"test/b/0"
    assert dataset(tmp_path / "x" / "val").split_sizes == {"calibration": 4, "validation": 4, "test": 7}


def test_images_of_blocks_that_are_done_are_not_read(tmp_path, monkeypatch):
    write_images(tmp_path, ["a", "b"], 6)
    read = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or whole(path))
    opened = dataset(tmp_path)
    opened.fingerprint  # noqa: B018
    assert not read
    numbers = [number for number, _ in opened.blocks("all", 3, done={0, 2})]
    assert numbers == [1, 3]
    assert len(read) == 6
    blocks = opened.blocks("all", 3)
    next(blocks)
    assert len(read) == 9  # only the block at hand
    (tmp_path / "a" / "1.JPG").unlink()
    (tmp_path / "b" / "0.JPG").unlink()
    os.mkfifo(tmp_path / "b" / "0.JPG")  # which would be waited for indefinitely
    assert [row["id"] for row in rows_of(opened, "all") if not row["image"]] == ["a/1.JPG", "b/0.JPG"]


def test_links_that_lead_back_hold_nothing_new(tmp_path):
    """Looked into again and again, two of them would be 2^40 folders before the system ends it."""
    write(tmp_path / "all" / "rows" / "x.jsonl", questions(9))
    for folder in ("all", "all/rows", "all/empty"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in ("up", "up2"):
            (tmp_path / folder / name).symlink_to(tmp_path / "all")
    write_images(tmp_path / "images", ["cat", "dog"])
    for name in ("round", "round2"):
        (tmp_path / "images" / "cat" / name).symlink_to(tmp_path / "images")
    assert len(rows_of(dataset(tmp_path / "all"), "all", 3)) == 9
    assert len(rows_of(dataset(tmp_path / "images"), "all", 3)) == 6


def test_a_dataset_opens_anew_in_another_process_and_folder(tmp_path, monkeypatch):
    write(tmp_path / "data" / "x.jsonl", questions(20))
    monkeypatch.chdir(tmp_path / "data")
    opened = dataset("x.jsonl", seed=3)
    monkeypatch.chdir("/")
    again = open_dataset(pickle.loads(pickle.dumps(opened.source)))
    assert again.fingerprint == opened.fingerprint
    assert rows_of(again, "test") == rows_of(opened, "test")


def test_the_fingerprint_changes_with_the_content_not_with_the_place(tmp_path):
    write(tmp_path / "a" / "x.jsonl", questions(20))
    first = dataset(tmp_path / "a").fingerprint
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    seen = {first}

    def changed(fingerprint):
        assert fingerprint not in seen
        seen.add(fingerprint)

    assert dataset(tmp_path / "b").fingerprint == first
    changed(dataset(tmp_path / "a", seed=1).fingerprint)
    changed(dataset(tmp_path / "a", context="question").fingerprint)
    write(tmp_path / "a" / "x.jsonl", questions(21))
    changed(dataset(tmp_path / "a").fingerprint)
    write(tmp_path / "b" / "test.jsonl", questions(20))
    (tmp_path / "b" / "x.jsonl").rename(tmp_path / "b" / "validation.jsonl")
    changed(dataset(tmp_path / "b").fingerprint)
    write_images(tmp_path / "c", ["a", "b"])
    changed(dataset(tmp_path / "c").fingerprint)
    (tmp_path / "c" / "a" / "0.JPG").write_bytes(b"longer than it was before")
    changed(dataset(tmp_path / "c").fingerprint)
    (tmp_path / "c" / "a" / "0.JPG").rename(tmp_path / "c" / "b" / "00.JPG")
    changed(dataset(tmp_path / "c").fingerprint)


def both(first, second):
    """Return what makes a folder of two, each a file's name and its rows, or a folder of images and its classes."""

    def make(folder):
        for name, content in (first, second):
            (write if "." in name else write_images)(folder / name, content)

    return make


# What cannot be read, a file's content or what makes a folder, and what is said of it.
REFUSED = {
    "list.json": ('[{"question": "?"}]', "line 1: one JSON object a line is expected, got a list"),
    "torn.jsonl": ('{"question": "?", "choices": ["a", "b"]}\n{"question":', "line 2: not JSON"),
    "short.csv": ("question,choices\na\n", "is not a readable CSV file: .*Expected 2 columns, got 1"),
    "twice.csv": ("question,question\na,b\n", "has two columns named 'question'"),
    "empty.csv": ("", "is not a readable CSV file: Empty CSV file"),
    "head.csv": ("question,choices\n", "holds no rows"),
    "empty.jsonl": ("\n", "holds no rows"),
    "half.jsonl": ('{"question": "\\ud800"}', "holds half a surrogate pair"),
    "latin.jsonl": (b'{"question": "\xe9"}', "is not a readable JSONL file"),
    "torn.parquet": ("PAR1 and no more", "is not a readable Parquet file"),
    "x.txt": ("hello", "is not a Parquet .* JSONL .* or CSV .* file"),
    "neither.jsonl": ('{"text": "?", "label": 0}', "no column question or image; it has text, label.*--columns"),
    "unchosen.jsonl": ('{"question": "?", "label": 0}', "no column choices; it has question, label.*--columns"),
    "few.jsonl": ('{"question": "?", "choices": ["a", "b"]}\n' * 3, "a partition 'few' of at least four rows"),
    "unlisted.csv": ("question,choices\n" + "?,a or b\n" * 4, r"row \d: choices are not a JSON list .*: 'a or b'"),
    "numbers.jsonl": (
        '{"question": "?", "choices": [1.5]}\n' * 4,
        "'choices' holds list<.*>; choices are lists of texts",
    ),
    "mixed.jsonl": ('{"question": {"a": 1}, "choices": ["a"]}\n' * 4, "column 'question' holds struct<.*>, not text"),
    "none": (Path.mkdir, "holds no .parquet, .jsonl or .csv files and no folders of images"),
    "formats": (both(("train.csv", questions(5)), ("test.jsonl", questions(5))), "are of different formats"),
    "names": (both(("val.jsonl", questions(5)), ("validation.jsonl", questions(5))), "both the partition 'validation'"),
    "columns": (
        both(("val/0.parquet", questions(5)), ("val/1.parquet", [{"question": "?"}])),
        r"1\.parquet has the columns question, but .*0\.parquet",
    ),
    "types": (
        both(("val/0.parquet", questions(5)), ("val/1.parquet", [{**row, "label": [1]} for row in questions(5, 5)])),
        r"1\.parquet does not fit the files before it",
    ),
    "rule": (
        both(("train.jsonl", questions(5)), ("dev.jsonl", questions(5))),
        "no rule splits .* dev, train; name them",
    ),
    "kinds": (both(("train.jsonl", questions(5)), ("images", ["a", "b"])), "is mixed: train.jsonl and images hold"),
    "flat": (both(("a.png", [{}]), ("b.png", [{}])), "holds images directly; put each into a folder of its class"),
    "classless": (lambda folder: write_images(folder, ["train", "test"]), "test holds images directly; put each into"),
    "tasks": (
        both(("validation.jsonl", questions(5)), ("test.jsonl", [{"image": [1, 2]}] * 5)),
        "the partitions validation and test are of different tasks",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, kind):
    content, says = REFUSED[kind]
    path = tmp_path / kind
    if callable(content):
        content(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=says) as refused:
        rows_of(dataset(path), "test")
    assert "\n" not in str(refused.value)
    assert kind in str(refused.value)


def test_unknown_datasets_and_splits_are_refused(tmp_path):
    for name in ("mmluu", "mmluu=/tmp", "", "no/such.parquet", "a\0b", "x" * 5000):
        with pytest.raises(ConfigError, match=r"unknown dataset .*Available: .*mmlu.* path of a file or folder"):
            dataset(name)
    with pytest.raises(ConfigError, match="'hub::x' names no dataset"):
        dataset("hub::x")
    with pytest.raises(ConfigError, match="'mmlu=' has no path: give mmlu=PATH"):
        dataset("mmlu=")
    with pytest.raises(DataError, match="there is no file or folder x"):
        dataset(f"mmlu={'x' * 5000}")
    with pytest.raises(DataError, match=r"there is no file or folder .*absent"):
        dataset(f"mmlu={tmp_path / 'absent'}")
    opened = dataset(write(tmp_path / "x.jsonl", questions(8)))
    with pytest.raises(ConfigError, match="unknown split 'tset'; did you mean 'test'"):
        opened.blocks("tset", 5)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read every folder")
def test_a_folder_that_may_not_be_read_is_refused(tmp_path):
    write_images(tmp_path / "x", ["a"])
    (tmp_path / "x").chmod(0)
    with pytest.raises(DataError, match="x cannot be read: Permission denied"):
        dataset(tmp_path / "x")


@real_data
def test_real_images_and_questions():
    opened = dataset(DATA / "cifar10_test.parquet")
    table = pq.read_table(DATA / "cifar10_test.parquet")
    assert opened.split_sizes == {"calibration": 2500, "validation": 2500, "test": 5000}
    seen = 0
    for _, block in opened.blocks("calibration", 700):
        expected = table.take([int(example) for example in block.example_ids])
        assert block.labels.tolist() == expected["label"].to_pylist()
        assert block.columns["image"].tolist() == expected["image"].to_pylist()
        seen += len(block.example_ids)
    assert seen == 2500

    photographs = dataset(DATA / "imagenet_nips17_1000.parquet", image="jpeg")
    found = rows_of(photographs, "all", 300)
    assert len(found) == 1000
    assert all(row["image"].startswith(b"\xff\xd8") and 0 <= row["label"] < 1000 for row in found)

    for path in sorted((DATA / "questions").iterdir()):
        for file in sorted(path.iterdir()):
            if path.name == "logiqa2":  # as published: some of its questions stand there twice
                with pytest.raises(DataError, match=r"test\.parquet, row 801: example id '10906' is a duplicate"):
                    dataset(path / "test.parquet")
                continue
            found = rows_of(dataset(file), "all", 4096)
            assert len(found) == pq.read_metadata(file).num_rows
            assert all(0 <= row["label"] < len(row["choices"]) <= len(string.ascii_uppercase) for row in found)


def test_image_files_whose_names_are_no_text_are_refused(tmp_path):
    folder = os.fsencode(tmp_path / "cats")
    os.makedirs(folder)
    for number in range(8):
        with open(folder + b"/%d\xfe.png" % number, "wb") as file:
            file.write(b"x")
    with pytest.raises(DataError, match="is not valid UTF-8; rename it"):
        dataset(tmp_path)
