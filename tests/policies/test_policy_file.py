import copy
import json
import math
import warnings
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from synthetic import chain

import cauc_ray
from cauc_ray.errors import CaucWarning, PolicyError
from cauc_ray.numbers.costs import Costs
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay
from cauc_ray.schemas import SCHEMAS, schema_path


@pytest.fixture(scope="module")
def policies():
    calibration, validation = chain(21, 200), chain(21, 150, shift=1)
    rule = ThresholdRule(budget=9.0)
    return {"base": fit_base(calibration, validation), "rf": fit_rf(calibration, validation, rule)}


@pytest.mark.parametrize("method", ["base", "rf"])
def test_a_policy_comes_back_from_its_file_to_the_bit(policies, method, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(policies[method].to_json())
    loaded = cauc_ray.Policy.load(path)
    assert loaded == policies[method]
    assert loaded.id == policies[method].id
    assert type(loaded) is {"base": BasePolicy, "rf": RFPolicy}[method]


@pytest.mark.parametrize("method", ["base", "rf"])
def test_the_fixed_keys_are_there(policies, method):
    content = json.loads(policies[method].to_json())
    assert {"format", "method", "cost_unit", "threshold", "budget", "stages"} <= set(content)
    assert content["format"] == "cauc-policy/1"
    own = {"base": {"mean", "std", "complementarity_rate", "fused"}, "rf": {"alpha", "beta"}}[method]
    for stage in content["stages"]:
        assert {"name", "cost", "temperature"} | own <= set(stage)
    if method == "base":
        assert content["stages"][-1]["fused"] is True
        assert content["stages"][-1]["complementarity_rate"] is None
    else:
        assert content["stages"][0]["alpha"] is content["stages"][0]["beta"] is None


@pytest.mark.parametrize("method", ["base", "rf"])
def test_files_from_before_a_field_was_there_are_read_and_keep_their_id(policies, method):
    content = json.loads(policies[method].to_json())
    for name in ("safe", "guards", "reference", "curve", "search"):
        del content[name]
    del content["expected"]["cost_deviation"]
    for stage in content["stages"]:
        for name in {"offsets", "isotonic", "n_gain", "n_loss"} & stage.keys():
            del stage[name]
        if method == "rf":
            del stage["fused"]
    old = cauc_ray.Policy.of(content)
    assert old.id == policies[method].id
    assert old != policies[method]


def edited(policy, changes):
    content = json.loads(policy.to_json())
    for key, value in changes.items():
        *parents, last = key.split("__")
        at = content
        for parent in parents:
            at = at[int(parent) if parent.isdigit() else parent]
        at[last] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format": "cauc-policy/2"}, "its format is 'cauc-policy/2'; this version of cauc-ray reads 'cauc-policy/1'"),
        ({"format": None}, "its format is None"),
        ({"method": "margin"}, "method 'margin' is none of base, rf"),
        ({"threshold": "0.5"}, "threshold: "),
        ({"stages__0__temperature": 1e-320}, "stages.0.temperature: "),
        ({"stages__1__mean": 1e308}, "stages.1.mean: "),
        ({"stages__1__name": "m0"}, "two stages are named 'm0'"),
        ({"stages__1__name": "m9"}, "the stages are m0, m9, m2, what is expected is of m0, m1, m2"),
        ({"expected__n": 0}, "expected.n: "),
        ({"threshold": float("nan")}, "threshold: "),
        ({"stages": []}, "stages: "),
        ({"stages__0__temperature": -1.0}, "stages.0.temperature: "),
        ({"stages__0__temprature": 1.0}, "unknown key 'stages.0.temprature'"),
        ({"stages__2__fused": False}, "the last stage must be fused"),
    ],
)
def test_a_file_that_is_no_such_policy_is_refused_in_one_line(policies, tmp_path, changes, says):
    path = tmp_path / "policy.json"
    path.write_text(edited(policies["base"], changes))
    with pytest.raises(PolicyError) as error:
        cauc_ray.Policy.load(path)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_rf_needs_its_pairs(policies, tmp_path):
    path = tmp_path / "policy.json"
    path.write_text(edited(policies["rf"], {"stages__1__alpha": None}))
    with pytest.raises(PolicyError, match="alpha and beta must be null for the first stage"):
        cauc_ray.Policy.load(path)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"policy"', "\x00\xff"])
def test_what_is_no_json_object_is_refused(tmp_path, text):
    path = tmp_path / "policy.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PolicyError):
        cauc_ray.Policy.load(path)
    with pytest.raises(PolicyError, match="no policy file"):
        cauc_ray.Policy.load(tmp_path / "absent.json")


# Every key of a policy's file and of its stages: what it is changed to where it decides an answer, and where not.
DECIDING = {
    "base": {
        "threshold": 0.123,
        "stages__0__name": "other",
        "stages__0__temperature": 1.25,
        "stages__0__mean": 0.5,
        "stages__0__std": 9.5,
        "stages__0__fused": "not",
    },
    "rf": {
        "threshold": 0.123,
        "stages__0__name": "other",
        "stages__2__temperature": 1.25,
        "stages__2__alpha": 3.5,
        "stages__2__beta": 3.5,
        "stages__2__fused": "not",
    },
    "offsets": {"stages__0__offsets": [0.5, 0.0, 0.0, 0.0, -0.5]},
    "isotonic": {"stages__0__isotonic": {"confidences": [0.0, 0.7, 1.0], "accuracies": [0.1, 0.2, 0.9]}},
}
ONE = {"models": ["m0"], "quality": 0.5, "cost": 1.0, "holdout_quality": None, "holdout_cost": None}
SEARCH = {"pool": ["m0"], "split": "validation", "objective": "accuracy", "budget": None, "runners_up": []}
SEARCH |= dict.fromkeys(("n_chains", "n_measured", "n_halves", "n_same"), 1)
SEARCH |= {"chosen": ONE, "full": ONE, "pair": None, "single": ONE}
SILENT = {
    "cost_unit": "USD",
    "costs": "per-call",
    "budget": 1234.5,
    "threshold_choice": {"rule": "given", "objective": None, "split": None},
    "logit_kind": "surrogate",
    "calibration__examples_fingerprint": "0",
    "validation": None,
    "expected": None,
    "search": SEARCH,
    "safe": {"models": ["m0"], "unfused": [], "limit": 1.0, "says": "so"},
    "guards": [],
    "reference": None,
    "curve": [],
    "stages__0__cost": 0.25,
    "stages__0__diagnostics__nll_after": "next",
    "stages__0__diagnostics__nll_before": "next",
    "stages__0__diagnostics__logits_fingerprint": "0",
}
OF_BASE = {"stages__0__complementarity_rate": "next", "stages__0__n_gain": None, "stages__0__n_loss": 5}
OF_RF = {"stages__1__pair_diagnostics__nll_after": "next"}


def changed(policy, key, value):
    """Return a policy with another value under a key."""
    content = json.loads(policy.to_json())
    *parents, last = key.split("__")
    at = content
    for parent in parents:
        at = at[int(parent) if parent.isdigit() else parent]
    at[last] = {"next": lambda: math.nextafter(at[last], 9), "not": lambda: not at[last]}.get(
        str(value), lambda: value
    )()
    if key == "logit_kind":  # the stages' own, which are all of one kind
        content["stages"] = [stage | {"logit_kind": value} for stage in content["stages"]]
    if last == "name":
        content |= {"expected": None, "reference": None}
    return cauc_ray.Policy.of(content)


@pytest.fixture(scope="module")
def every_policy(policies):
    calibration = chain(21, 300)
    two = replace(
        calibration, models=calibration.models[:2], logits=calibration.logits[:2], costs=Costs("s", np.ones(2))
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaucWarning)
        isotonic = fit_base(two, calibrator="isotonic")
    return {**policies, "offsets": fit_base(calibration, calibrator="offsets"), "isotonic": isotonic}


@pytest.mark.parametrize("kind", DECIDING)
def test_the_id_changes_with_all_that_decides_an_answer(every_policy, kind):
    policy = every_policy[kind]
    ids = {changed(policy, key, value).id for key, value in DECIDING[kind].items()}
    assert len(ids | {policy.id}) == len(DECIDING[kind]) + 1


@pytest.mark.parametrize("method", ["base", "rf"])
def test_the_id_changes_with_nothing_else(policies, method):
    policy, test = policies[method], chain(21, 100, shift=2)
    silent = {**SILENT, **(OF_BASE if method == "base" else OF_RF)}
    for key, value in silent.items():
        other = changed(policy, key, value)
        assert other != policy, key
        assert other.id == policy.id, key
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaucWarning)  # logits of another kind
            before, after = replay(policy, test), replay(other, test)
        assert np.array_equal(before.predictions, after.predictions)
        assert np.array_equal(before.confidences, after.confidences)
    # A key that a file gains must be put in one of these places.
    keys = {key.split("__")[-1 if key.startswith("stages") else 0] for key in [*silent, *DECIDING[method]]}
    keys |= {key.split("__")[2] for key in silent if key.startswith("stages")} | {"offsets", "isotonic"}
    assert {*type(policy).model_fields, *type(policy.stages[0]).model_fields} <= keys | {"format", "method", "stages"}


def test_two_methods_never_have_one_id(policies):
    assert policies["base"].id != policies["rf"].id


def test_the_order_of_stages_decides(policies):
    content = json.loads(policies["base"].to_json()) | {"expected": None, "reference": None}
    first, second, last = content["stages"]
    assert cauc_ray.Policy.of(content | {"stages": [second, first, last]}).id != policies["base"].id


@pytest.mark.parametrize("text", ["[1, 2]", '"policy"', "3", "null"])
def test_json_that_is_no_object_is_named_so(tmp_path, text):
    (tmp_path / "policy.json").write_text(text)
    with pytest.raises(PolicyError, match=r"policy.json: .* JSON object, got (list|str|int|NoneType)"):
        cauc_ray.Policy.load(tmp_path / "policy.json")


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_schemas_in_the_package_are_those_of_the_code(name):
    assert json.loads(schema_path(name).read_text()) == SCHEMAS[name](), "run: python -m cauc_ray.schemas"


@pytest.mark.parametrize("method", ["base", "rf"])
def test_policies_fit_the_published_schema(policies, method):
    schema = json.loads(schema_path("policy").read_text())
    content = json.loads(policies[method].to_json())
    jsonschema.validate(content, schema)
    wrong = copy.deepcopy(content)
    wrong["stages"][0]["temperature"] = "warm"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)
    assert Path(schema_path("policy")).parent.name == "schemas"
