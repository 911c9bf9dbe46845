"""Tasks on Ray that die, fail for a while, fail for good, or take too long."""

import os
import threading
from functools import partial

import pytest
from failing_tasks import bad_input, killed_until, missing_file, out_of_reach_until, slow

from cauc_ray.execution.tasks import ATTEMPTS, Task, run_tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
# By name: what a task does, the number of its attempts, and its value or words of its error.
TASKS = {
    "killed once": (partial(killed_until, 2), 2, "done"),
    "out of reach twice": (partial(out_of_reach_until, 3), 3, "done"),
    "killed always": (partial(killed_until, 1000), ATTEMPTS, "(4 attempts)"),
    "bad input": (bad_input, 1, "example 'a' has no label"),
    "no file": (missing_file, 1, "FileNotFoundError"),
    "too slow": (partial(slow, 500), 1, "not done after 10 s"),
}


def test_tasks_are_tried_again_where_that_may_help_and_fail_with_one_line(tmp_path):
    tasks = [Task("a", name, partial(measure, str(tmp_path / name))) for name, (measure, *_) in TASKS.items()]
    tasks.append(Task("a", "threads", partial(os.getenv, "OMP_NUM_THREADS")))
    outcomes = {outcome.task.name: outcome for outcome in run_tasks(tasks, deadline_s=10)}
    assert outcomes.pop("threads").value == "1"  # as many as a task has CPUs
    assert outcomes.keys() == TASKS.keys()
    for name, (_, n, words) in TASKS.items():
        outcome = outcomes[name]
        assert (outcome.attempts, (tmp_path / name).stat().st_size) == (n, n), name
        assert words in (outcome.value or outcome.error), name
        assert (outcome.error is None) == (words == "done"), name
        assert "\n" not in (outcome.error or "")


class Read:
    """What has been read can be in no other process."""

    def measure(self):
        self.table = threading.Lock()
        return "done"


def test_what_a_task_has_read_does_not_travel_with_its_outcome():
    (outcome,) = run_tasks([Task("a", "reads", Read().measure)], deadline_s=60)
    assert (outcome.value, outcome.error) == ("done", None)


def test_more_tasks_than_ray_gets_at_a_time(monkeypatch):
    monkeypatch.setattr("cauc_ray.execution.tasks.MOST_PENDING", 3)
    tasks = [Task("a", str(number), partial(abs, -number)) for number in range(20)]
    assert {outcome.task: outcome.value for outcome in run_tasks(tasks, 60)} == {t: int(t.name) for t in tasks}
