"""Logit tables, policies and predictions by URI: the same bytes and numbers as with local paths."""

import json
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
import yaml
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import ConfigError, DataError, PolicyError
from cauc_ray.execution.ledger import LEDGER_SCHEMA, new_record
from cauc_ray.files.documents import make_folder, write_json
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import path_of
from cauc_ray.models.pool import load_pool

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


def test_a_pool_and_a_ledger_by_uri_are_planned_as_by_path(places):
    plans = []
    for folder in places:
        policy = cauc_ray.fit(f"{folder}/LOGITS", models=MODELS, method="rf", budget=9)
        policy.save(f"{folder}/policy.json")
        saved = {"kind": "saved", "logits": "LOGITS", "split": "test"}
        stages = [{"name": name, "model": {**saved, "model": name}, "batch_size": 8} for name in MODELS]
        pool = {"name": "p", "task": "image-classification", "stages": stages, "labels": "labels.txt"}
        (folder / "pool.yaml").write_bytes(yaml.safe_dump(pool).encode())
        (folder / "labels.txt").write_bytes(b"a\nb\nc\nd\n")
        make_folder(folder / "run" / "ledger")
        write_json(folder / "run" / "run.json", new_record(policy.id, 8, {"a": 1}).model_dump())
        write_ledger(folder / "run" / "ledger")
        stage = load_pool(f"{folder}/pool.yaml").stages[1]
        ids = read_parquet(next((folder / "LOGITS/model=m1/split=test").iterdir())).column("example_id").to_numpy()
        assert stage.model.logits == str(folder / "LOGITS")
        found = cauc_ray.plan(f"{folder}/pool.yaml", f"{folder}/policy.json", 20.0, ledger=f"{folder}/run")
        plans.append(([stage["seconds"] for stage in found["stages"]], stage.model.load()({"example_id": ids}).logits))
    assert plans[0][0] == plans[1][0]
    assert np.array_equal(plans[0][1], plans[1][1], equal_nan=True)


def write_ledger(folder):
    """Write calls of every stage, of two sizes."""
    call = {"run_id": "r", "node": "n", "queue_s": 0.0, "device_s": None, "cost": 1.0, "attempt": 1}
    rows = [
        {
            **call, "stage": stage, "replica": 0, "started_at": datetime(2026, 1, 1, 0, minute, tzinfo=UTC), "batch": n,
            "accepted": n, "deferred": 0, "compute_s": 0.01 + 0.001 * n,
        }
        for stage in MODELS
        for minute, n in enumerate([8, 8, 4, 8])
    ]  # fmt: skip
    write_parquet(folder / "part-0.parquet", pa.Table.from_pylist(rows, schema=LEDGER_SCHEMA))


def test_weights_of_a_pool_behind_a_uri_are_refused_in_one_line(s3):
    at = path_of(f"{s3}/weights.yaml")
    model = {"kind": "torchvision", "arch": "resnet18", "weights": "resnet18.pth"}
    pool = {"name": "p", "task": "image-classification", "stages": [{"name": "a", "model": model}]}
    at.write_bytes(yaml.safe_dump(pool).encode())
    with pytest.raises(ConfigError, match=r"not .*/resnet18\.pth; give an absolute path"):
        load_pool(str(at))
    with pytest.raises(ConfigError, match=rf"there is no pool file {s3}/absent\.yaml"):
        load_pool(f"{s3}/absent.yaml")
