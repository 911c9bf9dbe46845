"""Every part of the benchmark at a tiny size: its ratios are those of its own figures, and it says them to people."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import ExecutionError
from cauc_ray.policies.trace import replay
from jobs.bench.__main__ import LONG, PARTS, load, main, options_by_part
from jobs.bench.cascades import planted_rows, write_table
from jobs.bench.children import printed
from jobs.bench.ledgers import StageCalls
from jobs.bench.part import parser_of
from jobs.bench.serving import compare
from jobs.bench.serving_cases import CASES, plant_requests, write_cascade

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"


def bench(*words):
    """Run the job and return its JSON object by part, and what else it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "jobs.bench", *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *said, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(said)


@pytest.mark.slow
def test_numbers_and_bodies():
    results, said = bench(
        "numbers", "--rows", 300, "--options", 20, "--repeats", 1, "--search-rows", 60, "--search-models", 3,
        "serving_bodies", "--megabytes", 1, "--times", 2,
    )  # fmt: skip
    assert list(results) == ["numbers", "serving_bodies"]
    numbers = results["numbers"]
    ratios = {"temperature_over_sklearn", "temperature_copies_warm", "pair_over_lbfgsb", "sweep_over_grid"}
    assert all(numbers[name] > 0 for name in ratios)
    assert abs(numbers["pair_nll_above_lbfgsb"]) < 1e-5
    for method in ("base", "rf"):
        assert numbers[f"search_{method}"]["chains"] == 7
        assert f"{method}: the best of 7 chains in" in said
    for kind in ("json", "binary"):
        found = results["serving_bodies"][kind]
        assert found["bytes"] == pytest.approx(1e6, rel=0.05)
        assert found["delay_ms"]["least"] <= found["delay_ms"]["median"] <= found["delay_ms"]["most"]
        assert f"{kind}: 1.0 MB in {found['seconds']['median']:.2f} s" in said


@pytest.mark.slow
def test_runs_their_memory_and_ray_data():
    results, said = bench(
        "controller", "--rows", 6000, "--sleepers", 1, 3, "--calls", 20, "--call-seconds", 0.1,
        "memory", "--rows", 3000, "--every", 0.1, "--store-mb", 100,
        "sink", "--rows", 20_000,
        "ray_data", "--rows", 1500, "--batch", 64, "--repeats", 1, "--cases", "fixed",
    )  # fmt: skip
    sleepers = results["controller"]["sleepers"]
    assert sleepers["replicas_called"] == sleepers["replicas"] == 4
    assert sleepers["least_busy_share"] <= sleepers["busy_share"] <= 1.0 + 1e-3
    memory = results["memory"]
    assert (memory["rows"], memory["input_mb"]) == (3000, 3000 * 12_288 / 1e6)
    assert all(memory["peak_rss_mb"][role] > 10 for role in ("driver", "controller", "reader", "worker"))
    assert all(
        memory["peak_to_input"][role] == size / memory["input_mb"] for role, size in memory["peak_rss_mb"].items()
    )
    assert "object store: at most" in said
    sink = results["sink"]
    assert (sink["rows"], sink["blocks"], sink["parts"]) == (20_000, 3, 1)
    assert sum(stage["answered"] for stage in sink["stages"]) == 20_000
    fixed = results["ray_data"]["fixed"]
    assert fixed["to_plan"] == {
        plan: pytest.approx(fixed["rows_per_s"] / rate) for plan, rate in fixed["ray_data_rows_per_s"].items()
    }
    assert fixed["rows_per_s"] == max(fixed["turns_rows_per_s"]["cauc-ray"])


@pytest.mark.slow
def test_a_sweep_and_an_evaluation_are_held_against_linear():
    results, said = bench(
        "spread", "--sweep-rows", 60, "--options", 5, "--seeds", 1, "--rows", 200, "--turns", 1, "--tasks", 2
    )
    for what in ("sweep", "evaluation"):
        found = results["spread"][what]
        assert found["share_of_linear"] == pytest.approx(found["one_s"] / (2 * found["several_s"]))
        assert f"{found['share_of_linear']:.3f} of linear" in said


@pytest.mark.slow
def test_networks_on_the_cpu(shared_logits):
    pytest.importorskip("torchvision")
    results, said = bench(
        "collect", "--arch", "mnasnet0_5", "--images", 32, "--batch", 16, "--repeats", 1,
        "gpu", "--device", "cpu", "--archs", "squeezenet1_1", "mnasnet0_5", "--rows", 24,
        "--calibration-rows", 16, "--batch", 8, "--cpus", 1,
        "saving", "--rows", 96, "--copies", 1, "--timed-rows", 64, "--batch", 16, "--repeats", 1,
        "--data", DATA,
    )  # fmt: skip
    collect, gpu, saving = results["collect"], results["gpu"], results["saving"]
    assert collect["collect_to_bare"] == pytest.approx(collect["collect_rows_per_s"] / collect["bare_rows_per_s"])
    assert collect["largest_difference"] < 1e-4  # both sides have answered the same images with the same network
    assert gpu["step_to_largest_batch"] == pytest.approx(gpu["step_s"] / gpu["largest_batch_s"])
    assert gpu["cascade"]["device_busy_share"] is None
    assert 0 < gpu["cascade"]["deferral"] < 1
    assert "time on the device not measured" in said
    assert saving["time_to_predicted"] == pytest.approx(saving["time_ratio"] / saving["predicted_cost_ratio"])
    assert 0 < saving["predicted_cost_ratio"] < 1
    assert min(saving["accuracy"].values()) > 0.8


@pytest.mark.slow
def test_serving_compares_turns_whose_answers_were_right():
    results, said = bench(
        "serving", "--few", 2, "--many", 4, "--seconds", 0.6, "--warm-up", 0.2, "--turns", 1, "--rows", 60,
        "--cases", "sleeping", "--ingress", "proxy",
    )  # fmt: skip
    for found in results["serving"]["proxy"]["sleeping"].values():
        for side in (found["cauc-ray"], found["batched"]):
            assert set(side["counts"]) == {"small", "large"}  # nothing was wrong, nothing refused
            assert 0.005 <= side["p50_s"]["median"] <= side["p99_s"]["median"]  # what the small model takes
        ours, theirs = (found[side]["p99_s"]["median"] for side in ("cauc-ray", "batched"))
        assert found["to_batched"]["p99_s"]["median"] == pytest.approx(ours / theirs)
    assert "sleeping, 4 clients, cauc-ray against batched by hand" in said


def turn(per_s, p50_s, **counts):
    return {"per_s": per_s, "p50_s": p50_s, "p99_s": 0.2, "counts": counts}


def test_ratios_are_of_turns_next_to_each_other_and_of_right_answers():
    sides = {
        "cauc-ray": [turn(160.0, 0.12, small=9), turn(120.0, 0.11, small=9), turn(100.0, 0.10, small=9)],
        "batched": [turn(80.0, 0.10, small=9), turn(120.0, 0.10, small=9), turn(200.0, 0.10, small=9)],
    }
    found = compare({("sleeping", "few"): sides})["sleeping"]["few"]
    assert found["to_batched"]["per_s"] == {"median": 1.0, "least": 0.5, "most": 2.0}
    wrong = {**sides, "batched": [*sides["batched"][:2], turn(40.0, 0.1, small=8, wrong=1)]}
    with pytest.raises(ExecutionError, match="batched: 1 of 27 answers were wrong"):
        compare({("sleeping", "few"): wrong})


@pytest.mark.parametrize("case", CASES)
def test_requests_defer_the_planted_share_and_are_judged_by_the_right_answers(case, tmp_path):
    requests = plant_requests(130, 0.3)
    assert [int(part.sum()) for part in np.split(requests.deferred_mask, [50, 100])] == [15, 15, 9]
    write_cascade(tmp_path, CASES[case], requests, 0.3)  # it raises where the policy decides otherwise
    for place, (small, large) in enumerate(requests.gaps):
        stage = int(requests.deferred_mask[place])
        prediction = int((large if stage else small) < 0)
        assert requests.judge(place, 200, answer(prediction, stage)) == ("small", "large")[stage]
        assert requests.judge(place, 200, answer(1 - prediction, stage)) == "wrong"
        assert requests.judge(place, 200, answer(prediction, 1 - stage)) == "wrong"
    assert requests.judge(0, 503, b"{}") == "status 503"


def answer(prediction, stage):
    outputs = [{"name": "prediction", "data": [prediction]}, {"name": "stage", "data": [stage]}]
    return json.dumps({"outputs": outputs}).encode()


def test_a_command_that_fails_is_an_error_with_its_last_line():
    lines = "import sys; print('no JSON'); print('{\"n\": 1}'); print('why', file=sys.stderr); sys.exit(3)"
    found = printed(sys.executable, "-c", lines)
    assert next(found) == {"n": 1}
    with pytest.raises(ExecutionError, match="ended with 3: why"):
        next(found)


def test_a_part_whose_needs_are_not_met_says_so(tmp_path, capsys):
    assert main(["saving", "--data", str(tmp_path)]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert "are not in" in json.loads(last)["saving"]["left_out"]
    assert any(line.startswith("left out: the CIFAR-10 images") for line in said)


def test_options_belong_to_the_part_before_them(capsys):
    assert options_by_part(["plan", "--seconds", "5", "numbers"]) == {"plan": ["--seconds", "5"], "numbers": []}
    assert list(options_by_part([])) == [part for part in PARTS if part not in LONG]
    assert main(["plann"]) == 2
    assert "did you mean 'plan'" in capsys.readouterr().err


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_its_options_with_defaults(name):
    options = parser_of(name, load(name)).parse_args([])
    assert vars(options)
    assert "%(default" not in parser_of(name, load(name)).format_help()


@pytest.mark.parametrize("deferral", [(0.5, 0.4), (0.3,), (0.0,)])
def test_planted_rows_are_deferred_as_planted(tmp_path, deferral):
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
