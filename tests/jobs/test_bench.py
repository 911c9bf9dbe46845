"""Every part of the benchmark at a tiny size: its ratios are those of its own figures, and it says them to people."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cauc_ray.policies.replay import replay
from jobs.bench.__main__ import LONG, PARTS, load, options_by_part
from jobs.bench.cascades import planted_rows, write_table
from jobs.bench.ledgers import StageCalls
from jobs.bench.part import parser_of

ROOT = Path(__file__).parents[2]


def bench(*words):
    """Run the job and return its JSON object by part, and what else it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "jobs.bench", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *said, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(said)


def test_numbers_and_runs_print_ratios_of_their_own_figures():
    results, said = bench(
        "numbers", "--rows", 300, "--options", 20, "--repeats", 1,
        "bound", "--rows", 400, "--seconds", 1.5,
        "controller", "--rows", 6000, "--controllers", 1, "--sleepers", 1, 3, "--calls", 20, "--call-seconds", 0.1,
    )  # fmt: skip
    assert list(results) == ["numbers", "bound", "controller"]

    numbers = results["numbers"]
    ratios = {"temperature_over_sklearn", "temperature_copies_warm", "pair_over_lbfgsb", "sweep_over_grid"}
    assert all(numbers[name] > 0 for name in ratios)
    assert abs(numbers["pair_nll_above_lbfgsb"]) < 1e-5

    bound = results["bound"]
    assert [stage["reached"] for stage in bound["stages"]] == [400, 200, 80]
    for stage in bound["stages"]:
        assert stage["busy_share"] == pytest.approx(stage["compute_s_per_replica"] / stage["span_s"])
        # A saved stage takes at least what it is told to: in this chain as long per replica at every stage.
        assert stage["compute_s_per_replica"] >= 1.5
    bottleneck = max(bound["stages"], key=lambda stage: stage["compute_s_per_replica"])
    assert (bound["bottleneck"], bound["bottleneck_busy_share"]) == (bottleneck["name"], bottleneck["busy_share"])
    assert f"bottleneck {bottleneck['name']}" in said

    controller = results["controller"]
    assert controller["rows_per_s"]["1"] > 0
    assert controller["to_one_controller"] == {"1": 1.0}
    sleepers = controller["sleepers"]
    assert sleepers["replicas_called"] == sleepers["replicas"] == 4
    assert sleepers["least_busy_share"] <= sleepers["busy_share"] <= 1.0 + 1e-3
    assert sleepers["worker_peak_rss_mb"] > 10


def test_ray_data_gives_the_same_answers_and_is_compared_at_its_best():
    results, said = bench(
        "ray_data", "--rows", 1500, "--batch", 64, "--repeats", 1, "--cases", "fixed",
        "--plans", "chain_gathered", "repartitioned",
    )  # fmt: skip
    fixed = results["ray_data"]["fixed"]
    assert set(fixed["ray_data_rows_per_s"]) == {"chain_gathered", "repartitioned"}
    best = max(fixed["ray_data_rows_per_s"].values())
    assert fixed["to_best_plan"] == pytest.approx(fixed["rows_per_s"] / best)
    union = fixed["ray_data_rows_per_s"]["repartitioned"]
    assert fixed["to_best_union_plan"] == pytest.approx(fixed["rows_per_s"] / union)
    assert fixed["rows_per_s"] == max(fixed["turns_rows_per_s"]["cauc-ray"])
    assert "times" in said


def test_memory_looks_at_the_processes_of_its_own_session():
    results, said = bench("memory", "--rows", 3000, "--parquet", "--every", 0.1, "--store-mb", 100)
    memory = results["memory"]
    assert memory["rows"] == 3000
    assert memory["input_to_store"] == pytest.approx(memory["input_mb"] / 100)
    assert memory["peak_rss_mb"]["worker"] > 10
    assert memory["spilled_to_input"] == pytest.approx(memory["spilled_mb"] / memory["input_mb"])
    assert "object store: at most" in said


def test_networks_on_the_cpu():
    pytest.importorskip("torchvision")
    results, said = bench(
        "collect", "--arch", "mnasnet0_5", "--images", 32, "--batch", 16, "--repeats", 1,
        "gpu", "--device", "cpu", "--archs", "squeezenet1_1", "mnasnet0_5", "--rows", 24,
        "--calibration-rows", 16, "--batch", 8, "--cpus", 1,
    )  # fmt: skip
    collect, gpu = results["collect"], results["gpu"]
    assert collect["collect_to_bare"] == pytest.approx(collect["collect_rows_per_s"] / collect["bare_rows_per_s"])
    assert collect["largest_difference"] < 1e-4  # both sides have answered the same images with the same network
    assert "of the bare loop's throughput" in said
    assert gpu["step_to_largest_batch"] == pytest.approx(gpu["step_s"] / gpu["largest_batch_s"])
    assert gpu["cascade_to_largest"] == pytest.approx(gpu["cascade"]["rows_per_s"] / gpu["large"]["rows_per_s"])
    assert gpu["cascade"]["device_busy_share"] is None
    assert 0 < gpu["cascade"]["deferral"] < 1
    assert "time on the device not measured" in said


def test_saving_predicts_from_measured_seconds(shared_logits):
    pytest.importorskip("torch")
    results, said = bench("saving", "--rows", 96, "--copies", 1, "--timed-rows", 64, "--batch", 16, "--repeats", 1)
    saving = results["saving"]
    assert saving["rows"] == 96
    assert saving["seconds_per_image"]["resnet20"] < saving["seconds_per_image"]["resnet56"]
    assert saving["time_ratio"] == pytest.approx(saving["run_s"]["cascade"] / saving["run_s"]["largest"])
    assert saving["time_to_predicted"] == pytest.approx(saving["time_ratio"] / saving["predicted_cost_ratio"])
    assert 0 < saving["predicted_cost_ratio"] < 1
    assert min(saving["accuracy"].values()) > 0.8
    assert "the policy predicts" in said


def test_a_part_whose_needs_are_not_met_says_so(tmp_path):
    results, said = bench("saving", "--data", tmp_path)
    assert "are not in" in results["saving"]["left_out"]
    assert "left out: the CIFAR-10 images" in said


def test_options_belong_to_the_part_before_them():
    assert options_by_part(["bound", "--rows", "5", "numbers"]) == {"bound": ["--rows", "5"], "numbers": []}
    assert list(options_by_part([])) == [part for part in PARTS if part not in LONG]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.bench", "boundd"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "did you mean 'bound'" in done.stderr


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_its_options_with_defaults(name):
    options = parser_of(name, load(name)).parse_args([])
    assert vars(options)
    assert "%(default" not in parser_of(name, load(name)).format_help()


@pytest.mark.parametrize("deferral", [(0.5, 0.4), (0.3,), (0.0,)])
def test_planted_rows_are_deferred_as_planted(tmp_path, deferral):
    from cauc_ray.data.logits import LogitTable

    models = {f"m{place}": place + 1.0 for place in range(len(deferral) + 1)}
    rows = planted_rows(np.random.default_rng(0), 2000, deferral)
    policy = write_table(tmp_path, models, [share or 0.3 for share in deferral], test=rows)
    replayed = replay(policy, LogitTable(tmp_path).read_chain(list(models), "test"))
    reached = 2000
    for place, share in enumerate(deferral):
        on = int((replayed.stages > place).sum())
        assert on == round(share * reached)
        reached = on


def test_busy_shares_and_fill_of_calls_laid_out_by_hand():
    # Replica 0 works for 4 s of 4, replica 1 for 3 s of 4; together they had 2 x 4 s.
    calls = StageCalls(
        name="m",
        started_s=np.array([0.0, 0.0, 2.0, 3.0]),
        compute_s=np.array([2.0, 2.0, 2.0, 1.0]),
        device_s=np.full(4, np.nan),
        batch=np.array([8, 8, 6, 1]),
        replica=np.array([0, 1, 0, 1]),
    )
    assert calls.span_s == 4.0
    assert calls.busy_share(2) == 7 / 8
    assert calls.replica_busy_shares().tolist() == [1.0, 0.75]
    assert calls.full_share(8) == 2 / 3
    assert calls.fill(8) == 22 / 24
