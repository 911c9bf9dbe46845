"""A stage's worker: a loaded model and the policy's step, in a process of its own."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray

from cauc_ray.data.blocks import concat_column
from cauc_ray.errors import CaucError, ConfigError, ExecutionError
from cauc_ray.execution.messages import CallResult
from cauc_ray.models.answers import Answers, AsDeclared, Batch, Model, ModelFacts, choices_in, matched
from cauc_ray.models.flops import measured_gflops
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy, Step

Column: TypeAlias = npt.NDArray[Any] | pa.Array


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a call, by where they stand among the call's arguments.

    parcel: which argument holds them.   places: int (n,), places there in rising order, or a slice of neighbours.
    """

    parcel: int
    places: Ints | slice

    def __len__(self) -> int:
        return self.places.stop - self.places.start if isinstance(self.places, slice) else len(self.places)

    @classmethod
    def of(cls, parcel: int, places: Ints) -> Part:
        """Return rows at rising places of a parcel."""
        first, last = int(places[0]), int(places[-1])
        return cls(parcel, slice(first, last + 1) if last - first + 1 == len(places) else places)

    def where(self, mask: Bools) -> Part | None:
        """Return those of the rows that a mask (n,) marks, None if it marks none."""
        if not mask.any():
            return None
        places = np.arange(self.places.start, self.places.stop) if isinstance(self.places, slice) else self.places
        return Part.of(self.parcel, places[mask])


@dataclass(frozen=True, slots=True)
class Parcel:
    """Rows on their way: their columns by name, numbers as numpy arrays, bytes in Arrow, and the state they carry.

    state: float64 (n, S), None before the first stage.
    """

    columns: Mapping[str, Column]
    state: Floats | None = None


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

    Loading is a call of its own: of what a constructor raises, Ray keeps only the text.
    """

    def __init__(self, spec: StageSpec, stage: int, policy: Policy | None, import_paths: Sequence[str]) -> None:
        sys.path[:0] = [path for path in import_paths if path not in sys.path]
        if not spec.resources.num_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a stage that asked for none shall not fill one's memory
        self._spec = spec
        self._model: Model | None = None
        self._as_declared = AsDeclared(ModelFacts(spec.name))
        self._gflops: float | None = None
        self._stage = stage
        self._policy = policy
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else socket.gethostname()

    def place(self) -> str:
        """Return the node that the worker has been placed on."""
        return self._node

    def load(self) -> ModelFacts:
        """Load the model and return what it says of itself. Raises CaucError, or what the user's code raises."""
        self._model = self._spec.model.load()
        self._as_declared = AsDeclared(self._model.facts)
        return self._model.facts

    def decide(self, parts: Sequence[Part], *parcels: Parcel) -> tuple[CallResult, Parcel]:
        """Answer a call's rows and decide which of them stop.

        parcels: what the parts point into. Returns the result, and the rows that go on.
        """
        assert self._policy is not None
        clock = _Clock()
        try:
            answers = self._as_declared(self._asked(gathered(parts, parcels)))
            answered = _answered(answers)
            state = _state(parts, parcels)
            state = state if state is None else state[answered]
            decided = time.perf_counter()
            step = self._policy.step(self._stage, answers.logits[answered], state) if answered.any() else _NOBODY
            policy_s = time.perf_counter() - decided
        except (ConfigError, ExecutionError):
            raise  # a wrong key or a server that is down is no fault of the rows
        except SystemExit:
            raise
        except BaseException as error:  # a model may raise what it likes
            return self._failed(error, clock), Parcel({})
        accepted = _spread(step.accepted, answered, False)
        goes_on = Parcel({})
        if not step.accepted.all():
            goes_on = Parcel(_chosen(parts, parcels, answered & ~accepted), step.state[~step.accepted])
        result = CallResult(
            predictions=_spread(step.predictions, answered, -1),
            confidences=_spread(step.confidences, answered, np.nan),
            accepted=accepted,
            costs=np.where(answered, self._costs(answers, len(answered)), 0.0),
            started_at=clock.started_at,
            compute_s=clock.elapsed_s,
            policy_s=policy_s,
            device_s=answers.device_s,
            node=self._node,
            failures=answers.failures,
            state_bytes=step.state.shape[1] * step.state.itemsize,
        )
        return result, goes_on

    def decide_last(self, parts: Sequence[Part], *parcels: Parcel) -> CallResult:
        """Answer a call's rows after which nothing comes: all of them stop."""
        return self.decide(parts, *parcels)[0]

    def answer(self, parts: Sequence[Part], *parcels: Parcel) -> tuple[CallResult, Collected | None]:
        """Answer a call's rows, deciding nothing: every row that the model answers is accepted.

        Returns the result, its predictions and confidences empty of meaning, and the model's answers; None for
        a call that failed.
        """
        clock = _Clock()
        try:
            answers = self._asked(gathered(parts, parcels))
        except (ConfigError, ExecutionError):
            raise
        except SystemExit:
            raise
        except BaseException as error:
            return self._failed(error, clock), None
        compute_s = clock.elapsed_s
        if self._gflops is None and answers.costs is None:
            assert self._model is not None
            self._gflops = measured_gflops(self._model, gathered(parts, parcels)) or 0.0
        answered = _answered(answers)
        n = len(answered)
        result = CallResult(
            predictions=np.full(n, -1, dtype=np.int32),
            confidences=np.full(n, np.nan),
            accepted=answered,
            costs=np.zeros(n) if answers.costs is None else answers.costs,
            started_at=clock.started_at,
            compute_s=compute_s,
            policy_s=0.0,
            device_s=answers.device_s,
            node=self._node,
            failures=answers.failures,
        )
        return result, Collected(answers, self._gflops or None)

    def _asked(self, batch: Batch) -> Answers:
        """Ask the model, and hold its answers against the number of choices where rows offer some."""
        assert self._model is not None
        n_choices = choices_in(batch)  # asked before: the model may do with its batch what it likes
        return matched(self._model(batch), n_choices)

    def _failed(self, error: BaseException, clock: _Clock) -> CallResult:
        try:
            said = " ".join(str(error).split())
        except Exception:
            said = "its message cannot be shown"
        reason = said if isinstance(error, CaucError) else f"{type(error).__name__}: {said}"
        return replace(CallResult.broken(clock.started_at, self._node, reason), compute_s=clock.elapsed_s)

    def _costs(self, answers: Answers, n: int) -> Floats:
        """Return each row's cost: the call's own where the policy counts those and the model tells them."""
        assert self._policy is not None
        if self._policy.costs == "per-call" and answers.costs is not None:
            return answers.costs
        return np.full(n, self._policy.stages[self._stage].cost)


# A policy has nothing to decide where a model has answered no row: there is not even an option.
_NOBODY = Step(np.zeros(0, np.int32), np.zeros(0), np.zeros(0, bool), np.zeros((0, 0)), np.zeros((0, 0)))


class _Clock:
    """The time that a call takes on the wall."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._started = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started


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


def gathered(parts: Sequence[Part], parcels: Sequence[Parcel]) -> Batch:
    """Gather the parts' rows, column by column, into arrays that the model may write to."""
    return {
        name: concat_column([_plain(_take(parcels[part.parcel].columns[name], part.places)) for part in parts])
        for name in parcels[parts[0].parcel].columns
    }


def _chosen(parts: Sequence[Part], parcels: Sequence[Parcel], mask: Bools) -> dict[str, Column]:
    """Gather those of a call's rows that a mask (n,) marks, as they travel on."""
    masks = np.split(mask, np.cumsum([len(part) for part in parts])[:-1])
    chosen = [part.where(own) for part, own in zip(parts, masks, strict=True)]
    kept = [part for part in chosen if part is not None]
    columns: dict[str, Column] = {}
    for name in parcels[parts[0].parcel].columns:
        taken = [_take(parcels[part.parcel].columns[name], part.places) for part in kept]
        arrow = all(isinstance(column, pa.Array) for column in taken)
        columns[name] = pa.concat_arrays(taken) if arrow else concat_column([_plain(column) for column in taken])
    return columns


def packed(columns: Batch) -> dict[str, Column]:
    """Return a block's columns as they travel to workers: those of bytes, as images are, in Arrow.

    A worker maps numbers and Arrow from shared memory, but would copy every one of the block's Python objects
    for each call that takes a few of its rows.
    """
    return {name: pa.array(c, pa.large_binary()) if _holds_bytes(c) else c for name, c in columns.items()}


def _holds_bytes(column: npt.NDArray[Any]) -> bool:
    return column.dtype == object and all(value is None or isinstance(value, bytes) for value in column)


def _take(column: Column, places: Ints | slice) -> Column:
    """Copy rows of a column: what is in shared memory cannot be written to, and would be kept there by a view."""
    if isinstance(column, pa.Array):
        return column.take(pa.array(np.arange(*places.indices(len(column))) if isinstance(places, slice) else places))
    return column[places].copy() if isinstance(places, slice) else column[places]


def _plain(column: Column) -> npt.NDArray[Any]:
    if isinstance(column, pa.Array):
        plain: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
        return plain
    return column


def _state(parts: Sequence[Part], parcels: Sequence[Parcel]) -> Floats | None:
    """Gather the parts' states, padded with -inf to the widest."""
    carried = [(parcels[part.parcel].state, part.places) for part in parts]
    return stacked([state[places] for state, places in carried if state is not None])


def stacked(states: Sequence[Floats]) -> Floats | None:
    """Return states in one array, padded with -inf to the widest; None where there are none."""
    if not states:
        return None
    width = max(state.shape[1] for state in states)
    if any(state.shape[1] < width for state in states):
        states = [np.pad(s, ((0, 0), (0, width - s.shape[1])), constant_values=-np.inf) for s in states]
    return np.concatenate(states)
