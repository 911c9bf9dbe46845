"""Cascades on a real Ray session."""

import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from runs import (
    MODELS,
    by_example,
    numbered_input,
    python_pool,
    read_all,
    run,
    saved_pool,
    split_input,
    two_model_policy,
    write_pool,
)
from stored import damage
from synthetic import write_table
from user_models import by_x

import cauc_ray
from cauc_ray.errors import CaucError, ConfigError, DataError, ExecutionError
from cauc_ray.policies.trace import replay

pytestmark = pytest.mark.usefixtures("ray_session")


# Of a fit, of its table's content, and of how the stages are run, which changes no answer.
LIVE = {
    "base-per-call": ({"method": "base", "budget": 9.0}, {"per_call": True}, {}),
    "base": ({"method": "base"}, {}, {"batch_size": 300, "replicas": {"min": 2, "max": 3}}),
    "rf": ({"method": "rf", "budget": 9.0}, {"ragged": True}, {"batch_size": 7}),
    "rf-offsets": ({"method": "rf", "calibrator": "offsets", "budget": 8.0}, {}, {}),
    "isotonic": ({"models": MODELS[:2], "method": "base", "calibrator": "isotonic"}, {}, {}),
}


@pytest.mark.parametrize("case", ["base-per-call", *(pytest.param(c, marks=pytest.mark.slow) for c in list(LIVE)[1:])])
def test_a_live_run_is_the_replay_row_for_row_and_its_ledger_adds_up(tmp_path, case):
    fit, content, ways = LIVE[case]
    chain = write_table(tmp_path / "LOGITS", n=700, **content)["test"]
    policy = cauc_ray.fit(tmp_path / "LOGITS", **{"models": MODELS, **fit})
    stages = yaml.safe_load(saved_pool(tmp_path, **ways).read_text())["stages"]
    pool = write_pool(tmp_path, stages[: len(policy.stages)])
    summary = run(tmp_path, pool, policy, split_input(tmp_path, chain))
    live = by_example(read_all(tmp_path / "out" / "predictions"))
    expected = by_example(cauc_ray.evaluate(tmp_path / "LOGITS", policy).to_arrow())
    assert live == expected  # predictions, stages, costs, labels, and confidences to the bit
    assert not (tmp_path / "out" / "failed").exists()
    assert summary["n"] == 700
    assert summary["accuracy"]["value"] == sum(r["prediction"] == r["label"] for r in live.values()) / 700
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())

    ledger = read_all(tmp_path / "out" / "ledger")
    assert ledger.column_names == [
        "run_id", "stage", "replica", "node", "started_at", "batch", "accepted", "deferred", "queue_s", "compute_s",
        "device_s", "cost", "attempt",
    ]  # fmt: skip
    calls, answered, reached = ledger.to_pylist(), Counter(row["stage"] for row in live.values()), 700
    assert len(answered) > 1
    for place, stage in enumerate(policy.stages):
        own = [call for call in calls if call["stage"] == stage.name]
        assert sum(call["batch"] for call in own) == reached
        assert sum(call["accepted"] for call in own) == answered[place]
        assert sum(call["deferred"] for call in own) == reached - answered[place]
        if policy.costs == "per-model":
            assert sum(call["cost"] for call in own) == pytest.approx(reached * stage.cost)
        assert summary["stages"][place]["reached"] == reached
        assert summary["stages"][place]["calls"] == len(own)
        reached -= answered[place]
    assert all(call["queue_s"] >= 0 and call["compute_s"] > 0 and call["attempt"] == 1 for call in calls)
    assert {call["run_id"] for call in calls} == {summary["run_id"]}
    assert len({(call["stage"], call["replica"]) for call in calls}) >= len(policy.stages)
    assert summary["total_cost"] == pytest.approx(sum(call["cost"] for call in calls))


@pytest.mark.slow
def test_python_models_get_the_inputs_columns_and_may_write_to_them_and_the_callers_session_stays(tmp_path):
    import ray

    pool = python_pool(tmp_path, [("writes_to_its_input", {}), ("by_x", {"factor": 5.0})])
    run(tmp_path, pool, two_model_policy(), numbered_input(tmp_path))
    assert ray.is_initialized()
    assert ray.get(ray.remote(num_cpus=0)(lambda: 7).remote(), timeout=60) == 7
    rows = by_example(read_all(tmp_path / "out" / "predictions"))
    assert len(rows) == 40
    assert {row["stage"] for row in rows.values()} == {0, 1}
    assert "label" not in next(iter(rows.values()))
    # The second stage sees x as it came: where x is clearly negative, it outweighs the first's x + 1.
    assert rows["row-14"]["stage"] == 1
    assert rows["row-14"]["prediction"] == 1


# The stages' models; of each row that fails, its stage and what its reason says.
SAYS, COSTS = "ValueError: cannot look at row-{} at all", "WordlessError: its message cannot be shown"
FAILING = {
    "named": (
        [("fails_on", {"example": "row-5"}), ("fails_on", {"example": "row-20"})],
        {"row-5": ("small", SAYS.format(5)), "row-20": ("large", SAYS.format(20))},
    ),
    "kills its replica": (
        [("by_x", {}), ("dies_on", {"example": "row-20"})],
        {"row-20": ("large", "stage 'large' died: Worker unexpectedly exits")},
    ),
    "no file can hold": (
        [("speaks_in_surrogates", {"example": "row-7"}), ("by_x", {})],
        {"row-7": ("small", "ValueError: cannot open caf?.jpg")},
    ),
    "no words": ([("raises_wordlessly", {"example": "row-7"}), ("by_x", {})], {"row-7": ("small", COSTS)}),
    "is prepared": (
        [("prepared", {"factory": "fails_on", "example": "row-20", "device_s": 0.05}), ("by_x", {})],
        {"row-20": ("small", SAYS.format(20))},
    ),
    "kills as it is prepared": (
        [("prepared", {"factory": "dies_on", "example": "row-20", "device_s": 0.05}), ("by_x", {})],
        {"row-20": ("small", "died")},
    ),
}


@pytest.mark.parametrize("case", ["named", *(pytest.param(c, marks=pytest.mark.slow) for c in list(FAILING)[1:])])
def test_rows_that_a_model_fails_on_are_named_and_the_others_answered(tmp_path, case):
    factories, expected = FAILING[case]
    pool = python_pool(tmp_path, factories)
    summary = run(tmp_path, pool, two_model_policy(threshold=0.99), numbered_input(tmp_path))
    failed = by_example(read_all(tmp_path / "out" / "failed"))
    assert {name: row["stage"] for name, row in failed.items()} == {
        name: stage for name, (stage, _) in expected.items()
    }
    assert all(says in failed[name]["reason"] for name, (_, says) in expected.items())
    answered = by_example(read_all(tmp_path / "out" / "predictions"))
    assert set(answered) | set(failed) == {f"row-{n}" for n in range(40)}
    assert not set(answered) & set(failed)
    assert (summary["n"], summary["n_failed"]) == (40, len(failed))
    spent = sum(row["cost"] for row in answered.values()) + sum(row["stage"] == "large" for row in failed.values())
    assert summary["cost"] == pytest.approx(spent / len(answered))  # what failed after the first stage is no saving
    ledger = read_all(tmp_path / "out" / "ledger").to_pylist()
    assert any(call["attempt"] > 1 for call in ledger)
    assert all(call["cost"] == 0 for call in ledger if call["accepted"] + call["deferred"] == 0)


@pytest.mark.slow
def test_a_model_that_always_fails_ends_the_run_with_its_reason(tmp_path):
    pool = python_pool(tmp_path, [("by_x", {}), ("always_fails", {})])
    with pytest.raises(ExecutionError, match="stage 'large' has failed on every row so far: RuntimeError: no such dev"):
        run(tmp_path, pool, two_model_policy(threshold=2.0), numbered_input(tmp_path))
    assert not (tmp_path / "out" / "summary.json").exists()
    # Its calls are in the ledger; no block is committed, and still it can go on.
    sound = python_pool(tmp_path, [("by_x", {}), ("by_x", {})])
    policy, inputs = two_model_policy(threshold=2.0), tmp_path / "input.parquet"
    assert cauc_ray.run(sound, policy, inputs, tmp_path / "out", resume=True)["n"] == 40


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_run_before_it_leaves_anything(tmp_path):
    # The first stage: where a later one takes its time to fail, calls have been made by then, and stand in the ledger.
    pool = python_pool(tmp_path, [("cannot_load", {}), ("by_x", {})])
    with pytest.raises(CaucError, match=r"stage 'small' failed: OSError: weights\.pt is not there"):
        cauc_ray.run(pool, two_model_policy(), numbered_input(tmp_path), tmp_path / "new" / "deep" / "out")
    assert not (tmp_path / "new").exists()
    pool = python_pool(tmp_path, [("absent", {}), ("by_x", {})])
    with pytest.raises(ConfigError, match="stage 'small': factory 'user_models:absent' cannot be imported"):
        run(tmp_path, pool, two_model_policy(), numbered_input(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_column_that_no_model_reads_may_be_damaged(tmp_path):
    inputs = numbered_input(tmp_path)
    pq.write_table(pq.read_table(inputs).append_column("y", [list(range(40))]), inputs)
    damage(inputs, 0, 2)
    pool = python_pool(tmp_path, [("by_x", {}), ("by_x", {})])
    assert run(tmp_path, pool, two_model_policy(), inputs)["n_failed"] == 40
    declared = yaml.safe_load(pool.read_text()) | {"inputs": {"x": {"datatype": "FP64", "shape": []}}}
    pool.write_text(yaml.safe_dump(declared))
    assert cauc_ray.run(pool, two_model_policy(), inputs, tmp_path / "new")["n_failed"] == 0


@pytest.mark.slow
def test_a_stage_whose_processes_end_as_they_load_ends_the_run_long_before_its_limit(tmp_path):
    pool = python_pool(tmp_path, [("by_x", {}), ("ends_its_process", {})])
    with pytest.raises(ExecutionError, match="all replicas of stage 'large' die while they load"):
        run(tmp_path, pool, two_model_policy(threshold=0.99), numbered_input(tmp_path))


@pytest.mark.slow
def test_what_is_committed_when_a_run_ends_badly_has_its_calls_in_the_ledger(tmp_path):
    """The rows before the one that ends it are three blocks further on."""
    pool = python_pool(tmp_path, [("gives_up_on", {"example": "row-18000"}), ("by_x", {})], batch_size=256)
    with pytest.raises(ExecutionError, match="the model's server is down"):
        run(tmp_path, pool, two_model_policy(threshold=0.5), numbered_input(tmp_path, 20_000))
    answered = read_all(tmp_path / "out" / "predictions").num_rows
    assert answered >= 4096
    accepted = sum(call["accepted"] for call in read_all(tmp_path / "out" / "ledger").to_pylist())
    assert accepted >= answered
    assert not (tmp_path / "out" / "summary.json").exists()


def priced(policy, factor):
    """Return a policy whose calls cost so many times as much."""
    stages = tuple(stage.model_copy(update={"cost": factor * stage.cost}) for stage in policy.stages)
    return policy.model_copy(update={"stages": stages})


@pytest.mark.parametrize("ending", [pytest.param("parquet", marks=pytest.mark.slow), "csv", "jsonl"])
def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path, ending):
    """It ends as an undisturbed run does on the same rows in Parquet."""
    inputs, policy = numbered_input(tmp_path, 20_000, ending), two_model_policy(threshold=0.7)
    ways = {"batch_size": 256}
    ended = python_pool(tmp_path, [("gives_up_on", {"example": "row-18000"}), ("by_x", {"factor": 5.0})], **ways)
    with pytest.raises(ExecutionError, match="is down"):
        run(tmp_path, ended, policy, inputs)
    first = {path.name: path.read_bytes() for path in (tmp_path / "out" / "predictions").iterdir()}
    assert 1 <= len(first) <= 4

    sound = python_pool(tmp_path, [("by_x", {}), ("by_x", {"factor": 5.0})], **ways)
    for other, says in (
        ({"policy": two_model_policy(threshold=0.8)}, "another policy"),
        ({"policy": priced(policy, 2.0)}, "another policy with other costs"),  # of one id: the answers are the same
        ({"input": numbered_input(tmp_path / "LOGITS", 19_000, ending)}, "another input"),
    ):
        with pytest.raises(ConfigError, match=says):
            cauc_ray.run(sound, other.get("policy", policy), other.get("input", inputs), tmp_path / "out", resume=True)
    with pytest.raises(ConfigError, match="not an empty folder"):
        cauc_ray.run(sound, policy, inputs, tmp_path / "out")
    summary = cauc_ray.run(sound, policy, inputs, tmp_path / "out", resume=True)
    undisturbed = cauc_ray.run(sound, policy, numbered_input(tmp_path, 20_000), tmp_path / "whole")

    for name, content in first.items():
        assert (tmp_path / "out" / "predictions" / name).read_bytes() == content
    rows, expected = (by_example(read_all(tmp_path / out / "predictions")) for out in ("out", "whole"))
    assert rows == expected
    assert len(rows) == summary["n"] == undisturbed["n"] == 20_000
    for stage, whole in zip(summary["stages"], undisturbed["stages"], strict=True):
        assert (stage["reached"], stage["answered"]) == (whole["reached"], whole["answered"])
        assert stage["repeated"] >= 0
        assert whole["repeated"] == 0
    ledger = read_all(tmp_path / "out" / "ledger").to_pylist()
    assert len({call["run_id"] for call in ledger}) == 1
    assert summary["total_cost"] == pytest.approx(sum(call["cost"] for call in ledger))
    # Asked again, a finished run has nothing left to do.
    assert cauc_ray.run(sound, policy, inputs, tmp_path / "out", resume=True) == summary
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="has no run to resume"):
        cauc_ray.run(sound, policy, inputs, tmp_path / "other", resume=True)


@pytest.mark.slow
def test_a_block_whose_rows_all_fail_is_committed_too(tmp_path):
    pool = python_pool(tmp_path, [("fails_on", {"example": "row-0"}), ("by_x", {})])
    summary = run(tmp_path, pool, two_model_policy(), numbered_input(tmp_path, 1))
    assert (summary["n"], summary["n_failed"], summary["stages"][0]["failed"]) == (1, 1, 1)
    assert read_all(tmp_path / "out" / "predictions").num_rows == 0


def test_a_stage_that_fits_nowhere_is_reported_before_anything_starts(tmp_path):
    inputs, policy = numbered_input(tmp_path), two_model_policy()
    for resources, asked in (
        ({"num_gpus": 2}, "8 CPUs and 2 GPUs"),
        ({"num_cpus": 999}, "999 CPUs"),
        ({"memory": "900TiB"}, "1 CPU and 900 TiB of memory"),
        ({"labels": {"tier": "moon"}}, "on a node labelled tier=moon"),
    ):
        pool = python_pool(tmp_path, [("by_x", {})] * 2, resources=resources)
        with pytest.raises(ExecutionError, match=f"stage 'small' with at least 1 replica of .*{asked}"):
            run(tmp_path, pool, policy, inputs)
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_memory_is_held_while_a_stage_runs(tmp_path):
    pool = python_pool(tmp_path, [("talkative", {"seconds": 0.3})] * 2, resources={"num_cpus": 0.5, "memory": "64MiB"})
    free = []
    policy, inputs = two_model_policy(), numbered_input(tmp_path, 80)

    def look(progress):
        free.append(ray.available_resources()["memory"])

    cauc_ray.run(pool, policy, inputs, tmp_path / "out", on_progress=look)
    assert ray.cluster_resources()["memory"] - min(free) == 2 * (64 << 20)


def test_faults_of_the_call_are_reported_before_ray_is_asked(tmp_path):
    inputs, policy = numbered_input(tmp_path), two_model_policy()
    pool = python_pool(tmp_path, [("by_x", {})] * 2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not an empty folder"):
        run(tmp_path, pool, policy, inputs)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]
    with pytest.raises(DataError, match="there is no file"):
        cauc_ray.run(pool, policy, tmp_path / "absent", tmp_path / "new")
    images = [{"name": name, "model": {"kind": "torchvision", "arch": "resnet18"}} for name in ("small", "large")]
    with pytest.raises(
        DataError, match=r"stage 'small' needs a column 'image', .*input\.parquet has only example_id, x"
    ):
        cauc_ray.run(write_pool(tmp_path, images), policy, inputs, tmp_path / "new")
    stages = [{"name": "smal", "model": {"kind": "python", "factory": "user_models:by_x"}}]
    with pytest.raises(ConfigError, match="unknown stage 'small'; did you mean 'smal'"):
        cauc_ray.run(write_pool(tmp_path, stages), policy, inputs, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_saved_stage_that_lacks_an_example_names_it(tmp_path):
    chain = write_table(tmp_path / "LOGITS", n=60)["test"]
    policy = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="base")
    inputs = split_input(tmp_path, chain)
    pq.write_table(pa.table({"example_id": ["stranger"], "label": pa.array([0], pa.int32())}), inputs / "c.parquet")
    run(tmp_path, saved_pool(tmp_path), policy, inputs)
    failed = by_example(read_all(tmp_path / "out" / "failed"))
    assert set(failed) == {"stranger"}
    assert "example 'stranger' is not in" in failed["stranger"]["reason"]


@pytest.mark.slow
def test_real_logits_live_and_replayed_agree(tmp_path, shared_logits):
    models = ["resnet20", "resnet32", "resnet56", "wrn_28_10"]
    table = shared_logits / "cifar10"
    policy = cauc_ray.fit(table, models=models, method="rf", budget=1.0)
    evaluation = cauc_ray.evaluate(table, policy)
    inputs = tmp_path / "test.parquet"
    pq.write_table(pa.table({"example_id": list(evaluation.chain.example_ids)}), inputs)
    stages = [
        {
            "name": model,
            "model": {"kind": "saved", "logits": str(table), "model": model, "split": "test"},
            "resources": {"num_cpus": 0.5},
        }
        for model in models
    ]
    run(tmp_path, write_pool(tmp_path, stages), policy, inputs)
    live = by_example(read_all(tmp_path / "out" / "predictions"))
    expected = by_example(evaluation.to_arrow().drop_columns(["label"]))
    assert live == expected
    assert (replay(policy, evaluation.chain).stages > 0).any()


def test_a_batch_is_prepared_while_the_one_before_is_computed(tmp_path):
    """Here no batch is answered before the next one is being prepared."""
    first = ("waits_for_the_next", {"n_batches": 12})
    policy, inputs = two_model_policy(threshold=0.0), numbered_input(tmp_path, 96)
    summary = run(tmp_path, python_pool(tmp_path, [first, ("by_x", {})]), policy, inputs)
    assert (summary["n"], summary["n_failed"]) == (96, 0)
    found = by_example(read_all(tmp_path / "out" / "predictions"))
    rows = pq.read_table(inputs).to_pylist()
    step = policy.start(by_x()({"x": np.array([row["x"] for row in rows])}).astype(np.float32))
    assert [found[row["example_id"]]["prediction"] for row in rows] == step.predictions.tolist()
    assert [found[row["example_id"]]["confidence"] for row in rows] == step.confidences.astype(np.float32).tolist()
    ledger = read_all(tmp_path / "out" / "ledger")
    began = pc.cast(ledger["started_at"], "int64").to_numpy() / 1e6
    took = ledger["compute_s"].to_numpy()
    assert took.sum() <= (began + took).max() - began.min() + 1e-3  # what two calls overlap counts once
