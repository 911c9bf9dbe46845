"""What `cauc fit` says of guards, `--strict` and `--safe`, and `cauc evaluate` of costs."""

import json

import numpy as np
import pytest
from synthetic import chain, write_table

import cauc_ray
from cauc_ray.data.writing import write_logits
from cauc_ray.errors import ConfigError, GuardError

CHAIN = ["--models", "m0,m1,m2"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of three models whose fit fires guards: too few examples."""
    folder = tmp_path_factory.mktemp("home") / "LOGITS"
    write_table(folder, n=150)
    return folder


@pytest.fixture
def cauc(table, tmp_path, command):
    (tmp_path / "LOGITS").symlink_to(table)

    return command


@pytest.mark.parametrize("method", ["base", "rf"])
def test_what_fires_is_one_line_each_and_a_field_of_the_file(cauc, method):
    fit = ["fit", "LOGITS", *CHAIN, "--method", method, "-o", "p.json"]
    code, out, err = cauc(*fit)
    assert code == 0
    said = json.loads(cauc(*fit, "--json")[1])
    fired = [guard for guard in said["guards"] if guard["fired"]]
    assert "few-examples" in {guard["name"] for guard in fired}
    assert len(fired) < len(said["guards"])
    warned = [f"warning: {guard['name']}: {guard['says']}" for guard in fired]
    assert err.splitlines() == [f"cauc: {line}" for line in warned]
    assert "warning:" not in out
    assert f"guards: {len(said['guards'])} looked at, {len(fired)} warnings: " in out
    with open("p.json") as file:
        assert json.load(file)["guards"] == said["guards"]
    inspected = [line for line in cauc("show", "p.json")[1].splitlines() if line.startswith("warning: ")]
    assert inspected == warned


def test_where_none_fires_one_line_says_how_many_were_looked_at(cauc, tmp_path):
    write_table(tmp_path / "enough", n=2000, strengths=(3.0,))
    code, out, _ = cauc("fit", "enough", "--models", "m0", "-o", "p.json")
    assert code == 0
    assert "guards: 3 looked at, all quiet\n" in out
    assert cauc("fit", "enough", "--models", "m0", "--strict", "-o", "strict.json")[0] == 0
    assert (tmp_path / "strict.json").read_text() == (tmp_path / "p.json").read_text()


def test_a_strict_fit_is_an_error_that_names_all_that_has_fired_and_writes_nothing(cauc, table, tmp_path):
    policy = cauc_ray.fit(table, models=["m0", "m1", "m2"])
    fired = [guard for guard in policy.guards if guard.fired]
    code, out, err = cauc("fit", "LOGITS", *CHAIN, "--strict", "-o", "p.json")
    assert (code, out) == (2, "")
    assert err.startswith(f"cauc: error: {fired[0].name}: {fired[0].says}")
    assert err.count("\n") == 1
    for guard in fired:
        assert guard.name in err
    assert not (tmp_path / "p.json").exists()
    with pytest.raises(GuardError) as error:
        cauc_ray.fit(table, models=["m0", "m1", "m2"], strict=True)
    assert error.value.guards == tuple(fired)


@pytest.mark.parametrize("options", [[], ["--budget", "9"], ["--threshold", "0.8"]])
def test_a_safe_fit_says_what_it_changed(cauc, table, options):
    code, out, _ = cauc("fit", "LOGITS", *CHAIN, "--method", "rf", "--safe", *options, "-o", "p.json")
    assert code == 0
    named = {option[2:]: float(value) for option, value in zip(options[::2], options[1::2], strict=True)}
    policy = cauc_ray.fit(table, models=["m0", "m1", "m2"], method="rf", safe=True, **named)
    assert f"safe: {policy.safe.says}\n" in out
    assert cauc_ray.Policy.load("p.json") == policy


@pytest.mark.parametrize("other", [["--search"], ["--certify", "risk<=0.2@0.9"]])
def test_what_cannot_be_safe_as_well_is_refused_in_one_line(cauc, table, tmp_path, other):
    code, out, err = cauc("fit", "LOGITS", *CHAIN, "--safe", *other, "-o", "p.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "leave" in err
    assert not (tmp_path / "p.json").exists()
    more = {"search": True} if other == ["--search"] else {"certify": other[1]}
    with pytest.raises(ConfigError, match="leave"):
        cauc_ray.fit(table, models=["m0", "m1", "m2"], safe=True, **more)


def test_an_evaluation_warns_where_costs_are_not_those_expected(cauc, tmp_path):
    folder = tmp_path / "two"
    write_table(folder, n=1500, strengths=(1.0, 2.5))
    assert cauc("fit", "two", "--models", "m0,m1", "--budget", "3.5", "-o", "p.json")[0] == 0
    code, _, err = cauc("evaluate", "two", "--policy", "p.json")
    assert (code, err) == (0, "")
    # The same questions, to a first model that is less sure.
    harder = chain(8, 1500, 5, (0.3, 2.5))
    for place, model in enumerate(("m0", "m1")):
        ids = [f"harder-{row}" for row in range(1500)]
        write_logits(folder, model, "harder", example_ids=ids, labels=harder.labels, logits=list(harder.logits[place]))
    code, out, err = cauc("evaluate", "two", "--policy", "p.json", "--split", "harder")
    assert (code, "warning:" in out) == (0, False)
    (warned,) = err.splitlines()
    found = json.loads(cauc("evaluate", "two", "--policy", "p.json", "--split", "harder", "--json")[1])
    (guard,) = found["guards"]
    assert warned == f"cauc: warning: cost-shift: {guard['says']}"
    assert guard["figures"]["cost"] == found["cost"]
    assert "a budget of 3.5" in warned
    assert np.isclose(guard["figures"]["expected_cost"], cauc_ray.Policy.load("p.json").expected.cost)
