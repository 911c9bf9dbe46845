"""Tasks of the paper's tables in this process, one after the other; Ray runs them in tests of its own."""

from contextlib import contextmanager, nullcontext

import pytest

from cauc_ray.errors import CaucError, own_warnings
from cauc_ray.execution import session, tasks
from cauc_ray.execution.outcomes import Outcome


def outcomes(of_round, deadline_s):
    """Yield the outcome of each task."""
    for task in of_round:
        messages = []
        try:
            with own_warnings(messages.append):
                value = task.measure()
        except CaucError as error:
            yield Outcome(task, error=str(error))
        else:
            yield Outcome(task, value, warnings=tuple(messages), seconds=1.0)


@contextmanager
def tasks_in_process():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "run_tasks", outcomes)
        patch.setattr(session, "ray_session", lambda address, n_cpus: nullcontext())
        yield


@pytest.fixture
def in_process():
    with tasks_in_process():
        yield
