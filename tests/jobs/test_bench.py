"""Every part of the benchmark at a tiny size: its ratios are those of its own figures, and people see them."""

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
from jobs.bench.__main__ import LONG, main, options_by_part
from jobs.bench.part import PARTS, load, parser_of
from jobs.bench.planted import planted_rows, write_table
from jobs.bench.processes import printed
from jobs.bench.serving import compare, plant_requests, require_same_answers

ROOT = Path(__file__).parents[2]


def bench(*words, start=("-m", "jobs.bench")):
    """Run the job and return its JSON object by part, and what else it printed."""
    done = subprocess.run(
        [sys.executable, *start, *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *said, last = done.stdout.splitlines()
    return json.loads(last), "\n".join(said)


@pytest.mark.slow
def test_numbers_and_bodies():
    results, said = bench(
        "numbers", "--rows", 300, "--options", 20, "--repeats", 1, "--search-rows", 60, "--search-models", 3,
        "bodies", "--megabytes", 1, "--times", 2,
    )  # fmt: skip
    assert list(results) == ["numbers", "bodies"]
    numbers = results["numbers"]
    assert numbers["temperature"]["apart_from_sklearn"] < 1e-3
    assert abs(numbers["pair"]["nll_above_lbfgsb"]) < 1e-5
    assert numbers["sweep"]["to_grid"] > 0
    for method in ("base", "rf"):
        assert numbers["search"][method]["chains"] == 7
    for kind in ("json", "binary"):
        found = results["bodies"][kind]
        assert found["megabytes"] == pytest.approx(1.0, rel=0.05)
        assert found["delay_ms"]["least"] <= found["delay_ms"]["median"] <= found["delay_ms"]["most"]
        assert f"  megabytes: {found['megabytes']:.4g}" in said


@pytest.mark.slow
def test_candidates_of_a_live_service():
    results, _ = bench("canary", "--runs", 1, "--rows", 2000)
    for kind in ("better", "worse", "just_worse"):
        found = results["canary"][kind]
        assert found["runs"] == sum(found.get(what, 0) for what in ("promote", "rollback", "open")) == 1
        assert 0 < found["median_rows"] <= 2000


@pytest.mark.slow
def test_runs_their_memory_and_ray_data():
    results, said = bench(
        "controller", "--rows", 6000, "--sleepers", 1, 3, "--calls", 20, "--call-seconds", 0.1,
        "memory", "--rows", 3000, "--every", 0.1, "--store-mb", 100,
        "sink", "--rows", 20_000,
        "ray_data", "--rows", 1500, "--batch", 64, "--repeats", 1, "--cases", "fixed",
    )  # fmt: skip
    sleepers = results["controller"]["sleepers"]
    assert sleepers["replicas"] == 4
    assert all(0.5 < share <= 1.0 + 1e-3 for share in sleepers["busy_share"].values())
    memory = results["memory"]
    assert (memory["rows"], memory["input_mb"]) == (3000, 3000 * 12_288 / 1e6)
    assert all(memory["peak_mb"][role] > 10 for role in ("driver", "controller", "reader", "worker"))
    assert memory["peak_to_input"] == {name: size / memory["input_mb"] for name, size in memory["peak_mb"].items()}
    assert "peak_mb:" in said
    sink = results["sink"]
    assert (sink["rows"], sink["blocks"], sink["parts"]) == (20_000, 3, 1)
    assert sum(sink["answered"].values()) == 20_000
    fixed = results["ray_data"]["fixed"]
    ours = max(fixed["turns_rows_per_s"]["cauc-ray"])
    assert fixed["to_plan"] == {plan: pytest.approx(ours / fixed["rows_per_s"][plan]) for plan in ("union", "chain")}


@pytest.mark.slow
def test_shards_and_tasks_are_compared_with_one_process_and_with_linear():
    results, _ = bench(
        "shards", "--rows", 400, "--options", 5, "--shards", 2, "--methods", "rf", "--sweep-rows", 60, "--seeds", 1,
        "--turns", 1,
    )  # fmt: skip
    found = results["shards"]
    assert found["rf"]["furthest"] < 1e-9
    assert found["rf"]["time_x_shards_to_alone"] == pytest.approx(2 * found["rf"]["sharded_s"] / found["rf"]["alone_s"])
    for what in ("sweep", "evaluation"):
        of = found[what]
        assert of["share_of_linear"] == pytest.approx(of["one_s"] / (2 * of["several_s"]))


@pytest.mark.slow
def test_networks_on_the_cpu():
    pytest.importorskip("torchvision")
    results, _ = bench(
        "collect", "--arch", "mnasnet0_5", "--images", 32, "--batch", 16, "--repeats", 1,
        "saving", "--small", "mnasnet0_5", "--large", "squeezenet1_1", "--rows", 32, "--calibration-rows", 32,
        "--batch", 8, "--repeats", 1,
    )  # fmt: skip
    collect, saving = results["collect"], results["saving"]
    assert collect["collect_to_bare"] == pytest.approx(collect["collect_rows_per_s"] / collect["bare_rows_per_s"])
    assert collect["largest_difference"] < 1e-4  # both sides have answered the same images with the same network
    assert saving["time_to_predicted"] == pytest.approx(saving["time_ratio"] / saving["predicted_ratio"])
    assert saving["time_ratio"] == pytest.approx(saving["cascade"]["run_s"] / saving["largest"]["run_s"])
    assert 0 < saving["cascade"]["deferral"] < 1


WITHOUT_RAY = """
import runpy, sys
class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, NoRay())
runpy.run_module("jobs.bench", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_what_a_gpu_is_asked_runs_on_a_cpu_without_ray():
    pytest.importorskip("transformers")
    results, _ = bench(
        "gpu", "--device", "cpu", "--rows", 96, "--batch", 8, "--stage-rows", 12, "--turns", 1,
        start=["-c", WITHOUT_RAY],
    )  # fmt: skip
    found = results["gpu"]
    cascade = found["cascade"]
    assert cascade["deferral"] == pytest.approx(0.5, abs=0.2)
    assert 0.5 < cascade["large_busy_share"] <= 1
    assert 0 < cascade["step_to_large_batch"] < 0.1
    measured = {kind: own for kind, own in found["stages"].items() if "left_out" not in own}
    assert {"torchvision", "transformers-classifier", "transformers-choice", "shared-prefix", "python"} <= set(measured)
    for kind, own in measured.items():
        assert own["same_answers"] > 0.9, kind  # both sides have done the same
        assert own["ratio"] == own["stage_rows_per_s"] / own["bare_rows_per_s"]
    assert "no GPU" in bench("gpu")[0]["gpu"]["left_out"]


@pytest.mark.slow
def test_serving_compares_turns_whose_answers_were_right():
    results, said = bench(
        "serving", "--few", 2, "--many", 4, "--seconds", 0.6, "--warm-up", 0.2, "--turns", 1, "--rows", 60,
        "--cases", "sleeping",
    )  # fmt: skip
    found = results["serving"]["sleeping"]
    assert list(found) == ["2 clients", "4 clients"]
    for of in found.values():
        for side in (of["cauc-ray"], of["by-hand"]):
            assert set(side["counts"]) == {"small", "large"}  # nothing was wrong, nothing refused
            assert 0.005 <= side["p50_s"]["median"] <= side["p99_s"]["median"]  # what the small model takes
        ours, theirs = (of[side]["p99_s"]["median"] for side in ("cauc-ray", "by-hand"))
        assert of["ratio"]["p99_s"]["median"] == pytest.approx(ours / theirs)
    assert "4 clients:" in said


def turn(per_s, p50_s, **counts):
    return {"per_s": per_s, "p50_s": p50_s, "p99_s": 0.2, "counts": counts}


def test_ratios_are_of_turns_next_to_each_other_and_of_right_answers():
    sides = {
        "cauc-ray": [turn(160.0, 0.12, small=9), turn(120.0, 0.11, small=9), turn(100.0, 0.10, small=9)],
        "by-hand": [turn(80.0, 0.10, small=9), turn(120.0, 0.10, small=9), turn(200.0, 0.10, small=9)],
    }
    assert compare(sides)["ratio"]["per_s"] == {"median": 1.0, "least": 0.5, "most": 2.0}
    wrong = {**sides, "by-hand": [*sides["by-hand"][:2], turn(40.0, 0.1, small=8, wrong=1)]}
    with pytest.raises(ExecutionError, match="by-hand: 1 of 27 answers were wrong"):
        compare(wrong)


def test_requests_defer_the_planted_share_and_are_judged_by_the_right_answers(tmp_path):
    requests = plant_requests(130, 0.3)
    assert [int(part.sum()) for part in np.split(requests.deferred_mask, [50, 100])] == [15, 15, 9]
    require_same_answers(write_table(tmp_path, {"small": 1.0, "large": 2.0}, [0.3]), requests)
    for number, (small, large) in enumerate(requests.planted.gaps):
        stage = int(requests.deferred_mask[number])
        prediction = int((large if stage else small) < 0)
        assert requests.judge(number, 200, answer(prediction, stage)) == ("small", "large")[stage]
        assert requests.judge(number, 200, answer(1 - prediction, stage)) == "wrong"
        assert requests.judge(number, 200, answer(prediction, 1 - stage)) == "wrong"
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


def test_a_part_whose_needs_are_not_met_says_so(ray_session, capsys):
    assert main(["memory"]) == 0
    *said, last = capsys.readouterr().out.splitlines()
    assert "a Ray session is up" in json.loads(last)["memory"]["left_out"]
    assert any(line.startswith("left_out: a Ray session") for line in said)


def test_options_belong_to_the_part_before_them(capsys):
    assert options_by_part(["plan", "--seconds", "5", "numbers"]) == {"plan": ["--seconds", "5"], "numbers": []}
    assert list(options_by_part([])) == [part for part in PARTS if part not in LONG]
    assert main(["plann"]) == 2
    assert "did you mean 'plan'" in capsys.readouterr().err


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_its_options_with_defaults(name):
    options = parser_of(name, load(name)).parse_args([])
    assert vars(options)
    described = parser_of(name, load(name)).format_help()
    assert all(f"{option}: " in described or f"{option}, " in described for option in vars(options))


@pytest.mark.parametrize("deferral", [(0.5, 0.4), (0.3,), (0.0,)])
def test_planted_rows_are_deferred_as_planted(tmp_path, deferral):
    models = {f"m{number}": number + 1.0 for number in range(len(deferral) + 1)}
    rows = planted_rows(np.random.default_rng(0), 2000, deferral)
    policy = write_table(tmp_path, models, [share or 0.3 for share in deferral], test=rows)
    replayed = replay(policy, LogitTable(tmp_path).read_chain(list(models), "test"))
    reached = 2000
    for number, share in enumerate(deferral):
        on = int((replayed.stages > number).sum())
        assert on == round(share * reached)
        reached = on
