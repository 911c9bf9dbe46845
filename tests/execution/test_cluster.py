"""A cluster of several nodes, and a session that a run starts itself: each in a process of its own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from local_head import local_head
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


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """Run four cascades on one cluster. Returns the folder of each, and what the cluster reports of its nodes."""
    prepare = {
        "labelled": prepare_labelled, "elastic": prepare_elastic, "narrow": prepare_narrow, "drained": prepare_drained,
    }  # fmt: skip
    folders = [tmp_path_factory.mktemp(name) for name in prepare]
    for folder, prepared_by in zip(folders, prepare.values(), strict=True):
        prepared_by(folder)
    said = python(Path(__file__).with_name("tiered_cluster.py"), *folders)
    return *folders, json.loads(said.splitlines()[-1])


def prepare_labelled(folder):
    _, pool = prepared(folder)
    content = yaml.safe_load(pool.read_text())
    for stage, tier in zip(content["stages"], ("edge", "edge", "cloud"), strict=True):
        stage["resources"] = {"num_cpus": 1, "labels": {"tier": tier}}
    pool.write_text(yaml.safe_dump(content))


def prepare_elastic(folder):
    """Have the rows that the second stage answers come first, and fewer GPUs than both others may have replicas."""
    chain = write_table(folder / "LOGITS", n=1500)["test"]
    policy = cauc_ray.fit(folder / "LOGITS", models=MODELS, method="rf", threshold=0.7)
    (folder / "policy.json").write_text(policy.to_json())
    stages = cauc_ray.evaluate(folder / "LOGITS", policy).to_arrow().column("stage").to_numpy()
    assert min(np.bincount(stages)[1:]) > 250
    order = np.argsort(stages, kind="stable")
    split_input(
        folder, replace(chain, example_ids=[chain.example_ids[row] for row in order], labels=chain.labels[order])
    )
    places = [
        {"num_cpus": 1, "custom": {"licence": 1}, "labels": {"tier": "!cloud"}},
        {"num_cpus": 1, "num_gpus": 1, "labels": {"tier": "moon"}, "fallback": [{"tier": "in(sun, cloud)"}]},
        {"num_cpus": 1, "num_gpus": 1, "labels": {"tier": "cloud"}},
    ]
    pool = saved_pool(folder, batch_size=16)
    content = yaml.safe_load(pool.read_text())
    seconds = (0.0, 0.01, 0.015)
    for stage, resources, row_s in zip(content["stages"], places, seconds, strict=True):
        stage["resources"] = resources
        stage["model"]["seconds_per_row"] = row_s
        if "num_gpus" in resources:
            stage["replicas"] = {"min": 1, "max": 2}
    pool.write_text(yaml.safe_dump(content))


def prepare_narrow(folder):
    """Have the first stage take as many CPUs as the edge node has, which is the only one with the second's licence."""
    _, pool = prepared(folder)
    content = yaml.safe_load(pool.read_text())
    needs = ({"num_cpus": 2}, {"num_cpus": 1, "custom": {"licence": 1}}, {"num_cpus": 1, "num_gpus": 1})
    for stage, resources in zip(content["stages"], needs, strict=True):
        stage |= {"resources": resources, "replicas": {"min": 1, "max": 1}, "down_after_s": 60}
    pool.write_text(yaml.safe_dump(content))


def prepare_drained(folder):
    """Have the first stage start on the cloud node, and take some ten seconds."""
    _, pool = prepared(folder)
    content = yaml.safe_load(pool.read_text())
    content["stages"][0]["model"]["seconds_per_row"] = 0.03
    for stage in content["stages"]:
        stage["resources"] = {"num_cpus": 0.5, "labels": {"tier": "cloud"}, "fallback": [{"tier": "edge"}]}
    pool.write_text(yaml.safe_dump(content))


def is_the_replay(folder):
    policy = cauc_ray.Policy.load(folder / "policy.json")
    live = by_example(read_all(folder / "out" / "predictions"))
    return live == by_example(cauc_ray.evaluate(folder / "LOGITS", policy).to_arrow())


@pytest.mark.slow
def test_stages_run_on_the_nodes_whose_labels_they_ask_for(tiered):
    folder, *_, nodes = tiered
    ran_on = {(c["stage"], c["node"]) for c in read_all(folder / "out" / "ledger").to_pylist()}
    assert ran_on == {("m0", nodes["edge"]), ("m1", nodes["edge"]), ("m2", nodes["cloud"])}
    assert is_the_replay(folder)


@pytest.mark.slow
def test_a_gpu_that_one_stage_no_longer_needs_goes_to_the_stage_that_does(tiered):
    """The second stage has the GPU to spare, until the third has more to do."""
    _, folder, _, _, nodes = tiered
    calls = read_all(folder / "out" / "ledger").sort_by("started_at").to_pylist()
    assert {(c["stage"], c["node"]) for c in calls} == {
        ("m0", nodes["edge"]), ("m1", nodes["cloud"]), ("m2", nodes["cloud"]),
    }  # fmt: skip
    # There are three GPUs for the four replicas: one was first the second stage's, then the third's.
    assert {stage: len({c["replica"] for c in calls if c["stage"] == stage}) for stage in MODELS} == {
        "m0": 1, "m1": 2, "m2": 2,
    }  # fmt: skip
    newest = {stage: max(c["replica"] for c in calls if c["stage"] == stage) for stage in ("m1", "m2")}
    assert newest["m1"] < newest["m2"]
    assert is_the_replay(folder)


@pytest.mark.slow
def test_stages_that_fit_are_not_refused_for_the_order_in_which_they_were_tried(tiered):
    _, _, folder, _, nodes = tiered
    ran_on = {(c["stage"], c["node"]) for c in read_all(folder / "out" / "ledger").to_pylist()}
    assert ran_on == {("m0", nodes["cloud"]), ("m1", nodes["edge"]), ("m2", nodes["cloud"])}
    assert is_the_replay(folder)


@pytest.mark.slow
def test_a_node_that_is_drained_is_left_at_once(tiered):
    """Ray would leave the replicas there for ten minutes."""
    *_, folder, nodes = tiered
    calls = read_all(folder / "out" / "ledger").to_pylist()
    after_s = [(c["started_at"].timestamp() - nodes["drained_at"], c["node"]) for c in calls]
    assert nodes["cloud"] in {node for seconds, node in after_s if seconds < 0}
    assert {node for seconds, node in after_s if seconds > 3} == {nodes["edge"]}
    assert is_the_replay(folder)


@pytest.mark.slow
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


@pytest.mark.slow
def test_nodes_that_an_autoscaler_has_yet_to_start_are_waited_for(tmp_path):
    """Only a node of a group at zero has the GPU that the last stage asks for, and one of another a shard's licence."""
    policy, pool = prepared(tmp_path)
    content = yaml.safe_load(pool.read_text())
    with local_head(n_cpus=2, grows_by=[{"CPU": 2, "GPU": 1}, {"CPU": 1, "licence": 1}]) as head:

        def run(out, **stage):
            content["stages"][-1] |= stage
            pool.write_text(yaml.safe_dump(content))
            return subprocess.run(
                [Path(sys.executable).with_name("cauc"), "run", pool, "--policy", tmp_path / "policy.json",
                 "--input", tmp_path / "input", "-o", tmp_path / out, "--address", head.gcs_address],
                capture_output=True, text=True, timeout=240,
            )  # fmt: skip

        done = run("never", resources={"num_cpus": 0.5, "num_gpus": 9}, down_after_s=6)
        assert done.returncode == 2
        assert "error: stage 'm2' has had no live replica for" in done.stderr
        assert "no node has free resources for 0.5 CPUs and 9 GPUs" in done.stderr
        done = run("out", resources={"num_cpus": 0.5, "num_gpus": 1}, down_after_s=240)
        said = python(
            "-c",
            "import cauc_ray\n"
            f"found = cauc_ray.fit({str(tmp_path / 'LOGITS')!r}, models={MODELS}, method='base', shards=1,\n"
            f"    resources={{'num_cpus': 0.5, 'custom': {{'licence': 1}}}}, address={head.gcs_address!r})\n"
            "print(found.id)",
        )
    assert said.strip() == cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="base").id
    assert done.returncode == 0, done.stderr
    (warning,) = [line for line in done.stderr.splitlines() if "autoscaler" in line]
    assert "stage 'm2' with at least 1 replica of 0.5 CPUs and 1 GPU does not fit" in warning
    expected = cauc_ray.evaluate(tmp_path / "LOGITS", policy)
    assert by_example(read_all(tmp_path / "out" / "predictions")) == by_example(expected.to_arrow())
