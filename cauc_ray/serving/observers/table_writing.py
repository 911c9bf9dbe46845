"""Writes a service's log, in the process that table_log starts for that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from operator import attrgetter

import numpy as np
import pyarrow as pa

from cauc_ray.data.writing import LABELS, LOGGED, PoolModel, TableInfo, logit_columns, read_info, write_info
from cauc_ray.errors import ConfigError
from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import parquet_below, write_parquet
from cauc_ray.files.paths import path_of
from cauc_ray.models.answers import ModelFacts
from cauc_ray.numbers.logits import joint_kind, widened
from cauc_ray.numbers.types import Floats
from cauc_ray.serving.observers.logged import TIME, Flush, Logged

# What must not change under a model's name.
_SAME = attrgetter("source", "logit_kind", "prompt")


def declare(logged: Logged, facts: Sequence[ModelFacts], labels: Sequence[str] | None) -> None:
    """Write pool.json, or complete the one that is there. Raises ConfigError where it is of other models."""
    to, unit = path_of(logged.spec.to), logged.cost_unit
    stored = read_info(to)
    if stored is not None and stored.cost_unit != unit:
        raise ConfigError(f"it has costs in {stored.cost_unit}, the policy has them in {unit}; log elsewhere")
    names = None if labels is None else list(labels)
    before = stored or TableInfo(cost_unit=unit, note="logged by a service", labels=names, models=[])
    models = {
        model.name: model.model_copy(update={"logit_kind": before.kind(model.name) or "raw"}) for model in before.models
    }
    for spec, cost, of_model in zip(logged.stages, logged.costs, facts, strict=True):
        logged_model = PoolModel(
            name=spec.name,
            cost=cost,
            source=f"{of_model.source}; {of_model.logit_kind}",  # as a collection writes it
            logit_kind=spec.model.answers_kind,
            dtype=of_model.dtype,
            prompt=spec.model.shown,
        )
        stored_model = models.get(spec.name, logged_model)
        if _SAME(stored_model) != _SAME(logged_model):
            raise ConfigError(f"it has logits of another model {spec.name!r}; log elsewhere")
        models[spec.name] = stored_model.model_copy(update={"cost": cost})
    kind = joint_kind([model.logit_kind or "raw" for model in models.values()])
    info = before.model_copy(update={"models": [*models.values()], "logit_kind": kind})
    if info != stored:
        make_folder(to)
        write_info(to, info)


def write(logged: Logged, flush: Flush) -> None:
    """Write a flush: a file of the same name and rows for each model, and one of labels."""
    to, stages = path_of(logged.spec.to), logged.stages if flush.rows else ()
    folders = [to / f"model={spec.name}" / f"split={logged.spec.split}" for spec in stages]
    for folder in folders:  # all of them first: a flush that is cut short leaves no table of fewer models
        make_folder(folder)
    ids = [example for example, _ in flush.rows]
    lengths = [max(_n_options(logits) for logits, _ in row.values()) for _, row in flush.rows]
    for stage, folder in enumerate(folders):
        calls = [row[stage] for _, row in flush.rows]
        vectors = [widened(logits[None], n)[0, :n] for (logits, _), n in zip(calls, lengths, strict=True)]
        costs = None
        if logged.per_call and stages[stage].cost is None and all(cost is not None for _, cost in calls):
            costs = np.array([cost for _, cost in calls], dtype=np.float64)
        write_parquet(folder / flush.name, logit_columns(ids, None, vectors, costs))
    if flush.labels:
        names, labels = zip(*flush.labels, strict=True)
        make_folder(to / LABELS)
        columns = {"example_id": pa.array(names, pa.string()), "label": pa.array(labels, pa.int32())}
        write_parquet(to / LABELS / flush.name, pa.table(columns))


def expire(logged: Logged) -> None:
    """Delete the files that are too old, which their names tell; of the same flush, for all models."""
    to, days = path_of(logged.spec.to), logged.spec.keep_days or 0.0
    oldest = datetime.fromtimestamp(time.time() - 86400 * days, UTC).strftime(TIME)
    for file in parquet_below(to) if to.is_dir() else ():
        if file.name.startswith(LOGGED) and file.name < f"{LOGGED}{oldest}":
            file.unlink(missing_ok=True)


def _n_options(logits: Floats) -> int:
    """Return how many options a row is known to have: beyond them a call has -inf, as it has for masks."""
    return int(np.flatnonzero(np.isfinite(logits))[-1]) + 1
