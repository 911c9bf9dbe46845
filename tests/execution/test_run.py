"""Cascades on a real Ray session."""

import json
import re
from collections import Counter

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from runs import (
    MODELS,
    SOUND,
    answers_of,
    by_example,
    numbered_input,
    pool_of,
    python_model,
    python_pool,
    ranked,
    read_all,
    rows_of,
    run,
    saved_model,
    saved_pool,
    split_input,
    two_model_policy,
    write_pool,
)
from stored import damage, write
from synthetic import write_table
from user_models import by_x

import cauc_ray
from cauc_ray.errors import CaucError, ConfigError, ExecutionError, PolicyError

pytestmark = pytest.mark.usefixtures("ray_session")


# Options of a fit, content of its table, and settings of stages that change no answer.
LIVE = {
    "base-per-call": ({"method": "base", "budget": 9.0}, {"per_call": True}, {}),
    "rf": ({"method": "rf", "budget": 9.0}, {"ragged": True}, {"batch_size": 7}),
    "base": ({"method": "base"}, {}, {"batch_size": 300, "replicas": {"min": 2, "max": 3}}),
}


def test_models_may_write_to_their_input_and_are_closed_when_a_run_ends(tmp_path):
    closed = tmp_path / "closed"
    pool = python_pool(tmp_path, [("writes_to_its_input", {}), ("notes_its_end", {"path": str(closed)})])
    run(tmp_path, pool, two_model_policy(), numbered_input(tmp_path))
    assert len(closed.read_text().split()) == 1
    rows = answers_of(tmp_path / "out")
    assert len(rows) == 40
    assert "label" not in rows["row-0"]
    # The second stage sees x as it came: the first, which saw x + 1, would have answered 0.
    assert (rows["row-14"]["stage"], rows["row-14"]["prediction"]) == (1, 1)


@pytest.mark.parametrize("case", ranked(LIVE, quick=1, slow=1))
def test_a_live_run_is_the_replay_row_for_row_and_its_ledger_adds_up(tmp_path, case):
    fit, content, stage_settings = LIVE[case]
    chain = write_table(tmp_path / "LOGITS", n=700, **content)["test"]
    policy = cauc_ray.fit(tmp_path / "LOGITS", **{"models": MODELS, **fit})
    pool = pool_of(tmp_path, {name: saved_model(name) for name in policy.models}, **stage_settings)
    summary = run(tmp_path, pool, policy, split_input(tmp_path, chain))
    live, failed = rows_of(tmp_path / "out")
    expected = by_example(cauc_ray.evaluate(tmp_path / "LOGITS", policy).to_arrow())
    assert (live, failed) == (expected, {})  # predictions, stages, costs, labels, and confidences to the bit
    assert summary["n"] == 700
    assert summary["accuracy"]["value"] == sum(r["prediction"] == r["label"] for r in live.values()) / 700
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())

    ledger = read_all(tmp_path / "out" / "ledger")
    assert ledger.column_names == [
        "run_id", "stage", "replica", "node", "started_at", "batch", "accepted", "deferred", "queue_s", "compute_s",
        "device_s", "cost", "attempt", "bytes_out", "bytes_in",
    ]  # fmt: skip
    calls, answered, reached = ledger.to_pylist(), Counter(row["stage"] for row in live.values()), 700
    assert len(answered) > 1
    for place, stage in enumerate(policy.stages):
        of_stage = [call for call in calls if call["stage"] == stage.name]
        assert sum(call["batch"] for call in of_stage) == summary["stages"][place]["reached"] == reached
        assert sum(call["accepted"] for call in of_stage) == answered[place]
        assert sum(call["deferred"] for call in of_stage) == reached - answered[place]
        if policy.costs == "per-model":
            assert sum(call["cost"] for call in of_stage) == pytest.approx(reached * stage.cost)
        assert summary["stages"][place]["calls"] == len(of_stage)
        reached -= answered[place]
    assert all(call["queue_s"] >= 0 and call["compute_s"] > 0 and call["attempt"] == 1 for call in calls)
    assert {call["run_id"] for call in calls} == {summary["run_id"]}
    assert len({(call["stage"], call["replica"]) for call in calls}) >= len(policy.stages)
    assert summary["total_cost"] == pytest.approx(sum(call["cost"] for call in calls))


# The stages' models; stage and words of the reason by failed row.
REASON = "ValueError: cannot look at row-{} at all"
FAILING = {
    "named": (
        [("fails_on", {"example": "row-5"}), ("fails_on", {"example": "row-20"})],
        {"row-5": ("small", REASON.format(5)), "row-20": ("large", REASON.format(20))},
    ),
    "killing its replica": (
        [SOUND[0], ("dies_on", {"example": "row-20"})],
        {"row-20": ("large", "stage 'large' died: Worker unexpectedly exits")},
    ),
    "with odd messages": (
        [("speaks_in_surrogates", {"example": "row-7"}), ("raises_wordlessly", {"example": "row-20"})],
        {"row-7": ("small", "ValueError: cannot open caf?.jpg"), "row-20": ("large", "WordlessError")},
    ),
    "while it is prepared": (
        [
            ("prepared", {"factory": "fails_on", "example": "row-5", "device_s": 0.05}),
            ("prepared", {"factory": "dies_on", "example": "row-20", "device_s": 0.05}),
        ],
        {"row-5": ("small", REASON.format(5)), "row-20": ("large", "died")},
    ),
}


@pytest.mark.parametrize("case", ranked(FAILING, quick=1, slow=1))
def test_rows_that_a_model_fails_on_are_named_and_the_others_answered(tmp_path, case):
    factories, expected = FAILING[case]
    pool = python_pool(tmp_path, factories, cost={"gflops": "auto"})  # the policy has the costs
    summary = run(tmp_path, pool, two_model_policy(0.99), numbered_input(tmp_path))
    answered, failed = rows_of(tmp_path / "out")
    assert {name: row["stage"] for name, row in failed.items()} == {
        name: stage for name, (stage, _) in expected.items()
    }
    assert all(words in failed[name]["reason"] for name, (_, words) in expected.items())
    assert set(answered) | set(failed) == {f"row-{n}" for n in range(40)}
    assert (summary["n"], summary["n_failed"]) == (40, len(failed))
    spent = sum(row["cost"] for row in answered.values()) + sum(row["stage"] == "large" for row in failed.values())
    assert summary["cost"] == pytest.approx(spent / len(answered))  # what failed after the first stage saves nothing
    ledger = read_all(tmp_path / "out" / "ledger").to_pylist()
    assert any(call["attempt"] > 1 for call in ledger)
    assert all(call["cost"] == 0 for call in ledger if call["accepted"] + call["deferred"] == 0)


def pool_failing_below(folder, limit, **pool):
    """Write a pool whose first model fails on the rows with an x below a limit, while folder/mended is not there."""
    path = python_pool(folder, [("fails_below", {"limit": limit, "path": str(folder / "mended")}), SOUND[1]])
    path.write_text(path.read_text() + "".join(f"{key}: {value}\n" for key, value in pool.items()))
    return path


@pytest.mark.slow
def test_more_failed_rows_than_a_pool_allows_end_the_run_with_one_line(tmp_path, command):
    two_model_policy().save(tmp_path / "policy.json")
    # 110 of 400 rows.
    arguments = ["--policy", tmp_path / "policy.json", "--input", numbered_input(tmp_path, 400), "-o", tmp_path / "out"]
    code, out, err = command("run", pool_failing_below(tmp_path, -0.9), *arguments)
    assert (code, out, len(re.sub(r"cauc: starting .*\n", "", err).splitlines())) == (2, "", 1)
    assert int(re.search(r"(\d+) of", err).group(1)) > 100  # some more may fail before anybody looks
    assert all(part in err for part in ("'small'", "no kernel image", "max_failed", "--retry-failed"))
    assert not (tmp_path / "out" / "summary.json").exists()
    # A pool that allows more goes on with the run; its failed rows are in failed/.
    resume = ["--resume"] if (tmp_path / "out").exists() else []  # nothing is left where nothing was written yet
    code, out, err = command("run", pool_failing_below(tmp_path, -0.9, max_failed=0.5), *arguments, *resume, "--json")
    assert code == 5, err  # with a warning of the guard: rows cost other than the policy expects
    answered, failed = rows_of(tmp_path / "out")
    assert (len(failed), len(answered) + len(failed), json.loads(out)["n_failed"]) == (110, 400, 110)
    # The first pool does not take what is there for a finished run.
    (tmp_path / "out" / "summary.json").unlink()
    code, _, err = command("run", pool_failing_below(tmp_path, -0.9), *arguments, "--resume")
    assert code == 2
    assert "110 of 400" in err


def mendable(folder, factory, kwargs):
    """Return a model that is that of a factory until folder/mended is there; its settings stay the same."""
    return "mended", {"path": str(folder / "mended"), "factory": factory, **kwargs}


# The stages' models, and what ends the run.
ENDING = {
    "always fails": ([SOUND[0], ("always_fails", {})], "'large' .* every row .*RuntimeError: no such"),
    "always dies": ([SOUND[0], ("always_dies", {})], "stage 'large' die: .*unexpectedly exits"),
    "dies loading": ([SOUND[0], ("ends_its_process", {})], "stage 'large' die while they load"),
    "cannot be loaded": ([("cannot_load", {}), SOUND[0]], r"stage 'small' .*OSError: weights\.pt is not there"),
    "is absent": ([("absent", {}), SOUND[0]], "stage 'small': .*'user_models:absent'"),
}


@pytest.mark.parametrize("case", ranked(ENDING, quick=0, slow=1))
def test_a_model_that_cannot_work_ends_the_run_with_its_reason_and_it_can_go_on(tmp_path, case):
    factories, words = ENDING[case]
    policy, inputs, out = two_model_policy(threshold=2.0), numbered_input(tmp_path), tmp_path / "deep" / "out"
    first, last = factories
    pool = python_pool(tmp_path, [first, last if last == SOUND[0] else mendable(tmp_path, *last)])
    with pytest.raises(CaucError, match=words):
        cauc_ray.run(pool, policy, inputs, out)
    assert not (out / "summary.json").exists()
    if last == SOUND[0]:  # the first stage: no call was made
        assert not (tmp_path / "deep").exists()
    elif out.exists():  # calls are in the ledger; no block is committed
        (tmp_path / "mended").touch()
        assert cauc_ray.run(pool, policy, inputs, out, resume=True)["n"] == 40


@pytest.mark.slow
def test_one_replica_that_cannot_load_its_model_is_replaced_where_a_stage_needs_several(tmp_path):
    models = [("loads_at_second_try", {"path": str(tmp_path / "tried")}), SOUND[1]]
    pool = python_pool(tmp_path, models, replicas={"min": 2, "max": 2})
    assert run(tmp_path, pool, two_model_policy(), numbered_input(tmp_path))["n"] == 40
    assert (tmp_path / "tried").exists()


@pytest.mark.soak("full")
def test_an_address_that_is_not_that_of_this_processs_cluster_is_refused(tmp_path):
    arguments = python_pool(tmp_path), two_model_policy(), numbered_input(tmp_path), tmp_path / "out"
    session_address = ray.get_runtime_context().gcs_address
    for address in ("192.0.2.1:6379", f"{session_address}1"):
        with pytest.raises(ConfigError, match="this process is connected to the Ray cluster at"):
            cauc_ray.run(*arguments, address=address)
    assert not (tmp_path / "out").exists()
    assert cauc_ray.run(*arguments, address=session_address)["n"] == 40


@pytest.mark.soak("full")
def test_a_column_that_no_model_reads_may_be_damaged(tmp_path):
    inputs = numbered_input(tmp_path)
    pq.write_table(pq.read_table(inputs).append_column("y", [list(range(40))]), inputs)
    damage(inputs, 0, 2)
    pool = python_pool(tmp_path)
    assert run(tmp_path, pool, two_model_policy(), inputs)["n_failed"] == 40
    declared = yaml.safe_load(pool.read_text()) | {"inputs": {"x": {"datatype": "FP64", "shape": []}}}
    pool.write_text(yaml.safe_dump(declared))
    assert cauc_ray.run(pool, two_model_policy(), inputs, tmp_path / "new")["n_failed"] == 0


def priced(policy, factor):
    """Return a policy whose calls cost so many times as much."""
    stages = tuple(stage.model_copy(update={"cost": factor * stage.cost}) for stage in policy.stages)
    return policy.model_copy(update={"stages": stages})


def test_a_short_run_that_is_ended_keeps_nearly_all_that_it_has_answered(tmp_path):
    # Of the last stage, which all rows reach in their order: those before have been answered when it gives up.
    models, policy = [SOUND[0], mendable(tmp_path, "gives_up_on", {"example": "row-380"})], two_model_policy(1.0)
    inputs, pool = numbered_input(tmp_path, 400), python_pool(tmp_path, models, batch_size=8)
    with pytest.raises(ExecutionError, match="is down"):
        run(tmp_path, pool, policy, inputs)
    assert read_all(tmp_path / "out" / "predictions").num_rows >= 256
    (tmp_path / "mended").touch()
    summary = cauc_ray.run(pool, policy, inputs, tmp_path / "out", resume=True)
    assert summary["n"] == 400
    assert summary["stages"][0]["repeated"] < 144


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # of Ray Data's own context
@pytest.mark.parametrize("kind", ranked(["csv", "ray dataset"], quick=0, slow=1))
def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path, kind):
    """It ends as an undisturbed run does on the same rows in Parquet."""
    import ray.data

    def as_input(rows):
        return ray.data.from_arrow(rows) if kind == "ray dataset" else write(tmp_path / "x.csv", rows.to_pylist())

    whole_input = numbered_input(tmp_path, 20_000)
    rows, policy = pq.read_table(whole_input), two_model_policy(threshold=0.7)
    models = [mendable(tmp_path, "gives_up_on", {"example": "row-18000"}), SOUND[1]]
    ended = python_pool(tmp_path, models, batch_size=256)
    with pytest.raises(ExecutionError, match="is down"):
        run(tmp_path, ended, policy, as_input(rows))
    out = tmp_path / "out"
    first = {path.name: path.read_bytes() for path in (out / "predictions").iterdir()}
    # What is committed has its calls in the ledger.
    answered = read_all(out / "predictions").num_rows
    assert 0 < answered <= sum(call["accepted"] for call in read_all(out / "ledger").to_pylist())
    assert not (out / "summary.json").exists()

    (tmp_path / "mended").touch()
    changed = python_pool(tmp_path, [models[0], ("by_x", {"factor": 6.0})], batch_size=256)
    with pytest.raises(ConfigError, match="at stage 'large'"):
        cauc_ray.run(changed, policy, as_input(rows), out, resume=True)
    sound = python_pool(tmp_path, models, batch_size=256)
    # A file is known by its content before it is read; a Ray Dataset only by its rows.
    with pytest.raises(CaucError, match=r"(another input|other rows .* block \d+ .* other rows).* start a new"):
        cauc_ray.run(sound, policy, as_input(rows[::-1]), out, resume=True)
    inputs = as_input(rows)
    for other_policy, words in (
        (two_model_policy(threshold=0.8), "another policy"),
        (priced(policy, 2.0), "another policy with other costs"),  # of one id: the answers are the same
    ):
        with pytest.raises(ConfigError, match=words):
            cauc_ray.run(sound, other_policy, inputs, out, resume=True)
    summary = cauc_ray.run(sound, policy, inputs, out, resume=True)
    undisturbed = cauc_ray.run(sound, policy, whole_input, tmp_path / "whole")

    assert {name: (out / "predictions" / name).read_bytes() for name in first} == first
    assert answers_of(out) == answers_of(tmp_path / "whole")
    assert summary["n"] == undisturbed["n"] == 20_000
    for stage, whole in zip(summary["stages"], undisturbed["stages"], strict=True):
        assert (stage["reached"], stage["answered"]) == (whole["reached"], whole["answered"])
        assert stage["repeated"] >= whole["repeated"] == 0
    ledger = read_all(out / "ledger").to_pylist()
    assert len({call["run_id"] for call in ledger}) == 1
    assert summary["total_cost"] == pytest.approx(sum(call["cost"] for call in ledger))


def python_stage(name, cost=None, **model):
    return {"name": name, "model": {**python_model("by_x"), **model}, "cost": cost}


REFUSED = {
    "another kind": ([python_stage("small"), python_stage("large", logit_kind="surrogate")], "surrogate.*raw"),
    "another unit": ([python_stage("small", cost={"usd": 1.0}), python_stage("large")], "USD.*GFLOPs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_policy_was_not_fitted_for_is_refused_before_anything_starts(tmp_path, case):
    stages, words = REFUSED[case]
    path, policy = write_pool(tmp_path, stages), two_model_policy()
    for start in (
        lambda: cauc_ray.run(path, policy, numbered_input(tmp_path), tmp_path / "out"),
        lambda: cauc_ray.serve(path, policy, port=0),
    ):
        with pytest.raises(PolicyError, match=rf"'(small|large)'.*{words}"):
            start()
    assert not (tmp_path / "out").exists()


def test_calls_that_tell_their_own_costs_must_do_so_in_the_policys_unit(tmp_path):
    """Costs of saved calls are in their table's unit, which counts where the policy counts calls."""
    chain = write_table(tmp_path / "LOGITS", n=60)["test"]
    policy = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, threshold=0.7).model_copy(update={"costs": "per-call"})
    info = tmp_path / "LOGITS" / "pool.json"
    info.write_text(info.read_text().replace("GFLOPs", "USD"))
    with pytest.raises(PolicyError, match="USD"):
        run(tmp_path, saved_pool(tmp_path), policy, split_input(tmp_path, chain))


def test_a_stage_that_fits_nowhere_is_reported_before_anything_starts(tmp_path):
    inputs, policy = numbered_input(tmp_path), two_model_policy()
    for resources, needs in (
        ({"num_gpus": 2}, "8 CPUs and 2 GPUs"),
        ({"num_cpus": 999}, "999 CPUs"),
        ({"memory": "900TiB"}, "1 CPU and 900 TiB of memory"),
        ({"labels": {"tier": "moon"}}, "on a node labelled tier=moon"),
    ):
        pool = python_pool(tmp_path, resources=resources)
        with pytest.raises(ExecutionError, match=f"stage 'small' with at least 1 replica of .*{needs}"):
            run(tmp_path, pool, policy, inputs)
        assert not (tmp_path / "out").exists()


LACKING = {
    "onnx": {"model": "absent.onnx", "columns": ["x"]},
    "remote": {"model": "m", "url": "https://h", "token_env": "ABSENT"},
}


@pytest.fixture
def no_session(monkeypatch):
    """Have no Ray session in this process."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.parametrize("kind", LACKING)
def test_what_this_machine_lacks_is_reported_before_ray_starts_on_it(tmp_path, monkeypatch, no_session, kind):
    policy, model = two_model_policy(), {"kind": kind, **LACKING[kind]}
    pool, inputs = pool_of(tmp_path, {"small": model, "large": model}), numbered_input(tmp_path)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    for start in (lambda: run(tmp_path, pool, policy, inputs), lambda: cauc_ray.serve(pool, policy, port=0)):
        with pytest.raises(ConfigError, match=r"ABSENT has no|absent\..* does not exist"):
            start()
    assert not (tmp_path / "out").exists()


def test_a_ray_that_does_not_start_is_one_line(tmp_path, monkeypatch, no_session):
    def time_out(**_):
        raise Exception("The current node timed out during startup.\nThis may happen on a busy machine.")

    monkeypatch.setattr(ray, "init", time_out)
    with pytest.raises(ExecutionError, match=r"^[^\n]*timed out during startup[^\n]*$"):
        run(tmp_path, python_pool(tmp_path), two_model_policy(), numbered_input(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.soak("full")
def test_a_batch_is_prepared_while_the_one_before_is_computed(tmp_path):
    """Here no batch is answered before the next one is being prepared."""
    policy, inputs = two_model_policy(threshold=0.0), numbered_input(tmp_path, 96)
    pool = python_pool(tmp_path, [("waits_for_the_next", {"n_batches": 12}), SOUND[0]])
    assert run(tmp_path, pool, policy, inputs)["n_failed"] == 0
    answers, rows = answers_of(tmp_path / "out"), pq.read_table(inputs).to_pylist()
    step = policy.start(by_x()({"x": np.array([row["x"] for row in rows])}).astype(np.float32))
    assert [answers[row["example_id"]]["prediction"] for row in rows] == step.predictions.tolist()
    assert [answers[row["example_id"]]["confidence"] for row in rows] == step.confidences.astype(np.float32).tolist()
    ledger = read_all(tmp_path / "out" / "ledger")
    began = pc.cast(ledger["started_at"], "int64").to_numpy() / 1e6
    took = ledger["compute_s"].to_numpy()
    assert took.sum() <= (began + took).max() - began.min() + 1e-3  # what two calls overlap counts once
