"""`cauc fit --calibrator`, and what other verbs make of such policies."""

import json

import pytest
from synthetic import write_table

import cauc_ray
from cauc_ray.policies.policy import Policy


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    write_table(folder / "LOGITS", n=300)
    write_table(folder / "RAGGED", n=60, ragged=True)
    return folder


@pytest.fixture
def cauc(home, tmp_path, command):
    for table in ("LOGITS", "RAGGED"):
        (tmp_path / table).symlink_to(home / table)

    return command


@pytest.mark.parametrize(
    ("kind", "models", "words"), [("offsets", "m0,m1,m2", "offsets"), ("isotonic", "m0,m1", "isotonic maps")]
)
def test_a_calibrator_is_fitted_kept_and_shown(cauc, tmp_path, kind, models, words):
    code, out, _ = cauc("fit", "LOGITS", "--models", models, "--calibrator", kind, "-o", "p.json")
    assert code == 0
    assert f"calibrated by temperature and {words}" in " ".join(out.split())
    policy = Policy.load("p.json")
    assert policy.calibrator_kind == kind
    assert policy == cauc_ray.fit("LOGITS", models=models.split(","), calibrator=kind)
    code, out, _ = cauc("show", "p.json")
    assert code == 0
    assert f"calibrated by temperature and {words}" in " ".join(out.split())
    code, out, _ = cauc("evaluate", "LOGITS", "--policy", "p.json", "--json")
    assert code == 0
    assert json.loads(out)["policy_id"] == policy.id


def test_by_default_nothing_is_said_of_it(cauc):
    for options in ([], ["--calibrator", "temperature"]):
        code, out, _ = cauc("fit", "LOGITS", "--models", "m0,m1", *options, "-o", "p.json")
        assert code == 0
        assert "calibrated by" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["LOGITS", "--models", "m0,m1,m2", "--calibrator", "isotonic"], "for method base with one or two models"),
        (["LOGITS", "--models", "m0,m1", "--method", "rf", "--calibrator", "isotonic"], "got rf with 2"),
        (["RAGGED", "--models", "m0,m1", "--calibrator", "offsets"], "lacks some of the 5 options of model 'm0'"),
        (["LOGITS", "--models", "m0,m1", "--calibrator", "platt"], "invalid choice: 'platt'"),
        (
            ["LOGITS", "--models", "m0,m1,m2", "--search", "--budget", "9", "--calibrator", "isotonic"],
            "for method base with one or two models",
        ),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(cauc, tmp_path, arguments, says):
    code, out, err = cauc("fit", *arguments, "-o", "p.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
    assert not (tmp_path / "p.json").exists()


def test_a_replaced_model_is_calibrated_as_the_others_are(home, tmp_path):
    policy = cauc_ray.fit(home / "LOGITS", models=["m0", "m2"], method="rf", calibrator="offsets")
    changed = cauc_ray.replace_model(policy, home / "LOGITS", {"m0": "m1"})
    assert changed.calibrator_kind == "offsets"
    expected = cauc_ray.fit(home / "LOGITS", models=["m1", "m2"], method="rf", calibrator="offsets")
    assert changed == expected


def test_a_search_takes_offsets(home):
    found = cauc_ray.fit(home / "LOGITS", models=["m0", "m1", "m2"], budget=9.0, search=True, calibrator="offsets")
    assert found.calibrator_kind == "offsets"
    assert found.search.chosen.quality == found.expected.accuracy.value
