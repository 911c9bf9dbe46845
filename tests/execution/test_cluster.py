"""A cluster of several nodes, and sessions that a run starts itself: each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

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
