"""Clusters of several nodes, each in a process of its own: where stages stand, and nodes that drain, die or start."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from local_head import local_head
from runs import MODELS, answers_of, by_example, cauc, python_model, read_all, saved_pool, split_input
from synthetic import write_table

import cauc_ray

pytestmark = pytest.mark.timeout(600)
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def python(*arguments):
    """Run Python in a process of its own. Returns its last line of output."""
    path = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=580, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.splitlines()[-1]


def prepared(folder, n=300, stages=({}, {}, {}), **rule):
    """Write a table, a policy, an input, and a pool of three stages, each with further settings."""
    chain = write_table(folder / "LOGITS", n=n)["test"]
    policy = cauc_ray.fit(folder / "LOGITS", models=MODELS, method="rf", **(rule or {"budget": 9.0}))
    policy.save(folder / "policy.json")
    pool = saved_pool(folder)
    content = yaml.safe_load(pool.read_text())
    content["stages"] = [{**stage, **settings} for stage, settings in zip(content["stages"], stages, strict=True)]
    pool.write_text(yaml.safe_dump(content))
    return chain, policy


def held_up(folder, model):
    """Return a saved model whose calls take two seconds until a file is removed, which the run's script does."""
    (folder / f"slow-{model}").touch()
    files = {"fails": str(folder / "never"), "hangs": str(folder / f"slow-{model}")}
    return python_model("saved_while", logits=str(folder / "LOGITS"), model=model, **files)


def prepare_elastic(folder):
    """Have the rows that the second stage answers come first, and fewer GPUs than both others may have replicas."""
    two = {"min": 1, "max": 2}
    licence = {"num_cpus": 1, "custom": {"licence": 1}, "labels": {"tier": "!cloud"}}
    gpu = {"num_cpus": 1, "num_gpus": 1, "labels": {"tier": "moon"}, "fallback": [{"tier": "in(sun, cloud)"}]}
    stages = (
        {"resources": licence},
        {"resources": gpu, "replicas": two, "model": held_up(folder, "m1")},
        {
            "resources": {"num_cpus": 1, "num_gpus": 1, "labels": {"tier": "cloud"}},
            "replicas": two,
            "model": held_up(folder, "m2"),
        },
    )
    chain, policy = prepared(folder, 1500, stages, threshold=0.7)
    answered_by = cauc_ray.evaluate(folder / "LOGITS", policy).to_arrow().column("stage").to_numpy()
    assert min(np.bincount(answered_by)[1:]) > 250
    order = np.argsort(answered_by, kind="stable")
    ids = [chain.example_ids[row] for row in order]
    split_input(folder, replace(chain, example_ids=ids, labels=chain.labels[order]))


def prepare_narrow(folder):
    """Have the first stage take as many CPUs as the edge node has, which is the only one with the second's licence."""
    needs = ({"num_cpus": 2}, {"num_cpus": 1, "custom": {"licence": 1}}, {"num_cpus": 1, "num_gpus": 1})
    stages = [{"resources": need, "replicas": {"min": 1, "max": 1}, "down_after_s": 240} for need in needs]
    split_input(folder, prepared(folder, stages=stages)[0])


def prepare_drained(folder):
    """Have the first stage start on the cloud node."""
    resources = {"num_cpus": 0.5, "labels": {"tier": "cloud"}, "fallback": [{"tier": "edge"}]}
    stages = [{"resources": resources, "model": held_up(folder, "m0")}, *[{"resources": resources}] * 2]
    split_input(folder, prepared(folder, stages=stages)[0])


@pytest.fixture(scope="module")
def tiered(tmp_path_factory):
    """Run three cascades on one cluster. Returns each one's calls, and what the cluster reports of its nodes."""
    folders = []
    for prepare in (prepare_elastic, prepare_narrow, prepare_drained):
        folders.append(tmp_path_factory.mktemp(prepare.__name__))
        prepare(folders[-1])
    nodes = json.loads(python(HERE / "tiered_cluster.py", *folders))
    for folder in folders:
        policy = cauc_ray.Policy.load(folder / "policy.json")
        assert answers_of(folder / "out") == by_example(cauc_ray.evaluate(folder / "LOGITS", policy).to_arrow())
    calls = [read_all(folder / "out" / "ledger").sort_by("started_at").to_pylist() for folder in folders]
    return *calls, nodes


@pytest.mark.soak("faults")
def test_a_gpu_that_one_stage_no_longer_needs_goes_to_the_stage_that_does(tiered):
    """The second stage has the GPU to spare, until the third has more to do. All stand where their labels ask for."""
    calls, _, _, nodes = tiered
    ran_on = {(c["stage"], c["node"]) for c in calls}
    assert ran_on == {("m0", nodes["edge"]), ("m1", nodes["cloud"]), ("m2", nodes["cloud"])}
    # There are three GPUs for the four replicas: one was first the second stage's, then the third's.
    replicas = {stage: {c["replica"] for c in calls if c["stage"] == stage} for stage in MODELS}
    assert [len(numbers) for numbers in replicas.values()] == [1, 2, 2]
    assert max(replicas["m1"]) < max(replicas["m2"])


@pytest.mark.soak("faults")
def test_a_stage_makes_way_for_one_that_only_its_node_has_room_for(tiered):
    """The first stage found no place but that of the second, whose licence and whose own place others held."""
    _, calls, _, nodes = tiered
    ran_on = {(c["stage"], c["node"]) for c in calls}
    assert {("m0", nodes["edge"]), ("m1", nodes["edge"]), ("m2", nodes["cloud"])} <= ran_on
    assert ran_on <= {*itertools.product(["m0"], nodes.values()), ("m1", nodes["edge"]), ("m2", nodes["cloud"])}


@pytest.mark.soak("faults")
def test_a_node_that_is_drained_is_left(tiered):
    """Ray would leave the replicas there for ten minutes."""
    *_, calls, nodes = tiered
    ran_on = {before: [c["node"] for c in calls if (c["started_at"].timestamp() < nodes["drained_at"]) == before]
              for before in (True, False)}  # fmt: skip
    assert nodes["cloud"] in ran_on[True]
    assert ran_on[False][-1] == nodes["edge"]


@pytest.mark.soak("faults")
def test_a_node_that_dies_changes_no_fit_by_shards_and_no_task(tmp_path):
    write_table(tmp_path / "LOGITS", n=1200)
    report = json.loads(python(HERE / "struck_cluster.py", tmp_path))
    assert report["nodes"] == 2
    assert report["policies"][0] == report["policies"][1]
    assert (report["n"], report["errors"]) == (8, [])
    assert max(report["attempts"]) >= 2


@pytest.mark.soak("faults")
@pytest.mark.timeout(900)
def test_nodes_that_an_autoscaler_has_yet_to_start_are_waited_for(tmp_path):
    """Only a node of a group at zero has the GPU that the last stage asks for, and one of another a shard's licence."""
    last = {"resources": {"num_cpus": 0.5, "num_gpus": 1}, "down_after_s": 500}
    chain, policy = prepared(tmp_path, stages=({}, {}, last))
    split_input(tmp_path, chain)
    with local_head(n_cpus=2, grows_by=[{"CPU": 2, "GPU": 1}, {"CPU": 1, "licence": 1}]) as head:
        files = ["--policy", tmp_path / "policy.json", "--input", tmp_path / "input", "-o", tmp_path / "out"]
        run = cauc("run", tmp_path / "pool.yaml", *files, "--address", head.gcs_address)
        fitted = python(
            "-c",
            "import cauc_ray, ray\n"
            f"policy = cauc_ray.fit({str(tmp_path / 'LOGITS')!r}, models={MODELS}, method='base', shards=1,\n"
            f"    resources={{'num_cpus': 0.5, 'custom': {{'licence': 1}}}}, address={head.gcs_address!r})\n"
            "print(policy.id, ray.is_initialized())",  # a session that it started ends with it
        )
    assert fitted.split() == [cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="base").id, "False"]
    assert run.returncode == 0, run.stderr
    (warning,) = [line for line in run.stderr.splitlines() if "autoscaler" in line]
    assert "stage 'm2'" in warning
    assert answers_of(tmp_path / "out") == by_example(cauc_ray.evaluate(tmp_path / "LOGITS", policy).to_arrow())
