import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from synthetic import chain

from cauc_ray.errors import BudgetError, ConfigError, PolicyError
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.serving.policies_live import KeptPolicy, PolicyChange, PolicyStore, digest

DATA = chain(4)
RF = fit_rf(DATA, DATA)
BASE = fit_base(DATA, DATA)


def test_a_change_names_a_policy_by_path_or_content_and_a_number_for_it(tmp_path):
    BASE.save(tmp_path / "base.json")
    content = json.loads((tmp_path / "base.json").read_text())
    for policy in (str(tmp_path / "base.json"), content):
        assert PolicyChange.of({"policy": policy}).applied(RF) == BASE
        assert PolicyChange.of({"policy": policy, "threshold": 0.7}).applied(RF).id == BASE.with_threshold(0.7).id
    assert PolicyChange.of({"threshold": 0.7}).applied(RF).id == RF.with_threshold(0.7).id
    budget = (RF.curve[0].cost + RF.curve[-1].cost) / 2
    assert PolicyChange.of({"budget": budget}).applied(RF).id == RF.with_budget(budget).id


def of_kind(kind):
    """Return the RF policy as it were fitted on logits of another kind."""
    content = RF.model_dump(mode="json")
    stages = [{**stage, "logit_kind": kind} for stage in content["stages"]]
    return {**content, "logit_kind": kind, "stages": stages}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "names a policy, a threshold or a budget"),
        ({"policies": "x"}, "unknown key 'policies'"),
        ({"threshold": 0.5, "budget": 3.0}, "not both"),
        ({"threshold": "high"}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
        ({"threshold": -1.0}, "threshold"),
        ({"policy": "nowhere.json"}, "there is no policy file"),
        ({"policy": {"format": "cauc-policy/2"}}, "cauc-policy/1"),
        (
            {"policy": fit_rf(chain(strengths=(1.0, 2.0)), rule=ThresholdRule(0.5)).model_dump(mode="json")},
            "what runs is",
        ),
        ({"policy": {**RF.model_dump(mode="json"), "cost_unit": "USD"}}, "counts costs in USD"),
        ({"policy": {**RF.model_dump(mode="json"), "logit_kind": "other"}}, "of the kind 'other'"),
        ({"policy": of_kind("surrogate")}, "of the kind 'surrogate'"),
        (["policy"], "no change of policy"),
    ],
)
def test_a_change_that_cannot_be_is_refused_in_one_line(change, says):
    with pytest.raises((PolicyError, ConfigError)) as error:
        PolicyChange.of(change).applied(RF)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_budget_below_all_points_is_refused():
    with pytest.raises(BudgetError):
        PolicyChange.of({"budget": RF.curve[0].cost / 2}).applied(RF)


@pytest.mark.usefixtures("ray_session")
def test_what_is_kept_is_read_by_all_who_know_the_key():
    store = PolicyStore("one")
    assert store.read() is None
    first, second = KeptPolicy(RF, digest({"a": 1}), None, 1), KeptPolicy(BASE, digest({"a": 2}), "it does not fit", 2)
    assert store.append(first)
    assert PolicyStore("one").read() == first
    assert store.append(second)
    assert PolicyStore("one").read() == store.read() == second
    assert PolicyStore("two").read() is None
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1})


@pytest.mark.usefixtures("ray_session")
def test_of_many_writers_each_version_has_one_and_all_read_the_same_order():
    """Each writer changes the number that it has read, until its change is a version: none is lost."""
    n_writers, n_each, seen = 6, 5, []

    def write(number):
        store, mine = PolicyStore("many"), 0
        while mine < n_each:
            kept = store.read()
            version, threshold = (0, 0.0) if kept is None else (kept.version, kept.policy.threshold)
            if store.append(KeptPolicy(RF.with_threshold(threshold + 1 / 128), str(number), None, version + 1)):
                mine += 1
                seen.append((version + 1, number))

    with ThreadPoolExecutor(n_writers) as pool:
        list(pool.map(write, range(n_writers)))
    assert sorted(version for version, _ in seen) == list(range(1, n_writers * n_each + 1))
    last = PolicyStore("many").read()
    assert (last.version, last.policy.threshold) == (n_writers * n_each, n_writers * n_each / 128)
    assert last.config == str(dict(seen)[last.version])
    assert not PolicyStore("many").append(KeptPolicy(BASE, "late", None, 3))
