"""The fault kit: what it counts as wrong, by hand, and some kinds of fault in real runs and services."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jobs.faults.cascade import NUMBER, compare, give_order, planted, write_cascade

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cascade(tmp_path_factory):
    return write_cascade(tmp_path_factory.mktemp("cascade"), 60)


def test_what_the_replay_answers_is_right_and_every_other_end_of_a_row_is_counted(cascade):
    ids = list(cascade.expected)
    answers = [dict(row) for row in cascade.expected.values()]
    right = dict.fromkeys(("lost", "doubled", "different", "wrongly_failed", "degraded"), 0)
    assert compare(cascade, ids, answers, []) == right
    first, second, third, *rest = answers
    assert compare(cascade, ids, [first, first, *rest], []) == right | {"lost": 2, "doubled": 1}
    other = second | {"confidence": float(np.nextafter(np.float32(second["confidence"]), np.float32(0)))}
    assert compare(cascade, ids, [first, other, third, *rest], []) == right | {"different": 1}
    failed = [first["example_id"]]
    assert compare(cascade, ids, answers[1:], failed) == right | {"wrongly_failed": 1}
    assert compare(cascade, ids, answers[1:], failed, must_fail=failed) == right
    assert compare(cascade, ids, answers, [], must_fail=failed) == right | {"wrongly_failed": 1}


def test_a_row_without_its_last_stage_is_right_where_it_says_so_and_the_replay_agrees(cascade):
    deep = next(row for row in cascade.expected.values() if row["stage"] == 2)
    one = deep["example_id"]
    answer = deep | cascade.at[1][one] | {"degraded": True}
    assert answer["cost"] < deep["cost"]
    assert compare(cascade, [one], [answer], [])["different"] == 0
    for wrong in (answer | {"degraded": False}, deep | {"degraded": True}, answer | {"prediction": 9}):
        assert compare(cascade, [one], [wrong], [])["different"] == 1


def test_models_do_as_ordered(cascade, tmp_path):
    heads = np.array(list(cascade.heads.values()), np.float32)
    model = planted(1, 0.0, str(tmp_path))
    assert (model({"payload": heads}) == heads[:, 4:8]).all()
    give_order(tmp_path, 1, does="raises", rows=[int(heads[7, NUMBER])])
    assert (model({"payload": heads[:7]}) == heads[:7, 4:8]).all()
    with pytest.raises(RuntimeError, match="device"):
        model({"payload": heads})
    assert list(tmp_path.glob("struck-1-*"))
    give_order(tmp_path, 1, does="length", replicas=1)
    assert len(model({"payload": heads})) == 60  # another process was to blame, by the notes: it struck once
    give_order(tmp_path, 1, does="nan", replicas=2)
    assert [int(np.isnan(model({"payload": heads})).sum()) for _ in range(3)] == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("where", "kinds"),
    [
        ("run", ["replicas-killed", "replica-turns-bad", "replica-hangs-on", "row-kills", "stage-down"]),
        ("run", ["reader-killed", "controller-killed", "driver-killed", "input-damaged", "node-replaced"]),
        ("service", ["replica-killed", "row-kills", "replica-turns-bad", "router-killed"]),
    ],
)
def test_faults_change_no_row(where, kinds):
    done = subprocess.run(
        [sys.executable, "-m", "jobs.bench", "faults", "--where", where, "--seeds", "1", "--kinds", *kinds],
        cwd=ROOT, capture_output=True, text=True, timeout=880, env={**os.environ, "RAY_ADDRESS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    *said, last = done.stdout.splitlines()
    found = json.loads(last)["faults"]
    assert set(found[where]) == set(kinds)
    assert found["sound"], "\n".join(said)
