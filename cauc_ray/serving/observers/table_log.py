"""The shadow sample of a service as a logit table, and the labels of feedback, to fit policies on.

A thread has another process write it: neither a slow store nor one that hangs keeps a request, or the end, waiting.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
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
# How often the thread looks whether a flush is due; how long it waits after one that failed; how often it deletes.
LOOK_S, PAUSE_S, LONGEST_PAUSE_S, EXPIRE_S = 0.2, 1.0, 60.0, 3600.0
# How long a service that is stopped waits for what is left to be written.
CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class TableLog(Observer):
    """Has rows and labels written as a logit table, a file for each model and flush.

    Any thread may call its methods, none of which waits for the store but close.

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
        self._elsewhere = Elsewhere()
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._rows: list[tuple[str, RowLogits]] = []
        self._labels: list[tuple[str, int]] = []
        self._since: float | None = None
        self._metrics = metrics
        self._flush: Flush | None = None
        self._declared = self._closing = self._is_away = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def add(self, rows: Sequence[tuple[str, RowLogits]]) -> None:
        """Take rows by their example ids; rows beyond the limit are dropped."""
        self._take([*rows], [], "dropped")

    def on_feedback(self, rows: Feedback, in_force: InForce) -> int | None:
        """Take labels of rows in the sample; labels beyond the limit are dropped."""
        self._take([], rows.logged(self._logged.share), "label_dropped")
        return None

    def _take(self, rows: list[tuple[str, RowLogits]], labels: list[tuple[str, int]], dropped: str) -> None:
        most = MOST_FLUSHES * self._spec.flush_rows
        with self._lock:
            if len(self._rows) >= most or len(self._labels) >= LABELS_PER_ROW * most:
                self._metrics.count("log_rows", dropped, n=len(rows) + len(labels))
                return
            self._rows += rows
            self._labels += labels
            self._since = time.monotonic() if self._since is None else self._since

    def close(self) -> None:
        """Write what is left, for CLOSE_S at most."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        self._elsewhere.close()
        if self._flush is not None or self._since is not None:
            logger.warning(f"the last rows of the log could not be written to {masked(str(self._spec.to))}")

    def _run(self) -> None:
        pause_s, expires_at = LOOK_S, 0.0
        while not (self._closing and self._flush is None and self._since is None):
            self._wake.wait(pause_s)
            self._flush = self._flush or self._due()
            try:
                if not self._declared and None not in (facts := self._facts()):
                    self._done("declare", facts, self._labels_of())
                    self._declared = True
                if self._flush is not None and self._declared:
                    self._done("write", self._flush)
                    self._metrics.count("log_rows", "written", n=len(self._flush.rows))
                    self._metrics.count("log_rows", "label_written", n=len(self._flush.labels))
                    self._flush = None
                if self._spec.keep_days is not None and time.monotonic() >= expires_at:
                    expires_at = time.monotonic() + EXPIRE_S
                    self._done("expire")
                pause_s, self._is_away = LOOK_S, False
            except Exception as error:  # of any type: what waits is tried again
                if not (self._is_away or self._closing):
                    logger.warning(masked(f"the log cannot be written to {self._spec.to}, trying again: {error}"))
                self._is_away = True
                pause_s = min(max(PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
            if self._closing and self._flush is not None:
                return

    def _done(self, what: str, *args: Any) -> None:
        self._elsewhere.wait(_do, what, self._logged, *args)

    def _due(self) -> Flush | None:
        """Take what waits once that is enough, has waited for long enough, or the service ends."""
        with self._lock:
            most, now = self._spec.flush_rows, time.monotonic()
            waited_s = 0.0 if self._since is None else now - self._since
            is_due = len(self._rows) >= most or waited_s >= self._spec.flush_s or self._closing
            if self._since is None or not is_due:
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
