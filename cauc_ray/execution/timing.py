"""Seconds of a stage's calls, measured here and now: one replica on Ray, a few batch sizes, nothing else running."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from cauc_ray.cascade.bundles import Bundle, Part, packed
from cauc_ray.cascade.results import CallResult
from cauc_ray.data.inputs import RunInput
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, result_of, worker_class
from cauc_ray.execution.session import require_fit
from cauc_ray.execution.user_code import import_paths
from cauc_ray.models.answers import Batch
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.service import Replicas
from cauc_ray.numbers.types import Floats, Ints

# Each size is called so often, after a first call of the full size that counts for nothing.
REPEATS = 5


@dataclass(frozen=True, slots=True)
class TimedCalls:
    """Calls of one stage.   rows: int (C,), of each call's batch.   seconds: float (C,), in model and worker."""

    rows: Ints
    seconds: Floats


def time_stages(
    stages: Sequence[StageSpec], inputs: RunInput, on_stage: Callable[[str], None] = lambda name: None
) -> list[TimedCalls]:
    """Time every stage's model on the first rows of an input, on the current Ray session, one stage after the other.

    Where the input has fewer rows than a batch, they come again.   on_stage: called with each stage's name before it.
    Raises DataError where the input cannot be read, ExecutionError where a stage does not fit, start or answer.
    """
    columns = _first_rows(inputs, max(stage.batch_size for stage in stages))
    alone = [stage.model_copy(update={"replicas": Replicas()}) for stage in stages]
    for stage in alone:
        require_fit([stage])
    timed = []
    for stage in alone:
        on_stage(stage.name)
        timed.append(_timed(stage, columns))
    return timed


def timed_sizes(batch_size: int) -> list[int]:
    """Return the batch sizes to time: a row, a quarter, half and the whole of a batch.

    >>> timed_sizes(64), timed_sizes(2)
    ([1, 16, 32, 64], [1, 2])
    """
    return sorted({1, max(1, batch_size // 4), max(1, batch_size // 2), batch_size})


def _timed(stage: StageSpec, columns: Batch) -> TimedCalls:
    who = f"stage {stage.name!r}"
    worker = worker_class(stage).remote(stage, 0, None, import_paths([stage]))
    try:
        result_of(worker.load.remote(), START_DEADLINE_S, who)
        sizes = timed_sizes(stage.batch_size)
        bundles = {n: ray.put(Bundle(packed({name: column[:n] for name, column in columns.items()}))) for n in sizes}
        _called(worker, bundles[sizes[-1]], sizes[-1], stage)
        # In turns, so that what changes meanwhile changes all sizes alike.
        rows = np.tile(np.array(sizes, dtype=np.int64), REPEATS)
        seconds = [_called(worker, bundles[n], n, stage) for n in rows.tolist()]
        return TimedCalls(rows, np.array(seconds))
    finally:
        ray.kill(worker)


def _called(worker: Any, bundle: Any, n: int, stage: StageSpec) -> float:
    who = f"stage {stage.name!r}"
    ref, _ = worker.collect.options(num_returns=2).remote([Part(0, slice(0, n))], None, bundle)
    results: list[CallResult] = result_of(ref, stage.call_timeout_s, who)
    result = CallResult.joined(results)
    if result.error is not None or result.failures:
        why = result.error if result.error is not None else next(iter(result.failures.values()))
        raise ExecutionError(f"{who} cannot answer the input's first rows: {why}")
    assert result.compute_s is not None
    return result.compute_s


def _first_rows(inputs: RunInput, n: int) -> Batch:
    """Return the columns of the input's first n rows, the same again where there are fewer."""
    source = inputs.source(n)
    block = next((block for group in range(source.n_groups) for _, block in source.blocks(group)), None)
    if block is None:
        raise DataError(f"{inputs.path} has no rows")
    if block.unreadable is not None:
        raise DataError(f"{inputs.path}: its first rows cannot be read: {block.unreadable}")
    positions = np.arange(n) % len(block.example_ids)
    return {name: column[positions] for name, column in block.columns.items()}
