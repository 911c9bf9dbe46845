"""Every method that can be compared can be fitted, saved, run and served: live, replay and comparison are the same."""

import json
from dataclasses import replace

import numpy as np
import planted
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from asking import infer, outputs_of
from runs import answers_of

import cauc_ray
from cauc_ray.errors import BudgetError, CaucError, ConfigError, PolicyError
from cauc_ray.policies.methods import METHODS
from cauc_ray.policies.policy import Policy

CONTROLS = ["duo", "margin", "max-probability", "random", "single:m1"]
LOOKING = [
    *(
        "frugalgpt",
        "cascade-routing",
        "post-hoc-embed",
        "routerdc",
        "benchmark-routing",
        "routellm-mf",
        "routellm-sw",
        "graphrouter",
    ),
    "embedllm",
]
ROUTERS = [name for name in LOOKING if METHODS[name].paradigm == "router"]
STACKED = ["stacked-competence", "stacked-both"]
EVERY = [(name, None) for name in (*CONTROLS, *LOOKING)] + [(name, "enc") for name in (*LOOKING, *STACKED)]
MODELS = ("m0", "m1", "m2")
BUDGET = 12.0
every = pytest.mark.parametrize(("method", "embedding"), EVERY, ids=lambda value: str(value))
# Runs and reports take seconds; those of a router, a cascade with an encoder and one of any order are always made.
QUICK = [("embedllm", None), ("stacked-both", "enc"), ("cascade-routing", "enc")]
some = pytest.mark.parametrize(
    ("method", "embedding"),
    [pytest.param(*each, marks=[] if each in QUICK else pytest.mark.soak("full")) for each in EVERY],
    ids=lambda value: str(value),
)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        planted.train_quickly(patch)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a logit table of 300 test rows, whose questions have two to five options."""
    folder = tmp_path_factory.mktemp("methods")
    fitting, test = planted.problem(3, n=250, n_test=300, m=3, k=5, ragged=True)
    splits = {"calibration": fitting.calibration, "validation": fitting.validation, "test": test}
    planted.write_table(folder / "LOGITS", splits)
    return folder


@pytest.fixture(scope="module")
def policies(home):
    """Return a function that fits a method once, at the budget where it has more than one setting."""
    known = {}

    def fitted(method, embedding=None):
        if (method, embedding) not in known:
            budget = None if method == "duo" or method.startswith("single") else BUDGET
            known[method, embedding] = cauc_ray.fit(
                home / "LOGITS", method=method, embedding=embedding, budget=budget, seed=2
            )
        return known[method, embedding]

    return fitted


@every
def test_a_policy_answers_as_the_method_does_in_a_comparison(home, policies, method, embedding):
    policy = policies(method, embedding)
    assert policy.encoder == embedding
    found = cauc_ray.evaluate(home / "LOGITS", policy).measures
    names = [method.partition(":")[0]]
    row = cauc_ray.compare(home / "LOGITS", methods=names, embedding=embedding, budget=BUDGET, seed=2).row(method)
    assert (found.accuracy.value, found.cost) == pytest.approx((row["accuracy"], row["cost"]), rel=1e-12)
    reached = {stage.name: stage.reached / found.n for stage in found.stages if stage.name != embedding}
    assert {name: reached.get(name, 0.0) for name in MODELS} == pytest.approx(row["calls"])
    if policy.budget is not None:
        assert policy.expected.cost <= BUDGET


@every
def test_a_policy_survives_its_file(home, policies, tmp_path, method, embedding):
    policy = policies(method, embedding)
    policy.save(tmp_path / "policy.json")
    again = cauc_ray.Policy.load(tmp_path / "policy.json")
    assert again == policy
    assert again.id == policy.id
    content = json.loads((tmp_path / "policy.json").read_text())
    has_arrays = content["arrays_sha256"] is not None
    assert (tmp_path / "policy.safetensors").exists() == has_arrays
    assert has_arrays == (method in LOOKING + STACKED)
    before, after = (cauc_ray.evaluate(home / "LOGITS", own) for own in (policy, tmp_path / "policy.json"))
    assert before.predictions.to_arrow().equals(after.predictions.to_arrow())
    assert cauc_ray.Policy.of(policy.packed()) == policy


@every
def test_no_answer_depends_on_the_rows_that_come_with_it(home, policies, method, embedding):
    policy = policies(method, embedding)
    whole = cauc_ray.evaluate(home / "LOGITS", policy)
    chain = whole.chain
    for row in (0, 7, 123):
        alone = replace(whole, chain=chain).of(policy, chain.of_rows(np.array([row]))).replay
        for name in ("predictions", "confidences", "stages", "costs"):
            assert getattr(alone, name)[0] == getattr(whole.replay, name)[row]


def write_pool(home, models):
    """Write a pool whose stages answer from the table, the encoder among them."""
    stages = []
    for name in models:
        saved = {"kind": "saved", "logits": str(home / "LOGITS"), "model": name, "split": "test"}
        own = saved | ({"logit_kind": "embedding"} if name == "enc" else {})
        stages.append({"name": name, "model": own, "batch_size": 32, "resources": {"num_cpus": 0.5}})
    path = home / "pool.yaml"
    inputs = {"example_id": {"datatype": "BYTES"}}
    path.write_text(yaml.safe_dump({"name": "test", "task": "classification", "stages": stages, "inputs": inputs}))
    return path


@pytest.mark.usefixtures("ray_session")
@some
def test_a_run_is_the_replay(home, policies, tmp_path, method, embedding):
    policy = policies(method, embedding)
    expected = cauc_ray.evaluate(home / "LOGITS", policy)
    ids = list(expected.predictions.example_ids)
    pq.write_table(pa.table({"example_id": ids, "label": expected.chain.labels}), tmp_path / "rows.parquet")
    pool = write_pool(home, ("m2", "enc", "m0", "m1"))
    summary = cauc_ray.run(pool, policy, tmp_path / "rows.parquet", tmp_path / "out")
    found = answers_of(tmp_path / "out")
    wanted = expected.predictions.to_arrow().to_pylist()
    assert [{key: found[row["example_id"]][key] for key in row} for row in wanted] == wanted
    assert summary["cost"] == pytest.approx(expected.measures.cost)
    assert summary["accuracy"]["value"] == pytest.approx(expected.measures.accuracy.value)
    shown = [(stage.name, stage.reached, stage.answered) for stage in expected.measures.stages]
    assert [(stage["name"], stage["reached"], stage["answered"]) for stage in summary["stages"]] == shown


@every
def test_a_service_answers_as_the_replay(home, policies, method, embedding):
    policy = policies(method, embedding)
    expected = cauc_ray.evaluate(home / "LOGITS", policy).predictions
    asked = list(expected.example_ids[:150])
    with cauc_ray.serve(write_pool(home, ("m2", "enc", "m0", "m1")), policy, port=0, local=True) as service:
        outputs = ("prediction", "stage", "cost", "confidence")
        for rows in (slice(0, 1), slice(1, 150)):
            status, content = infer(service.url, "test", {"example_id": asked[rows]}, outputs)
            assert status == 200, content
            found = outputs_of(content)
            for name in outputs:
                np.testing.assert_allclose(found[name], getattr(expected, name)[:150][rows], rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["margin", "frugalgpt", "benchmark-routing"])
def test_a_service_takes_another_budget_and_a_policy_with_its_arrays(home, policies, method):
    first, second = policies(method), policies(method).with_budget(20.0)
    assert second.threshold != first.threshold
    asked = list(cauc_ray.evaluate(home / "LOGITS", first).predictions.example_ids[:60])
    with cauc_ray.serve(write_pool(home, first.models), first, port=0, local=True) as service:
        for change in ({"budget": 20.0}, {"policy": first}, {"threshold": second.threshold}):
            now = first if "policy" in change else second
            assert cauc_ray.set_policy(url=service.url, **change)["policy_id"] == now.id
            expected = cauc_ray.evaluate(home / "LOGITS", now).predictions
            _, content = infer(service.url, "test", {"example_id": asked}, ("prediction", "stage"))
            assert (outputs_of(content)["stage"] == expected.stage[:60]).all()


def test_a_router_in_a_service_that_loses_the_chosen_stage_says_so(home, policies):
    """It knows no other answer, unless it has read the first model's."""
    policy = policies("benchmark-routing", "enc")
    with cauc_ray.serve(write_pool(home, policy.models), policy, port=0, local=True) as service:
        status, content = infer(service.url, "test", {"example_id": ["test-2-0"]}, (), {"max_stage": 1})
    assert status == 422
    assert "does not call stages in order" in content["error"]


@every
def test_checks_hold_on_the_rows_that_the_policy_was_chosen_on(home, policies, method, embedding):
    found = cauc_ray.check(home / "LOGITS", policies(method, embedding), split="validation")
    assert found.holds
    assert found.as_json()["n"] == 250
    assert found.as_json()["cost"][0] == pytest.approx(policies(method, embedding).expected.cost)


@pytest.mark.parametrize(("method", "embedding"), [*QUICK, ("margin", None)], ids=lambda value: str(value))
def test_checks_hold_on_new_rows_and_not_on_others(home, policies, method, embedding):
    """Of the others every answer is wrong that was right, or all were answered by the last model."""
    policy = policies(method, embedding)
    assert cauc_ray.check(home / "LOGITS", policy).holds
    found = cauc_ray.evaluate(home / "LOGITS", policy)
    arrays, labels = dict(zip(found.chain.models, found.chain.logits, strict=True)), (found.chain.labels + 1) % 2
    relabelled = cauc_ray.check(arrays, policy, labels=labels)
    assert not relabelled.holds
    assert relabelled.watched.evidence["accuracy"].at is not None
    if method in ("duo", "random"):  # the one has no early answers, the other chooses by ids, not by what rows are
        return
    late = np.resize(np.flatnonzero(found.replay.stages == len(policy.stages) - 1), len(labels))
    harder = {name: own[late] for name, own in arrays.items()}
    assert cauc_ray.check(harder, policy).watched.evidence["confidence"].at is not None


def test_a_check_sees_that_other_models_are_chosen(home, policies, tmp_path):
    """The embeddings of all rows are those of rows that only the last model gets right."""
    policy, table = policies("benchmark-routing", "enc"), home / "LOGITS"
    chain = cauc_ray.evaluate(table, policy).chain
    last = np.flatnonzero(cauc_ray.evaluate(table, policy).replay.stages == 3)
    arrays = dict(zip(chain.models, chain.logits, strict=True))
    arrays["enc"] = chain.logits[0][np.resize(last, len(chain))]
    found = cauc_ray.check(arrays, policy, labels=chain.labels)
    assert not found.holds
    assert found.watched.evidence["confidence"].at is not None


@pytest.mark.parametrize("method", ["frugalgpt", "routerdc"])
def test_arrays_that_are_missing_or_others_are_refused_in_one_line(policies, tmp_path, method):
    policies(method).save(tmp_path / "policy.json")
    arrays = tmp_path / "policy.safetensors"
    content = arrays.read_bytes()
    arrays.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PolicyError, match="its sha256 is not") as changed:
        cauc_ray.Policy.load(tmp_path / "policy.json")
    arrays.unlink()
    with pytest.raises(PolicyError, match=r"policy\.safetensors, which does not exist") as missing:
        cauc_ray.Policy.load(tmp_path / "policy.json")
    with pytest.raises(PolicyError, match="give it by its path") as alone:
        cauc_ray.Policy.of(json.loads((tmp_path / "policy.json").read_text()))
    assert not any("\n" in str(error.value) for error in (changed, missing, alone))


def test_the_id_covers_arrays_and_what_a_router_weighs(policies):
    policy = policies("embedllm", "enc")
    moved = {name: array + 0.5 for name, array in policy.arrays.items()}
    costlier = tuple(stage.model_copy(update={"cost": 2 * stage.cost}) for stage in policy.stages)
    others = [policy.with_arrays(moved), policy.model_copy(update={"stages": costlier}), policy.with_threshold(-0.5)]
    assert len({policy.id, *(other.id for other in others)}) == 4


def test_a_budget_chooses_another_solution_of_frugalgpt_and_cheaper_ones_are_found(home, policies):
    policy = policies("frugalgpt")
    lowest = min(point.cost for point in policy.curve)
    with pytest.raises(BudgetError, match="below the cheapest"):
        policy.with_budget(0.9 * lowest)
    costs = []
    for budget in np.linspace(lowest, policy.curve[-1].cost, 4):
        own = policy.with_budget(budget)
        costs.append(cauc_ray.evaluate(home / "LOGITS", own, split="validation").measures.cost)
        assert costs[-1] <= budget * (1 + 1e-9)
    assert costs == sorted(costs)


def test_costs_name_the_encoder_whose_calls_are_then_paid(home):
    costs = {"m0": 1.0, "m1": 10.0, "m2": 30.0}
    asked = {"method": "benchmark-routing", "embedding": "enc"}
    free = cauc_ray.fit(home / "LOGITS", **asked, costs=costs)
    paid = cauc_ray.fit(home / "LOGITS", **asked, costs={**costs, "enc": 0.25})
    assert paid.expected.cost == pytest.approx(free.expected.cost + 0.25)
    assert (free.stages[0].cost, paid.stages[0].cost) == (0.0, 0.25)


def test_arrays_in_memory_have_embeddings_by_the_name_of_the_encoder(home, policies):
    policy = policies("routellm-sw", "enc")
    expected = cauc_ray.evaluate(home / "LOGITS", policy)
    chain, order = expected.chain, np.random.default_rng(0).permutation(300)
    arrays = {name: own[order] for name, own in zip(chain.models, chain.logits, strict=True)}
    found = policy.predict(arrays)
    assert (found.stage == expected.replay.stages[order]).all()
    again = cauc_ray.evaluate(arrays, policy, labels=chain.labels[order])
    assert (again.predictions.prediction == expected.replay.predictions[order]).all()
    for wrong, words in (({}, "which the arrays lack"), ({"enc": np.zeros(300)}, r"must be finite numbers \(300, d\)")):
        left = {name: own for name, own in arrays.items() if name != "enc"}
        with pytest.raises(CaucError, match=words):
            policy.predict({**left, **wrong})


@pytest.mark.parametrize("method", ["max-probability", "embedllm", "frugalgpt"])
def test_a_risk_of_early_answers_is_certified_by_another_score(home, tmp_path, method):
    policy = cauc_ray.fit(home / "LOGITS", method=method, certify="risk<=0.8@0.9")
    assert policy.threshold_choice.certificate.risk == 0.8
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json") == policy


@pytest.mark.parametrize("method", ["margin", "routerdc"])
def test_a_plan_is_for_policies_that_call_models_in_turn(home, policies, method):
    if method == "margin":
        assert policies(method).in_turn
        return
    with pytest.raises(ConfigError, match="does not call its models in turn"):
        cauc_ray.plan(write_pool(home, MODELS), policies(method), rate=10.0)


@some
def test_reports_take_every_policy(home, policies, tmp_path, method, embedding):
    policy = policies(method, embedding)
    policy.save(tmp_path / "policy.json")
    cauc_ray.report(tmp_path, logits=home / "LOGITS")
    page = (tmp_path / "report.html").read_text()
    assert policy.id in page
    assert (tmp_path / "policy-card.md").is_file()
