"""A stage's worker: a loaded model and the policy's step, in a process of its own."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from cauc_ray.data.inputs import concat_column
from cauc_ray.errors import CaucError, ConfigError, ExecutionError
from cauc_ray.execution.messages import CallResult
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, choices_in, matched
from cauc_ray.models.flops import measured_gflops
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy, Step


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a call, by where they stand among the call's arguments.

    payload: which argument holds their columns.   indices: int (n,), places there.   state: which argument
    holds their state, None before the first stage.   state_rows: int (n,), places there.
    """

    payload: int
    indices: Ints
    state: int | None
    state_rows: Ints


@dataclass(frozen=True, slots=True)
class Collected:
    """What a model said of a call's rows, kept as it is.

    answers: of the whole call.   gflops: measured on the worker's first call, per example; None where torch
    has counted none.
    """

    answers: Answers
    gflops: float | None


class StageWorker:
    """Loads a model once and answers calls; a fault of a call is an answer, not an exception.

    Loading is a call of its own: of what a constructor raises, Ray keeps only the text. A worker that Ray has
    started again after its process died loads the model before it answers.
    """

    def __init__(self, spec: StageSpec, stage: int, policy: Policy | None, import_paths: Sequence[str]) -> None:
        sys.path[:0] = [path for path in import_paths if path not in sys.path]
        if not spec.resources.num_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a stage that asked for none shall not fill one's memory
        self._spec = spec
        self._model: Model | None = None
        self._gflops: float | None = None
        self._stage = stage
        self._policy = policy
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else socket.gethostname()

    def load(self) -> ModelFacts:
        """Load the model and return what it says of itself. Raises CaucError, or what the user's code raises."""
        return self._loaded().facts

    def decide(self, parts: Sequence[Part], *arguments: Any) -> tuple[CallResult, Floats]:
        """Answer a call's rows and decide which of them stop.

        arguments: the payloads (columns by name) and states that the parts point into.
        Returns the result and the state of the rows that go on, float64 (n_deferred, S).
        """
        assert self._policy is not None
        model = self._loaded()  # a model that cannot be loaded is no fault of the rows
        started_at, started = time.time(), time.perf_counter()
        try:
            answers = _asked(model, _batch(parts, arguments))
            answered = _answered(answers)
            state = _state(parts, arguments)
            state = state if state is None else state[answered]
            step = self._policy.step(self._stage, answers.logits[answered], state) if answered.any() else _NOBODY
        except (ConfigError, ExecutionError):
            raise  # a wrong key or a server that is down is no fault of the rows
        except Exception as error:
            return _failed(error, started_at, time.perf_counter() - started, self._node), np.zeros((0, 0))
        n = len(answered)
        result = CallResult(
            predictions=_spread(step.predictions, answered, -1),
            confidences=_spread(step.confidences, answered, np.nan),
            accepted=_spread(step.accepted, answered, False),
            costs=np.where(answered, self._costs(answers, n), 0.0),
            started_at=started_at,
            compute_s=time.perf_counter() - started,
            device_s=None,
            node=self._node,
            failures=answers.failures,
        )
        return result, step.state[~step.accepted]

    def answer(self, parts: Sequence[Part], *arguments: Any) -> tuple[CallResult, Collected | None]:
        """Answer a call's rows, deciding nothing: every row that the model answers is accepted.

        Returns the result, its predictions and confidences empty of meaning, and the model's answers; None for
        a call that failed.
        """
        model = self._loaded()
        started_at, started = time.time(), time.perf_counter()
        try:
            answers = _asked(model, _batch(parts, arguments))
        except (ConfigError, ExecutionError):
            raise
        except Exception as error:
            return _failed(error, started_at, time.perf_counter() - started, self._node), None
        compute_s = time.perf_counter() - started
        if self._gflops is None and answers.costs is None:
            self._gflops = measured_gflops(model, _batch(parts, arguments)) or 0.0
        answered = _answered(answers)
        n = len(answered)
        result = CallResult(
            predictions=np.full(n, -1, dtype=np.int32),
            confidences=np.full(n, np.nan),
            accepted=answered,
            costs=np.zeros(n) if answers.costs is None else answers.costs,
            started_at=started_at,
            compute_s=compute_s,
            device_s=None,
            node=self._node,
            failures=answers.failures,
        )
        return result, Collected(answers, self._gflops or None)

    def _loaded(self) -> Model:
        if self._model is None:
            self._model = self._spec.model.load()
        return self._model

    def _costs(self, answers: Answers, n: int) -> Floats:
        """Return each row's cost: the call's own where the policy counts those and the model tells them."""
        assert self._policy is not None
        if self._policy.costs == "per-call" and answers.costs is not None:
            return answers.costs
        return np.full(n, self._policy.stages[self._stage].cost)


# A policy has nothing to decide where a model has answered no row: there is not even an option.
_NOBODY = Step(np.zeros(0, np.int32), np.zeros(0), np.zeros(0, bool), np.zeros((0, 0)))


def _asked(model: Model, batch: Batch) -> Answers:
    """Ask a model, and hold its answers against the number of choices where rows offer some."""
    n_choices = choices_in(batch)  # asked before: the model may do with its batch what it likes
    return matched(model(batch), n_choices)


def _answered(answers: Answers) -> Bools:
    """Return which rows the model answered, bool (n,)."""
    answered = np.full(len(answers.logits), True)
    answered[list(answers.failures)] = False
    return answered


def _spread(values: npt.NDArray[Any], answered: Bools, otherwise: float) -> npt.NDArray[Any]:
    """Return the answered rows' values at their places among all rows."""
    if answered.all():
        return values
    spread = np.full(len(answered), otherwise, dtype=values.dtype)
    spread[answered] = values
    return spread


def _batch(parts: Sequence[Part], arguments: Sequence[Any]) -> Batch:
    """Gather the parts' rows, column by column, into arrays that the model may write to."""
    return {
        name: concat_column([_take(arguments[part.payload][name], part.indices) for part in parts])
        for name in arguments[parts[0].payload]
    }


def packed(columns: Batch) -> dict[str, npt.NDArray[Any] | pa.Array]:
    """Return a block's columns as they travel to workers: those of bytes, as images are, in Arrow.

    A worker maps numbers and Arrow from shared memory, but would copy every one of the block's Python objects
    for each call that takes a few of its rows.
    """
    return {name: pa.array(c, pa.large_binary()) if _holds_bytes(c) else c for name, c in columns.items()}


def _holds_bytes(column: npt.NDArray[Any]) -> bool:
    return column.dtype == object and all(value is None or isinstance(value, bytes) for value in column)


def _take(column: npt.NDArray[Any] | pa.Array, indices: Ints) -> npt.NDArray[Any]:
    if isinstance(column, pa.Array):
        taken: npt.NDArray[Any] = column.take(pa.array(indices)).to_numpy(zero_copy_only=False)
        return taken
    return column[indices]


def _state(parts: Sequence[Part], arguments: Sequence[Any]) -> Floats | None:
    """Gather the parts' states, padded with -inf to the widest."""
    states = [arguments[part.state][part.state_rows] for part in parts if part.state is not None]
    if not states:
        return None
    width = max(state.shape[1] for state in states)
    return np.concatenate([np.pad(s, ((0, 0), (0, width - s.shape[1])), constant_values=-np.inf) for s in states])


def _failed(error: Exception, started_at: float, compute_s: float, node: str) -> CallResult:
    said = " ".join(str(error).split())
    reason = said if isinstance(error, CaucError) else f"{type(error).__name__}: {said}"
    nothing = np.zeros(0)
    return CallResult(
        predictions=np.zeros(0, dtype=np.int32),
        confidences=nothing,
        accepted=np.zeros(0, dtype=bool),
        costs=nothing,
        started_at=started_at,
        compute_s=compute_s,
        device_s=None,
        node=node,
        error=reason,
    )
