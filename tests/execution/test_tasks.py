"""Tasks on Ray that die, fail for a while, fail for good, or take too long."""

import os
import time
from functools import partial

import pytest
from failing_tasks import bad_input, killed_until, missing_file, out_of_reach_until, slow

from cauc_ray.execution.tasks import ATTEMPTS, Task, run_tasks

pytestmark = pytest.mark.slow


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
    assert found["threads"].value == "1"  # as many as a task has CPUs


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


def test_more_tasks_than_ray_gets_at_a_time(ray_session, monkeypatch):
    monkeypatch.setattr("cauc_ray.execution.tasks.MOST_PENDING", 3)
    tasks = [Task("a", str(number), partial(abs, -number)) for number in range(20)]
    assert {outcome.task: outcome.value for outcome in run_tasks(tasks, 60)} == {t: int(t.name) for t in tasks}
