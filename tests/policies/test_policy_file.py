"""The policy file: what comes back from it, what is refused in one line, and what its id is of."""

import copy
import json
import math
import warnings

import jsonschema
import numpy as np
import pytest
from synthetic import chain, splits

from cauc_ray.errors import CaucWarning, PolicyError
from cauc_ray.numbers.guarantees import RiskLimit
from cauc_ray.policies.evidence import MOST_CURVE_POINTS
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay
from cauc_ray.schemas import schema_path

KINDS = ("base", "rf", "offsets", "isotonic", "certified")
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def policies():
    data = splits(21, 400)
    two = [split.of_models([0, 1]) for split in data]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaucWarning)
        return {
            "base": fit_base(*data),
            "rf": fit_rf(*data, ThresholdRule(budget=9.0)),
            "offsets": fit_base(*data, calibrator="offsets"),
            "isotonic": fit_base(*two, calibrator="isotonic"),
            "certified": fit_rf(*data, ThresholdRule(certify=RiskLimit(0.3, 0.9))),
        }


def edited(policy, changes):
    """Return the content of a policy's file with other values under some keys, or functions of the values there."""
    content = json.loads(policy.to_json())
    for key, value in changes.items():
        *parents, last = (int(part) if part.isdigit() else part for part in key.split("__"))
        at = content
        for parent in parents:
            at = at[parent]
        at[last] = value(at[last]) if callable(value) else value
    return content


@kinds
def test_a_policy_comes_back_from_its_file_to_the_bit_and_satisfies_the_published_schema(policies, kind):
    policy, schema = policies[kind], json.loads(schema_path("policy").read_text())
    for moved in (policy, policy.with_budget(20), policy.with_threshold(np.float64(0.25))):
        content = json.loads(moved.to_json())
        assert Policy.of(content) == moved
        jsonschema.validate(content, schema)
    content["stages"][0]["temperature"] = "warm"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)


def test_a_guard_of_an_earlier_version_is_read_with_its_message(policies):
    content = json.loads(policies["rf"].to_json())
    for guard in content["guards"]:
        guard["says"] = guard.pop("message")
    assert content["guards"]
    assert Policy.of(content) == policies["rf"]


def curve(*points):
    return {"curve": [dict(zip(("threshold", "cost", "quality"), point, strict=True)) for point in points]}


def reference(**changes):
    return {"reference__stages__0": lambda stage: stage | changes}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("base", {"format": "cauc-policy/2"}, "cauc-policy/2"),
        ("base", {"method": "alike"}, "'alike'"),
        ("base", {"threshold": "0.5"}, "threshold: "),
        ("base", {"stages__0__temperature": 1e-320}, "stages.0.temperature: "),
        ("base", {"stages__0__floor": 0.01}, "has a floor"),
        ("base", {"stages__1__name": "m0"}, "two stages are named 'm0'"),
        ("base", {"stages__1__name": "m9"}, "m0, m9, m2"),
        ("base", {"stages__0__temprature": 1.0}, "unknown key 'stages.0.temprature'"),
        ("base", {"stages__2__fused": False}, "the last stage must be fused"),
        ("rf", {"stages__1__alpha": None}, "alpha and beta"),
        ("offsets", {"stages__0__offsets": None}, "for all stages or for none"),
        ("offsets", {"stages__0__offsets": lambda offsets: offsets[:-1]}, "numbers of offsets, 4, 5"),
        ("isotonic", {"stages__1__offsets": [0.0]}, "both offsets and an isotonic map"),
        ("isotonic", {"stages__1__isotonic__confidences": lambda points: points[:-1]}, "breakpoints"),
        ("rf", {"threshold_choice__rule": "certified"}, "certificate"),
        ("rf", curve((0.5, 2.0, 0.7), (0.6, 2.0, 0.8)), "curve: "),
        ("rf", curve(*((0.5, 1.0 + n, n / 200) for n in range(MOST_CURVE_POINTS + 1))), "curve: "),
        ("rf", reference(name="other"), "the reference has"),
        ("rf", reference(right=[9999] + [0] * 9), "contradict"),
        ("rf", reference(confidences=[1, 2]), "10 bins"),
        ("rf", {"offline": lambda prefixes: prefixes[1:]}, "offline"),
        ("rf", reference(likeliest={"018": 1}), "likeliest"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_in_one_line(policies, kind, changes, words):
    with pytest.raises(PolicyError) as error:
        Policy.of(edited(policies[kind], changes))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "\x00\xff", "[1, 2]", '"policy"', "null", None])
def test_a_file_without_a_json_object_is_refused_by_its_name(tmp_path, text):
    if text is not None:
        (tmp_path / "policy.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(PolicyError, match=r"policy\.json") as error:
        Policy.load(tmp_path / "policy.json")
    assert "\n" not in str(error.value)


# Of a stage, by kind of policy; together with the threshold, the method and the order of the stages.
DECIDING = {
    "base": {"name", "temperature", "mean", "std", "fused"},
    "rf": {"name", "temperature", "alpha", "beta", "fused"},
    "offsets": {"name", "temperature", "mean", "std", "fused", "offsets"},
    "isotonic": {"name", "temperature", "mean", "std", "fused", "isotonic"},
    "certified": {"name", "temperature", "alpha", "beta", "fused"},
}


def paths(content, path=()):
    """Yield the keys that lead to each value in a file's content that is neither an object nor a list."""
    if isinstance(content, dict | list):
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            yield from paths(value, (*path, key))
    else:
        yield path


def with_another(content, *parents, last):
    """Return content with another value at a path, the nearest of its type."""
    content = at = copy.deepcopy(content)
    for key in parents:
        at = at[key]
    value = at[last]
    if isinstance(value, bool):
        at[last] = not value
    else:
        at[last] = (
            f"{value}x" if isinstance(value, str) else value + 1 if isinstance(value, int) else math.nextafter(value, 9)
        )
    return content


@pytest.mark.parametrize("kind", DECIDING)
def test_the_id_changes_with_all_that_decides_an_answer_and_with_nothing_else(policies, kind):
    policy, test = policies[kind], chain(21, 60, shift=2).of_models(range(len(policies[kind].stages)))
    before, decided, n_silent = replay(policy, test), set(), 0
    # Without measurements, which have the stages' names, these may change.
    for changes in ({"stages__0__prompt": "Ticket: {{ text }}"}, dict.fromkeys(("expected", "reference", "budget"))):
        content = edited(policy, changes)
        for path in paths(content):
            try:
                variant = Policy.of(with_another(content, *path[:-1], last=path[-1]))
            except (PolicyError, TypeError):  # it contradicts another value, or is null
                continue
            decides = path[0] == "threshold" or (path[0] == "stages" and path[2] in DECIDING[kind])
            assert (variant.id != policy.id) == decides, path
            if decides:
                decided.add(path[0] if path[0] == "threshold" else path[2])
            elif n_silent % 20 == 0:
                after = replay(variant, test)
                assert np.array_equal(before.predictions, after.predictions)
                assert np.array_equal(before.confidences, after.confidences)
            n_silent += not decides
    assert decided == {"threshold", *DECIDING[kind]}
    assert n_silent > 50


def test_the_id_changes_with_the_method_the_calibrator_and_the_order_of_stages(policies):
    content = edited(policies["base"], {"expected": None, "reference": None})
    first, second, last = content["stages"]
    swapped = Policy.of(content | {"stages": [second, first, last]})
    assert len({policy.id for policy in (swapped, *policies.values())}) == 1 + len(policies)
