"""`cauc fit --certify` and what `cauc evaluate` says of guarantees."""

import json

import pytest
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import ConfigError

CHAIN = ["--models", "m0,m1,m2"]
LIMIT = "risk<=0.1@0.9"


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home") / "LOGITS"
    write_table(folder, n=1500)
    return folder


@pytest.fixture
def cauc(table, tmp_path, command):
    (tmp_path / "LOGITS").symlink_to(table)

    return command


@pytest.mark.parametrize("method", ["base", "rf"])
def test_a_certified_fit_says_what_it_promises_and_costs(cauc, table, method):
    fit = ["fit", "LOGITS", *CHAIN, "--method", method, "--certify", LIMIT, "-o", "p.json"]
    code, out, _ = cauc(*fit)
    assert code == 0
    assert "certified with 90 % confidence: at most 10 % of early answers are wrong" in out
    assert "points less than at" in out
    said = json.loads(cauc(*fit, "--json")[1])
    policy = cauc_ray.fit(table, models=["m0", "m1", "m2"], method=method, certify=LIMIT)
    assert said["policy_id"] == policy.id
    assert said["threshold_choice"]["certificate"] == policy.threshold_choice.certificate.model_dump()
    code, out, _ = cauc("show", "p.json")
    assert "certified with 90 %" in out
    assert "certified at most 10 %" in cauc("evaluate", "LOGITS", "--policy", "p.json")[1]


def test_where_none_is_certified_one_line_says_so_and_nothing_is_written(cauc, tmp_path):
    code, out, err = cauc("fit", "LOGITS", *CHAIN, "--certify", "risk<=0.0001@0.95", "-o", "p.json")
    assert (code, out) == (2, "")
    assert err.startswith("cauc: error: no threshold is certified: at ")
    assert err.count("\n") == 1
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--certify", "risk<0.05@0.95"], "'risk<0.05@0.95' is not of the form"),
        (["--certify", "risk<=5@0.95"], "a risk to certify must lie between 0 and 1, got 5"),
        (["--certify", ""], "is not of the form"),
        (["--certify", LIMIT, "--budget", "9"], "each decides it alone"),
        (["--certify", LIMIT, "--threshold", "0.9"], "each decides it alone"),
        (["--certify", LIMIT, "--objective", "macro-f1"], "an objective chooses a threshold"),
        (["--certify", LIMIT, "--validation-split", "none"], "needs a validation split"),
    ],
)
def test_what_cannot_be_certified_is_refused_in_one_line(cauc, tmp_path, options, says):
    code, out, err = cauc("fit", "LOGITS", *CHAIN, *options, "-o", "p.json")
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "p.json").exists()


def test_in_python_it_excludes_the_same(table):
    with pytest.raises(ConfigError, match="each decides it alone"):
        cauc_ray.fit(table, models=["m0", "m1"], certify=LIMIT, budget=3.0)


@pytest.mark.parametrize("method", ["base", "rf"])
def test_an_evaluation_sets_each_promise_beside_what_came(cauc, method):
    cauc("fit", "LOGITS", *CHAIN, "--method", method, "-o", "p.json")
    result = json.loads(cauc("evaluate", "LOGITS", "--policy", "p.json", "--json")[1])
    *inner, last = result["stages"]
    assert last["guarantees"] is None
    for stage in inner:
        of = stage["guarantees"]
        assert of["coverage"] == pytest.approx(stage["answered"] / stage["reached"])
        assert of["accepted_accuracy"] == pytest.approx(stage["accepted_accuracy"])
        bound = result["threshold"] - of["epsilon"] / of["coverage"]
        assert of["accepted_accuracy_bound"] == pytest.approx(bound)
        assert bound <= stage["accepted_accuracy"] + 1e-9
        assert of["threshold_regret_bound"] == pytest.approx(of["epsilon"] + of["fallback_variation"])
        assert -1e-9 <= of["threshold_regret"] <= of["threshold_regret_bound"] + 1e-9
    early = result["early"]
    n_wrong = sum(stage["answered"] * (1 - stage["accepted_accuracy"]) for stage in inner)
    assert early["n"] == sum(stage["answered"] for stage in inner)
    assert early["risk"] == pytest.approx(n_wrong / early["n"])
    assert early["risk_interval"][0] < early["risk"] < early["risk_interval"][1]
    assert early["certified_risk"] is None
    out = cauc("evaluate", "LOGITS", "--policy", "p.json")[1]
    assert all(word in out for word in ("at least", "regret", "answered before the last stage"))
