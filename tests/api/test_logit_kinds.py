"""Kinds of logits: probabilities are refused with the remedy, or read as declared; masks are missing options."""

import json

import numpy as np
import pytest
from masked import MASKS, MODELS, softmax, splits, write_masked
from synthetic import steps, write_chains

import cauc_ray
from cauc_ray.errors import CaucError, CaucWarning, DataError
from cauc_ray.policies.policy import Policy

CHAIN = ["--models", ",".join(MODELS)]
READS = {
    "fit": ["LOGITS", *CHAIN, "-o", "out.json"],
    "compare": ["LOGITS", *CHAIN, "--methods", "base,margin"],
    "evaluate": ["LOGITS", "--policy", "raw.json"],
    "check": ["LOGITS", "--policy", "raw.json"],
}


@pytest.fixture(scope="module")
def chains():
    return splits(ragged=False)


@pytest.fixture(scope="module")
def ragged():
    return splits()


def logarithms(logits):
    return np.log(softmax(logits).astype(np.float64)).astype(np.float32)


def numbers(policy):
    """Return a policy's file without the kind of its logits."""
    content = json.loads(policy.to_json())
    content.pop("logit_kind")
    return {**content, "stages": [{**stage, "logit_kind": None} for stage in content["stages"]]}


@pytest.mark.parametrize("verb", READS)
def test_every_verb_refuses_probabilities_with_the_remedy(command, tmp_path, chains, verb):
    raw = write_chains(tmp_path / "RAW", chains, lambda z: z)
    (tmp_path / "raw.json").write_text(cauc_ray.fit(raw, models=MODELS).to_json())
    declared = {} if verb in ("fit", "check") else {"logit_kind": "raw"}
    write_chains(tmp_path / "LOGITS", chains, softmax, **declared)
    code, out, err = command(verb, *READS[verb])
    assert (code, out) == (2, "")
    assert all(word in err for word in ("probabilities", "--logit-kind probabilities", "'m0'"))
    assert not (tmp_path / "out.json").exists()
    for kind in ("probabilities", "m0=probabilities,m1=probabilities"):
        code, _, err = command(verb, *READS[verb], "--logit-kind", kind)
        assert code in ((0, 3) if verb == "check" else (0,)), err


def test_declared_probabilities_are_their_logarithms(tmp_path, chains):
    as_logs = write_chains(tmp_path / "LOGS", chains, logarithms, logit_kind="log-probabilities")
    declared = write_chains(tmp_path / "DECLARED", chains, softmax, logit_kind="probabilities")
    undeclared = write_chains(tmp_path / "GIVEN", chains, softmax)
    for method in ("base", "rf"):
        fit = {"models": MODELS, "method": method, "budget": 3.0}
        policies = cauc_ray.fit(declared, **fit), cauc_ray.fit(undeclared, **fit, logit_kind="probabilities")
        expected = cauc_ray.fit(as_logs, **fit)
        assert policies[0].to_json() == policies[1].to_json()
        assert numbers(policies[0]) == numbers(expected)
        assert [stage.logit_kind for stage in policies[0].stages] == ["probabilities"] * 2
        answers = cauc_ray.evaluate(as_logs, expected).to_arrow()
        for table in (declared, undeclared):  # what nobody declares is of the kind that the policy was fitted on
            assert cauc_ray.evaluate(table, policies[0]).to_arrow().equals(answers)


def test_kinds_may_differ_from_model_to_model(tmp_path, chains):
    raw = write_chains(tmp_path / "RAW", chains, lambda z: z, logit_kind="raw")
    turns = iter(range(100))
    mixed = write_chains(tmp_path / "MIXED", chains, lambda z: z if next(turns) % 2 else softmax(z))
    with pytest.raises(DataError, match="'m0'"):
        cauc_ray.fit(mixed, models=MODELS)
    policy = cauc_ray.fit(mixed, models=MODELS, logit_kind={"m0": "probabilities"})
    assert [stage.logit_kind for stage in policy.stages] == ["probabilities", "raw"]
    assert policy.logit_kind == "mixed"
    assert policy.stages[1] == cauc_ray.fit(raw, models=MODELS).stages[1]
    content = json.loads((mixed / "pool.json").read_text())
    content["models"][0] |= {"logit_kind": "probabilities", "dtype": "float32"}
    (mixed / "pool.json").write_text(json.dumps({**content, "logit_kind": "raw", "labels": list("abcde")}))
    assert cauc_ray.fit(mixed, models=MODELS).to_json() == policy.to_json()
    assert Policy.of(json.loads(policy.to_json())) == policy
    with pytest.warns(CaucWarning, match="'raw' for model 'm0'.*'probabilities'"):
        cauc_ray.evaluate(raw, policy)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("probabilities", r"model 'm0', example 'calibration-.*probabilities"),
        ({"m7": "raw"}, "m7"),
    ],
)
def test_declarations_that_cannot_be_are_refused(tmp_path, chains, kind, words):
    with pytest.raises(CaucError, match=words):
        cauc_ray.fit(write_chains(tmp_path / "LOGITS", chains, lambda z: z), models=MODELS, logit_kind=kind)


def test_a_masked_table_gives_what_the_same_table_with_missing_options_gives(tmp_path, ragged):
    results = []
    for mask in (-np.inf, -1e4, float(np.finfo(np.float32).min)):
        table = write_masked(tmp_path, ragged, mask)
        policy = cauc_ray.fit(table, models=MODELS, method="rf", budget=3.0)
        evaluation, checked = cauc_ray.evaluate(table, policy), cauc_ray.check(table, policy)
        results.append((policy.to_json(), evaluation.as_json(), evaluation.to_arrow(), checked.as_json()))
    assert results[0] == results[1] == results[2]
    assert policy.stages[0].diagnostics.status == "converged"


@pytest.mark.parametrize("mask", [-np.inf, *MASKS])
def test_a_masked_option_is_refused_where_a_missing_one_is(tmp_path, ragged, mask):
    with pytest.raises(CaucError, match=r"lacks some of the \d options of model 'm0'"):
        cauc_ray.fit(write_masked(tmp_path / "LOGITS", ragged, mask), models=MODELS, calibrator="offsets")

    def without_the_first_label(logits):
        cut = logits.copy()
        cut[0, ragged["calibration"].labels[0]] = mask
        return cut

    folder = write_chains(tmp_path / "CUT", {"calibration": ragged["calibration"]}, without_the_first_label)
    with pytest.raises(DataError, match=rf"calibration-{ragged['calibration'].example_ids[0]}.*label.*mask"):
        cauc_ray.fit(folder, models=MODELS)


@pytest.mark.parametrize("method", ["base", "rf"])
def test_a_step_from_arrays_takes_masks_for_missing_options(tmp_path, ragged, method):
    policy = cauc_ray.fit(write_masked(tmp_path, ragged, -np.inf), models=MODELS, method=method, threshold=0.7)
    logits = ragged["test"].logits
    expected = list(steps(policy, logits))
    for mask in MASKS:
        masked = [np.where(np.isneginf(z), np.float32(mask), z) for z in logits]
        for step, of_missing in zip(steps(policy, masked), expected, strict=True):
            for name in ("confidences", "predictions", "state"):
                assert np.array_equal(getattr(step, name), getattr(of_missing, name))
