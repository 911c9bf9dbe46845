"""The shadow sample of a service as a logit table, and the labels of feedback, to fit policies on.

Another process writes it: neither a slow store nor one that hangs keeps a request, or the end, waiting.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from cauc_ray.errors import masked
from cauc_ray.models.answers import ModelFacts
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.elsewhere import Elsewhere
from cauc_ray.serving.feedback import Feedback
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.observers.logged import TIME, Flush, Logged, RowLogits
from cauc_ray.serving.observers.service_metrics import ServingMetrics
from cauc_ray.serving.policies_live import InForce

# What may wait to be written, in flushes' worth of rows; of labels, which are small, so many times as much.
MOST_FLUSHES, LABELS_PER_ROW = 8, 100
# The pauses after a flush that failed; how often old files are deleted.
PAUSE_S, LONGEST_PAUSE_S, EXPIRE_S = 1.0, 60.0, 3600.0
# How long a service that is stopped waits for what is left to be written.
CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class TableLog(Observer):
    """Has rows and labels written as a logit table, a file for each model and flush.

    Args:
        logged: Settings of the log.
        facts: Returns facts of the stages' models, None for models that have not loaded.
        labels: Returns the names of the options, None if they are unknown.
        metrics: Counts written and dropped rows.
    """

    def __init__(
        self,
        logged: Logged,
        facts: Callable[[], Sequence[ModelFacts | None]],
        labels: Callable[[], Sequence[str] | None],
        metrics: ServingMetrics,
    ) -> None:
        self._logged, self._spec, self._facts, self._labels_of = logged, logged.spec, facts, labels
        self._elsewhere, self._metrics = Elsewhere(), metrics
        self._rows: list[tuple[str, RowLogits]] = []
        self._labels: list[tuple[str, int]] = []
        self._since: float | None = None
        self._flush: Flush | None = None
        self._declared = False
        self._pause_s = self._not_before = self._expires_at = 0.0

    def add(self, rows: Sequence[tuple[str, RowLogits]]) -> None:
        """Take rows by their example ids; rows beyond the limit are dropped."""
        self._take([*rows], [], "dropped")

    def on_feedback(self, rows: Feedback, in_force: InForce) -> int | None:
        """Take labels of rows in the sample; labels beyond the limit are dropped."""
        self._take([], rows.logged(self._logged.share), "label_dropped")
        return None

    def _take(self, rows: list[tuple[str, RowLogits]], labels: list[tuple[str, int]], dropped: str) -> None:
        most = MOST_FLUSHES * self._spec.flush_rows
        if len(self._rows) >= most or len(self._labels) >= LABELS_PER_ROW * most:
            self._metrics.count("log_rows", dropped, n=len(rows) + len(labels))
            return
        self._rows += rows
        self._labels += labels
        self._since = time.monotonic() if self._since is None else self._since

    async def settle(self) -> None:
        """Write what is due; what cannot be written is tried again, at longer and longer intervals."""
        if time.monotonic() < self._not_before:
            return
        try:
            for what, *args in self._work(at_end=False):
                await self._elsewhere.call(_do, what, self._logged, *args)
            self._pause_s = 0.0
        except Exception as error:  # of any type: what waits is tried again
            if not self._pause_s:
                logger.warning(masked(f"the log cannot be written to {self._spec.to}, trying again: {error}"))
            self._pause_s = min(max(PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._not_before = time.monotonic() + self._pause_s

    def close(self) -> None:
        """Write what is left, for CLOSE_S at most."""
        ends = time.monotonic() + CLOSE_S
        with suppress(Exception):  # of any type: this is the last try
            for what, *args in self._work(at_end=True) if self._has_rows else ():
                self._elsewhere.wait(max(0.0, ends - time.monotonic()), _do, what, self._logged, *args)
        self._elsewhere.close()
        if self._has_rows:
            logger.warning(f"the last rows of the log could not be written to {masked(str(self._spec.to))}")

    @property
    def _has_rows(self) -> bool:
        """Return whether rows or labels are not written yet."""
        return self._flush is not None or self._since is not None

    def _work(self, *, at_end: bool) -> Iterator[tuple[Any, ...]]:
        """Yield what the other process is to do, and go on once that is done: a function's name, and its arguments."""
        if not self._declared and None not in (facts := self._facts()):
            yield "declare", facts, self._labels_of()
            self._declared = True
        while self._declared and (flush := self._flush or self._due(at_end)) is not None:
            self._flush = flush
            yield "write", flush
            self._metrics.count("log_rows", "written", n=len(flush.rows))
            self._metrics.count("log_rows", "label_written", n=len(flush.labels))
            self._flush = None
        if self._spec.keep_days is not None and time.monotonic() >= self._expires_at:
            self._expires_at = time.monotonic() + EXPIRE_S
            yield ("expire",)

    def _due(self, at_end: bool) -> Flush | None:
        """Take what waits once that is enough, has waited for long enough, or the service ends."""
        most, now = self._spec.flush_rows, time.monotonic()
        waited_s = 0.0 if self._since is None else now - self._since
        if self._since is None or not (len(self._rows) >= most or waited_s >= self._spec.flush_s or at_end):
            return None
        name = f"log-{datetime.now(UTC).strftime(TIME)}-{uuid.uuid4().hex[:12]}.parquet"
        flush = Flush(name, self._rows[:most], self._labels)
        self._rows, self._labels = self._rows[most:], []
        self._since = now if self._rows else None
        return flush


def _do(what: str, *args: Any) -> None:
    """Do what a function of table_writing does, in the process that writes. Raises RequestError."""
    from cauc_ray.serving.observers import table_writing

    try:
        getattr(table_writing, what)(*args)
    except Exception as error:  # a store fails in many ways
        raise RequestError(" ".join(str(error).split())) from error
