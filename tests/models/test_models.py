import json
import time

import jsonschema
import numpy as np
import pytest
import yaml
from synthetic import write_table

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.answers import as_answers
from cauc_ray.models.pool import StageSpec, load_pool
from cauc_ray.models.python import PythonSpec
from cauc_ray.models.saved import SavedSpec
from cauc_ray.schemas import schema_path

BATCH = {"example_id": np.array(["a", "b"], dtype=object), "x": np.array([1.0, 2.0])}


def test_a_python_model_answers_arrays_and_ragged_lists():
    spec = PythonSpec(kind="python", factory="user_models:by_x", kwargs={"factor": 3.0})
    assert spec.load()(BATCH).logits.tolist() == [[3.0, 0.0], [6.0, 0.0]]
    greedy = PythonSpec(kind="python", factory="user_models:empties_its_batch")
    assert greedy.load()(dict(BATCH)).logits.tolist() == [[1.0, 0.0], [2.0, 0.0]]
    ragged = PythonSpec(kind="python", factory="user_models:ragged").load()(BATCH)
    assert ragged.logits.tolist() == [[1.0, -np.inf], [2.0, 2.0]]
    assert ragged.logits.dtype == np.float32


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (np.zeros((3, 2)), "returned 3 rows of logits for 2 inputs"),
        (np.zeros(2), r"logits of shape \(2,\)"),
        (np.zeros((2, 0)), r"logits of shape \(2, 0\)"),
        (np.array([[0.0, np.nan], [0, 0]]), "row 0 of the batch: a logit is NaN"),
        ([[1.0], [np.inf]], "row 1 of the batch"),
        ([[1.0], []], "row 1 of the batch"),
        ([["a"], ["b"]], "not numbers"),
        (np.array([["1", "2"], ["3", "4"]]), "not numbers"),
        ([["1", "2"], ["3", "4"]], "not numbers"),
        (np.array([[1j], [2j]]), "not numbers"),
        ([1.0, 2.0], "one vector of logits for each row"),
        ("ab", "not str"),
    ],
)
def test_answers_that_nobody_can_use_are_refused(output, says):
    with pytest.raises(DataError, match=says):
        as_answers(output, 2)


@pytest.mark.parametrize("factory", ["user_models:absent", "absent_module:load", "user_models:no_callable"])
def test_a_factory_that_gives_no_model_is_refused(factory):
    with pytest.raises(ConfigError, match="factory"):
        PythonSpec(kind="python", factory=factory).load()


def test_a_saved_model_answers_from_its_table_in_the_given_time(tmp_path):
    chain = write_table(tmp_path / "L", n=30, per_call=True)["test"]
    spec = SavedSpec(
        kind="saved", logits=tmp_path / "L", model="m1", split="test", seconds_per_call=0.05, seconds_per_row=0.01
    )
    model = spec.load()
    started = time.perf_counter()
    answers = model({"example_id": np.array([f"test-{chain.example_ids[row]}" for row in (7, 2)], dtype=object)})
    assert time.perf_counter() - started >= 0.07
    assert (answers.logits == chain.logits[1][[7, 2]]).all()
    assert answers.costs == pytest.approx(chain.costs.per_call[[7, 2], 1], rel=1e-6)
    known = f"test-{chain.example_ids[2]}"
    answers = model({"example_id": np.array(["nobody", known], dtype=object)})
    assert list(answers.failures) == [0]
    assert "example 'nobody' is not in" in answers.failures[0]
    assert (answers.logits[1] == chain.logits[1][2]).all()
    with pytest.raises(DataError, match="no column 'example_id'"):
        model({"x": np.zeros(1)})


GOOD = {
    "name": "two",
    "task": "multiple-choice",
    "stages": [
        {"name": "small", "model": {"kind": "python", "factory": "user_models:by_x"}, "cost": {"params_b": 8}},
        {"name": "large", "model": {"kind": "saved", "logits": "L", "model": "m1", "split": "test"}, "batch_size": 32},
    ],
}


def pool_file(tmp_path, **changes):
    content = yaml.safe_load(yaml.safe_dump(GOOD))
    for key, value in changes.items():
        *parents, last = key.split("__")
        at = content
        for parent in parents:
            at = at[int(parent) if parent.isdigit() else parent]
        at[last] = value
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_pool_file_is_read_with_its_defaults(tmp_path):
    pool = load_pool(pool_file(tmp_path))
    small, large = pool.chain(("small", "large"))
    assert (small.cost.value, small.cost.unit) == (8.0, "B params")
    assert (small.batch_size, small.replicas.min, small.replicas.max, small.resources.num_cpus) == (256, 1, 1, 1)
    assert large.model.logits == str((tmp_path / "L").resolve())
    assert load_pool(pool_file(tmp_path, stages__0__replicas={"min": 3})).stages[0].replicas.max == 3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"taks": "x"}, "unknown key 'taks'"),
        ({"stages__0__batchsize": 3}, "stages.0: unknown key 'batchsize'; did you mean 'batch_size'"),
        ({"stages__0__model__factroy": "a:b"}, "stages.0.model.python: unknown key 'factroy'; did you mean 'factory'"),
        (
            {"stages__0__model__kind": "pyhton"},
            "unknown kind 'pyhton'; did you mean 'python'?",
        ),
        ({"task": "guessing"}, "task: "),
        (
            {"stages__0__model": {"kind": "torchvision", "arch": "resnet50"}, "stages__0__resources": {"num_gpus": 2}},
            "stages.0: a model of kind 'torchvision' runs on one GPU at most, not 2; to use more, give the stage num",
        ),
        ({"stages": []}, "stages: "),
        ({"stages__1__name": "small"}, "two stages are named 'small'"),
        ({"stages__0__name": "a/b"}, "stages.0.name: "),
        ({"stages__0__name": "a,b"}, "without '/', '=' and ','"),
        ({"stages__0__name": "a\nb"}, "printable"),
        ({"stages__0__name": " a"}, "printable"),
        ({"stages__0__name": "ä" * 101}, "up to 200 bytes, got 202"),
        ({"stages__0__cost": {"gflops": None}}, "exactly one of gflops"),
        ({"stages__0__cost": {"gflops": True}}, "stages.0.cost.gflops"),
        ({"stages__0__cost": {"params_b": "4"}}, "stages.0.cost.params_b"),
        ({"stages__0__cost": {}}, "exactly one of gflops, kflops, params_b, seconds, usd, usd_per_mtok"),
        ({"stages__0__cost": {"gflops": 1, "seconds": 2}}, "exactly one of"),
        ({"stages__0__cost": {"gflops": -1}}, "stages.0.cost.gflops: "),
        ({"stages__0__replicas": {"min": 2, "max": 1}}, "max 1 is below min 2"),
        ({"stages__0__model__factory": "no colon"}, "stages.0.model.python.factory: "),
    ],
)
def test_a_pool_file_with_a_fault_is_refused_in_one_line(tmp_path, changes, says):
    path = pool_file(tmp_path, **changes)
    with pytest.raises(ConfigError) as error:
        load_pool(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


IMAGES = {"task": "image-classification"}


@pytest.mark.parametrize("name", ["classes.txt", "names/classes.txt"])
@pytest.mark.parametrize(
    "text",
    [
        "cat\ndog\ngreat white shark",
        "cat\ndog\ngreat white shark\n\n",
        "\ufeffcat\r\n dog\t\r\ngreat white shark\r\n",
    ],
)
def test_names_of_classes_come_from_a_list_or_a_file_beside_the_pool(tmp_path, monkeypatch, name, text):
    expected = ("cat", "dog", "great white shark")
    assert load_pool(pool_file(tmp_path)).labels is None
    listed = load_pool(pool_file(tmp_path, **IMAGES, labels=list(expected)))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(text.encode())
    path = pool_file(tmp_path, **IMAGES, labels=name)
    monkeypatch.chdir("/")
    assert load_pool(path).labels == listed.labels == expected
    assert load_pool(pool_file(tmp_path, **IMAGES, labels=str(tmp_path / name))).labels == expected


def test_a_name_is_any_text_as_it_is_written(tmp_path):
    names = ["naïve 鳥 🐦", "a, b", "\u2028", "0", "null"]
    (tmp_path / "classes.txt").write_text("\n".join(names[:2] + names[3:]), encoding="utf-8")
    assert load_pool(pool_file(tmp_path, **IMAGES, labels="classes.txt")).labels == (*names[:2], *names[3:])
    assert load_pool(pool_file(tmp_path, **IMAGES, labels=["naïve 鳥 🐦", " b "])).labels == ("naïve 鳥 🐦", " b ")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([], "labels: the list of labels is empty"),
        (["cat", ""], "labels: class 1 has an empty name"),
        ([0, 1], "labels.0: input should be a valid string, got 0"),
        ({"cat": 0}, "labels: "),
        ("absent.txt", "labels: there is no file"),
        (".", "labels: there is no file"),
        ("a" * 300, "cannot be read: File name too long"),
        ("empty.txt", "empty.txt is empty"),
        ("blank.txt", "labels: class 1 has an empty name"),
        ("latin.txt", "latin.txt is not UTF-8 text"),
    ],
)
def test_names_of_classes_with_a_fault_are_refused_in_one_line(tmp_path, labels, says):
    for name, content in {
        "empty.txt": b" \n\n",
        "blank.txt": b"cat\n\ndog\n",
        "latin.txt": "naïve".encode("latin-1"),
    }.items():
        (tmp_path / name).write_bytes(content)
    path = pool_file(tmp_path, **IMAGES, labels=labels)
    with pytest.raises(ConfigError) as error:
        load_pool(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_choices_of_questions_have_no_other_names(tmp_path):
    with pytest.raises(ConfigError, match="in multiple-choice, choices name themselves"):
        load_pool(pool_file(tmp_path, labels=["cat", "dog"]))


@pytest.mark.parametrize("labels", [None, ["cat", "dog"], "classes.txt"])
def test_pools_with_and_without_names_fit_the_published_schema(tmp_path, labels):
    schema = json.loads(schema_path("pool").read_text())
    content = yaml.safe_load(pool_file(tmp_path, **IMAGES, labels=labels).read_text())
    jsonschema.validate(content, schema)
    for wrong in ([], [1], "", 3):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**content, "labels": wrong}, schema)


@pytest.mark.parametrize("text", ["a: [", "- a\n- b", "", "name: \x00"])
def test_what_is_no_pool_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_pool(path)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="no pool file"):
        load_pool(tmp_path / "absent.yaml")


def test_a_stage_that_the_pool_lacks_gets_a_suggestion(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown stage 'lagre'; did you mean 'large'\?"):
        load_pool(pool_file(tmp_path)).chain(("small", "lagre"))


@pytest.mark.parametrize(
    "model",
    [
        {"kind": "python", "factory": "user_models:by_x"},
        {"kind": "saved", "logits": "L", "model": "m", "split": "test"},
        {"kind": "registered-somewhere", "depth": 3},
    ],
)
def test_what_is_declared_of_answers_makes_no_other_model_of_it(model):
    """A collection of earlier answers goes on: these are kept as the model gives them."""
    own, declared = (
        StageSpec(name="m", model={**model, **more}).model for more in ({}, {"logit_kind": "probabilities"})
    )
    assert own.identity == declared.identity
    assert declared.answers_kind == "probabilities"
    if model["kind"] == "registered-somewhere":
        assert StageSpec(name="m", model={**model, "device": "cpu"}).model.identity == own.identity
        assert StageSpec(name="m", model={**model, "depth": 4}).model.identity != own.identity
