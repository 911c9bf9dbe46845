"""Runs of a policy's cascade over an input: each in its own actor, restarted if that dies, followed to its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import ray
from ray.exceptions import RayError

from cauc_ray.cascade.allowance import Allowance
from cauc_ray.data.datasets import RunInput
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, explained, kind_of, result_of
from cauc_ray.execution.cluster import require_fit
from cauc_ray.execution.commits import Claim, Committed, FailedBlock, common_reason
from cauc_ray.execution.ledger import RunRecord, RunTables, new_claim, parts_of
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.progress import RunProgress, StageProgress
from cauc_ray.execution.run_controller import RunController
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.logits import ANSWERS
from cauc_ray.policies.policy import Policy

POLL_S = 0.5
# A run that is ended early may take so long to commit what is finished.
STOP_S = 10.0
# So often a controller whose process dies is started again; what was committed is not done again.
RESTARTS = 3
# A block has so many rows at most, and fewer where they are large.
MIN_BLOCK_ROWS, BLOCK_ROWS = 32, 8192
# Blocks of an input that has enough rows for them.
MIN_BLOCKS = 64
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
        """Wait for the end, as long as the timeout.

        Returns:
            The seconds from the first call to the last commit, None before the end.

        Raises:
            ExecutionError: The stages do not start or cannot go on; what was finished stays committed.
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
        label = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        controller = ray.remote(num_cpus=0, label_selector=label, concurrency_groups={"watch": 1})(RunController)
        self._actor = controller.remote(self._stages, self._policy, label)
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


def block_rows(row_bytes: float, n_rows: int | None) -> int:
    """Return the number of rows in a block. It is committed as a whole: a run that is stopped repeats unfinished ones.

    Args:
        row_bytes: A row's bytes, 0 if unknown.
        n_rows: Rows of the input, None if unknown.
    """
    fit = BLOCK_BYTES / row_bytes if row_bytes else BLOCK_ROWS / 8
    share = BLOCK_ROWS if n_rows is None else n_rows / MIN_BLOCKS
    return int(min(BLOCK_ROWS, max(MIN_BLOCK_ROWS, min(fit, share))))


@dataclass(frozen=True, slots=True)
class FailureLimit:
    """How many rows models may fail on before a run ends.   share: of all rows, and never fewer than MIN_FAILED.

    While a run goes on, it is also held against the rows that are done so far, once MANY_FAILED have failed, so
    that a long one does not compute for days what will fail in the end. Rows that wait for patient stages, those of
    people, do not count.
    """

    share: float
    n_rows: int | None
    patient: frozenset[str] = frozenset()

    def check(self, failed: Mapping[str, int], n_done: int, why: Callable[[], str], *, at_end: bool = False) -> None:
        """Raise ExecutionError where it is exceeded.   failed: rows by stage.   why: asked for the common reason."""
        failed = {name: n for name, n in failed.items() if name not in self.patient}
        n_failed = sum(failed.values())
        limits = [max(MIN_FAILED if at_end else MANY_FAILED, self.share * n_done)]
        if self.n_rows is not None:
            limits.append(max(MIN_FAILED, self.share * self.n_rows))
        if n_failed <= min(limits):
            return
        places = ", ".join(f"{n:,} at stage {name!r}" for name, n in failed.items() if n)
        of = f"{n_done:,} rows" if at_end or n_done == self.n_rows else f"{n_done:,} rows so far"
        raise DataError(
            f"models failed on {n_failed:,} of {of} ({places}), more than max_failed allows; most often: {why()}; fix "
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


@dataclass(frozen=True, slots=True)
class CascadeRun:
    """A run of a policy's chain over an input, which leaves out what is committed in its folder.

    Attributes:
        stages: The chain's.
        policy: The policy.
        opened: Returns the input and the run's record. It is first called while models load.
        out: The folder.
        columns: Those of the input that are read, None for all.
        degrade: Answer without a stage that is down.
        max_failed: The share of rows that models may fail on.
        allowance: The limits of deferral and of money, None without any.
        retry_failed: Do rows again that failed.
        names: Names of the options, for predictions.
    """

    stages: tuple[StageSpec, ...]
    policy: Policy
    opened: Callable[[], tuple[RunInput, RunRecord]]
    out: AnyPath
    columns: frozenset[str] | None
    degrade: bool
    max_failed: float
    allowance: Allowance | None = None
    retry_failed: bool = False
    names: Sequence[str] | None = None

    def run(self, on_progress: Callable[[RunProgress], None]) -> float:
        """Run on the current Ray session. Returns the seconds from the first call to the last commit.

        Raises:
            ExecutionError: The stages do not fit on the cluster, do not start or cannot go on, or models fail on too
                many rows. What was finished before stays in the folder.
        """
        require_fit(self.stages)
        parts, first = parts_of(self.out), self._begin()
        before, attempts = first[1], chain([first], iter(self._begin, None))
        start = partial(LiveRun, self.stages, self.policy, partial(self._plan, attempts))
        live = None if before.n_done else start()
        inputs, _ = self.opened()
        patient = frozenset(stage.name for stage in self.stages if stage.model.TAKES_LONG)
        limit, failed_before = FailureLimit(self.max_failed, inputs.n_rows, patient), before.failed

        def watch(progress: RunProgress) -> None:
            on_progress(progress)
            failed = {stage.name: failed_before.get(stage.name, 0) + stage.failed for stage in progress.stages}
            worst = max(progress.stages, key=lambda stage: stage.failed)
            limit.check(failed, before.n_done + progress.n_ended, lambda: worst.reason)

        limit.check(failed_before, before.n_done, lambda: common_reason(parts))
        seconds = 0.0
        if before.n_done != inputs.n_rows:
            seconds = follow(live or start(), watch)
            parts.clean()
        after = _Before(parts.committed(), {})
        is_whole = [*range(len(after.committed.rows))] == sorted(after.committed.rows)
        if not is_whole or inputs.n_rows not in (None, after.n_done):
            n_rows = "rows" if inputs.n_rows is None else f"of {inputs.n_rows:,} rows"
            raise ExecutionError(f"the run ended, but {self.out} has {after.n_done:,} {n_rows}; continue with --resume")
        limit.check(after.failed, after.n_done, lambda: common_reason(parts), at_end=True)
        return seconds

    def _begin(self) -> tuple[Claim, _Before]:
        """Begin an attempt. Returns its claim, and what earlier ones have left."""
        claim, parts = new_claim(self.out), parts_of(self.out)
        if claim.number:  # before anything is removed or looked at: an earlier attempt may still be at work
            claim.make()
        parts.clean()
        return claim, _Before(parts.committed(), parts.failed_blocks() if self.retry_failed else {})

    def _plan(self, attempts: Iterator[tuple[Claim, _Before]]) -> RunPlan | None:
        """Return what the next attempt has to do, None where that is nothing."""
        (inputs, record), (claim, before) = self.opened(), next(attempts)
        if before.n_done == inputs.n_rows:
            return None
        sink = RunTables(
            self.out,
            record,
            self.policy.models,
            degrade=self.degrade,
            names=self.names,
            sources=[at.source for at in self.policy.stages] if self.policy.logit_kind == ANSWERS else None,
            claim=claim,
            retried=before.again,
        )
        return RunPlan(
            run_id=record.run_id,
            stages=self.stages,
            policy=self.policy,
            source=inputs.blocks(record.block_rows, self.columns),
            done=before.committed.ids,
            again=before.again,
            sink=sink,
            n_rows=inputs.n_rows,
            n_done=before.n_done,
            block_rows=record.block_rows,
            degrade=self.degrade,
            allowance=self._allowance_after(before),
        )

    def _allowance_after(self, before: _Before) -> Allowance | None:
        """Return what a run may still take after what is committed."""
        if self.allowance is None or self.allowance.period == "hour":
            return self.allowance
        totals, (first, *later) = before.committed.totals, self.policy.models
        called = totals.get("called", Counter())
        return replace(
            self.allowance,
            n_rows=int(called[first]),
            n_deferred=int(max((called[name] for name in later), default=0)),
            spent_before=totals.get("cost", Counter())["sum"],
        )
