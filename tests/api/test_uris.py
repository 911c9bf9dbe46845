"""Logit tables, policies and predictions by URI: the same bytes and numbers as with local paths."""

import json

import pytest
import yaml
from earlier_runs import call, write_run
from reported import write_run as write_summary
from runs import MODELS, saved_model, saved_pool, write_questions
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import CaucError
from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import read_parquet
from cauc_ray.files.paths import path_of
from cauc_ray.models.pool import load_pool
from cauc_ray.planning import simulation


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


def test_what_is_not_there_is_named_by_its_uri(s3, command):
    model = {"kind": "torchvision", "arch": "resnet18", "weights": "resnet18.pth"}
    pool = {"name": "p", "task": "image-classification", "stages": [{"name": "a", "model": model}]}
    path_of(f"{s3}/weights.yaml").write_bytes(yaml.safe_dump(pool).encode())
    for read, words in (
        (lambda: cauc_ray.fit(f"{s3}/absent", models=MODELS), rf"no logit table at {s3}/absent"),
        (lambda: cauc_ray.Policy.load(f"{s3}/absent.json"), rf"policy file {s3}/absent\.json does not exist"),
        (lambda: load_pool(f"{s3}/absent.yaml"), rf"pool file {s3}/absent\.yaml"),
        (lambda: load_pool(f"{s3}/weights.yaml"), r"not .*/resnet18\.pth; give an absolute path"),
    ):
        with pytest.raises(CaucError, match=words):
            read()
    code, _, err = command("fit", cauc_ray.sample_logits(), "-o", "s3://no-such-bucket/policy.json")
    assert (code, err.count("\n")) == (2, 1)
    assert "s3://no-such-bucket/policy.json" in err


def test_a_buckets_rights_are_known_before_a_cluster_that_is_not_there_is_named(s3, tmp_path, monkeypatch, command):
    from moto.s3.exceptions import S3AccessDeniedError
    from moto.s3.models import S3Backend

    def refuse(*args, **more):
        raise S3AccessDeniedError

    write_table(tmp_path / "LOGITS")
    cauc_ray.fit(str(tmp_path / "LOGITS"), models=MODELS, budget=9).save(tmp_path / "policy.json")
    pool, rows, out = saved_pool(tmp_path), tmp_path / "rows.csv", f"{s3}/refused"
    write_questions(rows, 4)
    run = ("run", pool, "--policy", tmp_path / "policy.json", "--input", rows)
    for words in (run, ("collect", pool, "--dataset", rows)):
        with monkeypatch.context() as bucket:
            for action in ("put_object", "create_multipart_upload"):
                bucket.setattr(S3Backend, action, refuse)
            code, _, err = command(*words, "-o", out, "--address", "127.0.0.1:1")
        assert (code, err.count("\n")) == (2, 1)
        assert out in err
        assert "credentials" in err
    for action in ("delete_object", "delete_objects"):
        monkeypatch.setattr(S3Backend, action, refuse)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    for _ in range(2):  # the folder is as new as before where nothing can be deleted
        code, _, err = command(*run, "-o", out, "--address", "127.0.0.1:1")
        started, error = err.splitlines()
        assert (code, "starting" in started, "127.0.0.1:1" in error) == (4, True, True)
        assert out not in err


@pytest.mark.soak("full")
def test_plans_and_reports_by_uri_are_those_by_path(places, command, monkeypatch):
    monkeypatch.setattr(simulation, "LEAST_ROWS", 500)
    monkeypatch.setattr(simulation, "LEAST_LAST_ROWS", 50)
    sizes = (8, 8, 4, 8)
    calls = [call(m, 0, 60.0 * n, rows, 0.01 + 0.001 * rows) for m in MODELS for n, rows in enumerate(sizes)]
    results = []
    for folder in places:
        make_folder(folder / "policies")
        policy = cauc_ray.fit(f"{folder}/LOGITS", models=MODELS, method="rf", budget=9)
        for name, model in (("one", policy), ("two", cauc_ray.fit(f"{folder}/LOGITS", models=MODELS, budget=6))):
            model.save(folder / "policies" / f"{name}.json")
        stages = [{"name": name, "model": saved_model(name), "batch_size": 8} for name in MODELS]
        pool = {"name": "p", "task": "image-classification", "stages": stages, "labels": "labels.txt"}
        (folder / "pool.yaml").write_bytes(yaml.safe_dump(pool).encode())
        (folder / "labels.txt").write_bytes(b"a\nb\nc\nd\n")
        write_run(folder / "earlier", calls, policy.id)
        model = load_pool(f"{folder}/pool.yaml").stages[1].model
        ids = read_parquet(next((folder / "LOGITS/model=m1/split=test").iterdir())).column("example_id").to_numpy()
        logits = model.load()({"example_id": ids}).logits.tolist()
        plan = cauc_ray.plan(f"{folder}/pool.yaml", f"{folder}/policies/one.json", 20.0, ledger=f"{folder}/earlier")
        write_summary(folder / "run", policy)
        code, out, _ = command("report", folder, "--json")
        report = json.loads(out.replace(str(folder), "HOME"))
        assert (code, report["policy"], report["run"]) == (0, "HOME/policies/one.json", "HOME/run")
        pages = [(folder / name).read_text().replace(str(folder), "HOME") for name in ("report.html", "policy-card.md")]
        results.append((repr(logits), [stage["seconds"] for stage in plan["stages"]], report, pages))
    assert results[0] == results[1]
