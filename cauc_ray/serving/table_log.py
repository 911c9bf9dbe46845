"""What a service saw, for a later fit: its shadow sample as a logit table, and the labels that feedback brings.

A thread of its own writes it, so that neither a slow store nor one that is away keeps a request waiting.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from cauc_ray.data.writing import LABELS, LOGGED, PoolModel, TableInfo, logit_columns, read_info, write_info
from cauc_ray.errors import ConfigError
from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import parquet_below, write_parquet
from cauc_ray.files.paths import path_of
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import LogSpec, StageSpec
from cauc_ray.numbers.logits import joint_kind, widened
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.policy import Policy

# What may wait to be written, in flushes' worth of rows; of labels, which are small, so many times as much.
MOST_FLUSHES, LABELS_PER_ROW = 8, 100
# How often the thread looks whether a flush is due; how long it waits after one that failed; how often it deletes.
LOOK_S, PAUSE_S, LONGEST_PAUSE_S, EXPIRE_S = 0.2, 1.0, 60.0, 3600.0
# How long a service that is stopped waits for what is left to be written.
CLOSE_S = 3.0
_TIME = "%Y%m%dT%H%M%SZ"
# What must not change under a model's name.
_SAME = attrgetter("source", "logit_kind", "prompt")

logger = logging.getLogger(__name__)

# Of one row: by stage the model's logits, float32 (K,), and what it reported that the call cost, if it did.
RowLogits: TypeAlias = Mapping[int, tuple[Floats, float | None]]


@dataclass(slots=True)
class _Flush:
    """What is written together.   name: of its files, the same however often it is tried."""

    name: str
    rows: list[tuple[str, RowLogits]]
    labels: list[tuple[str, int]]


class TableLog:
    """Writes rows and labels as a logit table, a file for each model and flush.

    facts: of the stages' models, None where they are not known yet.   labels: the names of the options, if known.
    Any thread may call its methods, none of which waits for the store but close.
    """

    def __init__(
        self,
        spec: LogSpec,
        stages: Sequence[StageSpec],
        policy: Policy,
        facts: Callable[[], Sequence[ModelFacts | None]],
        labels: Callable[[], Sequence[str] | None],
    ) -> None:
        self._spec, self._stages, self._policy = spec, stages, policy
        self._facts, self._labels_of = facts, labels
        self._to = path_of(spec.to)
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._rows: list[tuple[str, RowLogits]] = []
        self._labels: list[tuple[str, int]] = []
        self._since: float | None = None
        self._counts: Counter[str] = Counter()
        self._flush: _Flush | None = None
        self._declared = self._closing = self._is_away = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def add(self, rows: Sequence[tuple[str, RowLogits]]) -> None:
        """Take rows by their example ids; those that there is no room for are dropped."""
        self._take([*rows], [], "dropped")

    def label(self, labels: Sequence[tuple[str, int]]) -> None:
        """Take labels by example id; those that there is no room for are dropped."""
        self._take([], [*labels], "label_dropped")

    def _take(self, rows: list[tuple[str, RowLogits]], labels: list[tuple[str, int]], dropped: str) -> None:
        most = MOST_FLUSHES * self._spec.flush_rows
        with self._lock:
            if len(self._rows) >= most or len(self._labels) >= LABELS_PER_ROW * most:
                self._counts[dropped] += len(rows) + len(labels)
                return
            self._rows += rows
            self._labels += labels
            self._since = time.monotonic() if self._since is None else self._since

    def count(self, outcome: str, n: int) -> None:
        """Count rows by what became of them."""
        with self._lock:
            self._counts[outcome] += n

    def take_counts(self) -> Mapping[str, int]:
        """Return what was counted since the last time: rows written, incomplete or dropped; labels as label_…."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def close(self) -> None:
        """Write what is left, for CLOSE_S at most."""
        self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_S)
        if self._flush is not None or self._since is not None:
            logger.warning(f"the last rows of the log could not be written to {self._to}")

    def _run(self) -> None:
        pause_s, expires_at = LOOK_S, 0.0
        while not (self._closing and self._flush is None and self._since is None):
            self._wake.wait(pause_s)
            self._flush = self._flush or self._due()
            try:
                if not self._declared and None not in self._facts():
                    self._declare()
                    self._declared = True
                if self._flush is not None and self._declared:
                    self._write(self._flush)
                    self._flush = None
                if self._spec.keep_days is not None and time.monotonic() >= expires_at:
                    expires_at = time.monotonic() + EXPIRE_S
                    self._expire(self._spec.keep_days)
                pause_s, self._is_away = LOOK_S, False
            except Exception as error:  # a store fails in many ways, and none of them is a request's affair
                if not self._is_away:
                    logger.warning(f"the log cannot be written to {self._to}, trying again: {error}")
                self._is_away = True
                pause_s = min(max(PAUSE_S, 2 * pause_s), LONGEST_PAUSE_S)
            if self._closing and self._flush is not None:
                return

    def _due(self) -> _Flush | None:
        """Take what waits once that is enough, has waited for long enough, or the service ends."""
        with self._lock:
            waited_s = 0.0 if self._since is None else time.monotonic() - self._since
            full = len(self._rows) >= self._spec.flush_rows
            if self._since is None or not (full or waited_s >= self._spec.flush_s or self._closing):
                return None
            name = f"{LOGGED}{datetime.now(UTC).strftime(_TIME)}-{uuid.uuid4().hex[:12]}.parquet"
            flush = _Flush(name, self._rows, self._labels)
            self._rows, self._labels, self._since = [], [], None
        return flush

    def _declare(self) -> None:
        """Write pool.json, or complete the one that is there. Raises ConfigError where it is of other models."""
        models = [
            PoolModel(
                name=spec.name,
                cost=stage.cost,
                source=f"{facts.source}; {facts.logit_kind}",  # as a collection writes it
                logit_kind=spec.model.answers_kind,
                dtype=facts.dtype,
                prompt=spec.model.shown,
            )
            for spec, stage, facts in zip(self._stages, self._policy.stages, self._facts(), strict=True)
            if facts is not None
        ]
        names, unit = self._labels_of(), self._policy.cost_unit
        found = read_info(self._to)
        if found is not None and found.cost_unit != unit:
            raise ConfigError(f"it has costs in {found.cost_unit}, the policy has them in {unit}; log elsewhere")
        before = found or TableInfo(
            cost_unit=unit, note="logged by a service", labels=list(names or ()) or None, models=[]
        )
        there = {
            model.name: model.model_copy(update={"logit_kind": before.kind(model.name) or "raw"})
            for model in before.models
        }
        for model in models:
            other = there.setdefault(model.name, model)
            if _SAME(other) != _SAME(model):
                raise ConfigError(f"it has logits of another model {model.name!r}; log elsewhere")
            there[model.name] = other.model_copy(update={"cost": model.cost})
        kind = joint_kind([model.logit_kind or "raw" for model in there.values()])
        info = before.model_copy(update={"models": [*there.values()], "logit_kind": kind})
        if info != found:
            make_folder(self._to)
            write_info(self._to, info)

    def _write(self, flush: _Flush) -> None:
        models = self._stages if flush.rows else ()
        folders = [self._to / f"model={spec.name}" / f"split={self._spec.split}" for spec in models]
        for folder in folders:  # all of them first: what a first flush that is cut short leaves is no smaller table
            make_folder(folder)
        ids = [example for example, _ in flush.rows]
        lengths = [max(_n_options(logits) for logits, _ in row.values()) for _, row in flush.rows]
        for stage, folder in enumerate(folders):
            found = [row[stage] for _, row in flush.rows]
            vectors = [widened(logits[None], n)[0, :n] for (logits, _), n in zip(found, lengths, strict=True)]
            costs = np.array([cost for _, cost in found], dtype=np.float64) if self._has_costs(stage, found) else None
            write_parquet(folder / flush.name, logit_columns(ids, None, vectors, costs))
        if flush.labels:
            names, labels = zip(*flush.labels, strict=True)
            make_folder(self._to / LABELS)
            columns = {"example_id": pa.array(names, pa.string()), "label": pa.array(labels, pa.int32())}
            write_parquet(self._to / LABELS / flush.name, pa.table(columns))
        self.count("written", len(flush.rows))
        self.count("label_written", len(flush.labels))

    def _has_costs(self, stage: int, found: Sequence[tuple[Floats, float | None]]) -> bool:
        """Return whether the costs of a stage's calls are its model's own, as in a collection."""
        counted = self._policy.costs == "per-call" and self._stages[stage].cost is None
        return counted and all(cost is not None for _, cost in found)

    def _expire(self, keep_days: float) -> None:
        """Delete files that are older, which their names tell; of the same flush, for all models."""
        oldest = datetime.fromtimestamp(time.time() - 86400 * keep_days, UTC).strftime(_TIME)
        for file in parquet_below(self._to) if self._to.is_dir() else ():
            if file.name.startswith(LOGGED) and file.name < f"{LOGGED}{oldest}":
                file.unlink(missing_ok=True)


def _n_options(logits: Floats) -> int:
    """Return how many options a row is known to have: beyond them a call has -inf, as it has for masks."""
    return int(np.flatnonzero(np.isfinite(logits))[-1]) + 1
