"""Verbs whose inputs and outputs are on an object store."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from job_cases import N_ROWS, SWEEP, write_inputs
from runs import cauc, read_all
from synthetic import write_table

import cauc_ray
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import path_of

TESTS = Path(__file__).parents[1]


@pytest.fixture
def bucket(s3, tmp_path):
    return path_of(f"{s3}/{tmp_path.name}")


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
