import csv
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cauc_ray.data.benchmarks import BENCHMARKS, mathqa_choices
from cauc_ray.data.datasets import DatasetSource, open_dataset
from cauc_ray.data.prompts import PROMPTS
from cauc_ray.data.splits import RULE_PARTITIONS, split_by_rule
from cauc_ray.errors import ConfigError, DataError

DATA = Path(__file__).parents[3] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="the real data (../shared/data) is not here")

# One row of each as published, and what models read of it.
PUBLISHED: Mapping[str, tuple[dict, dict]] = {
    "mmlu": (
        {"question": "2 + 2?", "subject": "abstract_algebra", "choices": ["3", "4", "5", "6"], "answer": 1},
        {"question": "2 + 2?", "subject": "abstract_algebra", "choices": ["3", "4", "5", "6"], "label": 1},
    ),
    "logiqa": (
        {"context": "All men die.", "query": "Socrates?", "options": ["a", "b", "c", "d"], "correct_option": 3},
        {"context": "All men die.", "question": "Socrates?", "choices": ["a", "b", "c", "d"], "label": 3},
    ),
    "mathqa": (
        {
            "Problem": "half of 76 ?",
            "Rationale": "so",
            "options": "a ) 38 , b ) $ 27.675 , c ) 30 % , d ) data inadequate , e ) none of these",
            "correct": "a",
            "category": "general",
        },
        {
            "question": "half of 76 ?",
            "choices": ["38", "$ 27.675", "30 %", "data inadequate", "none of these"],
            "label": 0,
        },
    ),
    "medmcqa": (
        {
            "id": "e9ad821a",
            "question": "Which nerve?",
            "opa": "ulnar",
            "opb": "radial",
            "opc": "median",
            "opd": "vagus",
            "cop": 2,
            "choice_type": "single",
            "exp": None,
            "subject_name": "Anatomy",
            "topic_name": None,
        },
        {
            "question": "Which nerve?",
            "choices": ["ulnar", "radial", "median", "vagus"],
            "subject": "Anatomy",
            "label": 2,
        },
    ),
    "piqa": (
        {"goal": "Dry a shirt.", "sol1": "Hang it up.", "sol2": "Wet it.", "label": 0},
        {"question": "Dry a shirt.", "choices": ["Hang it up.", "Wet it."], "label": 0},
    ),
    "socialiqa": (
        {"context": "Kai left.", "question": "Why?", "answerA": "a", "answerB": "b", "answerC": "c", "label": "3"},
        {"context": "Kai left.", "question": "Why?", "choices": ["a", "b", "c"], "label": 2},
    ),
}
SIZES = {"train": 50, "validation": 21, "test": 30}


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """Let the real datasets library find a benchmark in a local folder in place of the hub."""
    datasets = pytest.importorskip("datasets", reason="needs cauc-ray[datasets]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delenv("CAUC_DATA", raising=False)
    datasets.disable_progress_bars()

    def place(name, folder):
        standing_in = replace(BENCHMARKS[name], hub=str(folder), config=None, revision=None)
        monkeypatch.setitem(BENCHMARKS, name, standing_in)
        return name

    yield place
    datasets.enable_progress_bars()


def write_partitions(folder, row, sizes=SIZES):
    """Write each partition's copies of a row, as the hub's Parquet files are named."""
    folder.mkdir(parents=True)
    for partition, n in sizes.items():
        rows = [{**row, "id": f"{partition}-{i}"} if "id" in row else row for i in range(n)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{partition}-00000-of-00001.parquet")
    return folder


def rows_of(opened, split, rows=8):
    for _, block in opened.blocks(split, rows):
        for place in range(len(block.example_ids)):
            values = {name: column[place] for name, column in block.columns.items()}
            yield {**values, "label": int(block.labels[place])}


def test_all_nine_are_there():
    assert len(BENCHMARKS) == 9
    assert set(PUBLISHED) == set(PROMPTS) < set(BENCHMARKS)


@pytest.mark.parametrize("where", ["hub", "path"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_columns_become_those_that_models_read(tmp_path, on_hub, name, where):
    published, expected = PUBLISHED[name]
    folder = write_partitions(tmp_path / "data", published)
    opened = open_dataset(DatasetSource(on_hub(name, folder) if where == "hub" else f"{name}={folder}", seed=5))
    assert (opened.name, opened.task) == (name, "multiple-choice")
    rule = BENCHMARKS[name].rule
    splits = split_by_rule(rule, {partition: SIZES[partition] for partition in RULE_PARTITIONS[rule]}, 5)
    for split in ("calibration", "validation", "test"):
        picked = splits[split]
        found = list(rows_of(opened, split))
        assert [row.pop("example_id") for row in found] == [f"{picked.partition}-{row}" for row in picked.rows]
        assert all(row == {**expected, "task": name} for row in found)


@pytest.mark.parametrize("name", PUBLISHED)
def test_canonical_files_are_taken_as_they_are(tmp_path, name):
    row = {"id": "1", "question": "?", "choices": ["a", "b", "c"], "label": 2, "context": "c"}
    opened = open_dataset(DatasetSource(f"{name}={write_partitions(tmp_path / 'data', row)}"))
    for found in rows_of(opened, "test"):
        del found["example_id"]
        assert found == {"question": "?", "choices": ["a", "b", "c"], "label": 2, "context": "c", "task": name}


def test_labels_that_a_benchmark_counts_otherwise_are_refused(tmp_path):
    medmcqa, _ = PUBLISHED["medmcqa"]
    from_one = {**medmcqa, "cop": 4}  # as in the first release's files
    opened = open_dataset(DatasetSource(f"medmcqa={write_partitions(tmp_path / 'a', from_one)}"))
    with pytest.raises(DataError, match="label 4, counted from 0, is outside its 4 choices"):
        list(rows_of(opened, "test"))
    socialiqa, _ = PUBLISHED["socialiqa"]
    from_zero = {**socialiqa, "label": "0"}
    opened = open_dataset(DatasetSource(f"socialiqa={write_partitions(tmp_path / 'b', from_zero)}"))
    with pytest.raises(DataError, match="label '0' is neither the number of an option, counted from 1, nor its letter"):
        list(rows_of(opened, "test"))


def test_unknown_labels_of_published_test_sets_stay_unknown(tmp_path):
    for name, label in (("medmcqa", "cop"), ("piqa", "label"), ("socialiqa", "label")):
        row = {**PUBLISHED[name][0], label: "" if name == "socialiqa" else -1}
        opened = open_dataset(DatasetSource(f"{name}={write_partitions(tmp_path / name, row)}"))
        assert {found["label"] for found in rows_of(opened, "test")} == {-1}


def test_columns_given_go_before_those_published(tmp_path):
    row = {**PUBLISHED["piqa"][0], "better": "do it?"}
    folder = write_partitions(tmp_path / "data", row)
    opened = open_dataset(DatasetSource(f"piqa={folder}", {"question": "better"}))
    found = next(rows_of(opened, "test"))
    assert (found["question"], found["choices"]) == ("do it?", ["Hang it up.", "Wet it."])


def test_mathqa_options_that_are_not_five_are_none():
    assert mathqa_choices("a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5") == ["1", "2", "3", "4", "5"]
    assert mathqa_choices("a ) 1 / 2 , b ) 1 , 000 , c ) - 3 , d ) , e ) a ) 5") == [
        "1 / 2",
        "1 , 000",
        "- 3",
        "",
        "a ) 5",
    ]
    for text in ("a ) 1 , b ) 2", "", "a ) 1 , c ) 3 , b ) 2 , d ) 4 , e ) 5"):
        assert mathqa_choices(text) is None


def test_a_missing_partition_is_named(tmp_path, on_hub):
    row, _ = PUBLISHED["socialiqa"]
    folder = write_partitions(tmp_path / "data", row, {"train": 9, "validation": 9})
    with pytest.raises(DataError, match=r"has no test \(it has train, validation\).*give socialiqa=PATH") as refused:
        open_dataset(DatasetSource(on_hub("socialiqa", folder)))
    assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match=r"has no test \(it has train, validation\); add it, or give the path alone"):
        open_dataset(DatasetSource(f"socialiqa={folder}"))


def write_classes(folder, names, n):
    for name in names:
        (folder / name).mkdir(parents=True)
        for i in range(n):
            (folder / name / f"{name}_{i}.jpg").write_bytes(f"{name}/{i}".encode())


def test_caltech256_as_published_is_cut_and_with_partitions_is_halved(tmp_path):
    folder = tmp_path / "whole" / "256_ObjectCategories"
    write_classes(folder, ["001.ak47", "056.dog", "257.clutter"], 8)
    (folder / "056.dog" / "greg").mkdir()  # there is such a folder
    (folder / "056.dog" / "greg" / "other.jpg").write_bytes(b"")
    opened = open_dataset(DatasetSource(f"caltech256={tmp_path / 'whole'}"))
    assert opened.split_sizes == {"calibration": 6, "validation": 6, "test": 12}
    assert "25/25/50" in opened.rule
    assert {row["example_id"][:3]: row["label"] for row in rows_of(opened, "all")} == {"001": 0, "056": 1, "257": 2}
    for partition, n in (("train", 4), ("validation", 5), ("test", 6)):
        write_classes(tmp_path / "split" / partition, ["001.ak47", "056.dog"], n)
    opened = open_dataset(DatasetSource(f"caltech256={tmp_path / 'split'}"))
    assert opened.split_sizes == {"calibration": 5, "validation": 5, "test": 12}
    assert "halved" in opened.rule


@pytest.mark.parametrize("names", [("val", "train"), ("validation", "train"), ("val",)])
def test_imagenet_cuts_its_validation_set(tmp_path, names):
    for name in names:
        write_classes(tmp_path / name, ["n01440764", "n01443537"], 10)
    opened = open_dataset(DatasetSource(f"imagenet={tmp_path}"))
    assert opened.split_sizes == {"calibration": 5, "validation": 5, "test": 10}
    assert opened.rule == "validation cut 25/25/50 into calibration, validation and test (seed 0)"
    alone = open_dataset(DatasetSource(f"imagenet={tmp_path / names[0]}"))
    assert list(rows_of(alone, "test")) == list(rows_of(opened, "test"))


def write_wilds(folder):
    (folder / "train").mkdir(parents=True)
    sizes = {"train": 3, "val": 9, "test": 7, "id_val": 2, "id_test": 5}
    with (folder / "metadata.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "split", "location", "datetime", "filename", "y", "category_id"])
        for number, split in enumerate(split for split, n in sizes.items() for _ in range(n)):
            writer.writerow([number, split, 7, "2013-06-05 05:44:19", f"{number}.jpg", number % 182, 372])
            if split != "train":
                (folder / "train" / f"{number}.jpg").write_bytes(f"{split} {number}".encode())
    return sizes


def test_iwildcam_has_two_test_splits(tmp_path):
    sizes = write_wilds(tmp_path / "iwildcam_v2.0")
    opened = open_dataset(DatasetSource(f"iwildcam={tmp_path}"))
    assert opened.task == "image-classification"
    assert opened.split_sizes == {"calibration": 5, "validation": 4, "test-id": 5, "test-ood": 7}
    published = {"calibration": "val", "validation": "val", "test-id": "id_test", "test-ood": "test"}
    seen = []
    for split in opened.split_sizes:
        for row in rows_of(opened, split, 3):
            number = row["example_id"].removesuffix(".jpg")
            assert row["image"].decode() == f"{published[split]} {number}"
            assert row["label"] == int(number)
            seen.append(number)
    assert len(set(seen)) == len(seen) == sizes["val"] + sizes["test"] + sizes["id_test"]
    with pytest.raises(ConfigError, match="unknown split 'test'; did you mean 'test-id'"):
        opened.blocks("test", 5)


def test_iwildcam_metadata_that_does_not_serve_is_refused(tmp_path):
    write_wilds(tmp_path)
    metadata = tmp_path / "metadata.csv"
    whole = metadata.read_text()
    metadata.write_text(whole.replace("split", "part", 1))
    with pytest.raises(DataError, match=r"metadata\.csv has no column 'split'"):
        open_dataset(DatasetSource(f"iwildcam={tmp_path}"))
    metadata.write_text(whole.replace("3.jpg,3,", "3.jpg,cat,", 1))
    with pytest.raises(DataError, match=r"metadata\.csv, row 3: filename '3\.jpg' and y 'cat' do not name an image"):
        open_dataset(DatasetSource(f"iwildcam={tmp_path}"))
    metadata.write_text(whole.replace("id_test", "other"))
    with pytest.raises(DataError, match=r"has no test-id \(it has validation, test-ood\)"):
        open_dataset(DatasetSource(f"iwildcam={tmp_path}"))


def test_a_name_is_looked_for_in_cauc_data_first(tmp_path, monkeypatch):
    write_partitions(tmp_path / "mmlu", PUBLISHED["mmlu"][0])
    monkeypatch.setenv("CAUC_DATA", str(tmp_path))
    opened = open_dataset(DatasetSource("mmlu"))
    assert opened.split_sizes["test"] == SIZES["test"]
    monkeypatch.delenv("CAUC_DATA")
    again = open_dataset(opened.source)  # as a process would without that variable
    assert again.fingerprint == opened.fingerprint


def test_any_dataset_of_the_hub_is_read(tmp_path, on_hub):
    import datasets

    image = {"bytes": b"\x89PNG and no image", "path": "a.png"}  # decoding it would fail
    for partition in ("validation", "test"):
        features = datasets.Features({"picture": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
        rows = datasets.Dataset.from_list([{"picture": image, "label": i % 2} for i in range(10)], features=features)
        rows.to_parquet(tmp_path / "images" / "data" / f"{partition}-00000-of-00001.parquet")
    opened = open_dataset(DatasetSource(f"hub:{tmp_path / 'images'}", {"image": "picture"}))
    assert opened.split_sizes == {"calibration": 5, "validation": 5, "test": 10}
    assert [(row["image"], row["label"]) for row in rows_of(opened, "test")] == [
        (image["bytes"], i % 2) for i in range(10)
    ]
    assert opened.fingerprint == open_dataset(opened.source).fingerprint

    with pytest.raises(DataError, match=r"cannot load .*images' from the hub: BuilderConfig 'wrong' not found.*; give"):
        open_dataset(DatasetSource(f"hub:{tmp_path / 'images'}:wrong"))


def test_only_imagenets_validation_files_are_loaded(tmp_path, on_hub):
    (tmp_path / "hub" / "data").mkdir(parents=True)
    table = pa.table({"image": [{"bytes": b"a", "path": "a.jpg"}] * 8, "label": list(range(8))})
    for shard in range(2):
        pq.write_table(table, tmp_path / "hub" / "data" / f"validation-0000{shard}-of-00002.parquet")
    (tmp_path / "hub" / "data" / "train-00000-of-00001.parquet").write_bytes(b"would not load")
    opened = open_dataset(DatasetSource(on_hub("imagenet", tmp_path / "hub")))
    assert opened.split_sizes == {"calibration": 4, "validation": 4, "test": 8}
    assert [row["label"] for row in rows_of(opened, "all")] == [*range(8), *range(8)]


def test_what_is_not_to_be_had_is_refused_in_one_line(monkeypatch):
    pytest.importorskip("datasets", reason="needs cauc-ray[datasets]")
    monkeypatch.delenv("CAUC_DATA", raising=False)
    for name in ("mmlu", "hub:some/dataset"):  # there is no network in tests
        with pytest.raises(DataError, match=r"cannot load .* from the hub: .*; give ") as refused:
            open_dataset(DatasetSource(name))
        assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match="iwildcam is not on the hub: give iwildcam=PATH"):
        open_dataset(DatasetSource("iwildcam"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'cauc-ray\[datasets\]', or give mmlu=PATH"):
        open_dataset(DatasetSource("mmlu"))


@real_data
def test_real_questions_under_their_names():
    for name in ("mmlu", "logiqa"):
        folder = DATA / "questions" / name
        opened = open_dataset(DatasetSource(f"{name}={folder}"))
        published = {row["id"]: row for row in pq.read_table(folder / "test.parquet").to_pylist()}
        found = list(rows_of(opened, "test", 1000))
        assert len(found) == len(published) == opened.split_sizes["test"]
        for row in found:
            expected = {"task": name, **published[row.pop("example_id")]}
            del expected["id"]
            assert row == expected
        half = pq.read_metadata(folder / "validation.parquet").num_rows / 2
        assert abs(opened.split_sizes["validation"] - half) < 1
    with pytest.raises(
        DataError, match=r"has no test \(it has validation\); add it, or .* the path alone for a 25/25/50"
    ):
        open_dataset(DatasetSource(f"socialiqa={DATA / 'questions' / 'social_iqa'}"))
