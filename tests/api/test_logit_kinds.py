"""Probabilities in the place of logits: noticed, refused with the remedy, read as declared."""

import json

import numpy as np
import pytest
from masked import MODELS, softmax, splits, write

import cauc_ray
from cauc_ray.errors import CaucWarning, ConfigError, DataError
from cauc_ray.policies.policy import Policy

CHAIN = ["--models", ",".join(MODELS)]
READS = {
    "fit": ["LOGITS", *CHAIN, "-o", "out.json"],
    "compare": ["LOGITS", *CHAIN, "--methods", "base,margin"],
    "sweep": ["LOGITS", *CHAIN, "-o", "out.parquet"],
    "evaluate": ["LOGITS", "--policy", "raw.json"],
    "check": ["LOGITS", "--policy", "raw.json"],
}


@pytest.fixture(scope="module")
def chains():
    return splits(ragged=False)


def probabilities(logits):
    """Return a model's probabilities; every fifth row's least one is cut off to 0."""
    p = softmax(logits)
    p[np.arange(0, len(p), 5), p[::5].argmin(axis=1)] = 0.0
    return p


def logarithms(logits):
    with np.errstate(divide="ignore"):
        return np.maximum(np.log(probabilities(logits).astype(np.float64)), -50.0).astype(np.float32)


def numbers(policy):
    """Return a policy's file but for the kind of its logits."""
    content = json.loads(policy.to_json())
    content.pop("logit_kind")
    return {**content, "stages": [{**stage, "logit_kind": None} for stage in content["stages"]]}


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("declared", [{}, {"logit_kind": "raw"}], ids=["undeclared", "raw"])
def test_every_verb_refuses_probabilities_with_the_remedy(command, tmp_path, chains, verb, declared):
    raw = write(tmp_path / "RAW", chains, lambda z: z)
    (tmp_path / "raw.json").write_text(cauc_ray.fit(raw, models=MODELS).to_json())
    write(tmp_path / "LOGITS", chains, probabilities, **declared)
    code, out, err = command(verb, *READS[verb])
    assert (code, out) == (2, "")
    assert "probabilities" in err
    assert "--logit-kind probabilities" in err
    assert "'m0'" in err
    assert not (tmp_path / "out.json").exists()
    code, _, err = command(verb, *READS[verb], "--logit-kind", "probabilities")
    assert code in ((0, 3) if verb == "check" else (0,)), err
    code, _, err = command(verb, *READS[verb], "--logit-kind", "m0=probabilities,m1=probabilities")
    assert code in ((0, 3) if verb == "check" else (0,)), err


@pytest.mark.parametrize("method", ["base", "rf"])
def test_declared_probabilities_are_their_logarithms(tmp_path, chains, method):
    as_logs = write(tmp_path / "LOGS", chains, logarithms, logit_kind="log-probabilities")
    declared = write(tmp_path / "DECLARED", chains, probabilities, logit_kind="probabilities")
    given = write(tmp_path / "GIVEN", chains, probabilities)
    expected = cauc_ray.fit(as_logs, models=MODELS, method=method, budget=3.0)
    policies = [
        cauc_ray.fit(declared, models=MODELS, method=method, budget=3.0),
        cauc_ray.fit(given, models=MODELS, method=method, budget=3.0, logit_kind="probabilities"),
    ]
    assert policies[0].to_json() == policies[1].to_json()
    assert numbers(policies[0]) == numbers(expected)
    assert [stage.logit_kind for stage in policies[0].stages] == ["probabilities"] * 2
    found = cauc_ray.evaluate(as_logs, expected).to_arrow()
    assert cauc_ray.evaluate(declared, policies[0]).to_arrow().equals(found)
    # What nobody declares is of the kind that the policy was fitted on.
    assert cauc_ray.evaluate(given, policies[0]).to_arrow().equals(found)


def test_kinds_may_differ_from_model_to_model(tmp_path, chains):
    raw = write(tmp_path / "RAW", chains, lambda z: z, logit_kind="raw")
    turns = iter(range(100))
    mixed = write(tmp_path / "MIXED", chains, lambda z: z if next(turns) % 2 else probabilities(z))
    with pytest.raises(DataError, match="'m0'"):
        cauc_ray.fit(mixed, models=MODELS)
    given = cauc_ray.fit(mixed, models=MODELS, logit_kind={"m0": "probabilities"})
    assert [stage.logit_kind for stage in given.stages] == ["probabilities", "raw"]
    assert given.logit_kind == "mixed"
    assert given.stages[1] == cauc_ray.fit(raw, models=MODELS).stages[1]
    content = json.loads((mixed / "pool.json").read_text())
    content["models"][0] |= {"logit_kind": "probabilities", "dtype": "float32"}
    (mixed / "pool.json").write_text(json.dumps({**content, "logit_kind": "raw", "labels": list("abcde")}))
    assert cauc_ray.fit(mixed, models=MODELS).to_json() == given.to_json()
    path = tmp_path / "policy.json"
    path.write_text(given.to_json())
    assert Policy.load(path) == given
    with pytest.warns(CaucWarning, match="'raw' for model 'm0'.*'probabilities'"):
        cauc_ray.evaluate(raw, given)


def test_some_rows_that_sum_to_one_are_no_reason_to_refuse_logits(tmp_path, chains):
    def half(logits):
        z = logits.copy()
        z[::2] = softmax(z[::2])
        return z

    assert cauc_ray.fit(write(tmp_path, chains, half), models=MODELS).stages[0].logit_kind == "raw"


def test_raw_logits_declared_as_probabilities_are_refused_by_example(tmp_path, chains):
    folder = write(tmp_path, chains, lambda z: z)
    with pytest.raises(DataError, match=r"model 'm0', example 'calibration-.*probabilities"):
        cauc_ray.fit(folder, models=MODELS, logit_kind="probabilities")


def test_an_unknown_kind_or_model_is_refused(command, tmp_path, chains):
    write(tmp_path / "LOGITS", chains, lambda z: z)
    for given, says in (("probability", "probabilities"), ("m7=raw", "m7")):
        code, _, err = command("fit", "LOGITS", *CHAIN, "--logit-kind", given, "-o", "p.json")
        assert code == 2
        assert says in err
        assert len(err.splitlines()) == 1
    with pytest.raises(ConfigError, match="Available"):
        cauc_ray.compare(tmp_path / "LOGITS", models=MODELS, methods=["base"], logit_kind={"m0": "softmax"})


def test_policies_of_earlier_versions_load_and_answer_as_before(tmp_path, chains):
    folder = write(tmp_path / "LOGITS", chains, lambda z: z)
    policy = cauc_ray.fit(folder, models=MODELS)
    for text in ("unknown", "raw", "as the model returns them", "mixed: each model's source says which"):
        content = json.loads(policy.to_json())
        content["logit_kind"] = text
        for stage in content["stages"]:
            del stage["logit_kind"]
        earlier = Policy.of(content)
        assert cauc_ray.evaluate(folder, earlier).to_arrow().equals(cauc_ray.evaluate(folder, policy).to_arrow())


def test_real_tables_of_other_kinds_are_read(shared_logits):
    kinds = {
        "cifar100": ("efs_lenet_5", "log-probabilities"),
        "priced_mmlu": ("llama3.2-1b", "surrogate"),
        "cifar10": ("resnet20", "raw"),
        "emotion10k_task_icl0": ("qwen-1_8b", "raw"),
    }
    for name, (model, kind) in kinds.items():
        assert cauc_ray.fit(shared_logits / name, models=[model], threshold=0.5).stages[0].logit_kind == kind
