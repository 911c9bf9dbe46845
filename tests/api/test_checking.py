"""`cauc check`: its words, figures and exit codes."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import PolicyError

MODELS = ["m0", "m1", "m2"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    write_table(folder / "same", n=1500)
    write_table(folder / "other", n=1500, strengths=(0.2, 0.9, 2.4))
    return folder


@pytest.fixture
def cauc(tables, tmp_path, command):
    for name in ("same", "other"):
        (tmp_path / name).symlink_to(tables / name)

    assert command("fit", "same", "--models", "m0,m1,m2", "--method", "rf", "-o", "p.json")[0] == 0
    return command


def test_a_policy_holds_on_new_rows_and_not_where_models_have_changed(cauc):
    code, out, err = cauc("check", "same", "--policy", "p.json")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "the policy is valid"
    code, out, err = cauc("check", "other", "--policy", "p.json")
    assert (code, err) == (3, "")
    assert out.splitlines()[-1].startswith("the policy has drifted: ")
    code, out, _ = cauc("check", "other", "--policy", "p.json", "--json")
    found = json.loads(out)
    assert code == 3
    assert found["holds"] is False
    assert found == cauc_ray.check("other", cauc_ray.Policy.load("p.json")).as_json()


def test_figures_are_those_of_an_evaluation_whatever_the_order(cauc):
    policy = cauc_ray.Policy.load("p.json")
    measures = cauc_ray.evaluate("same", policy).measures
    for seed in range(3):
        found = cauc_ray.check("same", policy, seed=seed).as_json()
        assert found["cost"][0] == pytest.approx(measures.cost)
        for stage, expected in zip(found["stages"], measures.stages, strict=True):
            share = expected.accepted_accuracy
            assert stage["n"] == expected.answered
            assert stage["accepted_accuracy"] == pytest.approx([share.value, share.low, share.high])


def test_rows_without_labels_are_watched_for_what_needs_none(cauc, tables, tmp_path):
    (tmp_path / "blind").mkdir()
    for file in (tables / "other").rglob("*.parquet"):
        table, target = pq.read_table(file), tmp_path / "blind" / file.relative_to(tables / "other")
        target.parent.mkdir(parents=True)
        pq.write_table(table.set_column(1, "label", pa.nulls(len(table), pa.int32())), target)
    (tmp_path / "blind" / "pool.json").write_text((tables / "other" / "pool.json").read_text())
    code, out, _ = cauc("check", "blind", "--policy", "p.json", "--json")
    found = json.loads(out)
    assert code == 3
    assert (found["n"], found["n_labelled"]) == (1500, 0)
    features = {feature["name"]: feature for feature in found["features"]}
    assert features["accuracy"]["evidence"] is None
    assert not features["confidence"]["holds"]
    assert "labelled" in cauc("check", "blind", "--policy", "p.json")[1]


def test_what_cannot_be_checked_is_refused_in_one_line(cauc):
    cauc("fit", "same", "--models", "m0,m1,m2", "--method", "base", "-o", "p.json")
    policy = cauc_ray.Policy.load("p.json").with_threshold(0.5)
    policy.save("other.json")
    for arguments, says in (
        (["check", "same", "--policy", "other.json"], "fit it at this threshold"),
        (["check", "same", "--policy", "none.json"], "there is no policy file"),
        (["check", "nowhere", "--policy", "p.json"], "nowhere"),
        (["check", "same", "--policy", "p.json", "--split", "dev"], "dev"),
        (["check", "same", "--policy", "p.json", "--seed", "-1"], "seed: "),
    ):
        code, out, err = cauc(*arguments)
        assert (code, out) == (2, "")
        assert says in err
        assert err.count("\n") == 1
    assert "cannot be watched at this threshold" in cauc("show", "other.json")[1]


def test_a_policy_without_a_labelled_validation_has_no_reference(cauc):
    assert cauc_ray.fit("same", models=MODELS, threshold=0.7, validation_split="none").reference is None


def test_a_policy_may_be_given_by_its_file(cauc, tmp_path):
    policy = cauc_ray.Policy.load("p.json")
    for file in ("p.json", tmp_path / "p.json"):
        assert cauc_ray.check("same", file).as_json() == cauc_ray.check("same", policy).as_json()
        assert cauc_ray.evaluate("same", file).measures == cauc_ray.evaluate("same", policy).measures
    for verb in (cauc_ray.check, cauc_ray.evaluate):
        with pytest.raises(PolicyError, match="no policy file"):
            verb("same", "nowhere.json")
