"""Runs in progress: each in its own actor on the user's node, restarted if that dies, followed to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import ray
from ray.exceptions import RayError

from cauc_ray.errors import ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, explained, kind_of, make_actor, result_of
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.progress import RunProgress, StageProgress
from cauc_ray.execution.run_controller import RunController

POLL_S = 0.5
# So often a controller whose process dies is started again; what was committed is not done again.
RESTARTS = 3


class LiveRun:
    """A run in its own actor, on the node of the user, whose files it reads and writes.

    It starts the stages itself, so that they end with it.
    """

    def __init__(self, plan: Callable[[], RunPlan | None]) -> None:
        """Start a run on the current Ray session.

        plan: called here, and again if the controller has died: returns what is still to be done, None if nothing.
        """
        self._plan = plan
        self._restarts = RESTARTS
        self._spent_s = 0.0
        self._started = time.perf_counter()
        first = plan()
        assert first is not None
        self._start(first)

    def wait(self, timeout_s: float) -> float | None:
        """Wait so long for the end. Returns the seconds from the first call to the last commit, None before it.

        Raises ExecutionError when the stages do not start or cannot go on; what was finished stays committed.
        """
        if not ray.wait([self._seconds], timeout=timeout_s)[0]:
            if time.time() - self._last.at > START_DEADLINE_S:
                ray.kill(self._actor)  # it hangs; the next wait finds it dead, and starts another
            return None
        try:
            seconds: float = ray.get(self._seconds)
        except RayError as error:
            fault = explained(error, "the controller")
            if kind_of(error) != "died" or not self._restarts:
                raise fault from error
            return self._start_again()
        return self._spent_s + seconds

    def progress(self) -> RunProgress:
        """Return how far the run is; how far it was, where its controller has died."""
        with suppress(ExecutionError):
            at: RunProgress = result_of(self._actor.progress.remote(), START_DEADLINE_S, "the controller")
            self._last = at
        return self._last

    def close(self) -> None:
        """End the run and its stages."""
        ray.kill(self._actor)

    def _start(self, plan: RunPlan) -> None:
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        controller = make_actor(RunController, num_cpus=0, label_selector=here, concurrency_groups={"watch": 1})
        self._actor = controller.remote(plan, here)
        waiting = tuple(StageProgress(stage.name) for stage in plan.stages)
        self._last = RunProgress(time.time(), plan.n_rows, plan.n_done, waiting)
        self._seconds = self._actor.run.remote()

    def _start_again(self) -> float | None:
        self._restarts -= 1
        self._spent_s = time.perf_counter() - self._started
        plan = self._plan()
        if plan is None:
            return self._spent_s
        self._start(plan)
        return None


def follow(run: LiveRun, on_progress: Callable[[RunProgress], None]) -> float:
    """Wait for a run's end, reporting progress about twice a second; end it if it cannot go on. Returns its seconds."""
    try:
        while True:
            seconds = run.wait(POLL_S)
            on_progress(run.progress())
            if seconds is not None:
                return seconds
    finally:
        run.close()
