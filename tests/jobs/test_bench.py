"""One smoke test of each part of the benchmark at a tiny size: it ends, and both sides have given the same answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs.bench.compare import compare
from jobs.bench.part import PARTS, by_turns
from jobs.bench.ratios import SPECS
from jobs.bench.stages import stages

ROOT = Path(__file__).parents[2]


def bench(*words, start=("-m", "jobs.bench")):
    """Run the job and return its JSON object by part."""
    done = subprocess.run(
        [sys.executable, *start, *map(str, words)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# The words of a smoke test, and what holds of its results whatever the machine.
SMOKES = {
    "controller --rows 6000 --sleepers 1 3 --calls 20 --call-seconds 0.1 "
    "ray_data --rows 1500 --batch 64 --repeats 1 --cases fixed":
        lambda r: r["controller"]["rows"] == 6000 and r["ray_data"]["fixed"]["rows"] == 1500,
    "shards --rows 400 --options 5 --shards 2 --methods rf": lambda r: r["shards"]["rf"]["largest_difference"] < 1e-9,
    "compare --rows 800 --options 30 --models 2 3 --methods base agreement logistic":
        lambda r: all(
            of["ours"].keys() == {"base"} and of["others"].keys() == {"agreement"} and "report" in of["seconds"]
            and "up to 20 options" in of["failed"]["logistic"]  # and the others' figures are kept
            for of in r["compare"].values()
        ),
    "serving --few-clients 2 --many-clients 4 --seconds 0.6 --warm-up 0.2 --turns 1 --rows 60 --cases sleeping":
        lambda r: all(
            set(of[side]["counts"]) == {"small", "large"}  # nothing was wrong, nothing refused
            for of in r["serving"]["sleeping"].values() for side in ("cauc-ray", "by-hand")
        ),
}  # fmt: skip


@pytest.mark.soak("full")
@pytest.mark.parametrize("words", SMOKES, ids=lambda words: words.split()[0])
def test_a_part_ends_with_right_answers_on_both_sides(words):
    results = bench(*words.split())
    assert SMOKES[words](results), results


@pytest.mark.soak("full")
def test_the_memory_of_a_call_is_its_own():
    ballast = np.ones(1 << 27)  # a gigabyte
    (figures,) = compare(rows=400, options=5, models=(2,), methods=("base",)).values()
    assert ballast.any()
    assert figures["gb"].keys() >= {"base", "fit, rf"}
    assert max(figures["gb"].values()) < 0.8, figures


WITHOUT_RAY = "import sys, runpy; sys.modules['ray'] = None; runpy.run_module('jobs.bench', None, '__main__', True)"


@pytest.mark.soak("full")
def test_the_part_for_gpus_runs_on_a_cpu_without_ray():
    pytest.importorskip("transformers")
    sizes = ("--rows", 96, "--batch", 8, "--stage-rows", 12, "--turns", 1)
    results = bench("gpu", "--device", "cpu", *sizes, start=["-c", WITHOUT_RAY])["gpu"]
    assert results["cascade"]["deferral"] == pytest.approx(0.5, abs=0.2)
    stages = {kind: of for kind, of in results["stages"].items() if "left_out" not in of}
    assert {"torchvision", "transformers-classifier", "transformers-choice", "shared-prefix", "python"} <= set(stages)
    assert min(of["same_answers"] for of in stages.values()) > 0.9, stages


def test_a_part_whose_time_is_over_keeps_its_first_turn_and_names_what_is_left_over():
    taken = by_turns({"one": lambda turn: turn, "two": lambda turn: -turn}, 5, str, until=0.0)
    assert taken == {"one": [0], "two": [0]}
    assert "time was over" in stages(("python",), minutes=0)["python"]["left_out"]


def test_figures_that_something_is_asked_of_are_right_and_kept_for_each_commit(tmp_path):
    assert {spec["part"] for spec in SPECS} <= PARTS.keys()
    words = ["--save", tmp_path / "kept", "numbers", "--rows", 300, "--options", 20, "--repeats", 1]
    figures = bench(*words)
    assert figures["numbers"]["temperature"]["apart_from_sklearn"] < 1e-3
    assert abs(figures["numbers"]["pair"]["nll_above_lbfgsb"]) < 1e-5
    bench("--save", tmp_path / "kept", "doors", "--rows", 300, "--options", 4, "--repeats", 1)
    (path,) = (tmp_path / "kept").iterdir()
    saved = json.loads(path.read_text())
    assert path.stem == saved["commit"]
    assert saved["machine"]["cores"] == os.cpu_count()
    ratio = figures["numbers"]["temperature"]["to_sklearn"]
    assert ratio in [row["measured"] for row in saved["figures"]]  # what another part has measured before stays
