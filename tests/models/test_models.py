import copy
import time

import numpy as np
import pytest
import torch
import yaml
from batches import column, refused
from synthetic import write_table

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.answers import Answers, as_answers
from cauc_ray.models.kind import Placement
from cauc_ray.models.pool import load_pool
from cauc_ray.models.python import PythonSpec
from cauc_ray.models.saved import SavedSpec

BATCH = {"example_id": np.array(["a", "b"], dtype=object), "x": np.array([1.0, 2.0])}


def test_a_saved_model_answers_from_its_table_no_sooner_than_its_delay(tmp_path):
    chain = write_table(tmp_path / "L", n=30, per_call=True)["test"]
    delays = {"seconds_per_call": 0.05, "seconds_per_row": 0.01}
    model = SavedSpec(kind="saved", logits=tmp_path / "L", model="m1", split="test", **delays).load()
    started = time.perf_counter()
    answers = model({"example_id": column(f"test-{chain.example_ids[row]}" for row in (7, 2))})
    assert time.perf_counter() - started >= 0.07
    assert (answers.logits == chain.logits[1][[7, 2]]).all()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (np.zeros((3, 2)), "returned 3 rows of logits for 2 inputs"),
        (np.zeros(2), r"got shape \(2,\)"),
        (np.zeros((2, 0)), r"got shape \(2, 0\)"),
        ([["1", "2"], ["3", "4"]], "not numbers"),
        (np.array([[1j], [2j]]), "not numbers"),
        ("ab", "not str"),
        (Answers(np.zeros((2, 2), np.float32), costs=np.zeros(3)), "and 3 costs for 2 inputs"),
        (Answers(np.zeros((2, 2), np.float32), failures={2: "far away"}), "failure of row 2"),
    ],
)
def test_answers_that_nobody_can_use_are_refused(output, words):
    with pytest.raises(DataError, match=words):
        as_answers(output, 2)


@pytest.mark.parametrize(
    "output",
    [
        np.array([[0.0, 1], [0.0, np.nan]]),
        torch.tensor([[0.0, 1.0], [torch.inf, 0.0]], dtype=torch.bfloat16, requires_grad=True),
        [[0.0, 1.0], []],
        [torch.tensor([0.0, 1.0]), torch.tensor([torch.nan])],
        Answers(np.array([[0.0, 1], [0, 0]], np.float32), costs=np.array([0.5, np.nan])),
        Answers(np.array([[0.0, 1], [0, 0]], np.float32), failures={1: "too long"}),
    ],
    ids=["array", "tensor", "list", "tensors", "costs", "answers"],
)
def test_one_bad_row_of_a_users_model_costs_one_row(output):
    answers = as_answers(output, 2)
    assert answers.failures.keys() == {1}
    assert answers.logits[0].tolist() == [0.0, 1.0]
    assert answers.logits.dtype == np.float32


def test_labels_of_a_users_model_are_those_with_the_highest_scores():
    spec = PythonSpec(kind="python", factory="user_models:labelled", labels=["ok", "NA", "zz"])
    right, swapped = (
        spec.model_copy(update={"kwargs": {"names": names}}) for names in (["ok", "NA", "zz"], ["NA", "ok", "zz"])
    )
    batch = {"x": np.array([0, 1, 2])}
    assert right.load()(batch).logits.argmax(axis=1).tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match="with label 'NA', but its highest score is that of option 0"):
        swapped.load()(batch)


def test_a_users_model_gets_its_device_and_is_closed():
    model = PythonSpec(kind="python", factory="user_models:on_device").load(Placement(num_gpus=0.5))
    assert model(BATCH).costs.tolist() == [1.0, 1.0]
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        model(BATCH)
    assert PythonSpec(kind="python", factory="user_models:on_device").load()(BATCH).costs.tolist() == [0.0, 0.0]
    chosen = PythonSpec(kind="python", factory="user_models:on_device", kwargs={"device": "cuda"}).load()
    assert chosen(BATCH).costs.tolist() == [1.0, 1.0]


GOOD = {
    "name": "two",
    "task": "multiple-choice",
    "stages": [
        {"name": "small", "model": {"kind": "python", "factory": "user_models:by_x"}, "cost": {"params_b": 8}},
        {"name": "large", "model": {"kind": "saved", "logits": "L", "model": "m1", "split": "test"}, "batch_size": 32},
    ],
}


def pool_file(tmp_path, **changes):
    """Write the pool with other values; a stage's have its number before their key."""
    content = copy.deepcopy(GOOD)
    for key, value in changes.items():
        stage, _, name = key.rpartition("__")
        (content["stages"][int(stage)] if stage else content)[name] = value
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_pool_file_is_read_with_its_defaults(tmp_path):
    pool = load_pool(pool_file(tmp_path))
    small, large = pool.chain(("small", "large"))
    assert (small.cost.value, small.cost.unit) == (8.0, "B params")
    assert (small.batch_size, small.replicas.min, small.replicas.max, small.resources.num_cpus) == (256, 1, 1, 1)
    assert large.model.logits == str((tmp_path / "L").resolve())
    assert "unknown stage 'lagre'; did you mean 'large'?" in refused(lambda: pool.chain(("small", "lagre")))
    assert load_pool(pool_file(tmp_path, **{"0__replicas": {"min": 3}})).stages[0].replicas.max == 3
    assert pool.columns_read(pool.stages) is None  # a model of Python may read any
    declared = load_pool(pool_file(tmp_path, inputs={"x": {"datatype": "FP64", "shape": []}}))
    assert declared.columns_read(declared.stages) == {"example_id", "label", "choices", "x"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"0__batchsize": 3}, "stages.0: unknown key 'batchsize'; did you mean 'batch_size'"),
        (
            {"0__model": {"kind": "torchvision", "arch": "resnet50"}, "0__resources": {"num_gpus": 2}},
            "stages.0: a model of kind 'torchvision' runs on one GPU at most, not 2; to use more, give the stage num",
        ),
        ({"0__batch_size": True}, "stages.0.batch_size: a number was expected, got true"),
        ({"1__name": "small"}, "two stages are named 'small'"),
        ({"0__name": "a/b"}, "stages.0.name: "),
        ({"0__name": "ä" * 101}, "up to 200 bytes, got 202"),
        ({"0__cost": {"gflops": 1, "seconds": 2}}, "exactly one of"),
        ({"0__cost": {"seconds": "auto"}}, "round trip of a remote stage"),
        ({"0__replicas": {"min": 2, "max": 1}}, "max 1 is below min 2"),
        ({"labels": ["cat", "dog"]}, "in multiple-choice, choices name themselves"),
        *(
            ({"task": "image-classification", "labels": labels}, words)
            for labels, words in [
                ([], "labels: the list of labels is empty"),
                ([0, 1], "labels: class 0: a name must be a text that is not empty, got 0"),
                ("absent.txt", "labels: the file"),
                ("blank.txt", "labels: class 1: a name must be a text that is not empty"),
                ("latin.txt", "utf-8"),
            ]
        ),
    ],
)
def test_a_pool_file_with_a_fault_is_refused_in_one_line(tmp_path, changes, words):
    files = {"blank.txt": b"cat\n\ndog\n", "latin.txt": "na\xefve".encode("latin-1")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    path = pool_file(tmp_path, **changes)
    message = refused(lambda: load_pool(path))
    assert words in message
    assert str(path) in message


@pytest.mark.parametrize("text", ["a: [", "- a\n- b", "", "name: \x00", None])
def test_what_is_no_pool_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "pool.yaml"
    if text is not None:
        path.write_text(text)
    assert str(path) in refused(lambda: load_pool(path))


@pytest.mark.parametrize("text", ["cat\nnaïve 鳥, 🐦\n0", "\ufeffcat\r\n naïve 鳥, 🐦\t\r\n0\r\n\n"])
def test_names_of_classes_come_from_a_list_or_a_file_beside_the_pool(tmp_path, monkeypatch, text):
    names = ["cat", "naïve 鳥, 🐦", "0"]
    (tmp_path / "classes.txt").write_bytes(text.encode())
    monkeypatch.chdir("/")
    for labels in ("classes.txt", str(tmp_path / "classes.txt"), names, None):
        path = pool_file(tmp_path, task="image-classification", labels=labels)
        assert load_pool(path).labels == (labels and tuple(names))
