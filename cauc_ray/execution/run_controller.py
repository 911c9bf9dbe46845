"""A run's controller on Ray: it owns the actors and objects, and carries messages between them and its logic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.bundles import Part
from cauc_ray.cascade.patience import RunPatience
from cauc_ray.cascade.rows import Call, CallResult, Owner
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage import Stage
from cauc_ray.cascade.worker import Collected
from cauc_ray.errors import CaucError, ConfigError, DataError, ExecutionError
from cauc_ray.execution.actors import explained, in_group, kind_of
from cauc_ray.execution.cluster import draining_nodes, live_nodes, store_bytes
from cauc_ray.execution.commits import Committer
from cauc_ray.execution.metrics import RunMetrics
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.progress import RunProgress, StageProgress
from cauc_ray.execution.reading import Reading
from cauc_ray.execution.replicas import Replica, Replicas
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy

# The pause after the object store was found full, and for how long it may be.
FULL_PAUSE_S = 2.0
FULL_LIMIT_S = 300.0
# How long one wait for events lasts at most, how often replicas are looked after, and how often metrics are reported.
POLL_S = 0.1
COMING_S = 0.003  # while the rest of a block is about to come
WATCH_S = 0.1
REPORT_S = 1.0
# A stage that answered before is down once its replicas, each replaced by a new one, have all failed for so long.
FAILING_S = 60.0


class RunController:
    """Runs a run to its end."""

    def __init__(self, stages: Sequence[StageSpec], policy: Policy | None, node_label: dict[str, str]) -> None:
        """Start the stages, whose models load until there is a plan.

        Args:
            stages: The chain's.
            policy: What decides, as the plan has it.
            node_label: That of the node that the controller is on, whose files are read.
        """
        self._node_label = node_label
        self._names = [stage.name for stage in stages]
        self._replicas = Replicas(stages, policy, time.monotonic())
        self._counts = [(0, 0)] * len(stages)
        # By the reference that is waited for; a call's handle is that, and those to the result and what comes with it.
        self._sent: dict[Any, Call] = {}
        self._restarts: dict[int, int] = {}  # of blocks that are read again
        self._full_since: float | None = None
        self._read_from = 0.0
        self._first_call: float | None = None
        self._watched, self._reported = time.monotonic(), 0.0
        self._begun = self._stops = False

    @in_group("watch")
    def stop(self) -> None:
        """Have the run end early, once what is finished is committed."""
        self._stops = True

    @in_group("watch")
    def progress(self) -> RunProgress | None:
        """Return how far the run is, and when the controller last looked after everything; None before it has begun."""
        return self._progress() if self._begun else None

    def _progress(self) -> RunProgress:
        stages = tuple(map(_stage_progress, self._names, self._scheduler.stages, self._counts))
        return RunProgress(self._watched, self._plan.n_rows, self._n_finished, stages)

    def run(self, plan: RunPlan | None) -> float:
        """Run to the end, at once without a plan. Returns the seconds from the first call to the last commit."""
        if plan is None:
            self._replicas.close()
            return 0.0
        self._plan = plan
        limits, open_rows = plan.limits(store_bytes())
        self._scheduler = Scheduler(limits, RunPatience(), Blame("row"), open_rows, plan.allowance)
        self._reading = Reading(plan, self._node_label)
        self._committer = Committer(plan.sink)
        self._n_finished = plan.n_done
        self._metrics = RunMetrics(plan.run_id, self._names)
        self._begun = True
        try:
            while not self._scheduler.finished or self._reading.owes:
                if self._stops:
                    raise ExecutionError("the run was stopped")
                self._ask_for_blocks()
                self._send_calls()
                for ref in self._events():
                    self._take(ref)
                self._commit()
                self._watch(time.monotonic())
                self._commit()
        except BaseException:
            with suppress(Exception):
                self._committer.close()  # what is finished stays; the error that ends the run is the first one
            raise
        else:
            self._committer.close()
            self._replicas.close()
            self._n_finished = self._plan.n_done + self._committer.n_rows
            return time.perf_counter() - self._first_call if self._first_call is not None else 0.0
        finally:
            self._metrics.close()

    def _events(self) -> list[Any]:
        """Wait for the next events, and take those along that are there by then: a wait for each would cost more."""
        pending, coming = [*self._reading.streams, *self._sent, *self._replicas.by_ref], self._reading.coming
        wait_s = self._scheduler.wait_s(time.monotonic())
        timeout_s = min(POLL_S if wait_s is None else wait_s, COMING_S if coming else POLL_S)
        if not pending:
            time.sleep(timeout_s)
            return coming
        ready, _ = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if ready and len(pending) > 1:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        return [*ready, *coming]

    def _take(self, ref: Any) -> None:
        now = time.monotonic()
        if ref in self._sent:
            self._call_ready(ref, now)
        elif self._reading.reads(ref):
            self._block_ready(ref, now)
            self._scheduler.n_reads = self._reading.n_asked
        elif ref in self._replicas.by_ref:
            ready = self._replicas.take(ref, now)
            if ready is not None:
                replica, facts = ready
                if replica.stage == 0:
                    self._committer.start(facts)
                self._scheduler.stages[replica.stage].take_facts(facts)
                self._scheduler.replica_ready(replica.stage, replica.number, now)

    # Input

    def _ask_for_blocks(self) -> None:
        now = time.monotonic()
        while self._scheduler.lost:
            lost = self._scheduler.lost.pop()
            self._restarts[lost.block] = lost.restarts + 1
            self._reading.ask_again(lost.names)
        if now >= self._read_from:  # the object store has not just been found full
            while (self._reading.owes_now or self._scheduler.wants_block()) and self._reading.ask(now):
                self._scheduler.n_reads = self._reading.n_asked
        if self._reading.exhausted:
            self._scheduler.end_input()

    def _block_ready(self, stream: Any, now: float) -> None:
        try:
            read = self._reading.take(stream, now)
        except RayError as error:
            if kind_of(error) == "full":
                self._note_full(now, explained(error, "a task that reads the input"))
            self._reading.failed(stream, error)
            return
        if read is None:
            return
        self._full_since = None
        header = read.header
        n_rows = len(header.example_ids)
        owner = Owner(header.number, n_rows, header, self._restarts.get(header.number, 0))
        chunks = [Chunk(ref, *size) for ref, size in zip(read.chunks, header.chunks, strict=True)]
        policy = self._plan.policy
        first = None if policy is None else policy.first(n_rows, header.example_ids if policy.by_id else None)
        lost = "it was lost and cannot be read again: " if read.again else ""
        unreadable = {position: lost + reason for position, reason in header.unreadable.items()}
        self._scheduler.submit(owner, chunks, now, first, unreadable)

    # Calls

    def _send_calls(self) -> None:
        for call in self._scheduler.schedule(time.monotonic()):
            if self._first_call is None:
                self._first_call = time.perf_counter()
            pieces = [*call.rows, *([call.good_row] if call.good_row is not None else [])]
            sources = list(dict.fromkeys(rows.source for rows in pieces))
            parts = [Part(sources.index(rows.source), rows.positions) for rows in pieces]
            good = parts.pop() if call.good_row is not None else None
            refs = self._replicas.by_number[call.replica].answer.remote(parts, good, *sources)
            result, onward = refs if isinstance(refs, list) else (refs, None)
            # To wait for a model's answers brings them here: a call has ended once no other node can lose them.
            call.handle = (onward if self._plan.policy is None else result), result, onward
            self._sent[call.handle[0]] = call

    def _call_ready(self, ref: Any, now: float) -> None:
        call = self._sent[ref]
        try:
            results: list[CallResult] = ray.get(call.handle[1])
            collected: Collected | None = ray.get(call.handle[2]) if self._plan.policy is None else None
        except RayError as error:
            self._call_broken(call, error, now)
            return
        del self._sent[ref]
        self._full_since = None
        result = CallResult.joined(results)
        self._replicas.by_number[call.replica].has_answered |= result.n_answered > 0
        for batch in results if result.error is None else [result]:
            self._committer.add_call(call, batch, collected)
        self._call_ended(call, result, now)

    def _call_ended(self, call: Call, result: CallResult, now: float) -> None:
        """Hand a call's result on; replace the replicas that it shows to be bad."""
        goes_on = None if call.handle is None else call.handle[2]
        self._scheduler.call_ended(call, result, goes_on, now)
        if result.n_answered:
            return
        at, name = self._scheduler.stages[call.stage], self._names[call.stage]
        for number, why in at.take_bad().items():
            if number in self._replicas.by_number:
                self._replica_lost(self._replicas.by_number[number], why, now, own_fault=False)
        if at.never_succeeds:
            why = result.error or next(iter(result.failures.values()), "")
            self._stage_fails(call.stage, DataError(f"stage {name!r} has failed on every row so far: {why}"))

    def _call_broken(self, call: Call, error: RayError, now: float) -> None:
        name = self._names[call.stage]
        kind, fault = kind_of(error), explained(error, f"stage {name!r}")
        cause = getattr(error, "cause", None)
        if kind == "raised" and isinstance(cause, ConfigError | ExecutionError):
            if isinstance(cause, ConfigError):
                raise fault from error
            self._replica_lost(self._replicas.by_number[call.replica], str(fault), now, own_fault=False)
            # For example a server that is down: with degrade, a new replica will check whether it still is.
            self._stage_fails(call.stage, fault)
            return
        if kind == "died":
            replica = self._replicas.by_number[call.replica]
            # Several idle replicas may die with their node, which calls find out only one after another.
            self._replica_lost(replica, str(fault), now, own_fault=replica.node in live_nodes())
            if self._scheduler.stages[call.stage].never_succeeds:
                self._stage_fails(call.stage, ExecutionError(f"all replicas of stage {name!r} die: {fault}"))
            return
        broken = self._note_broken(call, str(fault))
        if kind == "full":
            self._note_full(now, fault)
            self._scheduler.call_postponed(call, FULL_PAUSE_S, now)
        elif kind == "lost":
            self._scheduler.rows_lost(call, f"its data was lost: {fault}", now)
        else:
            self._call_ended(call, broken, now)

    def _replica_lost(self, replica: Replica, why: str, now: float, *, own_fault: bool = True) -> None:
        """Give a replica up; take first what it has answered already."""
        calls_at = self._scheduler.stages[replica.stage].replicas.calls_at
        refs = [call.handle[0] for call in calls_at(replica.number)]
        for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []:
            if ref in self._sent and _is_well(ref):
                self._call_ready(ref, now)
        if replica.number not in self._replicas.by_number:  # what it had answered has shown that it is bad
            return
        for call in calls_at(replica.number):
            self._note_broken(call, why)
        self._scheduler.replica_lost(replica.stage, replica.number, why, now, own_fault=own_fault)
        self._replicas.lost(replica, why, now)

    def _leave(self, nodes: set[str], now: float) -> None:
        """Give up the replicas on nodes that are about to end, while their data can still be fetched."""
        for replica in [replica for replica in self._replicas.by_number.values() if replica.node in nodes]:
            if replica.phase in ("live", "closing"):
                self._replica_lost(replica, "its node is about to end", now, own_fault=False)
            else:
                self._replicas.let_go(replica, now)

    def _note_broken(self, call: Call, why: str) -> CallResult:
        """Forget a call of which nothing will come, and have it written down."""
        del self._sent[call.handle[0]]
        broken = CallResult.broken(time.time(), self._replicas.by_number[call.replica].node, why)
        self._committer.add_call(call, broken)
        return broken

    def _note_full(self, now: float, fault: CaucError) -> None:
        """End the run if the object store has been full for too long."""
        self._full_since = self._full_since or now
        self._read_from = now + FULL_PAUSE_S
        if now - self._full_since > FULL_LIMIT_S:
            raise ExecutionError(f"the object store has been full for {FULL_LIMIT_S:.0f} s: {fault}")

    def _stage_fails(self, stage: int, error: CaucError) -> None:
        """Go on without a stage where the pool allows it and others have answers, else end the run."""
        if not self._plan.degrade or stage == 0:
            raise error
        self._scheduler.stage_down(stage, time.monotonic())

    # What is over

    def _commit(self) -> None:
        """Have blocks written whose last row is done."""
        while self._scheduler.done:
            owner = self._scheduler.done.pop(0)
            self._reading.forget(owner.names)
            self._restarts.pop(owner.block, None)
            self._committer.add_block(owner, owner.names.example_ids, owner.names.labels)

    # Looking after everything

    def _watch(self, now: float) -> None:
        """Every so often: give up what hangs, start and stop replicas and reading tasks, report how far the run is."""
        if now - self._watched < WATCH_S:
            return
        self._watched = now
        self._committer.check()
        self._n_finished = self._plan.n_done + self._committer.n_rows
        for stage, spec in enumerate(self._plan.stages):
            for number in self._scheduler.stages[stage].replicas.overdue(spec.call_timeout_s, now):
                why = f"stage {spec.name!r} has not answered a call within {spec.call_timeout_s:g} s"
                self._replica_lost(self._replicas.by_number[number], why, now)
            if (dies := self._replicas.dies_loading(stage)) is not None:
                self._stage_fails(
                    stage, ExecutionError(f"all replicas of stage {spec.name!r} die while they load: {dies}")
                )
            self._check_answers(stage, spec, now)
            seconds, why = self._replicas.down_for(stage, now)
            if seconds > spec.down_after_s and (stage == 0 or self._scheduler.stages[stage].in_work):
                why = why or "none has loaded its model"
                gone = f"stage {spec.name!r} has had no live replica for {seconds:.0f} s"
                self._stage_fails(stage, ExecutionError(f"{gone}; {why}"))
        self._rescale(now)
        self._reading.watch(now, starved=self._scheduler.starved)
        self._scheduler.n_reads = self._reading.n_asked
        self._counts = self._replicas.counts()
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._leave(draining_nodes(), now)
            self._metrics.report(self._progress())

    def _check_answers(self, stage: int, spec: StageSpec, now: float) -> None:
        """Give a stage up whose replicas, one after the other and new ones among them, fail or die over their calls."""
        at, limit_s = self._scheduler.stages[stage], min(FAILING_S, spec.down_after_s)
        if at.failing_since is None or now - at.failing_since <= limit_s or at.lost_in_row < spec.replicas.min + 2:
            return
        _, why = self._replicas.down_for(stage, now)
        self._stage_fails(
            stage,
            ExecutionError(
                f"all replicas of stage {spec.name!r} have failed for {now - at.failing_since:.0f} s, {at.lost_in_row} "
                f"in a row ({why}); fix the model or its device, then continue with --resume"
            ),
        )

    def _rescale(self, now: float) -> None:
        for replica in self._replicas.rescale(self._scheduler, now):
            replica.phase = "closing"
            self._scheduler.stages[replica.stage].replicas.close(replica.number)
        for replica in [r for r in self._replicas.by_number.values() if r.phase == "closing"]:
            replicas = self._scheduler.stages[replica.stage].replicas
            if not replicas.calls_at(replica.number):
                replicas.drop(replica.number)
                self._replicas.let_go(replica, now)


def _stage_progress(name: str, at: Stage, replicas: tuple[int, int]) -> StageProgress:
    """Return where a stage's rows are.   replicas: live and starting."""
    return StageProgress(
        name=name,
        queued=at.n_waiting,
        in_flight=at.in_flight,
        accepted=at.accepted,
        deferred=at.deferred,
        failed=at.failed,
        degraded=at.degraded,
        replicas=replicas[0],
        starting=replicas[1],
        quarantined=at.quarantined,
        busy_s=at.busy_s,
        cost=at.cost,
        reason=at.reasons.most_common(1)[0][0] if at.reasons else "",
    )


def _is_well(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return False
    return True
