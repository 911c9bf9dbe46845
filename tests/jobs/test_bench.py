"""One smoke test of each part of the benchmark at a tiny size: its ratios are those of its own figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cauc_ray.errors import ExecutionError
from jobs.bench.__main__ import main, options_by_part
from jobs.bench.load import NO_ANSWER, REFUSED, Load, run_load
from jobs.bench.part import PARTS, load, parser_of
from jobs.bench.processes import free_port
from jobs.bench.serving import compare

ROOT = Path(__file__).parents[2]


def bench(*words, start=("-m", "jobs.bench")):
    """Run the job and return its JSON object by part."""
    done = subprocess.run(
        [sys.executable, *start, *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_numbers(numbers, bodies):
    assert numbers["temperature"]["apart_from_sklearn"] < 1e-3
    assert abs(numbers["pair"]["nll_above_lbfgsb"]) < 1e-5
    assert {method: of["chains"] for method, of in numbers["search"].items()} == {"base": 7, "rf": 7}
    assert bodies["json"]["megabytes"] == pytest.approx(1.0, rel=0.05)


def check_runs(controller, memory, sink, ray_data):
    assert all(0.5 < share <= 1.0 + 1e-3 for share in controller["sleepers"]["busy_share"].values())
    assert memory["peak_to_input"] == {name: size / memory["input_mb"] for name, size in memory["peak_mb"].items()}
    assert sum(sink["answered"].values()) == 20_000
    ours = max(ray_data["fixed"]["turns_rows_per_s"]["cauc-ray"])
    rates = ray_data["fixed"]["rows_per_s"]
    assert ray_data["fixed"]["to_plan"] == {plan: pytest.approx(ours / rates[plan]) for plan in ("union", "chain")}


def check_canary(canary):
    for kind in ("better", "worse", "just_worse"):
        assert sum(canary[kind].get(end, 0) for end in ("promote", "rollback", "open")) == canary[kind]["runs"] == 1


def check_shards(shards):
    assert shards["rf"]["furthest"] < 1e-9
    for part in ("sweep", "evaluation"):
        of = shards[part]
        assert of["share_of_linear"] == pytest.approx(of["one_s"] / (2 * of["several_s"]))


def check_networks(collect, saving):
    assert collect["collect_to_bare"] == pytest.approx(collect["collect_rows_per_s"] / collect["bare_rows_per_s"])
    assert collect["largest_difference"] < 1e-4  # both sides have answered the same images with the same network
    assert saving["time_to_predicted"] == pytest.approx(saving["time_ratio"] / saving["predicted_ratio"])
    assert 0 < saving["cascade"]["deferral"] < 1


def check_serving(serving):
    for of in serving["sleeping"].values():
        for side in ("cauc-ray", "by-hand"):
            assert set(of[side]["counts"]) == {"small", "large"}  # nothing was wrong, nothing refused
        ours, theirs = (of[side]["p99_s"]["median"] for side in ("cauc-ray", "by-hand"))
        assert of["ratio"]["p99_s"]["median"] == pytest.approx(ours / theirs)


SMOKES = {
    "numbers --rows 300 --options 20 --repeats 1 --search-rows 60 --search-models 3 bodies --megabytes 1 --times 2":
        check_numbers,
    "controller --rows 6000 --sleepers 1 3 --calls 20 --call-seconds 0.1 memory --rows 3000 --every 0.1 --store-mb 100 "
    "sink --rows 20000 ray_data --rows 1500 --batch 64 --repeats 1 --cases fixed": check_runs,
    "canary --runs 1 --rows 2000": check_canary,
    "shards --rows 400 --options 5 --shards 2 --methods rf --sweep-rows 60 --seeds 1 --turns 1": check_shards,
    "collect --arch mnasnet0_5 --images 32 --batch 16 --repeats 1 "
    "saving --small mnasnet0_5 --large squeezenet1_1 --rows 32 --calibration-rows 32 --batch 8 --repeats 1":
        check_networks,
    "serving --few 2 --many 4 --seconds 0.6 --warm-up 0.2 --turns 1 --rows 60 --cases sleeping": check_serving,
}  # fmt: skip


@pytest.mark.soak("full")
@pytest.mark.parametrize("words", SMOKES, ids=lambda words: words.split()[0])
def test_a_part_runs_and_its_ratios_are_of_its_own_figures(words):
    SMOKES[words](**bench(*words.split()))


WITHOUT_RAY = """
import runpy, sys
class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, NoRay())
runpy.run_module("jobs.bench", run_name="__main__", alter_sys=True)
"""


@pytest.mark.soak("full")
def test_the_part_for_gpus_runs_on_a_cpu_without_ray():
    pytest.importorskip("transformers")
    sizes = {"rows": 96, "batch": 8, "stage-rows": 12, "turns": 1}
    words = [word for size in sizes.items() for word in (f"--{size[0]}", size[1])]
    results = bench("gpu", "--device", "cpu", *words, start=["-c", WITHOUT_RAY])["gpu"]
    assert results["cascade"]["deferral"] == pytest.approx(0.5, abs=0.2)
    stages = {kind: of for kind, of in results["stages"].items() if "left_out" not in of}
    assert {"torchvision", "transformers-classifier", "transformers-choice", "shared-prefix", "python"} <= set(stages)
    for kind, of in stages.items():
        assert of["same_answers"] > 0.9, kind  # both sides have done the same
        assert of["ratio"] == of["stage_rows_per_s"] / of["bare_rows_per_s"]


def test_every_part_has_described_options_with_defaults_and_an_unknown_one_is_named(capsys):
    for name in PARTS:
        parser = parser_of(name, load(name))
        options = vars(parser.parse_args([]))
        described = parser.format_help()
        assert options
        assert all(f"{option}: " in described or f"{option}, " in described for option in options)
    assert options_by_part(["plan", "--seconds", "5", "numbers"]) == {"plan": ["--seconds", "5"], "numbers": []}
    assert main(["plann"]) == 2
    assert "did you mean 'plan'" in capsys.readouterr().err


def turn(per_s, **counts):
    return {"per_s": per_s, "p50_s": 0.1, "p99_s": 0.2, "counts": counts}


def test_ratios_are_of_neighbouring_turns_and_of_right_answers():
    sides = {
        "cauc-ray": [turn(per_s, small=9) for per_s in (160.0, 120.0, 100.0)],
        "by-hand": [turn(per_s, small=9) for per_s in (80.0, 120.0, 200.0)],
    }
    assert compare(sides)["ratio"]["per_s"] == {"median": 1.0, "least": 0.5, "most": 2.0}
    wrong = {**sides, "by-hand": [*sides["by-hand"][:2], turn(40.0, small=8, wrong=1)]}
    with pytest.raises(ExecutionError, match="by-hand: 1 of 27 answers were wrong"):
        compare(wrong)


def test_a_load_without_an_answer_has_no_rate():
    url = f"http://127.0.0.1:{free_port()}/infer"
    result = run_load(Load(url, [b"row"], n_clients=2, seconds=0.1, warm_up_s=0.0))
    assert set(result.counts()) == {(NO_ANSWER, REFUSED)}
    with pytest.raises(ExecutionError, match="no request was answered"):
        _ = result.measured_s
