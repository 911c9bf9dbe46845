"""A run's controller on Ray: it owns the actors and objects, and carries messages between them and its logic."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import ray
from ray.exceptions import RayError

from cauc_ray.cascade.parcels import Part
from cauc_ray.cascade.results import CallResult
from cauc_ray.errors import CaucError, ConfigError, ExecutionError
from cauc_ray.execution.actors import kind_of, told
from cauc_ray.execution.blocks import BlockResult
from cauc_ray.execution.committing import Committer
from cauc_ray.execution.controller import Controller, Released
from cauc_ray.execution.messages import Call
from cauc_ray.execution.metrics import RunMetrics
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.progress import RunProgress
from cauc_ray.execution.reading import Reading
from cauc_ray.execution.replicas import Replica, Replicas, no_replica
from cauc_ray.execution.session import store_bytes
from cauc_ray.models.pool import StageSpec

Method = TypeVar("Method", bound=Callable[..., Any])

# The pause after the object store was found full, and for how long it may be.
FULL_PAUSE_S = 2.0
FULL_LIMIT_S = 300.0
# How long one wait for events lasts at most, how often replicas are looked after, and how often metrics are told.
POLL_S = 0.1
WATCH_S = 0.1
REPORT_S = 1.0
# A stage that answered before is down once its replicas, each replaced by a new one, have all failed for so long.
FAILING_S = 60.0


@dataclass(slots=True)
class _Sent:
    """A call on its way.   extra: the reference to what comes beside its result, None after the last stage."""

    call: Call
    extra: Any


def _in_group(name: str) -> Callable[[Method], Method]:
    """Have an actor's method run beside the others; Ray's own decorator has no types."""
    return cast("Callable[[Method], Method]", ray.method(concurrency_group=name))


class RunController:
    """Runs one controller's share of a run to its end."""

    def __init__(self, plan: RunPlan, here: dict[str, str]) -> None:
        """Take the plan, and the label of the node that the controller is on, whose files the readers read."""
        self._plan = plan
        self._here = here
        limits, open_rows = plan.limits(store_bytes())
        self._names = [stage.name for stage in plan.stages]
        self._logic = Controller(limits, open_rows)
        self._counts = [(0, 0)] * len(plan.stages)
        self._n_finished = 0
        self._sent: dict[Any, _Sent] = {}
        self._refs: dict[int, Any] = {}
        self._parcels: dict[int, Any] = {}
        self._names_of: dict[int, Any] = {}
        self._full_since: float | None = None
        self._read_from = 0.0
        self._first_call: float | None = None
        self._watched, self._reported = time.time(), 0.0

    @_in_group("watch")
    def progress(self) -> RunProgress:
        """Return how far the run is, and when the controller last looked after everything."""
        stages = self._logic.progress(self._names, self._counts)
        return RunProgress(self._watched, self._plan.n_rows, self._n_finished, stages)

    def run(self) -> float:
        """Run to the end. Returns the seconds from the first call to the last commit."""
        self._replicas = Replicas(self._plan, time.time())
        self._reading = Reading(self._plan, self._here)
        self._committer = Committer(self._plan.sink)
        self._metrics = RunMetrics(self._plan.run_id, self._names)
        self._n_finished = self._plan.n_done
        try:
            while not self._logic.finished:
                self._ask_for_blocks()
                self._send_calls()
                for ref in self._events():
                    self._take(ref)
                self._watch(time.time())
        except BaseException:
            with suppress(Exception):
                self._committer.close()  # what is finished stays; the error that ends the run is the first one
            raise
        else:
            self._committer.close()
            self._n_finished = self._plan.n_done + self._committer.n_rows
            return time.perf_counter() - self._first_call if self._first_call is not None else 0.0
        finally:
            self._metrics.close()

    def _events(self) -> list[Any]:
        """Wait for the next events, and take those along that are there by then: a wait for each would cost more."""
        pending = [*self._reading.refs, *self._sent, *self._replicas.by_ref]
        wait_s = self._logic.wait_s(time.time())
        timeout_s = POLL_S if wait_s is None else min(wait_s, POLL_S)
        if not pending:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(pending, num_returns=1, timeout=timeout_s)
        if ready and len(pending) > 1:
            ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
        return list(ready)

    def _take(self, ref: Any) -> None:
        now = time.time()
        if ref in self._sent:
            self._call_ready(ref, now)
        elif ref in self._reading.refs:
            self._block_ready(ref, now)
        elif ref in self._replicas.by_ref:
            ready = self._replicas.take(ref, now)
            if ready is not None:
                replica, facts = ready
                if replica.stage == 0:
                    self._committer.start(facts)
                self._logic.stages[replica.stage].add_replica(replica.number)

    # Input

    def _ask_for_blocks(self) -> None:
        now = time.time()
        while (block := self._logic.next_restart()) is not None and self._reading.ask_again(block, now):
            self._logic.read_started()
        while self._may_read(now) and self._logic.wants_block() and self._reading.ask(now):
            self._logic.read_started()
        if self._reading.exhausted:
            self._logic.end_input()

    def _may_read(self, now: float) -> bool:
        """Say whether the object store has not just been found full."""
        return now >= self._read_from

    def _block_ready(self, ref: Any, now: float) -> None:
        try:
            read = self._reading.take(ref)
        except RayError as error:
            if kind_of(error) == "full":
                self._note_full(now, told(error, "the reader"))
            for _ in range(self._reading.failed(ref, error)):
                self._logic.read_ended()
            return
        self._logic.read_ended()
        self._full_since = None
        if read is None:
            return
        header = read.header
        if read.again is not None and header.unreadable is not None:
            reason = f"it was lost and cannot be read again: {header.unreadable}"
            self._release(self._logic.give_up(read.again, reason))
        elif read.again is not None:
            numbers = self._logic.add_again(read.again, header.chunks, now)
            kept = zip(numbers, read.chunks, strict=False)
            self._parcels.update((number, chunk) for number, chunk in kept if number is not None)
        elif header.unreadable is not None:
            self._names_of[header.number] = read.names
            unread = BlockResult.empty(header.number, header.n_rows)
            unread.fail(np.arange(header.n_rows), -1, header.unreadable)
            self._commit(unread)
        else:
            self._names_of[header.number] = read.names
            numbers_of = self._logic.add_block(header.number, header.chunks, now)
            self._parcels.update(zip(numbers_of, read.chunks, strict=False))

    # Calls

    def _send_calls(self) -> None:
        while (call := self._logic.next_call(time.time())) is not None:
            if self._first_call is None:
                self._first_call = time.perf_counter()
            numbers = list(dict.fromkeys(rows.parcel for rows in call.rows))
            parts = [Part.of(numbers.index(rows.parcel), rows.places) for rows in call.rows]
            parcels = [self._parcels[number] for number in numbers]
            refs = self._replicas.by_number[call.replica].answer.remote(parts, *parcels)
            result, extra = refs if isinstance(refs, list) else (refs, None)
            self._sent[result] = _Sent(call, extra)
            self._refs[call.id] = result

    def _call_ready(self, ref: Any, now: float) -> None:
        sent = self._sent[ref]
        call = sent.call
        try:
            result: CallResult = ray.get(ref)
        except RayError as error:
            self._call_broken(call, error, now)
            return
        del self._sent[ref], self._refs[call.id]
        self._full_since = None
        self._replicas.by_number[call.replica].has_answered |= result.n_answered > 0
        self._note_call(sent, result)
        if result.n_deferred and not call.probe:
            self._parcels[call.output] = sent.extra
        self._call_ended(call, result, now)

    def _call_ended(self, call: Call, result: CallResult, now: float) -> None:
        """Hand a call's result on; replace the replicas that it shows to be bad."""
        self._release(self._logic.call_ended(call.id, result, now))
        if result.n_answered:
            return
        at, name = self._logic.stages[call.stage], self._names[call.stage]
        for number, why in at.take_bad().items():
            self._replica_lost(self._replicas.by_number[number], why, now, own_fault=False)
        if at.hopeless:
            self._stage_fails(
                call.stage, ExecutionError(f"stage {name!r} has failed on every row so far: {result.error}")
            )

    def _call_broken(self, call: Call, error: RayError, now: float) -> None:
        name = self._names[call.stage]
        kind, fault = kind_of(error), told(error, f"stage {name!r}")
        cause = getattr(error, "cause", None)
        if kind == "raised" and isinstance(cause, ConfigError | ExecutionError):
            if isinstance(cause, ConfigError):
                raise fault from error
            self._replica_lost(self._replicas.by_number[call.replica], str(fault), now, own_fault=False)
            # A server that is gone, say: with degrade, a new replica will see whether it still is.
            self._stage_fails(call.stage, fault)
            return
        if kind == "died":
            replica = self._replicas.by_number[call.replica]
            # Several idle replicas may die with their node, which calls find out only one after another.
            self._replica_lost(replica, str(fault), now, own_fault=replica.node in _live_nodes())
            if self._logic.stages[call.stage].hopeless:
                self._stage_fails(call.stage, ExecutionError(f"every replica of stage {name!r} dies: {fault}"))
            return
        broken = self._note_broken(call, str(fault), now)
        if kind == "full":
            self._note_full(now, fault)
            self._logic.call_postponed(call.id, FULL_PAUSE_S, now)
        elif kind == "lost":
            self._release(self._logic.rows_lost(call.id, f"its data was lost: {fault}", now))
        else:
            self._call_ended(call, broken, now)

    def _replica_lost(self, replica: Replica, why: str, now: float, *, own_fault: bool = True) -> None:
        """Give a replica up; take first what it has answered already."""
        calls_at = self._logic.stages[replica.stage].calls_at
        others = [self._refs[call] for call in calls_at(replica.number)]
        for ref in ray.wait(others, num_returns=len(others), timeout=0)[0] if others else []:
            if _is_well(ref):
                self._call_ready(ref, now)
        for call_id in calls_at(replica.number):
            self._note_broken(self._sent[self._refs[call_id]].call, why, now)
        self._release(self._logic.replica_lost(replica.stage, replica.number, why, now, own_fault=own_fault))
        self._replicas.lost(replica, why, now)

    def _note_broken(self, call: Call, why: str, now: float) -> CallResult:
        """Forget a call of which nothing will come, and note it for the ledger."""
        sent = self._sent.pop(self._refs.pop(call.id))
        broken = CallResult.broken(now, self._replicas.by_number[call.replica].node, why)
        self._note_call(sent, broken)
        return broken

    def _note_call(self, sent: _Sent, result: CallResult) -> None:
        """Have a call written down. What goes on to the next stage stays out: its bytes would wait there uncounted."""
        self._committer.add_call(sent.call, result, sent.extra if self._plan.policy is None else None)

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
        self._release(self._logic.stage_down(stage))

    # What is over

    def _release(self, released: Released) -> None:
        for parcel in released.parcels:
            del self._parcels[parcel]
        for block in released.blocks:
            self._commit(block)

    def _commit(self, block: BlockResult) -> None:
        self._reading.forget(block.block)
        self._committer.add_block(block, self._names_of.pop(block.block))

    # Looking after everything

    def _watch(self, now: float) -> None:
        """Every so often: give up what hangs, start and stop replicas and readers, tell how far the run is."""
        if now - self._watched < WATCH_S:
            return
        self._watched = now
        self._committer.check()
        self._n_finished = self._plan.n_done + self._committer.n_rows
        for stage, spec in enumerate(self._plan.stages):
            for number in self._logic.stages[stage].overdue(spec.call_timeout_s, now):
                why = f"stage {spec.name!r} has not answered a call for {spec.call_timeout_s:g} s"
                self._replica_lost(self._replicas.by_number[number], why, now)
            if (dies := self._replicas.dies_loading(stage)) is not None:
                self._stage_fails(
                    stage, ExecutionError(f"every replica of stage {spec.name!r} dies as it loads: {dies}")
                )
            self._check_answers(stage, spec, now)
            seconds, why = self._replicas.down_for(stage, now)
            if seconds > spec.down_after_s and (stage == 0 or self._logic.stages[stage].in_work):
                self._stage_fails(stage, no_replica(spec.name, seconds, why))
        self._rescale(now)
        for _ in range(self._reading.watch(now, starved=self._logic.stages[0].starved)):
            self._logic.read_ended()
        self._counts = self._replicas.counts()
        if now - self._reported >= REPORT_S:
            self._reported = now
            self._metrics.report(self.progress())

    def _check_answers(self, stage: int, spec: StageSpec, now: float) -> None:
        """Give a stage up whose replicas, one after the other and new ones among them, fail or die over their calls."""
        at, limit_s = self._logic.stages[stage], min(FAILING_S, spec.down_after_s)
        if at.failing_since is None or now - at.failing_since <= limit_s or at.lost_in_row < spec.replicas.min + 2:
            return
        _, why = self._replicas.down_for(stage, now)
        self._stage_fails(
            stage,
            ExecutionError(
                f"every replica of stage {spec.name!r} has failed for {now - at.failing_since:.0f} s, {at.lost_in_row} "
                f"in a row ({why}); mend the model or its device, then go on with --resume"
            ),
        )

    def _rescale(self, now: float) -> None:
        for stage in self._replicas.rescale(self._logic, now):
            replica = self._replicas.newest(stage)
            if replica is not None:
                replica.phase = "closing"
                self._logic.stages[stage].close_replica(replica.number)
        for replica in [r for r in self._replicas.by_number.values() if r.phase == "closing"]:
            if not self._logic.stages[replica.stage].calls_at(replica.number):
                self._logic.stages[replica.stage].drop_replica(replica.number)
                self._replicas.let_go(replica, now)


def _is_well(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return False
    return True


def _live_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
