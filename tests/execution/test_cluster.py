"""Clusters of several nodes, each in a process of its own: where stages stand, and nodes that drain, die or start."""

import itertools
import json
from pathlib import Path

import pytest
import yaml
from local_head import local_head
from runs import MODELS, answers_of, by_example, cauc, python, python_model, read_all, saved_pool, split_input
from synthetic import write_table

import cauc_ray

pytestmark = pytest.mark.timeout(600)
HERE = Path(__file__).parent


def prepared(folder, *stages):
    """Write a table, a policy, an input, and a pool of three stages, each with further settings. Returns the policy."""
    chain = write_table(folder / "LOGITS")["test"]
    policy = cauc_ray.fit(folder / "LOGITS", models=MODELS, method="rf", budget=9.0)
    policy.save(folder / "policy.json")
    split_input(folder, chain)
    pool = saved_pool(folder)
    content = yaml.safe_load(pool.read_text())
    content["stages"] = [{**stage, **settings} for stage, settings in zip(content["stages"], stages, strict=True)]
    pool.write_text(yaml.safe_dump(content))
    return policy


def prepare_narrow(folder):
    """Have the first stage take as many CPUs as the edge node has, which is the only one with the second's licence."""
    needs = ({"num_cpus": 2}, {"num_cpus": 1, "custom": {"licence": 1}}, {"num_cpus": 1, "num_gpus": 1})
    stages = [{"resources": need, "replicas": {"min": 1, "max": 1}, "down_after_s": 240} for need in needs]
    return prepared(folder, *stages)


def prepare_drained(folder):
    """Have the first stage start on the cloud node, where its calls take two seconds until the run's script ends it."""
    resources = {"num_cpus": 0.5, "labels": {"tier": "in(sun, cloud)"}, "fallback": [{"tier": "!cloud"}]}
    (folder / "slow-m0").touch()
    files = {"fails": str(folder / "never"), "hangs": str(folder / "slow-m0")}
    slow = python_model("saved_while", logits=str(folder / "LOGITS"), model="m0", **files)
    return prepared(folder, {"resources": resources, "model": slow}, *[{"resources": resources}] * 2)


@pytest.mark.soak("faults")
def test_a_stage_makes_way_for_one_that_only_its_node_has_room_for_and_a_drained_node_is_left(tmp_path_factory):
    """Two cascades on one cluster. Ray would leave the replicas on the drained node for ten minutes."""
    folders = [tmp_path_factory.mktemp(name) for name in ("narrow", "drained")]
    policies = [prepare(folder) for prepare, folder in zip((prepare_narrow, prepare_drained), folders, strict=True)]
    nodes = json.loads(python(HERE / "tiered_cluster.py", *folders))
    for folder, policy in zip(folders, policies, strict=True):
        assert answers_of(folder / "out") == by_example(cauc_ray.evaluate(folder / "LOGITS", policy).to_arrow())
    narrow, drained = (read_all(at / "out" / "ledger").sort_by("started_at").to_pylist() for at in folders)
    # The first stage found no place but that of the second, whose licence and whose own place others held.
    ran_on = {(call["stage"], call["node"]) for call in narrow}
    assert {("m0", nodes["edge"]), ("m1", nodes["edge"]), ("m2", nodes["cloud"])} <= ran_on
    assert ran_on <= {*itertools.product(["m0"], nodes.values()), ("m1", nodes["edge"]), ("m2", nodes["cloud"])}
    before = [call["node"] for call in drained if call["started_at"].timestamp() < nodes["drained_at"]]
    assert nodes["cloud"] in before
    assert len(before) < len(drained)
    assert drained[-1]["node"] == nodes["edge"]


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
    policy = prepared(tmp_path, {}, {}, last)
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
