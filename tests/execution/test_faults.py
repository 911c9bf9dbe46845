"""Faults put into real runs: the rows are those of an undisturbed run, with the same values, and nobody outlives it.

The job `python -m jobs.bench faults` has more kinds of them, at more moments.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cauc_ray.execution import manifest, runner
from jobs.faults.cascade import small_blocks, write_cascade
from jobs.faults.kinds import KINDS
from jobs.faults.trial import Trial

ROOT = Path(__file__).parents[2]
ROWS = 1280


@pytest.fixture(scope="module")
def cascade(tmp_path_factory):
    before = runner.BLOCK_ROWS, manifest.COMMIT_S
    small_blocks()
    yield write_cascade(tmp_path_factory.mktemp("cascade"), ROWS)
    runner.BLOCK_ROWS, manifest.COMMIT_S = before


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize(
    "name",
    [
        "replica-killed",
        "replica-turns-bad",
        "replica-hangs",
        "replica-hangs-on",
        "replicas-turn-bad",
        "replica-turns-nan",
        "replica-turns-shape",
        "replica-turns-deadly",
        "bad-for-a-while",
        "row-kills",
        "stage-down-degrade",
        "reader-killed",
        "controller-killed",
    ],
)
def test_a_fault_changes_no_row(tmp_path, cascade, name):
    kind = next(kind for kind in KINDS if kind.name == name)
    outcome = kind.put_into(Trial(cascade, tmp_path, random.Random(name), run_s=1.5))
    assert outcome.struck
    assert outcome.is_sound, outcome


@pytest.mark.slow
def test_rows_whose_node_dies_begin_anew_from_the_input(tmp_path):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dying_cluster.py")), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["struck"] == 1
    assert outcome["is_sound"], outcome
    assert outcome["seen"]["repeated"] > 0  # the first stage has seen rows twice: once before and once after
