"""Runs of a policy's cascade over an input: each in its own actor, restarted if that dies, followed to its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from cauc_ray.data.datasets import RunInput
from cauc_ray.errors import ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, explained, kind_of, make_actor, result_of
from cauc_ray.execution.cluster import require_fit
from cauc_ray.execution.commits import Claim, Committed, FailedBlock, common_reason
from cauc_ray.execution.ledger import RunRecord, RunTables, new_claim, parts_of
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.progress import RunProgress, StageProgress
from cauc_ray.execution.run_controller import RunController
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy

POLL_S = 0.5
# A run that is ended early may take so long to commit what is finished.
STOP_S = 10.0
# So often a controller whose process dies is started again; what was committed is not done again.
RESTARTS = 3
# A block has so many rows at most, and fewer where they are large.
BLOCK_ROWS = 8192
BLOCK_BYTES = 16 * 1024 * 1024
# Models may fail on so many rows of any run; and on so many before the share of rows done so far counts.
MIN_FAILED = 100
MANY_FAILED = 1000


class LiveRun:
    """A run in its own actor, on the node of the user, whose files it reads and writes.

    It starts the stages itself, so that they end with it.
    """

    def __init__(self, stages: Sequence[StageSpec], policy: Policy | None, plan: Callable[[], RunPlan | None]) -> None:
        """Start a run on the current Ray session.

        Args:
            stages: The chain's.
            policy: What decides, None for collections.
            plan: Called here while models load, and again if the controller has died. Returns what is still to be done,
                None if nothing.
        """
        self._stages, self._policy, self._plan = stages, policy, plan
        self._restarts = RESTARTS
        self._spent_s, self._started = 0.0, time.perf_counter()
        self._start()

    def wait(self, timeout_s: float) -> float | None:
        """Wait so long for the end. Returns the seconds from the first call to the last commit, None before it.

        Raises ExecutionError when the stages do not start or cannot go on; what was finished stays committed.
        """
        if not ray.wait([self._seconds], timeout=timeout_s)[0]:
            if time.monotonic() - self._last.at > START_DEADLINE_S:
                ray.kill(self._actor)  # it hangs; the next wait finds it dead, and starts another
            return None
        try:
            seconds: float = ray.get(self._seconds)
        except RayError as error:
            fault = explained(error, "the controller")
            if kind_of(error) != "died" or not self._restarts:
                raise fault from error
            self._restarts -= 1
            self._spent_s = time.perf_counter() - self._started
            self._start()
            return None
        return self._spent_s + seconds

    def progress(self) -> RunProgress:
        """Return how far the run is; how far it was, where its controller has died."""
        with suppress(ExecutionError):
            at: RunProgress | None = result_of(self._actor.progress.remote(), START_DEADLINE_S, "the controller")
            if at is not None:
                self._last = at
        return self._last

    @staticmethod
    def close(runs: Sequence[LiveRun]) -> None:
        """End runs and their stages. Those that are at work commit first what is finished, if that takes no longer."""
        try:
            for run in runs:
                run._actor.stop.remote()
            ray.wait([run._seconds for run in runs], num_returns=len(runs), timeout=STOP_S)
        finally:
            for run in runs:
                ray.kill(run._actor)

    def _start(self) -> None:
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        controller = make_actor(RunController, num_cpus=0, label_selector=here, concurrency_groups={"watch": 1})
        self._actor = controller.remote(self._stages, self._policy, here)
        try:
            plan = self._plan()
        except BaseException:
            ray.kill(self._actor)
            raise
        waiting = tuple(StageProgress(stage.name) for stage in self._stages)
        n_rows, n_done = (None, 0) if plan is None else (plan.n_rows, plan.n_done)
        self._last = RunProgress(time.monotonic(), n_rows, n_done, waiting)
        self._seconds = self._actor.run.remote(plan)


def follow(run: LiveRun, on_progress: Callable[[RunProgress], None]) -> float:
    """Wait for a run's end, reporting progress about twice a second; end it if it cannot go on. Returns its seconds."""
    try:
        while True:
            seconds = run.wait(POLL_S)
            on_progress(run.progress())
            if seconds is not None:
                return seconds
    finally:
        LiveRun.close([run])


def block_rows(row_bytes: float) -> int:
    """Return the number of rows in a block, given a row's bytes (0 if unknown)."""
    fit = BLOCK_BYTES / row_bytes if row_bytes else BLOCK_ROWS / 8
    return int(min(BLOCK_ROWS, max(32, fit)))


@dataclass(frozen=True, slots=True)
class FailureLimit:
    """How many rows models may fail on before a run ends.   share: of all rows, and never fewer than MIN_FAILED.

    While a run goes on, it is also held against the rows that are done so far, once MANY_FAILED have failed, so
    that a long one does not compute for days what will fail in the end.
    """

    share: float
    n_rows: int | None

    def check(self, failed: Mapping[str, int], n_done: int, why: Callable[[], str], *, at_end: bool = False) -> None:
        """Raise ExecutionError where it is exceeded.   failed: rows by stage.   why: asked for the common reason."""
        n_failed = sum(failed.values())
        limits = [max(MIN_FAILED if at_end else MANY_FAILED, self.share * n_done)]
        if self.n_rows is not None:
            limits.append(max(MIN_FAILED, self.share * self.n_rows))
        if n_failed <= min(limits):
            return
        where = ", ".join(f"{n:,} at stage {name!r}" for name, n in failed.items() if n)
        of = f"{n_done:,} rows" if at_end or n_done == self.n_rows else f"{n_done:,} rows so far"
        raise ExecutionError(
            f"models failed on {n_failed:,} of {of} ({where}), more than max_failed allows; most often: {why()}; fix "
            "the cause and continue with --resume --retry-failed, or raise max_failed in the pool file and continue "
            "with --resume"
        )


@dataclass(frozen=True, slots=True)
class _Before:
    """What earlier attempts at a run have left.   again: blocks whose failed rows are tried again."""

    committed: Committed
    again: Mapping[int, FailedBlock]

    @property
    def n_done(self) -> int:
        """Return the rows that are done with."""
        rows = self.committed.rows
        return sum(rows.values()) - sum(len(failed.rows) for failed in self.again.values())

    @property
    def failed(self) -> dict[str, int]:
        """Return how many rows each stage's model failed on, without those that are tried again."""
        left = self.committed.totals.get("failed", Counter()).copy()
        for failed in self.again.values():
            left.subtract(failed.by_stage)
        return {stage: n for stage, n in left.items() if stage}


def run_cascade(
    stages: tuple[StageSpec, ...],
    policy: Policy,
    opened: Callable[[], tuple[RunInput, RunRecord]],
    out: AnyPath,
    on_progress: Callable[[RunProgress], None],
    *,
    columns: frozenset[str] | None,
    degrade: bool,
    max_failed: float,
    retry_failed: bool = False,
    names: Sequence[str] | None = None,
) -> float:
    """Run a policy's chain over an input on the current Ray session, leaving out what is committed in out.

    opened: returns the input and the run's record; first called while models load, and again and again.
    columns: of the input, those that are read, None for all.   degrade: answer without a stage that is down.
    max_failed: the share of rows that models may fail on.
    retry_failed: do rows again that failed.   names: of the options, for predictions.
    Returns the seconds from the first call to the last commit. Raises ExecutionError when the stages do not fit on
    the cluster, do not start or cannot go on, or models fail on too many rows; what was finished before stays in
    the output.
    """
    require_fit(stages)
    parts = parts_of(out)

    def begun() -> tuple[Claim, _Before]:
        """Begin an attempt, and return what earlier ones have left."""
        claim = new_claim(out)
        if claim.number:  # before anything is removed or looked at: an earlier attempt may still be at work
            claim.make()
        parts.clean()
        return claim, _Before(parts.committed(), parts.failed_blocks() if retry_failed else {})

    attempts = [begun()]

    def plan() -> RunPlan | None:
        inputs, record = opened()
        claim, there = attempts.pop() if attempts else begun()
        if there.n_done == inputs.n_rows:
            return None
        return RunPlan(
            run_id=record.run_id,
            stages=stages,
            policy=policy,
            source=inputs.blocks(record.block_rows, columns),
            done=there.committed.ids,
            again=there.again,
            sink=RunTables(out, record, policy.models, degrade=degrade, names=names, claim=claim, retried=there.again),
            n_rows=inputs.n_rows,
            n_done=there.n_done,
            block_rows=record.block_rows,
            degrade=degrade,
        )

    before = attempts[0][1]
    failed_before = before.failed
    live = None if before.n_done else LiveRun(stages, policy, plan)
    inputs, _ = opened()
    limit = FailureLimit(max_failed, inputs.n_rows)

    def watch(progress: RunProgress) -> None:
        on_progress(progress)
        failed = {stage.name: failed_before.get(stage.name, 0) + stage.failed for stage in progress.stages}
        n_done = before.n_done + progress.n_ended
        worst = max(progress.stages, key=lambda stage: stage.failed)
        limit.check(failed, n_done, lambda: worst.reason)

    limit.check(failed_before, before.n_done, lambda: common_reason(parts))
    seconds = 0.0
    if before.n_done != inputs.n_rows:
        seconds = follow(live or LiveRun(stages, policy, plan), watch)
        parts.clean()
    after = _Before(parts.committed(), {})
    is_whole = [*range(len(after.committed.rows))] == sorted(after.committed.rows)
    if not is_whole or inputs.n_rows not in (None, after.n_done):
        of = "rows" if inputs.n_rows is None else f"of {inputs.n_rows:,} rows"
        raise ExecutionError(f"the run ended, but {out} has {after.n_done:,} {of}; continue with --resume")
    limit.check(after.failed, after.n_done, lambda: common_reason(parts), at_end=True)
    return seconds
