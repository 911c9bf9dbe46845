"""`cauc fit --search`, from Python and as a command."""

import json
from itertools import combinations
from pathlib import Path

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import BudgetError, CaucWarning, ConfigError
from cauc_ray.policies.policy import Policy
from cauc_ray.schemas import schema_path

POOL = ["m0", "m1", "m2", "m3"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search") / "LOGITS"
    write_table(folder, n=250, strengths=(0.8, 1.4, 1.5, 2.4))
    return folder


@pytest.mark.parametrize("method", ["base", "rf"])
@pytest.mark.parametrize(
    "rule", [{}, {"budget": 8.0}, {"budget": 20.0, "objective": "macro-f1"}, {"threshold": 0.8}], ids=str
)
def test_a_searched_policy_is_the_direct_fit_of_its_models(table, method, rule):
    policy = cauc_ray.fit(table, models=POOL, method=method, search=True, **rule)
    assert policy.search is not None
    assert policy.models == policy.search.chosen.models
    direct = cauc_ray.fit(table, models=policy.models, method=method, **rule)
    assert direct.search is None
    assert policy.model_copy(update={"search": None}) == direct
    assert policy.id == direct.id
    if rule.get("objective") != "macro-f1":
        assert policy.search.chosen.quality == pytest.approx(policy.expected.accuracy.value)
    assert policy.search.chosen.cost == pytest.approx(policy.expected.cost)


def test_given_costs_order_the_pool_and_price_the_chain(table):
    costs = {"m0": 30.0, "m1": 9.0, "m2": 2.0, "m3": 1.0}
    policy = cauc_ray.fit(table, models=POOL, costs=list(costs.values()), method="rf", budget=12.0, search=True)
    assert policy.search.pool == ("m3", "m2", "m1", "m0")
    assert all(stage.cost == costs[stage.name] for stage in policy.stages)


@pytest.mark.filterwarnings("ignore:.*the order is used as given")
@pytest.mark.parametrize("method", ["base", "rf"])
@pytest.mark.parametrize(("name", "pool"), [("priced_mmlu", 9), ("cifar10", 5)])
def test_no_direct_fit_of_the_whole_pool_or_of_a_pair_is_better(shared_logits, method, name, pool):
    names = [model["name"] for model in json.loads((shared_logits / name / "pool.json").read_text())["models"]][:pool]
    budget = {"priced_mmlu": 0.2, "cifar10": 0.08}[name]
    fit = {"method": method, "budget": budget}
    found = cauc_ray.fit(shared_logits / name, models=names[::-1], search=True, **fit)
    whole = found.search.pool
    for models in [whole, *combinations(whole, 2)]:
        try:
            other = cauc_ray.fit(shared_logits / name, models=models, **fit)
        except BudgetError:  # a pair whose first model costs too much
            continue
        assert found.expected.accuracy.value >= other.expected.accuracy.value
    assert found.expected.cost <= budget
    on_test = cauc_ray.evaluate(shared_logits / name, found).measures.accuracy
    assert on_test.low <= found.search.chosen.holdout_quality <= on_test.high


def test_the_command_writes_the_policy_and_shows_what_else_there_was(command, table):
    arguments = ("fit", table, "--models", "m3,m1,m0,m2", "--method", "rf", "--budget", 8, "--search", "-o", "p.json")
    code, out, _ = command(*arguments)
    assert code == 0
    assert "of 15 chains of 4 models" in out
    for row in ("chosen", "best pair", "all models", "best model", "next best"):
        assert row in out
    policy = Policy.load("p.json")
    assert policy.search.pool == tuple(POOL)
    content = json.loads(Path("p.json").read_text())
    jsonschema.validate(content, json.loads(schema_path("policy").read_text()))
    code, out, _ = command(*arguments, "--json")
    assert code == 0
    assert json.loads(out)["search"] == content["search"]
    assert "of 15 chains of 4 models" in command("show", "p.json")[1]
    code, out, _ = command("evaluate", table, "--policy", "p.json", "--json")
    assert json.loads(out)["policy_id"] == policy.id


def test_examples_that_only_other_models_failed_on_count_in_the_policy(tmp_path):
    """A model that is never chosen, and failed on some examples, changes nothing of the policy of the others."""
    write_table(tmp_path, n=120, strengths=(-3.0, 1.0, 2.0))
    for split in ("calibration", "validation"):
        failed = tmp_path / "failed" / "model=m0" / f"split={split}"
        failed.mkdir(parents=True)
        place = ("calibration", "validation").index(split)
        ids = [f"{split}-{place}-{row:05d}" for row in range(5)]
        columns = {"example_id": ids, "reason": ["damaged"] * 5}
        pq.write_table(pa.table(columns), failed / "part-0.parquet")
    with pytest.warns(CaucWarning, match="left out"):
        policy = cauc_ray.fit(tmp_path, models=["m0", "m1", "m2"], method="rf", search=True)
    assert "m0" not in policy.models
    assert policy.calibration.n == policy.validation.n == 120
    direct = cauc_ray.fit(tmp_path, models=policy.models, method="rf")
    assert policy.model_copy(update={"search": None}) == direct


def test_another_budget_keeps_the_record_of_the_search(table):
    policy = cauc_ray.fit(table, models=POOL, method="rf", budget=8.0, search=True)
    changed = policy.with_budget(6.0)
    assert (changed.budget, changed.search) == (6.0, policy.search)


def test_bad_input_is_one_line(command, table, tmp_path):
    code, _, err = command("fit", table, "--models", ",".join(POOL), "--budget", 0.5, "--search", "-o", "p.json")
    assert code == 2
    assert err.count("\n") == 1
    assert "budget 0.5 GFLOPs is below the cost of the cheapest chain, 1 GFLOPs ('m0' alone)" in err
    thirteen = {f"m{place}": [[0.0, 1.0]] * 4 for place in range(13)}
    with pytest.raises(ConfigError, match="up to 12 models, got 13"):
        cauc_ray.fit(thirteen, [0, 1, 0, 1], search=True)
    code, _, err = command(
        "fit", table, "--models", "m0,m1", "--validation-split", "nowhere", "--search", "-o", "p.json"
    )
    assert (code, err.count("\n")) == (2, 1)
    assert "validation split" in err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="is a duplicate"):
        cauc_ray.fit(table, models=["m0", "m0"], search=True)
