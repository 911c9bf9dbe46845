"""Runs and collections whose inputs and outputs are on an object store: killed, gone on with, the same as on a disk."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
import yaml
from job_cases import N_ROWS, SWEEP, write_inputs
from runs import answers_of, cauc, numbered_input, python_pool, read_all, two_model_policy
from synthetic import write_table

import cauc_ray
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import path_of, visible

TESTS = Path(__file__).parents[1]
N_RUN = 400


@pytest.fixture
def bucket(s3, tmp_path):
    return path_of(f"{s3}/{tmp_path.name}")


def started(*arguments):
    """Start `cauc` with small commits in a process of its own, on the cluster of this session."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}  # the nodes have none
    job = json.dumps({"runtime_env": {"env_vars": settings}})
    words = [*map(str, arguments), "--address", ray.get_runtime_context().gcs_address]
    return subprocess.Popen(
        [sys.executable, "-m", "jobs.faults.run", *words], env={**os.environ, "RAY_JOB_CONFIG_JSON_ENV_VAR": job},
        cwd=TESTS.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def result_of(process):
    """Return the JSON object of a `cauc` that ends well."""
    out, err = process.communicate(timeout=400)
    assert process.returncode in (0, 5), err
    return json.loads(out)


def killed_after(process, manifest, n_entries):
    """Kill a `cauc` by SIGKILL once a manifest has so many entries."""
    deadline = time.monotonic() + 400
    while len(visible(manifest) if manifest.is_dir() else []) < n_entries:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.soak("full")
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("ray_session")
def test_a_run_is_killed_and_gone_on_with_as_on_a_disk(tmp_path, bucket):
    """Its input there is CSV, and on the disk the same rows in Parquet."""
    local = numbered_input(tmp_path, N_RUN)
    (bucket / "input" / "rows.csv").write_bytes(numbered_input(tmp_path, N_RUN, "csv").read_bytes())
    policy = two_model_policy()
    policy.save(str(bucket / "policy.json"))
    cauc_ray.run(python_pool(tmp_path, [("by_x", {})] * 2), policy, local, tmp_path / "out")
    slow = {"seconds": 0.1, "log": str(tmp_path / "log"), "path": str(tmp_path / "faster"), "factory": "slow_by_x"}
    words = ["--policy", bucket / "policy.json", "--input", bucket / "input", "-o", bucket / "out", "--json"]
    pool = python_pool(tmp_path, [("by_x", {}), ("mended", slow)])
    process = started("run", pool, *words)
    killed_after(process, bucket / "out" / "manifest", 3)
    n_before = len(visible(bucket / "out" / "manifest"))
    assert not (bucket / "out" / "summary.json").exists()
    (tmp_path / "faster").touch()
    summary = result_of(started("run", pool, *words, "--resume"))
    assert (summary["n"], summary["n_failed"]) == (N_RUN, 0)
    assert 3 <= n_before < len(visible(bucket / "out" / "manifest"))
    assert answers_of(bucket / "out") == answers_of(tmp_path / "out")
    calls = read_all(bucket / "out" / "ledger").to_pylist()
    assert len({call["run_id"] for call in calls}) == 1
    assert {call["replica"] // 100_000 for call in calls} == {0, 1}
    assert summary["total_cost"] == pytest.approx(sum(call["cost"] for call in calls))


def job(verb, folder, **config):
    """Run a verb by a config in a process and Ray session of its own. Returns its results."""
    (folder / f"{verb}.yaml").write_text(yaml.safe_dump(config))
    process = cauc(verb, "--config", folder / f"{verb}.yaml", "--json", cwd=TESTS.parent)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.soak("full")
@pytest.mark.timeout(2400)
def test_configs_read_and_write_there_and_do_nothing_twice(tmp_path, bucket):
    write_inputs(tmp_path)
    write_parquet(bucket / "input.parquet", pq.read_table(tmp_path / "input.parquet"))
    for name in ("policy.json", "questions.jsonl"):
        (bucket / name).write_bytes((tmp_path / name).read_bytes())
    config = {"pool": "pool.yaml", "policy": f"{bucket}/policy.json", "input": f"{bucket}/input.parquet"}
    config |= {"resume": True, "output": f"{bucket}/run"}
    summary = job("run", tmp_path, **config)
    assert summary["n"] == read_all(bucket / "run" / "predictions").num_rows == 600
    assert job("run", tmp_path, **config) == summary
    config = {"pool": "python.yaml", "dataset": f"{bucket}/questions.jsonl", "output": f"{bucket}/collected"}
    assert job("collect", tmp_path, **config)["splits"] == {"calibration": 10, "validation": 10, "test": 20}
    assert read_all(bucket / "collected" / "model=long" / "split=test").num_rows == 20
    config = {"logits": f"{bucket}/collected", "models": ["long"], "threshold": 0.5, "shards": 1}
    job("fit", tmp_path, **config, output=f"{bucket}/policy-of-shards.json")
    assert cauc_ray.Policy.load(f"{bucket}/policy-of-shards.json").models == ("long",)
    write_table(bucket / "planted", n=600)
    config = {**SWEEP, "sets": [{**SWEEP["sets"][0], "logits": f"{bucket}/planted"}], "output": f"{bucket}/sweep"}
    assert len(job("compare", tmp_path, **config)["rows"]) == N_ROWS
    assert read_parquet(bucket / "sweep" / "rows.parquet").num_rows == N_ROWS


def test_a_bucket_that_is_absent_is_named_before_anything_starts(tmp_path, s3, command):
    two_model_policy().save(tmp_path / "policy.json")
    pool, inputs = python_pool(tmp_path), numbered_input(tmp_path)
    absent = ["-o", "s3://no-such-bucket/out"]
    for arguments in (
        ["run", pool, "--policy", tmp_path / "policy.json", "--input", inputs, *absent],
        ["collect", pool, "--dataset", inputs, "--columns", "question=example_id,choices=x", *absent],
    ):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert "bucket s3://no-such-bucket does not exist" in err.splitlines()[-1]  # the input's rows have no labels
