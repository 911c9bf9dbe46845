"""A policy of every method through each verb: fit, evaluate, run, serve, check and report agree with the comparison.

What a policy answers by itself is tested in tests/policies/test_methods.py.
"""

import json
from contextlib import ExitStack

import numpy as np
import planted
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from asking import infer, outputs_of
from runs import answers_of

import cauc_ray
from cauc_ray.errors import CaucError, ConfigError, PolicyError
from cauc_ray.policies.method import METHODS

CONTROLS = ["duo", "margin", "max-probability", "random", "single:m1"]
ROUTERS = [name for name, method in METHODS.items() if method.paradigm == "router" and method.needs != "texts"]
LEARNED = ["frugalgpt", "cascade-routing", "post-hoc-embed", *ROUTERS]
EVERY = [(name, None) for name in (*CONTROLS, *LEARNED)] + [(name, "enc") for name in (*LEARNED, "stacked")]
# A router, a cascade with an encoder, and one that calls models in any order.
QUICK = [("embedllm", None), ("stacked", "enc"), ("cascade-routing", "enc")]
MODELS = ("m0", "m1", "m2")
BUDGET = 12.0


def others_soak(quick):
    """Run a test for some of the methods here and for all others in the soak."""
    rest = [pytest.param(*case, marks=pytest.mark.soak("full")) for case in EVERY if case not in quick]
    return pytest.mark.parametrize(("method", "embedding"), [*quick, *rest], ids=str)


@pytest.fixture(scope="module", autouse=True)
def _short_training():
    with pytest.MonkeyPatch.context() as patch:
        planted.train_quickly(patch)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a logit table of 300 test rows, whose questions have two to five options, and a pool."""
    folder = tmp_path_factory.mktemp("methods")
    fitting, test = planted.problem(3, n=250, n_test=300, m=3, k=5, ragged=True)
    splits = {"calibration": fitting.calibration, "validation": fitting.validation, "test": test}
    planted.write_table(folder / "LOGITS", splits)
    stages = []
    for name in ("m2", "enc", "m0", "m1"):
        model = {"kind": "saved", "logits": str(folder / "LOGITS"), "model": name, "split": "test"}
        model |= {"logit_kind": "embedding"} if name == "enc" else {}
        stages.append({"name": name, "model": model, "batch_size": 32, "resources": {"num_cpus": 0.5}})
    pool = {"name": "test", "task": "classification", "stages": stages, "inputs": {"example_id": {"datatype": "BYTES"}}}
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    return folder


@pytest.fixture(scope="module")
def policies(home):
    """Return a function that fits a method once, at the budget where it has more than one setting."""
    fits = {}

    def policy_of(method, embedding=None):
        if (method, embedding) not in fits:
            budget = None if method == "duo" or method.startswith("single") else BUDGET
            options = {"method": method, "embedding": embedding, "budget": budget, "seed": 2}
            fits[method, embedding] = cauc_ray.fit(home / "LOGITS", **options)
        return fits[method, embedding]

    return policy_of


@pytest.fixture(scope="module")
def service_of(home):
    """Return a function that puts a policy into force in the service of its stages."""
    with ExitStack() as stack:
        services = {}

        def service(policy):
            if policy.models in services:
                assert cauc_ray.set_policy(url=services[policy.models].url, policy=policy)["policy_id"] == policy.id
            else:
                served = cauc_ray.serve(home / "pool.yaml", policy, port=0, local=True)
                services[policy.models] = stack.enter_context(served)
            return services[policy.models]

        yield service


@others_soak([*QUICK, ("frugalgpt", None), ("post-hoc-embed", None), ("routellm-mf", "enc"), ("margin", None)])
def test_a_service_answers_as_the_replay(home, policies, service_of, method, embedding):
    """Asked for rows alone and together."""
    policy, outputs = policies(method, embedding), ("prediction", "stage", "cost", "confidence")
    service, predictions = service_of(policy), cauc_ray.evaluate(home / "LOGITS", policy).predictions
    for rows in (slice(0, 1), slice(1, 150)):
        status, content = infer(service.url, "test", {"example_id": list(predictions.example_ids[rows])}, outputs)
        assert status == 200, content
        for name, values in outputs_of(content).items():
            np.testing.assert_allclose(values, getattr(predictions, name)[rows], rtol=1e-6, atol=0)


def test_a_router_in_a_service_without_the_chosen_stage_has_no_answer(policies, service_of):
    """It knows no other answer, unless it has read the first model's."""
    service = service_of(policies("benchmark-routing", "enc"))
    status, content = infer(service.url, "test", {"example_id": ["test-2-0"]}, (), {"max_stage": 1})
    assert status == 422
    assert "max_stage" in content["error"]


@pytest.mark.usefixtures("ray_session")
@others_soak([("cascade-routing", "enc")])
def test_a_run_is_the_replay(home, policies, tmp_path, method, embedding):
    policy = policies(method, embedding)
    evaluation = cauc_ray.evaluate(home / "LOGITS", policy)
    ids = list(evaluation.predictions.example_ids)
    pq.write_table(pa.table({"example_id": ids, "label": evaluation.chain.labels}), tmp_path / "rows.parquet")
    summary = cauc_ray.run(home / "pool.yaml", policy, tmp_path / "rows.parquet", tmp_path / "out")
    answers = answers_of(tmp_path / "out")
    expected = evaluation.predictions.to_arrow().to_pylist()
    assert [{key: answers[row["example_id"]][key] for key in row} for row in expected] == expected
    assert summary["cost"] == pytest.approx(evaluation.measures.cost)
    assert summary["accuracy"]["value"] == pytest.approx(evaluation.measures.accuracy.value)
    stages = [(stage.name, stage.reached, stage.answered) for stage in evaluation.measures.stages]
    assert [(stage["name"], stage["reached"], stage["answered"]) for stage in summary["stages"]] == stages


@pytest.mark.parametrize(("method", "embedding"), [*QUICK, ("margin", None)], ids=str)
def test_checks_hold_on_rows_like_those_of_the_fit_and_not_on_others(home, policies, method, embedding):
    """Of the others every answer is wrong that was right, or all were answered by the last model."""
    policy, table = policies(method, embedding), home / "LOGITS"
    on_validation = cauc_ray.check(table, policy, split="validation")
    assert on_validation.valid
    assert on_validation.as_json()["n"] == 250
    assert on_validation.as_json()["cost"][0] == pytest.approx((policy.on_selection or policy.expected).cost)
    assert cauc_ray.check(table, policy).valid
    evaluation = cauc_ray.evaluate(table, policy)
    chain, labels = evaluation.chain, (evaluation.chain.labels + 1) % 2
    arrays = dict(zip(chain.models, chain.logits, strict=True))
    relabelled = cauc_ray.check(arrays, policy, labels=labels)
    assert not relabelled.valid
    assert relabelled.watched.evidence["accuracy"].at is not None
    late = np.resize(np.flatnonzero(evaluation.replay.stages == len(policy.stages) - 1), len(labels))
    harder = {name: logits[late] for name, logits in arrays.items()}
    assert cauc_ray.check(harder, policy).watched.evidence["confidence"].at is not None


@pytest.mark.parametrize("method", ["frugalgpt", "routerdc"])
def test_missing_or_changed_arrays_are_refused_in_one_line(policies, tmp_path, method):
    policy, arrays = tmp_path / "policy.json", tmp_path / "policy.safetensors"
    policies(method).save(policy)
    content = arrays.read_bytes()
    arrays.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PolicyError, match="sha256") as changed:
        cauc_ray.Policy.load(policy)
    arrays.unlink()
    with pytest.raises(PolicyError, match=r"policy\.safetensors") as missing:
        cauc_ray.Policy.load(policy)
    with pytest.raises(PolicyError, match="path") as alone:
        cauc_ray.Policy.of(json.loads(policy.read_text()))
    assert not any("\n" in str(error.value) for error in (changed, missing, alone))


def test_the_id_covers_arrays_and_the_costs_that_a_router_weighs(policies):
    policy = policies("embedllm", "enc")
    moved = {name: array + 0.5 for name, array in policy.arrays.items()}
    costlier = tuple(stage.model_copy(update={"cost": 2 * stage.cost}) for stage in policy.stages)
    changed = [policy.with_arrays(moved), policy.model_copy(update={"stages": costlier}), policy.with_threshold(-0.5)]
    assert len({policy.id, *(variant.id for variant in changed)}) == 4


def test_costs_name_the_encoder_whose_calls_are_then_paid(home):
    costs = {"m0": 1.0, "m1": 10.0, "m2": 30.0}
    options = {"method": "benchmark-routing", "embedding": "enc"}
    free = cauc_ray.fit(home / "LOGITS", **options, costs=costs)
    paid = cauc_ray.fit(home / "LOGITS", **options, costs={**costs, "enc": 0.25})
    assert paid.expected.cost == pytest.approx(free.expected.cost + 0.25)
    assert (free.stages[0].cost, paid.stages[0].cost) == (0.0, 0.25)


def test_arrays_in_memory_have_embeddings_by_the_name_of_the_encoder(home, policies):
    policy = policies("routellm-sw", "enc")
    evaluation = cauc_ray.evaluate(home / "LOGITS", policy)
    arrays = dict(zip(evaluation.chain.models, evaluation.chain.logits, strict=True))
    assert (cauc_ray.evaluate(arrays, policy).predictions.prediction == evaluation.replay.predictions).all()
    models_alone = {name: logits for name, logits in arrays.items() if name != "enc"}
    for wrong in ({}, {"enc": np.zeros(300)}):
        with pytest.raises(CaucError, match="enc"):
            policy.predict({**models_alone, **wrong})


def test_a_plan_of_a_policy_that_does_not_call_models_in_turn_is_refused(home, policies):
    with pytest.raises(ConfigError, match="in turn"):
        cauc_ray.plan(home / "pool.yaml", policies("routerdc"), rate=10.0)


@others_soak([("stacked", "enc")])
def test_a_report_takes_every_policy(home, policies, tmp_path, method, embedding):
    policy = policies(method, embedding)
    policy.save(tmp_path / "policy.json")
    cauc_ray.report(tmp_path, logits=home / "LOGITS")
    assert policy.id in (tmp_path / "report.html").read_text()
    assert (tmp_path / "policy-card.md").is_file()
