"""Commits in a thread of the controller: it passes results to the sink, in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import pyarrow as pa

from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.rows import Call, Owner
from cauc_ray.errors import CaucError
from cauc_ray.execution.manifest import COMMIT_BYTES
from cauc_ray.execution.reader import BlockHeader
from cauc_ray.models.answers import ModelFacts
from cauc_ray.numbers.types import Ints

# So many results may wait to be written before the controller waits, too.
MOST_WAITING = 512
# The pauses before each further try at a commit: a disk may be full, or a store out of reach, for a moment.
PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)


class Sink(Protocol):
    """Where a run's results go; plain, used in the controller's process.

    commit_s: for how many seconds what it has taken may wait to be written.
    """

    commit_s: float

    @property
    def n_bytes(self) -> int:
        """Return the bytes that wait to be written."""

    def start(self, facts: ModelFacts) -> None:
        """Take the facts of the first stage's model, from each replica that has loaded it."""

    def add_call(self, call: Call, result: CallResult, extra: Any) -> None:
        """Take a call's result.   extra: a reference to the model's answers where these are collected, else None."""

    def add_block(self, block: Owner, example_ids: pa.Array, labels: Ints | None) -> None:
        """Take a block that is done."""

    def commit(self) -> None:
        """Write what has been taken."""

    def close(self) -> None:
        """Write what is left after the last block."""


class Committer:
    """Gives a sink what happened, in its order, on a thread of its own, so that a slow disk holds up no replica.

    n_rows: rows of the blocks that are done.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._todo: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._error: BaseException | None = None
        self.n_rows = 0
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def start(self, facts: ModelFacts) -> None:
        """Pass the facts of the model to the sink."""
        self._put(lambda: self._sink.start(facts))

    def add_call(self, call: Call, result: CallResult, extra: Any) -> None:
        """Give the sink a call's result."""
        self._put(lambda: self._sink.add_call(call, result, extra))

    def add_block(self, block: Owner) -> None:
        """Give the sink a block that is done, whose names are its BlockHeader."""
        known: BlockHeader = block.names

        def add() -> None:
            self._sink.add_block(block, known.example_ids, known.labels)
            self.n_rows += block.n

        self._put(add)

    def close(self) -> None:
        """Wait until all is written. Raises what the sink has raised."""
        self._put(self._commit)
        self._put(self._sink.close)
        self._put(None)
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise what the sink has raised, if it has."""
        if self._error is not None:
            raise self._error

    def _put(self, what: Callable[[], None] | None) -> None:
        while True:
            self.check()
            try:
                self._todo.put(what, timeout=1.0)
                return
            except queue.Full:
                continue  # unless what fills it is an error

    def _commit(self) -> None:
        for pause_s in PAUSES_S:
            try:
                self._sink.commit()
            except CaucError:
                time.sleep(pause_s)
            else:
                return
        self._sink.commit()

    def _work(self) -> None:
        pa.array([""])  # Arrow's first array imports pandas, where that is installed: now, while replicas load
        try:
            due: float | None = None
            while True:
                with suppress(queue.Empty):
                    what = self._todo.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
                    if what is None:
                        return
                    what()
                    due = due or time.monotonic() + self._sink.commit_s
                if due is not None and (time.monotonic() >= due or self._sink.n_bytes >= COMMIT_BYTES):
                    self._commit()
                    due = None
        except BaseException as error:
            self._error = error
