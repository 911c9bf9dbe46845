"""A two-stage cascade in Ray Data alone, as plans that a user of Ray Data would write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.data import ActorPoolStrategy, Dataset, SaveMode

from cauc_ray.policies.policy import Policy
from jobs.bench.models import Columns, from_column

# What stays of a row that has its answer: the columns of a cauc-ray run's predictions.
ANSWER = ("example_id", "prediction", "confidence", "stage", "cost", "label")


class Small:
    """The first stage: answers every row, and keeps beside the answer what a deferred row takes along."""

    def __init__(self, policy: Policy, kwargs: Mapping[str, Any]) -> None:
        self._policy = policy
        self._model = from_column(**kwargs)

    def __call__(self, batch: Columns) -> Columns:
        """Add the answer, whether it is accepted, and the policy's state."""
        step = self._policy.start(self._model(batch))
        n = len(step.predictions)
        return {
            **batch,
            "prediction": step.predictions.astype(np.int32),
            "confidence": step.confidences.astype(np.float32),
            "stage": np.where(step.accepted, 0, 1).astype(np.int8),
            "cost": np.full(n, self._policy.stages[0].cost, np.float32),
            "state": step.state,
        }


class Large:
    """The second stage: answers the deferred rows of a batch, in calls of so many, and drops what nobody needs now."""

    def __init__(self, policy: Policy, kwargs: Mapping[str, Any], rows_per_call: int) -> None:
        self._policy = policy
        self._model = from_column(**kwargs)
        self._rows_per_call = rows_per_call

    def __call__(self, batch: Columns) -> Columns:
        """Replace the answers of the deferred rows."""
        answered = {name: batch[name] for name in ANSWER}
        for name in ("prediction", "confidence", "cost"):
            answered[name] = answered[name].copy()  # what Ray Data gives out is read-only
        deferred = np.flatnonzero(batch["stage"] == 1)
        for start in range(0, len(deferred), self._rows_per_call):
            rows = deferred[start : start + self._rows_per_call]
            logits = self._model({name: column[rows] for name, column in batch.items()})
            step = self._policy.step(1, logits, batch["state"][rows])
            answered["prediction"][rows] = step.predictions
            answered["confidence"][rows] = step.confidences
            answered["cost"][rows] += np.float32(self._policy.stages[1].cost)
        return answered


@dataclass(frozen=True, slots=True)
class DataCascade:
    """The cascade's parts in Ray Data.

    small, large: keyword arguments of from_column.   batch: rows in a call of either model.
    read_blocks: into how many blocks the input is read.
    """

    policy: Policy
    small: Mapping[str, Any]
    large: Mapping[str, Any]
    batch: int
    read_blocks: int

    def answered(self, inputs: Path) -> Dataset:
        """Read the input and ask the small model."""
        return ray.data.read_parquet(str(inputs), override_num_blocks=self.read_blocks).map_batches(
            Small,
            fn_constructor_args=(self.policy, self.small),
            batch_size=self.batch,
            batch_format="numpy",
            compute=ActorPoolStrategy(size=1),
            num_cpus=0.5,
            udf_modifying_row_count=False,
        )

    def finished(self, rows: Dataset, batch: int | None) -> Dataset:
        """Ask the large model for the deferred among so many rows at a time, None for a whole block."""
        return rows.map_batches(
            Large,
            fn_constructor_args=(self.policy, self.large, self.batch),
            batch_size=batch,
            batch_format="numpy",
            compute=ActorPoolStrategy(size=1),
            num_cpus=0.5,
            udf_modifying_row_count=False,
        )


def chain(cascade: DataCascade, inputs: Path, out: Path) -> None:
    """One chain: the large stage sees all rows in batches and picks its own from each."""
    write(cascade.finished(cascade.answered(inputs), cascade.batch), out)


def chain_gathered(cascade: DataCascade, inputs: Path, out: Path) -> None:
    """One chain whose large stage sees whole blocks and calls its model on full batches of the deferred in them."""
    write(cascade.finished(cascade.answered(inputs), None), out)


def lazy(cascade: DataCascade, inputs: Path, out: Path) -> None:
    """Two filters and a union: the small stage runs once for each branch."""
    write(branches(cascade, cascade.answered(inputs)), out)


def materialized(cascade: DataCascade, inputs: Path, out: Path) -> None:
    """Two filters and a union over a materialized first stage, which therefore runs once, but all of it first."""
    write(branches(cascade, cascade.answered(inputs).materialize()), out)


def repartitioned(cascade: DataCascade, inputs: Path, out: Path) -> None:
    """As materialized, with the deferred rows gathered into blocks of full batches."""
    write(branches(cascade, cascade.answered(inputs).materialize(), gather=True), out)


def branches(cascade: DataCascade, answered: Dataset, gather: bool = False) -> Dataset:
    """Return the union of the accepted rows and of the deferred ones with the large model's answers."""
    accepted = answered.filter(expr=ray.data.expressions.col("stage") == 0).select_columns(list(ANSWER))
    deferred = answered.filter(expr=ray.data.expressions.col("stage") == 1)
    if gather:
        deferred = deferred.repartition(target_num_rows_per_block=4 * cascade.batch)
    return accepted.union(cascade.finished(deferred, cascade.batch))


def write(rows: Dataset, out: Path) -> None:
    """Write the predictions: the columns of a cauc-ray run's."""
    rows.select_columns(list(ANSWER)).write_parquet(str(out), mode=SaveMode.OVERWRITE)


PLANS: dict[str, Callable[[DataCascade, Path, Path], None]] = {
    plan.__name__: plan for plan in (chain, chain_gathered, lazy, materialized, repartitioned)
}
