"""A cascade through cauc-ray against the same cascade in Ray Data alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

import cauc_ray
from cauc_ray.errors import ExecutionError
from cauc_ray.execution.session import ray_session
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.policies.policy import Policy
from jobs.bench.part import by_turns
from jobs.bench.planted import (
    Columns,
    SleepingStage,
    column_model,
    from_column,
    planted_rows,
    write_cascade,
    write_input,
)
from jobs.bench.processes import scratch

PAYLOAD = 512
# Seconds of a call and of a row, for the small and for the large model.
FIXED = ((0.005, 0.0), (0.020, 0.0001))
CASES = ("fixed", "per_row", "nothing_deferred")
INPUT_FILES = 8
# The columns of a run's predictions, which stay of an answered row.
ANSWER = ("example_id", "prediction", "confidence", "stage", "cost", "label")


def ray_data(
    rows: int = 80_000, batch: int = 256, deferral: float = 0.3, repeats: int = 3, cases: tuple[str, ...] = CASES
) -> dict[str, Any]:
    """Measure a two-stage cascade through cauc-ray against the same in Ray Data alone, cold start on both sides.

    Both read the same Parquet rows (512 float32 each next to what the models read), use the same sleeping models and
    the same policy step, and write the same predictions. One Ray session is up before either starts; each turn starts
    its own actors. cauc-ray and two plans that a user of Ray Data would write take turns, and the best turn of each
    counts: `union`, filters and a union over a materialized first stage whose deferred rows are gathered into blocks of
    full batches, the best of its kind; and `chain`, whose large stage sees whole blocks and calls its model on full
    batches of the deferred rows in them. Three cases: a fixed cost per call and one per row, the same totals at a full
    batch as a cost per row only, and the first with nothing deferred.

    Args:
        rows: Rows of the input.
        batch: Rows in a full batch of either model.
        deferral: Share of the rows that the large model answers.
        repeats: Turns of each side.
        cases: Costs to measure.
    """
    results: dict[str, Any] = {}
    configure_ray_data()
    with ray_session(None, 4):
        for case in cases:
            small, large = ((0.0, call / batch + row) if case == "per_row" else (call, row) for call, row in FIXED)
            stages = (
                SleepingStage("small", batch, *small, deferral=deferral),
                SleepingStage("large", batch, *large, cost=4.0),
            )
            with scratch() as folder:
                results[case] = one_case(folder, stages, rows, 0.0 if case == "nothing_deferred" else deferral, repeats)
    return results


def one_case(
    folder: Path, stages: tuple[SleepingStage, SleepingStage], n: int, deferral: float, repeats: int
) -> dict[str, Any]:
    """Write the input, let the sides take turns, and check that they gave the same answers."""
    pool, policy = write_cascade(folder, stages, num_cpus=0.5)
    rng = np.random.default_rng(0)
    payload = pa.FixedShapeTensorArray.from_numpy_ndarray(rng.random((n, PAYLOAD), dtype=np.float32))
    columns = planted_rows(rng, n, [deferral]).columns() | {"payload": payload}
    inputs = write_input(folder / "input", columns, files=INPUT_FILES)
    small, large = (column_model(number, stage)["kwargs"] for number, stage in enumerate(stages))
    cascade = DataCascade(policy, small, large, stages[0].batch)

    def rate(run: Callable[[Path], object], side: str, turn: int) -> float:
        started = time.perf_counter()
        run(folder / f"{side}-{turn}")
        return n / (time.perf_counter() - started)

    runs: dict[str, Callable[[Path], object]] = {"cauc-ray": partial(cauc_ray.run, pool, policy, inputs)}
    runs |= {plan.__name__: partial(plan, cascade, inputs) for plan in (union, chain)}
    sides = {side: partial(rate, run, side) for side, run in runs.items()}
    turns = by_turns(sides, repeats, lambda rows_per_s: f"{rows_per_s:8,.0f} rows/s")
    for plan in (union, chain):
        require_same(folder / "cauc-ray-0" / "predictions", folder / f"{plan.__name__}-0", plan.__name__)
    best = {side: max(rates) for side, rates in turns.items()}
    to_plan = {side: best["cauc-ray"] / rate for side, rate in best.items() if side != "cauc-ray"}
    return {"rows": n, "turns_rows_per_s": turns, "rows_per_s": best, "to_plan": to_plan}


def configure_ray_data() -> None:
    """Have Ray Data print nothing, and read files into as many blocks as it is asked for."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    # Ray 2.60's newer reader packs the files into blocks of 128 MB, two in all here, so that the stages do not overlap.
    context.use_datasource_v2 = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)


def require_same(expected: Path, written: Path, side: str) -> None:
    """Raise ExecutionError where a side's predictions are not the same, row for row."""
    ours, theirs = (
        pa.concat_tables(map(read_parquet, parquet_files(path))).sort_by("example_id") for path in (expected, written)
    )
    for name in ours.column_names:
        if not pc.all(pc.equal(ours.column(name), theirs.column(name))).as_py() or len(ours) != len(theirs):
            raise ExecutionError(f"{side}: column {name} of the predictions is not what cauc-ray answered")


class Small:
    """The first stage: answers every row, and adds the policy's state for deferred rows."""

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
    """The second stage: answers the deferred rows of a batch, in full calls."""

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

    Attributes:
        policy: The policy.
        small: Keyword arguments of from_column for the first model.
        large: Keyword arguments of from_column for the second model.
        batch: Rows in a call.
    """

    policy: Policy
    small: Mapping[str, Any]
    large: Mapping[str, Any]
    batch: int

    def answered(self, inputs: Path) -> Any:
        """Read the input and ask the small model."""
        rows = ray.data.read_parquet(str(inputs), override_num_blocks=INPUT_FILES)
        return self._asked(rows, Small, (self.policy, self.small), self.batch)

    def finished(self, rows: Any, batch: int | None) -> Any:
        """Ask the large model for the deferred among some rows at a time, None for a whole block."""
        return self._asked(rows, Large, (self.policy, self.large, self.batch), batch)

    def _asked(self, rows: Any, kind: type, arguments: tuple[Any, ...], batch: int | None) -> Any:
        return rows.map_batches(
            kind,
            fn_constructor_args=arguments,
            batch_size=batch,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=0.5,
            udf_modifying_row_count=False,
        )


def union(cascade: DataCascade, inputs: Path, out: Path) -> None:
    """Split what the small model has answered, gather the deferred rows, and put both branches together."""
    stage_of, answered = ray.data.expressions.col("stage"), cascade.answered(inputs).materialize()
    accepted = answered.filter(expr=stage_of == 0).select_columns(list(ANSWER))
    deferred = answered.filter(expr=stage_of == 1).repartition(target_num_rows_per_block=4 * cascade.batch)
    write(accepted.union(cascade.finished(deferred, cascade.batch)), out)


def chain(cascade: DataCascade, inputs: Path, out: Path) -> None:
    """Have the large stage see whole blocks and call its model on full batches of the deferred rows in them."""
    write(cascade.finished(cascade.answered(inputs), None), out)


def write(rows: Any, out: Path) -> None:
    """Write the predictions: the columns of a cauc-ray run's."""
    rows.select_columns(list(ANSWER)).write_parquet(str(out), mode=ray.data.SaveMode.OVERWRITE)
