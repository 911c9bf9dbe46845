"""Logit tables, policies and predictions by URI: the same bytes and numbers as with local paths."""

import json

import pytest
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import DataError, PolicyError
from cauc_ray.files.parquet import read_parquet
from cauc_ray.files.paths import path_of

MODELS = ["m0", "m1", "m2"]


@pytest.fixture
def places(s3, tmp_path):
    """Return a local folder and one on S3 with the same logit table."""
    both = tmp_path, path_of(f"{s3}/{tmp_path.name}")
    for folder in both:
        write_table(folder / "LOGITS")
    return both


def test_fit_and_evaluate_by_uri_are_those_by_path(places, command):
    policies, results = [], []
    for folder in places:
        policy, predictions = folder / "policy.json", folder / "predictions.parquet"
        table = f"{folder}/LOGITS"
        assert command("fit", table, "--models", ",".join(MODELS), "--budget", 9, "-o", policy)[0] == 0
        arguments = ("--policy", policy, "--split", "test", "--predictions", predictions, "--json")
        code, out, _ = command("evaluate", table, *arguments)
        assert code == 0
        policies.append(policy.read_text())
        accuracy = cauc_ray.evaluate(table, str(policy), split="test").measures.accuracy
        results.append((json.loads(out.replace(table, "LOGITS")), read_parquet(predictions), accuracy))
        assert cauc_ray.Policy.load(str(policy)) == cauc_ray.fit(table, models=MODELS, budget=9)
    assert policies[0] == policies[1]
    assert results[0] == results[1]


def test_what_is_not_there_is_named_by_its_uri(places, command):
    _, remote = places
    with pytest.raises(DataError, match=rf"there is no logit table at {remote}/absent"):
        cauc_ray.fit(f"{remote}/absent", models=MODELS)
    with pytest.raises(PolicyError, match=rf"there is no policy file {remote}/absent\.json"):
        cauc_ray.Policy.load(f"{remote}/absent.json")
    code, _, err = command("fit", remote / "LOGITS", "--models", "m0", "-o", "s3://no-such-bucket/policy.json")
    assert code == 2
    assert "s3://no-such-bucket/policy.json" in err
    assert err.count("\n") == 1
