"""The Ray shell around a run: actors for reader, stages and controller, and the loop that feeds them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from cauc_ray.data.inputs import RunInput
from cauc_ray.errors import ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, make_actor, result_of, start_workers, worker_class
from cauc_ray.execution.controller import BlockResult, Controller, InputLimits, StageLimits
from cauc_ray.execution.ledger import RunRecord, RunTables
from cauc_ray.execution.messages import Call, CallResult
from cauc_ray.execution.session import replicas_that_fit
from cauc_ray.execution.stage import Part
from cauc_ray.models.answers import Answers
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy

BLOCK_ROWS = 2048
BLOCKS_READ_AHEAD = 2
OPEN_BYTES = 512 * 1024 * 1024
CALL_DEADLINE_S = 600.0
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that a run needs: the chain's stages, the policy, where rows come from and go to.

    record: what the run's folder says of it, for a later resumption.   done: blocks of the input that an earlier
    attempt has committed.
    """

    record: RunRecord
    stages: tuple[StageSpec, ...]
    policy: Policy
    input: Path
    out: Path
    import_paths: tuple[str, ...]
    done: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is: rows of the input, rows finished, and rows waiting, computing and answered per stage."""

    n_rows: int
    n_finished: int
    stages: tuple[tuple[str, int, int, int], ...]


def run_cascade(plan: RunPlan, on_progress: Callable[[RunProgress], None]) -> float:
    """Run a plan on the current Ray session, reporting progress about twice a second.

    Returns the seconds from the first read to the last commit, without starting the stages.

    Raises ExecutionError when the stages do not fit on the cluster, do not start or die; what was finished
    before stays in the output.
    """
    counts = replicas_that_fit(plan.stages)
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    # Beside the user, whose files it reads and writes. It starts the stages itself, so that they end with it.
    controller = make_actor(_CascadeRun, num_cpus=0, label_selector=here, concurrency_groups={"watch": 1}).remote(
        plan, tuple(counts), here
    )
    try:
        seconds = controller.run.remote()
        while not ray.wait([seconds], timeout=POLL_S)[0]:
            on_progress(result_of(controller.progress.remote(), START_DEADLINE_S, "the controller"))
        result: float = result_of(seconds, START_DEADLINE_S, "the controller")
        on_progress(result_of(controller.progress.remote(), START_DEADLINE_S, "the controller"))
        return result
    finally:
        ray.kill(controller)


@dataclass(frozen=True, slots=True)
class StageAnswers:
    """One model's answers to some rows of the input, undecided: logits and costs as models.answers has them."""

    stage: str
    example_ids: Sequence[str]
    labels: Ints | None
    logits: Floats
    costs: Floats | None


def collect_answers(stages: Sequence[StageSpec], inputs: Path, import_paths: Sequence[str]) -> Iterator[StageAnswers]:
    """Let every stage answer every row of an input, side by side, and yield the answers block by block."""
    replicas_that_fit(stages)
    workers = start_workers(
        [(stage, stage.name) for stage in stages],
        [worker_class(stage).remote(stage, place, None, tuple(import_paths)) for place, stage in enumerate(stages)],
    )
    try:
        for block in RunInput(inputs).blocks(BLOCK_ROWS):
            columns = ray.put(block.columns)
            n = len(block.example_ids)
            pending = [
                (stage, worker.answer.remote(columns, start, min(start + stage.batch_size, n)), start)
                for stage, worker in zip(stages, workers, strict=True)
                for start in range(0, n, stage.batch_size)
            ]
            for stage, ref, start in pending:
                answers: Answers = result_of(ref, CALL_DEADLINE_S, f"stage {stage.name!r}")
                part = slice(start, start + len(answers.logits))
                labels = None if block.labels is None else block.labels[part]
                ids = block.example_ids[part]
                yield StageAnswers(stage.name, ids, labels, answers.logits, answers.costs)
    finally:
        for worker in workers:
            ray.kill(worker)


@dataclass(frozen=True, slots=True)
class _BlockHeader:
    """What the controller needs of a block; n_skipped: rows before it that were done already."""

    number: int
    example_ids: list[str]
    labels: Ints | None
    n_bytes: int
    n_skipped: int


class _Reader:
    """Reads the input block by block, in a process of its own."""

    def __init__(self, path: Path, done: frozenset[int]) -> None:
        self._path = path
        self._done = done
        self._n_skipped = 0

    def open(self) -> int:
        """Open the input and return its number of rows."""
        opened = RunInput(self._path)
        self._blocks = enumerate(opened.blocks(BLOCK_ROWS))
        return opened.n_rows

    def next_block(self) -> tuple[_BlockHeader | None, Any]:
        """Return the next block that is not done, its columns apart from all else; None after the last."""
        for number, block in self._blocks:
            if number not in self._done:
                header = _BlockHeader(number, block.example_ids, block.labels, block.n_bytes, self._n_skipped)
                return header, block.columns
            self._n_skipped += len(block.example_ids)
        return None, None


class _CascadeRun:
    """Owns a run's actors and objects, and carries messages between them and the controller's logic."""

    def __init__(self, plan: RunPlan, counts: Sequence[int], here: dict[str, str]) -> None:
        self._plan = plan
        self._counts = counts
        self._here = here
        self._tables = RunTables(plan.out, plan.record, [s.name for s in plan.stages])
        limits = [StageLimits(s.batch_size, s.batch_wait_s, n) for s, n in zip(plan.stages, counts, strict=True)]
        # Enough open rows for every replica to have its batches, and as many again to be gathered.
        in_work = sum(4 * s.batch_size * s.n_replicas for s in limits)
        self._controller = Controller(limits, InputLimits(max(in_work, 4 * BLOCK_ROWS), OPEN_BYTES))
        self._n_rows = 0
        self._n_finished = 0
        self._n_skipped = 0
        self._calls: dict[Any, tuple[Call, Any]] = {}
        self._reads: dict[Any, Any] = {}
        self._payloads: dict[int, Any] = {}
        self._states: dict[int, Any] = {}
        self._blocks: dict[int, tuple[list[str], Ints | None]] = {}

    @ray.method(concurrency_group="watch")
    def progress(self) -> RunProgress:
        stages = zip(self._plan.stages, self._controller.progress(), strict=True)
        return RunProgress(
            self._n_rows,
            self._n_skipped + self._n_finished,
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
        self._tables.write_ledger()
        return time.perf_counter() - started

    def _start(self) -> None:
        self._reader = make_actor(_Reader, num_cpus=0, label_selector=self._here).remote(
            self._plan.input, self._plan.done
        )
        self._n_rows = result_of(self._reader.open.remote(), START_DEADLINE_S, "the reader")
        handles, specs = [], []
        for place, (stage, n) in enumerate(zip(self._plan.stages, self._counts, strict=True)):
            for _ in range(n):
                specs.append((stage, stage.name))
                handles.append(worker_class(stage).remote(stage, place, self._plan.policy, self._plan.import_paths))
        workers = iter(start_workers(specs, handles))
        self._workers = [[next(workers) for _ in range(n)] for n in self._counts]

    def _submit(self) -> None:
        while self._controller.wants_block() and len(self._reads) < BLOCKS_READ_AHEAD:
            header, columns = self._reader.next_block.options(num_returns=2).remote()
            self._reads[header] = columns
        while (call := self._controller.next_call(time.time())) is not None:
            parts, arguments = self._arguments(call)
            worker = self._workers[call.stage][call.replica]
            result, state = worker.decide.options(num_returns=2).remote(parts, *arguments)
            self._calls[result] = (call, state)

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
        call, state = self._calls.pop(ref)
        stage = self._plan.stages[call.stage]
        result: CallResult = result_of(ref, CALL_DEADLINE_S, f"stage {stage.name!r}")
        self._tables.add_call(call, result)
        if result.error is None and not result.accepted.all():
            self._states[call.id] = state
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
        self._n_skipped = header.n_skipped
        self._blocks[header.number] = (header.example_ids, header.labels)
        self._payloads[header.number] = columns
        self._controller.add_block(header.number, len(header.example_ids), header.n_bytes, time.time())

    def _commit(self, result: BlockResult) -> None:
        example_ids, labels = self._blocks.pop(result.block)
        del self._payloads[result.block]
        self._tables.add_block(result, example_ids, labels)
        self._n_finished += len(example_ids)

    def _waiting(self) -> str:
        stages = sorted({self._plan.stages[call.stage].name for call, _ in self._calls.values()})
        return ", ".join([f"stage {name!r}" for name in stages] + ["the reader"] * bool(self._reads))


def import_paths() -> tuple[str, ...]:
    """Return where stages look for a user's own modules beside the installed ones: the current folder."""
    return (os.getcwd(),)
