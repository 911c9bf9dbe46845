import copy
import json
from pathlib import Path

import jsonschema
import pytest
from synthetic import chain

import cauc_ray
from cauc_ray.errors import PolicyError
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
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


def test_the_id_changes_with_what_decides_and_with_nothing_else(policies):
    policy = policies["rf"]
    assert policy.model_copy(update={"threshold": policy.threshold + 1e-9}).id != policy.id
    elsewhere = policy.expected.model_copy(update={"cost": 0.0})
    assert policy.model_copy(update={"expected": elsewhere}).id == policy.id


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
