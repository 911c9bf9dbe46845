"""Every part of the benchmark at a tiny size: its ratios are those of its own figures, and it says them to people."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cauc_ray.errors import ExecutionError
from cauc_ray.policies.trace import replay
from jobs.bench.__main__ import LONG, PARTS, load, main, options_by_part
from jobs.bench.cascades import planted_rows, write_table
from jobs.bench.ledgers import StageCalls
from jobs.bench.part import parser_of
from jobs.bench.serving_cases import CASES, plant_requests, write_cascade
from jobs.bench.serving_ratios import compare

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"


def bench(*words, address=""):
    """Run the job and return its JSON object by part, and what else it printed.

    address: of the Ray session that the parts use, instead of one of each part's own.
    """
    done = subprocess.run(
        [sys.executable, "-m", "jobs.bench", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "RAY_ADDRESS": address},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *said, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(said)


@pytest.mark.slow
def test_a_search_says_what_the_chosen_chain_is_worth_on_test():
    results, said = bench("search", "--models", 3, "--rows", 60, "--options", 4, "--budget", 2)
    for method in ("base", "rf"):
        found = results["search"][method]
        assert found["n_measured"] <= found["n_chains"] == 7
        assert found["chosen"]["quality"] >= max(found[name]["quality"] for name in ("single", "pair", "full"))
        assert f"{method}: {found['n_measured']} of {found['n_chains']} chains" in said
        assert f"test {found['chosen']['accuracy']:.4f}" in said


@pytest.mark.slow
def test_long_bodies_of_both_kinds_are_answered_next_to_others():
    results, said = bench("serving_bodies", "--megabytes", 1, "--times", 2)
    found = results["serving_bodies"]
    for kind in ("json", "binary"):
        assert found[kind]["bytes"] == pytest.approx(1e6, rel=0.05)
        assert found[kind]["delay_ms"]["least"] <= found[kind]["delay_ms"]["median"] <= found[kind]["delay_ms"]["most"]
        assert f"{kind}: 1.0 MB in {found[kind]['seconds']['median']:.2f} s" in said


@pytest.mark.slow
def test_numbers_and_runs_print_ratios_of_their_own_figures():
    results, said = bench(
        "numbers", "--rows", 300, "--options", 20, "--repeats", 1,
        "bound", "--rows", 400, "--seconds", 1.5,
        "controller", "--rows", 6000, "--sleepers", 1, 3, "--calls", 20, "--call-seconds", 0.1,
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
    assert controller["rows_per_s"] > 0
    sleepers = controller["sleepers"]
    assert sleepers["replicas_called"] == sleepers["replicas"] == 4
    assert sleepers["least_busy_share"] <= sleepers["busy_share"] <= 1.0 + 1e-3
    assert sleepers["worker_peak_rss_mb"] > 10


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_sinks_parts_add_up_to_all_rows():
    results, said = bench("sink", "--rows", 20_000)
    sink = results["sink"]
    assert (sink["rows"], sink["blocks"], sink["parts"]) == (20_000, 3, 1)
    assert sum(stage["answered"] for stage in sink["stages"]) == 20_000
    assert "20,000 rows in 3 blocks and 1 parts" in said


@pytest.mark.slow
def test_memory_looks_at_the_processes_of_its_own_session():
    results, said = bench("memory", "--rows", 3000, "--parquet", "--every", 0.1, "--store-mb", 100)
    memory = results["memory"]
    assert memory["rows"] == 3000
    assert memory["input_to_store"] == pytest.approx(memory["input_mb"] / 100)
    assert memory["peak_rss_mb"]["worker"] > 10
    assert memory["spilled_to_input"] == pytest.approx(memory["spilled_mb"] / memory["input_mb"])
    assert "object store: at most" in said


@pytest.fixture(scope="module")
def networks(ray_session):
    """Run the parts that load torch, in one process; those whose needs are not met are left out."""
    import ray

    return bench(
        "collect", "--arch", "mnasnet0_5", "--images", 32, "--batch", 16, "--repeats", 1,
        "gpu", "--device", "cpu", "--archs", "squeezenet1_1", "mnasnet0_5", "--rows", 24,
        "--calibration-rows", 16, "--batch", 8, "--cpus", 1,
        "saving", "--rows", 96, "--copies", 1, "--timed-rows", 64, "--batch", 16, "--repeats", 1,
        "--data", DATA,
        address=ray.get_runtime_context().gcs_address,
    )  # fmt: skip


@pytest.mark.slow
def test_networks_on_the_cpu(networks):
    pytest.importorskip("torchvision")
    results, said = networks
    collect, gpu = results["collect"], results["gpu"]
    assert collect["collect_to_bare"] == pytest.approx(collect["collect_rows_per_s"] / collect["bare_rows_per_s"])
    assert collect["largest_difference"] < 1e-4  # both sides have answered the same images with the same network
    assert "of the bare loop's throughput" in said
    assert gpu["step_to_largest_batch"] == pytest.approx(gpu["step_s"] / gpu["largest_batch_s"])
    assert gpu["cascade_to_largest"] == pytest.approx(gpu["cascade"]["rows_per_s"] / gpu["large"]["rows_per_s"])
    assert gpu["cascade"]["device_busy_share"] is None
    assert 0 < gpu["cascade"]["deferral"] < 1
    assert "time on the device not measured" in said


@pytest.mark.slow
def test_serving_compares_turns_whose_answers_were_right():
    results, said = bench(
        "serving", "--few", 2, "--many", 4, "--seconds", 0.6, "--warm-up", 0.2, "--turns", 1, "--rows", 60,
        "--cases", "sleeping", "--ingress", "proxy",
    )  # fmt: skip
    sleeping = results["serving"]["proxy"]["sleeping"]
    assert set(sleeping["few"]) == {"cauc-ray", "batched"}
    assert set(sleeping["many"]) == {"cauc-ray", "batched", "per-sample"}
    for side in sleeping["many"].values():
        assert set(side["counts"]) == {"small", "large"}  # nothing was wrong, nothing refused
        assert side["p50_s"]["median"] <= side["p99_s"]["median"]
        assert side["p50_s"]["median"] >= 0.005  # what the small model takes
    ours, theirs = (sleeping["few"][side]["p99_s"]["median"] for side in ("cauc-ray", "batched"))
    assert sleeping["p99_to_batched"]["median"] == pytest.approx(ours / theirs)
    ours, theirs = (sleeping["many"][side]["per_s"]["median"] for side in ("cauc-ray", "per-sample"))
    assert sleeping["throughput_to_per_sample"]["median"] == pytest.approx(ours / theirs)
    assert "against a call of each stage per request" in said


def turn(per_s, n_small, n_large, **others):
    return {"per_s": per_s, "p50_s": 0.1, "p99_s": 0.2, "counts": {"small": n_small, "large": n_large, **others}}


def test_speed_ups_of_served_turns_laid_out_by_hand():
    # Calls of 4 rows take the large model 90 ms, the small one 5 ms: a quarter deferred makes 4 times the throughput.
    sides = {
        "cauc-ray": [turn(160.0, 300, 100), turn(120.0, 150, 50)],
        "largest": [turn(40.0, 0, 160), turn(40.0, 0, 160)],
        "cauc-ray-largest": [turn(80.0, 0, 160), turn(40.0, 0, 160)],
    }
    slow = compare({("slow", "some"): sides})["slow"]
    assert (slow["deferral"], slow["predicted_speedup"]) == (0.25, pytest.approx(4.0))
    assert slow["speedup_over_largest"] == {"median": 3.5, "least": 3.0, "most": 4.0}
    assert slow["speedup_over_own_largest"] == {"median": 2.5, "least": 2.0, "most": 3.0}
    assert slow["speedup_over_largest_to_predicted"] == pytest.approx({"median": 0.875, "least": 0.75, "most": 1.0})
    with pytest.raises(ExecutionError, match="largest: 1 of 321 answers were wrong"):
        compare({("slow", "some"): {**sides, "largest": [turn(40.0, 0, 160), turn(40.0, 0, 160, wrong=1)]}})


@pytest.mark.parametrize("case", CASES)
def test_requests_defer_the_planted_share_and_each_side_is_judged_by_its_own_answers(case, tmp_path):
    requests = plant_requests(130, 0.3)
    assert [int(part.sum()) for part in np.split(requests.deferred_mask, [50, 100])] == [15, 15, 9]
    write_cascade(tmp_path, CASES[case], requests, 0.3)  # it raises where the policy decides otherwise
    for side, deferred in (("cauc-ray", requests.deferred_mask), ("largest", np.full(130, True))):
        judge = requests.judge(side)
        for place, (small, large) in enumerate(requests.gaps):
            prediction = int((large if deferred[place] else small) < 0)
            stage = int(deferred[place]) if side == "cauc-ray" else 0
            expected = "large" if deferred[place] else "small"
            assert judge(place, 200, answer(prediction, stage)) == expected
            assert judge(place, 200, answer(1 - prediction, stage)) == "wrong"
            assert judge(place, 200, answer(prediction, 1 - stage)) == "wrong"
    assert judge(0, 503, b"{}") == "status 503"


def answer(prediction, stage):
    outputs = [{"name": "prediction", "data": [prediction]}, {"name": "stage", "data": [stage]}]
    return json.dumps({"outputs": outputs}).encode()


@pytest.mark.slow
def test_saving_predicts_from_measured_seconds(shared_logits, networks):
    pytest.importorskip("torch")
    results, said = networks
    saving = results["saving"]
    assert saving["rows"] == 96
    assert saving["seconds_per_image"]["resnet20"] < saving["seconds_per_image"]["resnet56"]
    assert saving["time_ratio"] == pytest.approx(saving["run_s"]["cascade"] / saving["run_s"]["largest"])
    assert saving["time_to_predicted"] == pytest.approx(saving["time_ratio"] / saving["predicted_cost_ratio"])
    assert 0 < saving["predicted_cost_ratio"] < 1
    assert min(saving["accuracy"].values()) > 0.8
    assert "the policy predicts" in said


def test_a_part_whose_needs_are_not_met_says_so(tmp_path, capsys):
    assert main(["saving", "--data", str(tmp_path)]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert "are not in" in json.loads(last)["saving"]["left_out"]
    assert any(line.startswith("left out: the CIFAR-10 images") for line in said)
    assert main(["saving"]) == 0
    assert "left out: --data names no folder" in capsys.readouterr().out


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
