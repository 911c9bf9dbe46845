import os
import pickle
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import dataset, questions, rows_of, values_of, write, write_images

from cauc_ray.data.datasets import open_dataset
from cauc_ray.data.splits import choose_rule, split_by_rule
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.files.paths import list_files, path_inside, path_of

# CSV knows no NUL, and reads \r\n as \n.
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), min_size=1, max_size=8)
ROWS = st.builds(
    dict,
    question=TEXTS | st.none(),
    choices=st.lists(TEXTS, min_size=2, max_size=5) | st.none(),
    context=TEXTS | st.none(),
    label=st.sampled_from([0, 1, None]),
)


@given(st.lists(ROWS, min_size=4, max_size=12))
def test_every_format_gives_the_same_rows(rows):
    rows = [{"id": str(place), **row} for place, row in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        for ending in ("parquet", "jsonl", "json", "csv"):
            found = rows_of(dataset(write(Path(folder) / f"x.{ending}", rows)), "all", 3)
            assert found == [{**row, "label": -1 if row["label"] is None else row["label"]} for row in rows]


# Of a folder's partitions, those that splits are taken from.
LAYOUTS = {
    "calibration validation test": ("calibration", "validation", "test"),
    "validation test": ("validation", "validation", "test"),
    "val test dev": ("validation", "validation", "test"),
    "train validation": ("train", "train", "validation"),
    "train test": ("train", "train", "test"),
    "train": ("train", "train", "train"),
    "questions": ("questions", "questions", "questions"),
}
SIZES = {"train": 60, "validation": 31, "test": 40, "calibration": 10, "dev": 5, "questions": 41}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partitions_of_a_folder_become_splits_by_a_rule(tmp_path, layout):
    published = {}
    for name in layout.split():
        partition = "validation" if name == "val" else name
        published[partition] = [f"{partition}-{i}" for i in range(SIZES[partition])]
        rows = [{**row, "id": example} for row, example in zip(questions(1000), published[partition], strict=False)]
        write(tmp_path / f"{name}.jsonl", rows)
    opened, other = dataset(tmp_path, seed=3), dataset(tmp_path, seed=4)
    taken = dict.fromkeys(LAYOUTS[layout])
    splits = split_by_rule(choose_rule(published), {name: SIZES[name] for name in taken}, 3)
    assert [splits[split].partition for split in opened.split_sizes] == list(LAYOUTS[layout])
    for split, picked in splits.items():
        ids = [published[picked.partition][row] for row in picked.rows]
        assert values_of(opened, "id", split) == ids
        assert opened.split_sizes[split] == len(ids)
    if "calibration" not in layout:
        assert values_of(other, "id", "validation") != values_of(opened, "id", "validation")
    assert dataset(tmp_path, seed=3).fingerprint == opened.fingerprint
    assert (other.fingerprint == opened.fingerprint) == ("calibration" in layout)


def write_shards(folder, sizes, **options):
    """Write questions in shards of so many rows. Returns them all."""
    rows, start = questions(sum(sizes)), 0
    for shard, size in enumerate(sizes):
        name = f"validation-{shard:05}-of-{len(sizes):05}.parquet"
        write(folder / name, rows[start : start + size], **options)
        start += size
    return rows


@given(
    st.lists(st.integers(1, 20), min_size=4, max_size=5),
    st.integers(1, 9),
    st.integers(1, 50),
    st.sets(st.integers(0, 45)),
    st.booleans(),
)
def test_shards_row_groups_and_done_blocks_change_nothing_of_the_rows(sizes, group_rows, block_rows, done, deep):
    with tempfile.TemporaryDirectory() as folder:
        inside = Path(folder, "validation") if deep else Path(folder)
        rows = write_shards(inside, sizes, row_group_size=group_rows)
        opened = dataset(folder)
        splits = split_by_rule("three-way", {"validation": len(rows)})
        picked = {"all": range(len(rows)), **{split: each.rows for split, each in splits.items()}}
        for split, numbers in picked.items():
            assert rows_of(opened, split, block_rows) == [rows[number] for number in numbers]
        left = opened.blocks(block_rows)
        blocks = [block for group in range(left.n_groups) for block in left.blocks(group)]
        assert {number for number, _ in blocks} == set(range(len(blocks)))
        again = [number for group in range(left.n_groups) for number, _ in left.blocks(group, done)]
        assert again == [number for number, _ in blocks if number not in done]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "csv", "images"])
def test_a_dataset_by_uri_is_that_of_its_path(tmp_path, s3, kind):
    if kind == "images":
        write_images(tmp_path / "all", ["cat", "dog"])
    else:
        (tmp_path / "all").mkdir()
        for name, first, n in (("validation", 0, 6), ("test", 6, 5)):
            write(tmp_path / "all" / f"{name}.{kind}", questions(n, first))
    there = path_of(f"{s3}/{tmp_path.name}/all")
    for entry in list_files(tmp_path / "all"):
        (there / path_inside(entry.path, tmp_path / "all")).write_bytes(entry.path.read_bytes())
    local, remote = dataset(tmp_path / "all"), dataset(str(there))
    assert (remote.name, remote.fingerprint, remote.example_ids) == (local.name, local.fingerprint, local.example_ids)
    for split in local.split_sizes:
        assert rows_of(remote, split, 2) == rows_of(local, split, 2)
    assert rows_of(open_dataset(remote.spec), "test", 2) == rows_of(local, "test", 2)
    with pytest.raises(DataError, match=rf"there is no file or folder {there}/absent"):
        dataset(f"{there}/absent")


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path, [4, 4, 4])
    (tmp_path / "validation-00001-of-00003.parquet").unlink()
    with pytest.raises(DataError, match="has 2 of the 3 files of 'validation'"):
        dataset(tmp_path)


NO_LABEL = "rows have a label that is neither an option's number.*row 2"
LABELS = [
    ([0, 1, 2, None], [0, 1, 2, -1]),
    (["A", "b", "C", None], [0, 1, 2, -1]),
    ([0.0, 1.0, 2.0, None], [0, 1, 2, -1]),
    ([-1, 0, 0, -1], [-1, 0, 0, -1]),
    *[([0, 1, bad, None], NO_LABEL) for bad in ("cat", "1.5", "²", "-2", -2, 1.5, 2**40)],
    (["a", "b", "c", "d"], "row 3: label 3, counted from 0, is outside its 3 choices"),
    ([True, False, True, False], "the column of labels has type bool"),
]


@pytest.mark.parametrize(("values", "labels"), LABELS)
def test_labels_are_numbers_or_letters(tmp_path, values, labels):
    file = write(
        tmp_path / "x.jsonl", [{**row, "label": value} for row, value in zip(questions(4), values, strict=True)]
    )
    if isinstance(labels, list):
        assert values_of(dataset(file), "label") == labels
    else:
        with pytest.raises(DataError, match=rf"x\.jsonl.*{labels}"):
            rows_of(dataset(file))


def test_csv_cells_are_text_and_empty_ones_null(tmp_path):
    cells = 'id,question,choices,label\r\n007,"1\n2","[""NA"", ""2013-06-05""]",""\r\n08,,,1.0\r\n'
    (tmp_path / "x.csv").write_bytes(("\ufeff" + cells + '9,"",,b\r\n\r\n010,NA,"[""a"",""b""]",A\r\n').encode())
    names = ("id", "label", "question", "choices")
    assert [[row[name] for name in names] for row in rows_of(dataset(tmp_path / "x.csv"))] == [
        ["007", -1, "1\n2", ["NA", "2013-06-05"]],
        ["08", 1, None, None],
        ["9", 1, None, None],
        ["010", 0, "NA", ["a", "b"]],
    ]


LISTS_OF_TEXT = [
    *[pa.list_(kind) for kind in (pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.int64())],
    pa.large_list(pa.large_string()),
    pa.list_(pa.string(), 2),
    pa.list_view(pa.string()),
    pa.string(),  # as JSON
]
KINDS_OF_TEXT = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]


@pytest.mark.parametrize("text", KINDS_OF_TEXT, ids=str)
@pytest.mark.parametrize("choices", LISTS_OF_TEXT, ids=str)
def test_texts_and_lists_of_every_type_are_read(tmp_path, choices, text):
    stored = [1, 2] if choices == pa.list_(pa.int64()) else '["1", "2"]' if choices == pa.string() else ["1", "2"]
    columns = {
        "question": pa.array(["?"] * 4).cast(text),
        "choices": pa.array([stored] * 4, choices),
        "label": pa.array(["A", "b", "1", None]).cast(text),
    }
    found = rows_of(dataset(write(tmp_path / "x.parquet", pa.table(columns))), "all", 3)
    assert [row["choices"] for row in found] == [["1", "2"]] * 4
    assert [(row["question"], row["label"]) for row in found] == [("?", 0), ("?", 1), ("?", 1), ("?", -1)]


NAMES = {"question": "stem", "choices": "opa+opb+opc+opd", "label": "key", "example_id": "nr"}


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_columns_are_named_and_gathered(tmp_path, ending):
    cells = [["x", "y", "z"], ["x", "y", None], ["x", "y", "z"], ["x", None, "z"]]
    options = [dict(zip(("opa", "opb", "opc", "opd"), [*own, None], strict=True)) for own in cells]
    rows = [{"nr": i, "stem": f"q{i}", **options[i], "key": "B"} for i in range(4)]
    path = write(tmp_path / f"x.{ending}", rows)
    found = rows_of(dataset(path, **NAMES))
    # An option that is missing before others would move those to other letters: it stays, as no text.
    assert [row["choices"] for row in found] == [["x", "y", "z"], ["x", "y"], ["x", "y", "z"], ["x", None, "z"]]
    assert [(row["id"], row["question"], row["label"]) for row in found] == [(str(i), f"q{i}", 1) for i in range(4)]
    for names, words in (
        ({**NAMES, "question": "root"}, r"no column 'root' for question; it has nr, stem, .* --columns"),
        ({**NAMES, "choices": "opa+opx"}, "no column 'opx' for choices"),
        ({"questoin": "stem"}, "unknown column to read 'questoin'; did you mean 'question'"),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            dataset(path, task="multiple-choice", **names)


BARE = [{"question": "?", "choices": ["a", "b"], "other": i} for i in range(5)]


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_ids_are_the_files_or_made(tmp_path, ending):
    def with_ids(**columns):
        rows = [{**row, **{name: ids[i] for name, ids in columns.items()}} for i, row in enumerate(BARE)]
        return dataset(write(tmp_path / f"v.{ending}", rows))

    assert values_of(with_ids(), "id") == [f"v-{i}" for i in range(5)]
    assert values_of(with_ids(id=range(5), example_id=range(10, 15)), "id") == [str(10 + i) for i in range(5)]
    texts = [f"00{i}" for i in range(5)]
    assert values_of(with_ids(id=texts), "id") == texts
    with pytest.raises(DataError, match=r"row 4: example id '001' is a duplicate of .*, row 1"):
        with_ids(id=[*texts[:4], "001"])
    with pytest.raises(DataError, match="row 4: the row has no example_id"):
        with_ids(id=[*texts[:4], None])
    if ending != "csv":
        with pytest.raises(DataError, match="the column of example ids has type double"):
            with_ids(id=[0.5, 1.5, 2.5, 3.5, 4.5])


ARRAYS = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
LISTS = [[1, 2], None, [3, 4], None]
STRUCTS = [{"bytes": b"a", "path": "a.png"}, None, {"bytes": None, "path": "b.png"}, {"bytes": None}]
IMAGES = {
    "bytes": (pa.array([b"a", None, b"c", b""]), [b"a", None, b"c", b""]),
    "bytes of one length": (pa.array([b"ab", None, b"cd", None], pa.binary(2)), [b"ab", None, b"cd", None]),
    "structs": (pa.array(STRUCTS), [b"a", None, b"its file's", None]),
    "lists": (pa.array(LISTS), LISTS),
    "lists of one length": (pa.array(LISTS, pa.list_(pa.uint8(), 2)), LISTS),
    "tensors": (pa.FixedShapeTensorArray.from_numpy_ndarray(ARRAYS), ARRAYS.tolist()),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_images_stay_as_they_are_stored(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    Path("b.png").write_bytes(b"its file's")
    column, expected = IMAGES[kind]
    found = values_of(dataset(write(tmp_path / "x.parquet", pa.table({"image": column}))), "image")
    assert [image.tolist() if isinstance(image, np.ndarray) else image for image in found] == expected
    if kind == "tensors":
        assert found[0].dtype == np.uint8


def test_class_folders_are_labels(tmp_path):
    classes = ["zebra", "Ant", "bee", "train"]
    write_images(tmp_path, classes)
    (tmp_path / "bee" / "notes.txt").write_text("no image")
    (tmp_path / "bee" / ".hidden.jpg").write_text("no image")
    opened = dataset(tmp_path)
    found = rows_of(opened, "all", 5)
    assert [row["id"] for row in found] == sorted(f"{name}/{i}.JPG" for name in classes for i in range(3))
    assert {row["id"].split("/")[0]: row["label"] for row in found} == {"Ant": 0, "bee": 1, "train": 2, "zebra": 3}
    assert all(row["image"].decode() == f"{tmp_path.name}/{row['id'].removesuffix('.JPG')}" for row in found)
    endings = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "PNG")
    for ending in endings:
        write_images(tmp_path, ["cow"], 1, ending)
    assert sum(dataset(tmp_path).split_sizes.values()) == 12 + len(endings)


def test_partitions_above_class_folders(tmp_path):
    write_images(tmp_path / "x" / "val", ["a", "b", "c"], 5)
    write_images(tmp_path / "x" / "test", ["b", "c"], 4)
    for root in (tmp_path, tmp_path / "x"):  # a folder that holds but one folder is looked through
        opened = dataset(root)
        assert opened.split_sizes == {"calibration": 8, "validation": 7, "test": 8}
        labels = {row["id"].split("/")[-2]: row["label"] for row in rows_of(opened, "test")}
        assert labels == {"b": 1, "c": 2}  # as in val, where there is an a
        assert len(rows_of(opened, "all")) == 23
    assert rows_of(opened, "test")[0]["image"] == b"test/b/0"
    assert dataset(tmp_path / "x" / "val").split_sizes == {"calibration": 4, "validation": 4, "test": 7}


def test_images_of_blocks_that_are_done_are_not_read(tmp_path, monkeypatch):
    write_images(tmp_path, ["a", "b"], 6)
    read = []
    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or whole(path))
    opened = dataset(tmp_path, split="all")
    assert opened.fingerprint
    assert [number for number, _ in opened.blocks(3).blocks(0, {0, 2})] == [1, 3]
    assert len(read) == 6
    (tmp_path / "a" / "1.JPG").unlink()
    (tmp_path / "b" / "0.JPG").unlink()
    os.mkfifo(tmp_path / "b" / "0.JPG")  # which would be waited for indefinitely
    ((_, *rest),) = [next(opened.blocks(20).blocks(0))]
    columns = rest[0].columns
    assert [name for name, image in zip(rest[0].example_ids, columns["image"], strict=True) if not image] == [
        "a/1.JPG",
        "b/0.JPG",
    ]


def test_links_that_lead_back_hold_nothing_new(tmp_path):
    """Looked into again and again, two of them would be 2^40 folders before the system ends it."""
    write(tmp_path / "all" / "rows" / "x.jsonl", questions(9))
    write_images(tmp_path / "images", ["cat", "dog"])
    (tmp_path / "all" / "empty").mkdir()
    for inside, target in (("all", "all"), ("all/rows", "all"), ("all/empty", "all"), ("images/cat", "images")):
        for name in ("up", "up2"):
            (tmp_path / inside / name).symlink_to(tmp_path / target)
    assert len(rows_of(dataset(tmp_path / "all"), "all", 3)) == 9
    assert len(rows_of(dataset(tmp_path / "images"), "all", 3)) == 6


def test_a_dataset_opens_anew_in_another_process_and_folder(tmp_path, monkeypatch):
    write(tmp_path / "data" / "x.jsonl", questions(20))
    monkeypatch.chdir(tmp_path / "data")
    opened = dataset("x.jsonl", seed=3)
    monkeypatch.chdir("/")
    again = open_dataset(pickle.loads(pickle.dumps(opened.spec)))
    assert again.fingerprint == opened.fingerprint
    assert rows_of(again, "test") == rows_of(opened, "test")


def test_the_fingerprint_changes_with_the_content_not_with_the_place(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    write(a / "x.jsonl", questions(20))
    shutil.copytree(a, b)
    assert dataset(a).fingerprint == dataset(b).fingerprint
    seen = [dataset(a).fingerprint, dataset(a, seed=1).fingerprint, dataset(a, context="id").fingerprint]
    write(a / "x.jsonl", questions(21))
    write(b / "test.jsonl", questions(20))
    (b / "x.jsonl").rename(b / "validation.jsonl")
    write_images(c, ["a", "b"])
    seen += [dataset(each).fingerprint for each in (a, b, c)]
    (c / "a" / "0.JPG").write_bytes(b"longer than it was before")
    seen.append(dataset(c).fingerprint)
    (c / "a" / "0.JPG").rename(c / "b" / "00.JPG")
    seen.append(dataset(c).fingerprint)
    assert len(set(seen)) == len(seen)


FIVE = questions(5)
UNFIT = [{**row, "label": [1]} for row in questions(5, 5)]
# What cannot be read, a file's content or a folder's files of rows and folders of images, and the words of the line.
REFUSED = {
    "list.json": ('[{"question": "?"}, 3]', "item 1: expected a JSON object, got a int"),
    "latin.csv": ("question,choices\nd\udce9,b\n", "must be UTF-8 .*iconv"),
    "torn.jsonl": ('{"question": "?", "choices": ["a", "b"]}\n\n{"question":', "line 3: not JSON"),
    "short.csv": ("question,choices\na\n", "is not a readable CSV file: .*Expected 2 columns, got 1"),
    "twice.csv": ("question,question\na,b\n", "has two columns named 'question'"),
    "head.csv": ("question,choices\n", "has no rows"),
    "half.jsonl": ('{"question": "\\ud800"}', "half a surrogate pair"),
    "neither.jsonl": ('{"text": "?", "label": 0}', "no column 'question'; it has text, label.*--columns"),
    "few.jsonl": ('{"question": "?", "choices": ["a", "b"]}\n' * 3, "a partition 'few' of at least four rows"),
    "unlisted.csv": ("question,choices\n" + "?,a or b\n" * 4, r"row \d: choices must be a JSON list .* 'a or b'"),
    "mixed.jsonl": (
        '{"question": {"a": 1}, "choices": ["a"]}\n' * 4,
        "column 'question' has type struct<.*>, expected text",
    ),
    "none": ({}, "has no .parquet, .jsonl or .csv files and no folders of images"),
    "formats": ({"a.csv": FIVE, "b.jsonl": FIVE}, "have different formats"),
    "names": ({"val.jsonl": FIVE, "validation.jsonl": FIVE}, "both named as partition 'validation'"),
    "columns": ({"val/0.parquet": FIVE, "val/1.parquet": [{"question": "?"}]}, r"columns question, but .*0\.par"),
    "types": ({"val/0.parquet": FIVE, "val/1.parquet": UNFIT}, r"1\.parquet does not fit the files before it"),
    "kinds": ({"train.parquet": FIVE, "images": ["a", "b"]}, "is mixed: train.parquet and images have"),
    "delta": ({"_delta_log/0.jsonl": FIVE, "a.parquet": FIVE}, "is a Delta table.*export it"),
    "classless": ({"": ["train", "test"]}, "test contains images directly; put each into"),
    "tasks": ({"validation.jsonl": FIVE, "test.jsonl": [{"image": [1, 2]}] * 5}, "test.jsonl has no column 'question'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, kind):
    content, words = REFUSED[kind]
    path = tmp_path / kind
    if isinstance(content, str):
        path.write_text(content, errors="surrogateescape")
    else:
        path.mkdir()
        for name, rows in content.items():
            (write if "." in name else write_images)(path / name, rows)
    with pytest.raises(DataError, match=words) as refused:
        rows_of(dataset(path), "test")
    assert "\n" not in str(refused.value)
    assert kind in str(refused.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "unknown dataset .*mmlu.* path of an existing file") for name in ("mmluu", "mmluu=/tmp", "")),
        *((name, "unknown dataset .*Available: .*mmlu") for name in ("such.parquet", "a\0b", "x" * 5000)),
        ("hub::x", "'hub::x' does not name a dataset"),
        ("no/such.parquet", "there is no file or folder no/such.parquet"),
        ("mmlu=", "'mmlu=' has no path: give mmlu=PATH"),
        (f"mmlu={'x' * 5000}", "there is no file or folder x"),
        ("mmlu=/absent", "there is no file or folder /absent"),
    ],
)
def test_unknown_datasets_are_refused(name, words):
    with pytest.raises((ConfigError, DataError), match=words):
        dataset(name)
