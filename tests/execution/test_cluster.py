"""A cluster of several nodes, and sessions that a run starts itself: each in a process of its own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from runs import MODELS, by_example, read_all, saved_pool, split_input
from synthetic import write_table

import cauc_ray


def prepared(tmp_path):
    chain = write_table(tmp_path / "LOGITS", n=300)["test"]
    policy = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="rf", budget=9.0)
    (tmp_path / "policy.json").write_text(policy.to_json())
    split_input(tmp_path, chain)
    return policy, saved_pool(tmp_path)


def python(*arguments):
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stages_run_on_the_nodes_whose_labels_they_ask_for(tmp_path):
    policy, pool = prepared(tmp_path)
    content = yaml.safe_load(pool.read_text())
    for stage, tier in zip(content["stages"], ("edge", "edge", "cloud"), strict=True):
        stage["resources"] = {"num_cpus": 1, "labels": {"tier": tier}}
    pool.write_text(yaml.safe_dump(content))
    python(Path(__file__).with_name("labelled_cluster.py"), tmp_path)
    nodes = json.loads((tmp_path / "nodes.json").read_text())
    ran_on = {(c["stage"], c["node"]) for c in read_all(tmp_path / "out" / "ledger").to_pylist()}
    assert ran_on == {("m0", nodes["edge"]), ("m1", nodes["edge"]), ("m2", nodes["cloud"])}
    live = by_example(read_all(tmp_path / "out" / "predictions"))
    assert live == by_example(cauc_ray.evaluate(tmp_path / "LOGITS", policy).predictions())


def test_a_session_that_a_run_starts_ends_with_it(tmp_path):
    prepared(tmp_path)
    said = python(
        "-c",
        "import sys, ray, cauc_ray\n"
        "from pathlib import Path\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "summary = cauc_ray.run(folder / 'pool.yaml', folder / 'policy.json', folder / 'input', folder / 'out')\n"
        "print(summary['n'], ray.is_initialized())\n",
    )
    assert said.split() == ["300", "False"]


def test_a_gpu_that_one_stage_no_longer_needs_goes_to_the_stage_that_does(tmp_path):
    """The rows that the second stage answers come first: it has the GPU to spare, until the third has more to do."""
    chain = write_table(tmp_path / "LOGITS", n=1500)["test"]
    policy = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="rf", threshold=0.7)
    (tmp_path / "policy.json").write_text(policy.to_json())
    stages = cauc_ray.evaluate(tmp_path / "LOGITS", policy).predictions().column("stage").to_numpy()
    assert min(np.bincount(stages)[1:]) > 250
    order = np.argsort(stages, kind="stable")
    split_input(
        tmp_path, replace(chain, example_ids=[chain.example_ids[row] for row in order], labels=chain.labels[order])
    )
    places = [
        {"num_cpus": 1, "custom": {"licence": 1}, "labels": {"tier": "!cloud"}},
        {"num_cpus": 1, "num_gpus": 1, "labels": {"tier": "moon"}, "fallback": [{"tier": "in(sun, cloud)"}]},
        {"num_cpus": 1, "num_gpus": 1, "labels": {"tier": "cloud"}},
    ]
    pool = saved_pool(tmp_path, batch_size=16)
    content = yaml.safe_load(pool.read_text())
    seconds = (0.0, 0.01, 0.015)
    for stage, resources, row_s in zip(content["stages"], places, seconds, strict=True):
        stage["resources"] = resources
        stage["model"]["seconds_per_row"] = row_s
        if "num_gpus" in resources:
            stage["replicas"] = {"min": 1, "max": 2}
    pool.write_text(yaml.safe_dump(content))
    python(Path(__file__).with_name("elastic_cluster.py"), tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    ran_on = {(c["stage"], c["node"]) for c in read_all(tmp_path / "out" / "ledger").to_pylist()}
    nodes = found["nodes"]
    assert ran_on == {("m0", nodes["edge"]), ("m1", nodes["cloud"]), ("m2", nodes["cloud"])}
    counts = {tuple(counts) for counts in found["replicas"]}
    assert {(1, 2, 1), (1, 1, 2)} <= counts  # the third GPU was the one's, then the other's
    live = by_example(read_all(tmp_path / "out" / "predictions"))
    assert live == by_example(cauc_ray.evaluate(tmp_path / "LOGITS", policy).predictions())
