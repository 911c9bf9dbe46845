"""Tasks on Ray that die, fail for a while, fail for good, or take too long."""

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from failing_tasks import bad_input, killed_until, missing_file, out_of_reach_until, slow

from cauc_ray.execution.tasks import ATTEMPTS, Task, run_tasks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes(ray_session, tmp_path_factory):
    """Return what came of tasks that ran side by side, and the folder with their attempts."""
    folder = tmp_path_factory.mktemp("attempts")
    measures = {
        "killed once": partial(killed_until, 2),
        "killed always": partial(killed_until, 1000),
        "out of reach twice": partial(out_of_reach_until, 3),
        "bad input": bad_input,
        "no file": missing_file,
        "too slow": partial(slow, 500),
    }
    tasks = [Task("a", name, partial(measure, str(folder / name))) for name, measure in measures.items()]
    tasks.append(Task("a", "threads", partial(os.getenv, "OMP_NUM_THREADS")))
    started = time.monotonic()
    found = {outcome.task.name: outcome for outcome in run_tasks(tasks, deadline_s=10)}
    assert time.monotonic() - started < 200
    assert found.keys() == {task.name for task in tasks}
    return found, folder


@pytest.mark.parametrize(("name", "n"), [("killed once", 2), ("out of reach twice", 3)])
def test_what_may_pass_is_tried_again(outcomes, name, n):
    found, folder = outcomes
    assert found[name].error is None
    assert (found[name].value, found[name].attempts) == ("done", n)
    assert (folder / name).stat().st_size == n


@pytest.mark.parametrize(
    ("name", "n", "says"),
    [
        ("killed always", ATTEMPTS, "(4 attempts)"),
        ("bad input", 1, "example 'a' has no label"),
        ("no file", 1, "FileNotFoundError"),
        ("too slow", 1, "not done after 10 s"),
    ],
)
def test_what_fails_says_why_and_no_more_often_than_helps(outcomes, name, n, says):
    found, folder = outcomes
    assert says in found[name].error
    assert "\n" not in found[name].error
    assert found[name].attempts == n
    assert (folder / name).stat().st_size == n


def test_libraries_have_as_many_threads_as_a_task_has_cpus(outcomes):
    assert outcomes[0]["threads"].value == "1"


def test_more_tasks_than_ray_gets_at_a_time(ray_session, monkeypatch):
    monkeypatch.setattr("cauc_ray.execution.tasks.MOST_PENDING", 3)
    tasks = [Task("a", str(number), partial(abs, -number)) for number in range(20)]
    assert {outcome.task: outcome.value for outcome in run_tasks(tasks, 60)} == {t: int(t.name) for t in tasks}


def test_tasks_whose_node_dies_are_done_on_another(tmp_path):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dying_tasks.py")), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ['PYTHONPATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["errors"] == []
    assert said["n"] == 6
    assert max(said["attempts"]) == 2
