"""The Ray shell of a run: actors for reader, stages and controller, and the loop that carries their messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from cauc_ray.data.inputs import InputBlock
from cauc_ray.errors import ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, make_actor, result_of, start_workers, worker_class
from cauc_ray.execution.controller import BlockResult, Controller, InputLimits, StageLimits
from cauc_ray.execution.messages import Call, CallResult
from cauc_ray.execution.stage import Part, packed
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.policy import Policy

BLOCKS_READ_AHEAD = 2
OPEN_BYTES = 512 * 1024 * 1024
CALL_DEADLINE_S = 600.0
POLL_S = 0.5


class BlockSource(Protocol):
    """Where a run's rows come from; plain, opened in the reader's own process."""

    def blocks(self) -> Iterator[tuple[int, InputBlock]]:
        """Yield the numbered blocks that are to be done."""
        ...


class Sink(Protocol):
    """Where a run's results go; plain, used in the controller's process."""

    def start(self, facts: Sequence[ModelFacts]) -> None:
        """Take what the workers' models say of themselves, one for each worker."""
        ...

    def add_call(self, call: Call, result: CallResult, extra: Any) -> None:
        """Take a call's result; extra: a reference to what the worker returned beside it."""
        ...

    def add_block(self, result: BlockResult, example_ids: Sequence[str], labels: Ints | None) -> None:
        """Commit a finished block."""
        ...

    def close(self) -> None:
        """Write what is left after the last block."""
        ...


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that a run needs: the chain's stages, what decides, where rows come from and go to.

    policy: None lets every row stop at the only stage and keeps the model's own answers.   n_rows: of the whole
    input.   n_done: of those, rows that an earlier attempt has committed.   block_rows: rows in a block of input.
    """

    stages: tuple[StageSpec, ...]
    policy: Policy | None
    source: BlockSource
    sink: Sink
    n_rows: int
    n_done: int
    block_rows: int
    import_paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is: rows of the input, rows finished, and rows waiting, computing and answered per stage."""

    n_rows: int
    n_finished: int
    stages: tuple[tuple[str, int, int, int], ...]


class LiveRun:
    """A run in its own actor, beside the user, whose files it reads and writes.

    It starts the stages itself, so that they end with it.
    """

    def __init__(self, plan: RunPlan, counts: Sequence[int]) -> None:
        """Start the run on the current Ray session, with so many replicas of each stage."""
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        self._actor = make_actor(_Run, num_cpus=0, label_selector=here, concurrency_groups={"watch": 1}).remote(
            plan, tuple(counts), here
        )
        self._seconds = self._actor.run.remote()

    def wait(self, timeout_s: float) -> float | None:
        """Wait so long for the end. Returns the seconds from the first read to the last commit, None before it.

        Raises ExecutionError when the stages do not start or die; what was finished before stays committed.
        """
        if not ray.wait([self._seconds], timeout=timeout_s)[0]:
            return None
        seconds: float = result_of(self._seconds, START_DEADLINE_S, "the controller")
        return seconds

    def progress(self) -> RunProgress:
        """Return how far the run is."""
        at: RunProgress = result_of(self._actor.progress.remote(), START_DEADLINE_S, "the controller")
        return at

    def close(self) -> None:
        """End the run and its stages."""
        ray.kill(self._actor)


def follow(run: LiveRun, on_progress: Callable[[RunProgress], None]) -> float:
    """Wait for a run's end, reporting progress about twice a second; end it if that is interrupted."""
    try:
        while (seconds := run.wait(POLL_S)) is None:
            on_progress(run.progress())
        on_progress(run.progress())
        return seconds
    finally:
        run.close()


def import_paths() -> tuple[str, ...]:
    """Return where stages look for a user's own modules beside the installed ones: the current folder."""
    return (os.getcwd(),)


@dataclass(frozen=True, slots=True)
class _BlockHeader:
    """What the controller needs of a block."""

    number: int
    example_ids: list[str]
    labels: Ints | None
    n_bytes: int


class _Reader:
    """Reads the input block by block, in a process of its own."""

    def __init__(self, source: BlockSource) -> None:
        self._blocks = source.blocks()

    def next_block(self) -> tuple[_BlockHeader | None, Any]:
        """Return the next block, its columns apart from all else; None after the last."""
        for number, block in self._blocks:
            return _BlockHeader(number, block.example_ids, block.labels, block.n_bytes), packed(block.columns)
        return None, None


class _Run:
    """Owns a run's actors and objects, and carries messages between them and the controller's logic."""

    def __init__(self, plan: RunPlan, counts: Sequence[int], here: dict[str, str]) -> None:
        self._plan = plan
        self._counts = counts
        self._here = here
        limits = [StageLimits(s.batch_size, s.batch_wait_s, n) for s, n in zip(plan.stages, counts, strict=True)]
        # Enough open rows for every replica to have its batches, and as many again to be gathered.
        in_work = sum(4 * s.batch_size * s.n_replicas for s in limits)
        self._controller = Controller(limits, InputLimits(max(in_work, 4 * plan.block_rows), OPEN_BYTES))
        self._n_finished = plan.n_done
        self._calls: dict[Any, tuple[Call, Any]] = {}
        self._reads: dict[Any, Any] = {}
        self._payloads: dict[int, Any] = {}
        self._states: dict[int, Any] = {}
        self._blocks: dict[int, tuple[list[str], Ints | None]] = {}

    @ray.method(concurrency_group="watch")
    def progress(self) -> RunProgress:
        stages = zip(self._plan.stages, self._controller.progress(), strict=True)
        return RunProgress(
            self._plan.n_rows,
            self._n_finished,
            tuple((stage.name, at.queued, at.in_flight, at.answered) for stage, at in stages),
        )

    def run(self) -> float:
        self._start()
        started = time.perf_counter()
        last_event = time.monotonic()
        while not self._controller.finished:
            self._submit()
            wait = self._controller.wait_s(time.time())
            pending = [*self._reads, *self._calls]
            timeout = POLL_S if wait is None else min(wait, POLL_S)
            ready, _ = ray.wait(pending, num_returns=1, timeout=timeout) if pending else ([], [])
            if ready and len(pending) > 1:
                # Those that are ready by now too: one wait for each would cost more than the events themselves.
                ready, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            for ref in ready:
                self._take(ref)
            if ready:
                last_event = time.monotonic()
            elif time.monotonic() - last_event > CALL_DEADLINE_S:
                raise ExecutionError(
                    f"nothing has come back for {CALL_DEADLINE_S:.0f} s; waiting for {self._waiting()}"
                )
        self._plan.sink.close()
        return time.perf_counter() - started

    def _start(self) -> None:
        plan = self._plan
        self._reader = make_actor(_Reader, num_cpus=0, label_selector=self._here).remote(plan.source)
        places = [place for place, n in enumerate(self._counts) for _ in range(n)]
        handles = [
            worker_class(plan.stages[place]).remote(plan.stages[place], place, plan.policy, plan.import_paths)
            for place in places
        ]
        self._plan.sink.start(start_workers([plan.stages[place].name for place in places], handles))
        workers = iter(handles)
        self._workers = [[next(workers) for _ in range(n)] for n in self._counts]

    def _submit(self) -> None:
        while self._controller.wants_block() and len(self._reads) < BLOCKS_READ_AHEAD:
            header, columns = self._reader.next_block.options(num_returns=2).remote()
            self._reads[header] = columns
        while (call := self._controller.next_call(time.time())) is not None:
            parts, arguments = self._arguments(call)
            worker = self._workers[call.stage][call.replica]
            answer = worker.answer if self._plan.policy is None else worker.decide
            result, extra = answer.options(num_returns=2).remote(parts, *arguments)
            self._calls[result] = (call, extra)

    def _arguments(self, call: Call) -> tuple[list[Part], list[Any]]:
        """Return a call's rows as places in its arguments, each payload and state given once."""
        arguments: list[Any] = []
        places: dict[tuple[str, int], int] = {}

        def place(kind: str, key: int, refs: dict[int, Any]) -> int:
            if (kind, key) not in places:
                places[kind, key] = len(arguments)
                arguments.append(refs[key])
            return places[kind, key]

        parts = [
            Part(
                payload=place("payload", rows.block, self._payloads),
                indices=rows.indices,
                state=None if rows.state is None else place("state", rows.state, self._states),
                state_rows=rows.state_rows,
            )
            for rows in call.rows
        ]
        return parts, arguments

    def _take(self, ref: Any) -> None:
        if ref in self._reads:
            self._block_read(ref, self._reads.pop(ref))
            return
        call, extra = self._calls.pop(ref)
        stage = self._plan.stages[call.stage]
        result: CallResult = result_of(ref, CALL_DEADLINE_S, f"stage {stage.name!r}")
        self._plan.sink.add_call(call, result, extra)
        if result.error is None and result.n_deferred:
            self._states[call.id] = extra
        released = self._controller.call_ended(call.id, result, time.time())
        for spent in released.states:
            del self._states[spent]
        for block in released.blocks:
            self._commit(block)
        if self._controller.hopeless(call.stage):
            raise ExecutionError(f"stage {stage.name!r} has failed on every row so far: {result.error}")

    def _block_read(self, ref: Any, columns: Any) -> None:
        header: _BlockHeader | None = result_of(ref, CALL_DEADLINE_S, "the reader")
        if header is None:
            if not self._reads:  # one that was asked for earlier may still come
                self._controller.end_input()
            return
        self._blocks[header.number] = (header.example_ids, header.labels)
        self._payloads[header.number] = columns
        self._controller.add_block(header.number, len(header.example_ids), header.n_bytes, time.time())

    def _commit(self, result: BlockResult) -> None:
        example_ids, labels = self._blocks.pop(result.block)
        del self._payloads[result.block]
        self._plan.sink.add_block(result, example_ids, labels)
        self._n_finished += len(example_ids)

    def _waiting(self) -> str:
        stages = sorted({self._plan.stages[call.stage].name for call, _ in self._calls.values()})
        return ", ".join([f"stage {name!r}" for name in stages] + ["the reader"] * bool(self._reads))
