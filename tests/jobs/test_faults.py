"""The fault kit: what it counts as wrong, by hand, and kinds of fault in real runs and services."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs.faults.cascade import compare, write_cascade
from jobs.faults.kinds import KINDS

ROOT = Path(__file__).parents[2]


def test_rows_that_end_unlike_the_replay_are_counted(tmp_path):
    cascade = write_cascade(tmp_path, 60)
    ids, answers = list(cascade.expected), list(cascade.expected.values())
    right = dict.fromkeys(("lost", "doubled", "different", "wrongly_failed", "degraded"), 0)
    first, second, third, *rest = answers
    changed = second | {"confidence": float(np.nextafter(np.float32(second["confidence"]), np.float32(0)))}
    failed = [first["example_id"]]
    assert compare(cascade, ids, answers, []) == right
    assert compare(cascade, ids, [first, first, *rest], []) == right | {"lost": 2, "doubled": 1}
    assert compare(cascade, ids, [first, changed, third, *rest], []) == right | {"different": 1}
    assert compare(cascade, ids, answers[1:], failed) == right | {"wrongly_failed": 1}
    assert compare(cascade, ids, answers[1:], failed, must_fail=failed) == right
    assert compare(cascade, ids, answers, [], must_fail=failed) == right | {"wrongly_failed": 1}
    of_next = cascade.expected | {changed["example_id"]: changed}
    assert compare(cascade, ids, [first, changed, third, *rest], [], of_next=of_next) == right


# The gate has one trial of what nothing else in it strikes; the soak ten of every kind.
GATE = {"run": ["reader-node-killed"]}
OF_BATCHES = {target: [kind.name for kind in KINDS if target in kind.on] for target in ("run", "collection")}
SOAK = {
    **OF_BATCHES,
    "service": ["row-kills", "router-killed", "version-next", "bodies-hostile", "replica-killed", "replica-turns-bad"],
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("target", "kinds", "n_seeds"),
    [
        *(pytest.param(target, kinds, 1, id=target, marks=pytest.mark.slow) for target, kinds in GATE.items()),
        *(
            pytest.param(target, [kind], 10, id=f"{target}-{kind}", marks=pytest.mark.soak("faults"))
            for target, kinds in SOAK.items()
            for kind in kinds
        ),
    ],
)
def test_faults_change_no_row(target, kinds, n_seeds):
    words = ["--targets", target, "--seeds", str(n_seeds), "--kinds", *kinds]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.faults", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=3500, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    printed, _, last = done.stdout.strip().rpartition("\n")
    assert done.returncode == 0, f"{printed}\n{done.stderr}"
    if "left_out" not in (results := json.loads(last)["faults"]):
        assert set(results[target]) == set(kinds)
        assert results["sound"], printed
