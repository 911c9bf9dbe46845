"""Arrays in files give what the arrays themselves give, in whatever form a file has them."""

import json

import numpy as np
import pytest

import cauc_ray


@pytest.fixture
def arrays(tmp_path, command):
    """Return logits of two models with their labels, and save a policy of them next to them."""
    rng = np.random.default_rng(0)
    labels = rng.integers(3, size=200)
    small, large = (np.round(np.eye(3)[labels] * gap + rng.normal(size=(200, 3)), 3) for gap in (1, 3))
    cauc_ray.fit({"small": small, "large": large}, labels, costs=[1, 10], validation=0.5).save(tmp_path / "policy.json")
    return {"small": small, "large": large, "labels": labels}


def text_of(array, header=""):
    lines = [",".join(map(str, row)) for row in np.reshape(array, (len(array), -1)).tolist()]
    return "\n".join([header] * bool(header) + lines) + "\n"


@pytest.mark.parametrize("n", [1, 2, 200])
@pytest.mark.parametrize("form", ["npy", "npz", "columns", "csv", "csv with a header", "csv of Excel"])
def test_files_are_read_as_the_arrays_that_they_hold(arrays, tmp_path, command, form, n):
    arrays = {name: array[:n] for name, array in arrays.items()}
    policy = cauc_ray.Policy.load(tmp_path / "policy.json")
    expected = cauc_ray.evaluate({name: arrays[name] for name in policy.models}, policy, labels=arrays["labels"])
    words = ["arrays.npz"]
    if form == "npz":
        np.savez("arrays.npz", **arrays)
    elif form in ("npy", "columns"):
        np.savez("arrays.npz", **{**arrays, "labels": arrays["labels"][:, None]})
        for name, array in arrays.items():
            np.save(f"{name}.npy", np.asfortranarray(array))
        if form == "npy":
            words = ["small=small.npy", "large=large.npy", "--labels", "labels.npy"]
    else:
        for name, array in arrays.items():
            header = ",".join("abc"[: array[0].size]) if form == "csv with a header" else ""
            encoding = "utf-8-sig" if form == "csv of Excel" else "utf-8"
            (tmp_path / f"{name}.csv").write_text(text_of(array, header), encoding=encoding)
        words = ["small=small.csv", "large=large.csv", "--labels", "labels.csv"]
    code, out, error = command("evaluate", *words, "--policy", "policy.json", "--json")
    assert code == 0, error
    printed, keys = json.loads(out), ("n", "accuracy", "cost")
    assert {key: printed[key] for key in keys} == {key: expected.as_json()[key] for key in keys}
    assert printed["n"] == n


@pytest.mark.parametrize("content", ["", "a,b,c\n", ",a\n0,1\n", "1,2\n1\n"], ids=repr)
def test_files_without_an_array_are_refused_in_one_line(arrays, tmp_path, command, content):
    np.savez("arrays.npz", **arrays)
    (tmp_path / "small.csv").write_text(content)
    np.save("large.npy", arrays["large"])
    words = ["small=small.csv", "large=large.npy", "--labels", "large.npy"]
    code, out, error = command("evaluate", *words, "--policy", "policy.json")
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert "small.csv does not hold an array" in error
