"""Arrays in files give what the arrays themselves give, in whatever form a file has them."""

import json

import numpy as np
import pytest

import cauc_ray
from cauc_ray.comparison.comparing import compare

SETTINGS = {"costs": {"small": 1, "large": 10}, "validation": 0.5}


@pytest.fixture
def arrays(tmp_path, command):
    """Return logits of two models with their labels, and save a policy of them and all of them next to each other."""
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=200)
    small, large = (np.round(np.eye(3)[labels] * gap + rng.normal(size=(200, 3)), 3) for gap in (1, 3))
    cauc_ray.fit({"small": small, "large": large}, labels, **SETTINGS).save("policy.json")
    arrays = {"small": small, "large": large, "labels": labels}
    np.savez("arrays.npz", **{**arrays, "labels": labels[:, None]})
    for name, array in arrays.items():
        np.save(f"{name}.npy", np.asfortranarray(array))
    return arrays


HEADERS = {"csv": "", "csv with a header": "a,b,c", "csv of Excel": "", "csv of pandas": "0,1,2"}


@pytest.mark.parametrize("n", [1, 2, 200])
@pytest.mark.parametrize("form", HEADERS)
def test_csv_files_are_read_as_the_arrays_that_they_hold(arrays, command, form, n):
    arrays = {name: array[:n] for name, array in arrays.items()}
    policy = cauc_ray.Policy.load("policy.json")
    expected = cauc_ray.evaluate({name: arrays[name] for name in policy.models}, policy, labels=arrays["labels"])
    written = {"fmt": "%s", "delimiter": ",", "comments": "", "newline": "\r\n" if form == "csv of pandas" else "\n"}
    written |= {"encoding": "utf-8-sig" if form == "csv of Excel" else "utf-8"}
    for name, array in arrays.items():
        np.savetxt(f"{name}.csv", array, header=HEADERS[form] if array.ndim == 2 else "", **written)
    words = ["small=small.csv", "large=large.csv", "--labels", "labels.csv"]
    code, out, error = command("evaluate", *words, "--policy", "policy.json", "--json")
    assert code == 0, error
    printed, keys = json.loads(out), ("n", "accuracy", "cost")
    assert {key: printed[key] for key in keys} == {key: expected.as_json()[key] for key in keys}
    assert printed["n"] == n


@pytest.mark.parametrize("words", ["small=small.npy large=large.npy --labels labels.npy", "arrays.npz"])
def test_every_verb_reads_arrays(arrays, tmp_path, command, words):
    labels, logits = arrays.pop("labels"), arrays
    settings = ["--costs", "small=1,large=10", "--validation", "0.5"]
    code, out, _ = command("compare", *words.split(), *settings, "--methods", "rf,margin", "--points", "3", "--json")
    compared = compare(logits, labels, methods=["rf", "margin"], points=3, **SETTINGS)
    assert (code, len(compared.rows)) == (0, 6)
    assert [row["accuracy"] for row in json.loads(out)["rows"]] == [row["accuracy"] for row in compared.rows]
    assert command("fit", *words.split(), *settings, "-o", "p.json")[0] == 0
    assert (tmp_path / "p.json").read_text() == (tmp_path / "policy.json").read_text()
    of_policy = ["--policy", "policy.json", "--json"]
    evaluated = json.loads(command("evaluate", *words.split(), *of_policy)[1])
    assert evaluated["accuracy"] == cauc_ray.evaluate(logits, "policy.json", labels=labels).measures.accuracy.value
    for source, known_labels in ((words, labels), ("small=small.npy large=large.npy", None)):
        code, out, _ = command("check", *source.split(), *of_policy)
        checked = cauc_ray.check(logits, "policy.json", labels=known_labels).as_json()
        assert (code, json.loads(out)) == (0, json.loads(json.dumps(checked)))
        assert checked["n_labelled"] == (0 if known_labels is None else 200)


NO_ARRAYS = {"empty.csv": "", "titles.csv": "a,b,c\n", "indexed.csv": ",a\n0,1\n", "ragged.csv": "1,2\n1\n"}
SEMICOLONS = ("a;b\n0.1;0.2\n0.3;0.4\n", "0,1;0,2\n0,3;0,4\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(
            (f"small={name} large=large.npy --labels labels.npy", f"{name} does not hold an array")
            for name in (*NO_ARRAYS, "objects.npy")
        ),
        *((f"small=semicolons{number}.csv large=large.npy --labels labels.npy", "semicolons;") for number in (0, 1)),
        ("small=small.npy large=absent.npy --labels labels.npy", "absent.npy"),
        ("small.npy large.npy --labels labels.npy", "as small=small.npy"),
        ("small=small.npy arrays.npz --labels labels.npy", "got 'arrays.npz'"),
        ("small=small.npy large=large.npy", "need labels"),
        ("small=small.npy large=large.npy --labels large.npy", "(200, 3)"),
        ("capital.npz", "capital.npz has "),
    ],
)
def test_files_that_hold_no_such_arrays_are_refused_in_one_line(arrays, tmp_path, command, words, message):
    for name, content in NO_ARRAYS.items():
        (tmp_path / name).write_text(content)
    for number, content in enumerate(SEMICOLONS):
        (tmp_path / f"semicolons{number}.csv").write_text(content)
    np.save("objects.npy", np.array([None, {}]), allow_pickle=True)
    np.savez("capital.npz", small=arrays["small"], Labels=arrays["labels"])
    code, out, error = command("compare", *words.split(), "--costs", "1,10", "--methods", "rf,margin")
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert message in error
