"""Stages and shards stand on the nodes whose labels they ask for, and a node that dies changes no result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runs import MODELS, by_example, read_all, split_input
from synthetic import write_table

import cauc_ray
from cauc_ray.files.documents import read_json

PLACES = {
    "m0": {"num_cpus": 1, "labels": {"tier": "edge"}},
    "m1": {"num_cpus": 1, "num_gpus": 0.5, "labels": {"tier": "small-gpu"}},
    "m2": {"num_cpus": 1, "num_gpus": 1, "labels": {"tier": "large-gpu"}},
}


def write_inputs(folder):
    """Write a table, a policy, a pool and an input."""
    chain = write_table(folder / "logits", n=1200)["test"]
    policy = cauc_ray.fit(folder / "logits", models=MODELS, method="rf", budget=9.0)
    (folder / "policy.json").write_text(policy.to_json())
    split_input(folder, chain)
    stages = [
        {
            "name": name,
            "model": {"kind": "saved", "logits": "logits", "model": name, "split": "test", "seconds_per_row": 0.008},
            "batch_size": 16,
            "replicas": {"min": 2, "max": 2} if name == "m0" else {"min": 1, "max": 1},
            "resources": resources,
        }
        for name, resources in PLACES.items()
    ]
    pool = {"name": "four-nodes", "task": "multiple-choice", "stages": stages}
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the folder of all jobs' outputs and what the cluster was."""
    folder = tmp_path_factory.mktemp("four")
    write_inputs(folder)
    script = Path(__file__).with_name("labelled_cluster.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_shards_and_stages_stand_where_they_should(ran):
    folder, said = ran
    assert set(read_json(folder / "fit" / "result.json")["nodes"]) == set(said["tiers"]["edge"])
    ledger = read_all(folder / "run" / "ledger").to_pylist()
    for name, resources in PLACES.items():
        found = {call["node"] for call in ledger if call["stage"] == name}
        assert found <= set(said["tiers"][resources["labels"]["tier"]])
        assert found


@pytest.mark.slow
def test_a_node_that_dies_in_mid_job_changes_nothing_in_the_result(ran):
    folder, said = ran
    assert said["died_in_time"] == {"fit": [True], "run": [True]}
    policies = [(folder / name / "policy.json").read_text() for name in ("fit", "fit-struck")]
    assert policies[0] == policies[1]
    tables = [by_example(read_all(folder / name / "predictions")) for name in ("run", "run-struck")]
    assert len(tables[0]) == 1200
    assert tables[0] == tables[1]
    policy = cauc_ray.Policy.load(folder / "policy.json")
    assert tables[0] == by_example(cauc_ray.evaluate(folder / "logits", policy).to_arrow())
