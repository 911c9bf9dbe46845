import shutil
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import dataset, questions, rows_of, values_of, write, write_images

from cauc_ray.data.datasets import open_dataset
from cauc_ray.data.splits import choose_rule, split_by_rule
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.files.paths import list_files, path_inside, path_of

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
    opened, reseeded = dataset(tmp_path, seed=3), dataset(tmp_path, seed=4)
    taken = dict.fromkeys(LAYOUTS[layout])
    splits = split_by_rule(choose_rule(published), {name: SIZES[name] for name in taken}, 3)
    assert [splits[split].partition for split in opened.split_sizes] == list(LAYOUTS[layout])
    for split, picked in splits.items():
        ids = [published[picked.partition][row] for row in picked.rows]
        assert values_of(opened, "id", split) == ids
        assert opened.split_sizes[split] == len(ids)
    if "calibration" not in layout:
        assert values_of(reseeded, "id", "validation") != values_of(opened, "id", "validation")
    assert dataset(tmp_path, seed=3).fingerprint == opened.fingerprint
    assert (reseeded.fingerprint == opened.fingerprint) == ("calibration" in layout)


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
        picked = {"all": range(len(rows)), **{split: of_split.rows for split, of_split in splits.items()}}
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
    bucket = path_of(f"{s3}/{tmp_path.name}/all")
    for entry in list_files(tmp_path / "all"):
        (bucket / path_inside(entry.path, tmp_path / "all")).write_bytes(entry.path.read_bytes())
    local, remote = dataset(tmp_path / "all"), dataset(str(bucket))
    assert (remote.name, remote.fingerprint) == (local.name, local.fingerprint)
    for split in local.split_sizes:
        assert rows_of(remote, split, 2) == rows_of(local, split, 2)
    assert rows_of(open_dataset(remote.spec), "test", 2) == rows_of(local, "test", 2)
    with pytest.raises(DataError, match=rf"{bucket}/absent does not exist"):
        dataset(f"{bucket}/absent")


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
    rows = rows_of(dataset(write(tmp_path / "x.parquet", pa.table(columns))), "all", 3)
    assert [row["choices"] for row in rows] == [["1", "2"]] * 4
    assert [(row["question"], row["label"]) for row in rows] == [("?", 0), ("?", 1), ("?", 1), ("?", -1)]


NAMES = {"question": "stem", "choices": "opa+opb+opc+opd", "label": "key", "example_id": "nr"}


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_columns_are_named_and_gathered(tmp_path, ending):
    cells = [["x", "y", "z"], ["x", "y", None], ["x", "y", "z"], ["x", None, "z"]]
    options = [dict(zip(("opa", "opb", "opc", "opd"), [*row, None], strict=True)) for row in cells]
    rows = [{"nr": i, "stem": f"q{i}", **options[i], "key": "B"} for i in range(4)]
    path = write(tmp_path / f"x.{ending}", rows)
    read = rows_of(dataset(path, **NAMES))
    # An option that is missing before others would move those to other letters: it stays, as no text.
    assert [row["choices"] for row in read] == [["x", "y", "z"], ["x", "y"], ["x", "y", "z"], ["x", None, "z"]]
    assert [(row["id"], row["question"], row["label"]) for row in read] == [(str(i), f"q{i}", 1) for i in range(4)]
    for names, words in (
        ({**NAMES, "question": "root"}, r"no column 'root' for question; it has nr, stem, .* --columns"),
        ({**NAMES, "choices": "opa+opx"}, "no column 'opx' for choices"),
        ({"questoin": "stem"}, "unknown column to read 'questoin'; did you mean 'question'"),
    ):
        with pytest.raises((ConfigError, DataError), match=words):
            dataset(path, task="multiple-choice", **names)


def test_class_folders_are_labels(tmp_path):
    classes = ["zebra", "Ant", "bee", "train"]
    write_images(tmp_path, classes)
    (tmp_path / "bee" / "notes.txt").write_text("no image")
    (tmp_path / "bee" / ".hidden.jpg").write_text("no image")
    opened = dataset(tmp_path)
    rows = rows_of(opened, "all", 5)
    assert [row["id"] for row in rows] == sorted(f"{name}/{i}.JPG" for name in classes for i in range(3))
    assert {row["id"].split("/")[0]: row["label"] for row in rows} == {"Ant": 0, "bee": 1, "train": 2, "zebra": 3}
    assert all(row["image"].decode() == f"{tmp_path.name}/{row['id'].removesuffix('.JPG')}" for row in rows)


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
    seen += [dataset(folder).fingerprint for folder in (a, b, c)]
    (c / "a" / "0.JPG").write_bytes(b"longer than it was before")
    seen.append(dataset(c).fingerprint)
    (c / "a" / "0.JPG").rename(c / "b" / "00.JPG")
    seen.append(dataset(c).fingerprint)
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "unknown dataset .*mmlu.* path of an existing file") for name in ("mmluu", "mmluu=/tmp", "")),
        *((name, "unknown dataset .*Available: .*mmlu") for name in ("such.parquet", "a\0b", "x" * 5000)),
        ("hub::x", "'hub::x' does not name a dataset"),
        ("no/such.parquet", "no/such.parquet does not exist"),
        ("mmlu=", "'mmlu=' has no path: give mmlu=PATH"),
        (f"mmlu={'x' * 5000}", "x+ does not exist"),
        ("https://example.org/a.parquet", "web address; download"),
    ],
)
def test_unknown_datasets_are_refused(name, words):
    with pytest.raises((ConfigError, DataError), match=words):
        dataset(name)
