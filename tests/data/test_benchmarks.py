import sys
from contextlib import nullcontext

import pytest
from stored import dataset, rows_of, values_of, write, write_images

from cauc_ray.data.benchmarks import BENCHMARKS
from cauc_ray.data.datasets import DatasetSpec, open_dataset, open_input
from cauc_ray.data.splits import RULE_PARTITIONS, split_by_rule
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.prompts import Prompts
from cauc_ray.models.transformers import TransformersChoiceSpec

Q, S, X, C = "2 + 2?", "abstract_algebra", "All men die.", ["3", "4", "5", "6"]
OPTIONS = "a ) 3 , b ) $ 27.675 , c ) 30 % , d ) data inadequate , e ) none of these"
# One row of each as published, and what models read of it.
PUBLISHED = {
    "mmlu": (
        {"question": Q, "subject": S, "choices": C, "answer": 1},
        {"question": Q, "subject": S, "choices": C, "label": 1},
    ),
    "logiqa": (
        {"context": X, "query": Q, "options": C, "correct_option": 3},
        {"context": X, "question": Q, "choices": C, "label": 3},
    ),
    "mathqa": (
        {"Problem": Q, "options": OPTIONS, "correct": "a"},
        {"question": Q, "choices": ["3", "$ 27.675", "30 %", "data inadequate", "none of these"], "label": 0},
    ),
    "medmcqa": (
        {"id": "e9", "question": Q, "opa": "3", "opb": "4", "opc": "5", "opd": "6", "cop": 2, "subject_name": S},
        {"question": Q, "choices": C, "subject": S, "label": 2},
    ),
    "piqa": ({"goal": Q, "sol1": "a", "sol2": "b", "label": 0}, {"question": Q, "choices": ["a", "b"], "label": 0}),
    "socialiqa": (
        {"context": X, "question": Q, "answerA": "a", "answerB": "b", "answerC": "c", "label": "3"},
        {"context": X, "question": Q, "choices": ["a", "b", "c"], "label": 2},
    ),
}
# Each benchmark's folder as it is published, and what its models answer with.
PUBLISHED_IMAGES = ("caltech256", "imagenet", "iwildcam")
SIZES = {"train": 50, "validation": 21, "test": 30}


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """Let the real datasets library find a benchmark in a local folder in place of the hub."""
    datasets = pytest.importorskip("datasets", reason="needs cauc-ray[datasets]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delenv("CAUC_DATA", raising=False)
    datasets.disable_progress_bars()

    def place(name, folder):
        standing_in = BENCHMARKS[name].model_copy(update={"hub": str(folder), "config": None, "revision": None})
        monkeypatch.setitem(BENCHMARKS, name, standing_in)
        return name

    yield place
    datasets.enable_progress_bars()


def write_partitions(folder, row, sizes=SIZES):
    """Write each partition's copies of a row, as the hub's Parquet files are named."""
    for partition, n in sizes.items():
        rows = [{**row, "id": f"{partition}-{i}"} if "id" in row else row for i in range(n)]
        write(folder / f"{partition}-00000-of-00001.parquet", rows)
    return folder


@pytest.mark.parametrize("source", ["hub", "path"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_columns_become_those_that_models_read(tmp_path, on_hub, name, source):
    published, expected = PUBLISHED[name]
    folder = write_partitions(tmp_path / "data", published)
    opened = dataset(on_hub(name, folder) if source == "hub" else f"{name}={folder}", seed=5)
    assert opened.name == name
    rule = BENCHMARKS[name].split
    for split, picked in split_by_rule(
        rule, {partition: SIZES[partition] for partition in RULE_PARTITIONS[rule]}, 5
    ).items():
        ids = [f"{picked.partition}-{row}" for row in picked.rows]
        assert rows_of(opened, split, 8) == [{"id": example, **expected} for example in ids]


@pytest.mark.parametrize("name", PUBLISHED)
def test_canonical_files_are_taken_as_they_are(tmp_path, name):
    row = {"id": "1", "question": "?", "choices": ["a", "b", "c"], "label": 2, "context": "c"}
    opened = dataset(f"{name}={write_partitions(tmp_path / 'data', row)}")
    assert all({**values, "id": "1"} == {**row} for values in rows_of(opened, "test"))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        # As in the first release's files, which count from one.
        ("medmcqa", {"cop": 4}, "label 4, counted from 0, is outside its 4 choices"),
        ("socialiqa", {"label": "0"}, "neither an option's number, counted from 1, nor its letter: '0'"),
        ("medmcqa", {"cop": -1}, None),
        ("socialiqa", {"label": ""}, None),
    ],
)
def test_labels_that_a_benchmark_counts_otherwise_are_refused_and_unknown_ones_stay(tmp_path, name, change, words):
    folder = write_partitions(tmp_path, {**PUBLISHED[name][0], **change})
    with pytest.raises(DataError, match=words) if words else nullcontext():
        assert set(values_of(dataset(f"{name}={folder}"), "label", "test")) == {-1}


def test_a_missing_partition_is_named(tmp_path, on_hub):
    folder = write_partitions(tmp_path / "data", PUBLISHED["logiqa"][0], {"train": 9, "validation": 9})
    for name, remedy in ((on_hub("logiqa", folder), "give logiqa=PATH"), (f"logiqa={folder}", "add it, or give only")):
        with pytest.raises(DataError, match=rf"^.* has no test \(it has train, validation\).*{remedy}.*$"):
            dataset(name)


def test_socialiqa_without_its_test_set_is_split_as_those_without_test_labels(tmp_path, on_hub):
    folder = write_partitions(tmp_path / "data", PUBLISHED["socialiqa"][0], {"train": 50, "validation": 21})
    opened = dataset(on_hub("socialiqa", folder), seed=5)
    expected = split_by_rule("sample-train", {"train": 50, "validation": 21}, 5)
    assert opened.split_sizes == {split: len(picked.rows) for split, picked in expected.items()}


def test_of_medmcqa_questions_with_one_right_option_count(tmp_path):
    for partition, n in (("train", 60), ("validation", 20)):
        kinds = ["multi" if row % 4 == 0 else "single" for row in range(n)]
        rows = [{**PUBLISHED["medmcqa"][0], "id": f"{partition}-{row}", "choice_type": kinds[row]} for row in range(n)]
        write(tmp_path / f"{partition}.parquet", rows)
    opened = dataset(f"medmcqa={tmp_path}")
    assert opened.split_sizes == {"calibration": 8, "validation": 7, "test": 15}
    assert opened.rule.endswith(", of rows whose choice_type is single")
    ids = [row["id"] for split in opened.split_sizes for row in rows_of(opened, split)]
    assert len(set(ids)) == 30
    assert all(int(example.partition("-")[2]) % 4 for example in ids)


def test_caltech256_as_published_is_cut_and_with_partitions_is_halved(tmp_path):
    folder = tmp_path / "whole" / "256_ObjectCategories"
    write_images(folder, ["001.ak47", "056.dog", "257.clutter"], 8)
    write_images(folder / "056.dog", ["greg"])  # there is such a folder
    opened = dataset(f"caltech256={tmp_path / 'whole'}")
    assert opened.split_sizes == {"calibration": 6, "validation": 6, "test": 12}
    assert "25/25/50" in opened.rule
    assert {row["id"].split("/")[1][:3]: row["label"] for row in rows_of(opened)} == {"001": 0, "056": 1, "257": 2}
    for partition, n in (("train", 4), ("validation", 5), ("test", 6)):
        write_images(tmp_path / "split" / partition, ["001.ak47", "056.dog"], n)
    opened = dataset(f"caltech256={tmp_path / 'split'}")
    assert opened.split_sizes == {"calibration": 5, "validation": 5, "test": 12}
    assert "halved" in opened.rule


@pytest.mark.parametrize("names", [("val", "train"), ("validation", "train"), ("val",)])
def test_imagenet_cuts_its_validation_set(tmp_path, names):
    for name in names:
        write_images(tmp_path / name, ["n01440764", "n01443537"], 10)
    opened = dataset(f"imagenet={tmp_path}")
    assert opened.split_sizes == {"calibration": 5, "validation": 5, "test": 10}
    assert opened.rule == "validation cut 25/25/50 into calibration, validation and test (seed 0)"
    alone = dataset(f"imagenet={tmp_path / names[0]}")
    assert values_of(alone, "image", "test") == values_of(opened, "image", "test")


def write_wilds(folder):
    sizes = {"train": 3, "val": 9, "test": 7, "id_val": 2, "id_test": 5}
    splits = [split for split, n in sizes.items() for _ in range(n)]
    rows = [{"": i, "split": split, "filename": f"{i}.jpg", "y": i % 182} for i, split in enumerate(splits)]
    write(folder / "metadata.csv", rows)
    (folder / "train").mkdir()
    for row in rows[sizes["train"] :]:
        (folder / "train" / row["filename"]).write_bytes(f"{row['split']} {row['y']}".encode())


def test_iwildcam_has_two_test_splits(tmp_path):
    write_wilds(tmp_path / "iwildcam_v2.0")
    opened = dataset(f"iwildcam={tmp_path}")
    assert opened.split_sizes == {"calibration": 5, "validation": 4, "test-id": 5, "test-ood": 7}
    published = {"calibration": "val", "validation": "val", "test-id": "id_test", "test-ood": "test"}
    seen = [{**row, "split": published[split]} for split in opened.split_sizes for row in rows_of(opened, split, 3)]
    assert len({row["id"] for row in seen}) == len(seen)
    assert all(row["image"].decode() == f"{row['split']} {row['label']}" for row in seen)
    assert all(row["id"] == f"{row['label']}.jpg" for row in seen)
    with pytest.raises(ConfigError, match="unknown split 'test'; did you mean 'test-id'"):
        open_dataset(opened.spec, "test")


def test_iwildcam_metadata_that_does_not_serve_is_refused(tmp_path):
    write_wilds(tmp_path)
    metadata = tmp_path / "metadata.csv"
    metadata.write_bytes(metadata.read_bytes().replace(b"3.jpg,3\r", b"3.jpg,cat\r"))
    with pytest.raises(DataError, match=r"metadata\.csv, row 3: filename '3\.jpg' and y 'cat' are not an image's path"):
        dataset(f"iwildcam={tmp_path}")


def test_a_name_is_looked_for_in_cauc_data_first(tmp_path, monkeypatch):
    write_partitions(tmp_path / "mmlu", PUBLISHED["mmlu"][0])
    monkeypatch.setenv("CAUC_DATA", str(tmp_path))
    opened = dataset("mmlu")
    assert opened.split_sizes["test"] == SIZES["test"]
    monkeypatch.delenv("CAUC_DATA")
    assert open_dataset(opened.spec).fingerprint == opened.fingerprint  # as a process would without that variable


def test_any_dataset_of_the_hub_is_read(tmp_path, on_hub):
    import datasets

    image = {"bytes": b"\x89PNG and no image", "path": "a.png"}  # decoding it would fail
    features = datasets.Features({"picture": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    rows = datasets.Dataset.from_list([{"picture": image, "label": i % 2} for i in range(10)], features=features)
    for partition in ("validation", "test"):
        rows.to_parquet(tmp_path / "images" / "data" / f"{partition}-00000-of-00001.parquet")
    opened = dataset(f"hub:{tmp_path / 'images'}", image="picture")
    assert opened.split_sizes == {"calibration": 5, "validation": 5, "test": 10}
    images = [(row["image"], row["label"]) for row in rows_of(opened, "test")]
    assert images == [(image["bytes"], i % 2) for i in range(10)]
    assert opened.fingerprint == open_dataset(opened.spec).fingerprint
    with pytest.raises(DataError, match=r"cannot load .*images' from the hub: BuilderConfig 'wrong' not found.*; give"):
        dataset(f"hub:{tmp_path / 'images'}:wrong")


def test_what_is_not_to_be_had_is_refused_in_one_line(monkeypatch):
    pytest.importorskip("datasets", reason="needs cauc-ray[datasets]")
    monkeypatch.delenv("CAUC_DATA", raising=False)
    for name in ("mmlu", "hub:some/dataset"):  # tests have no network
        with pytest.raises(DataError, match=r"^cannot load .* from the hub: .*; give .*$"):
            dataset(name)
    with pytest.raises(DataError, match="iwildcam is not on the hub: give the path of its files as iwildcam=PATH"):
        dataset("iwildcam")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'cauc-ray\[datasets\]', or give .* mmlu=PATH"):
        dataset("mmlu")


def write_published(folder, name):
    """Write a small benchmark in its published layout. Returns what names it."""
    if name in PUBLISHED:
        write_partitions(folder, PUBLISHED[name][0])
    elif name == "iwildcam":
        write_wilds(folder)
    elif name == "imagenet":
        write_images(folder / "val", ["n01440764", "n01443537"], 10)
    else:
        write_images(folder / "256_ObjectCategories", ["001.ak47", "056.dog"], 8)
    return f"{name}={folder}"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_run_reads_and_asks_what_a_collection_did(tmp_path, name):
    """To the byte: each row's columns, and the prompt of a model that is asked as the benchmark has it."""
    task = "image-classification" if name in PUBLISHED_IMAGES else "multiple-choice"
    spec = DatasetSpec(write_published(tmp_path / "data", name), task)
    seen = []
    for rows, block_rows in ((open_dataset(spec), 3), (open_input(spec), 7)):
        source, by_id = rows.blocks(block_rows), {}
        for block in (block for group in range(source.n_groups) for _, block in source.blocks(group)):
            prompts = {}
            if BENCHMARKS[name].prompt is not None:
                model = TransformersChoiceSpec(kind="transformers-choice", model="m", prompt=name)
                prompts, faults = Prompts(model, chat=False)(block.columns)
                assert not faults
            for row, example in enumerate(block.example_ids):
                values = {key: column[row] for key, column in block.columns.items()}
                by_id[example] = repr((values, prompts.get(row), None if block.labels is None else block.labels[row]))
        seen.append(by_id)
    collected, ran = seen
    assert collected
    assert {example: ran[example] for example in collected} == collected
