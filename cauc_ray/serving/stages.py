"""A stage behind Serve: a loaded model that answers rows of parcels, and how the router calls it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from cauc_ray.errors import CaucError, printable
from cauc_ray.execution.stage import Parcel, Part, gathered, packed
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, choices_in, matched
from cauc_ray.models.pool import StageSpec
from cauc_ray.serving.faults import StageError
from cauc_ray.serving.lane import StageAnswer

# Smaller columns travel with the call: to put them into the object store and fetch them takes longer.
SHARED_BYTES = 100_000
# Replicas that compute answer within this, too.
ASK_S = 2.0


class StageServer:
    """A replica of a stage: it loads the model and lets it answer in a thread of its own, one call at a time."""

    def __init__(self, spec: StageSpec, import_paths: Sequence[str]) -> None:
        sys.path[:0] = [path for path in import_paths if path not in sys.path]
        if not spec.resources.num_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a stage that asked for none shall not fill one's memory
        self._spec = spec
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._busy_since: float | None = None
        self._model: Model = self._thread.submit(spec.model.load).result()

    async def facts(self) -> ModelFacts:
        """Return what the model says of itself."""
        return self._model.facts

    async def answer(self, parts: Sequence[Part], parcels: Sequence[Any]) -> StageAnswer:
        """Answer rows of parcels: columns by name, or references to some. A fault of the model is an answer."""
        columns = [await _fetched(parcel) for parcel in parcels]
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._answer, parts, [Parcel(one) for one in columns])

    def check_health(self) -> None:
        """Raise where a call hangs, so that Serve replaces the replica."""
        longest = min(self._spec.call_timeout_s, 2 * self._spec.serving.timeout_s)
        busy_since = self._busy_since
        if busy_since is not None and time.monotonic() - busy_since > longest:
            raise RuntimeError(f"a call has not ended for {longest:g} s")

    def _answer(self, parts: Sequence[Part], parcels: Sequence[Parcel]) -> StageAnswer:
        self._busy_since = started = time.monotonic()
        try:
            answers = self._asked(gathered(parts, parcels))
        except Exception as error:  # a model may raise what it likes
            said = " ".join(str(error).split())
            reason = said if isinstance(error, CaucError) else f"{type(error).__name__}: {said}"
            return StageAnswer(None, time.monotonic() - started, printable(reason))
        finally:
            self._busy_since = None
        return StageAnswer(answers, time.monotonic() - started)

    def _asked(self, batch: Batch) -> Answers:
        n_choices = choices_in(batch)  # asked before: the model may do with its batch what it likes
        return matched(self._model(batch), n_choices)


async def _fetched(parcel: Any) -> Any:
    return await parcel if isinstance(parcel, ray.ObjectRef) else parcel


class ServeClient:
    """Calls a stage through its handle."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle

    async def replicas(self) -> list[ModelFacts] | None:
        """Return what the replicas that take calls say of their models, None where some do not answer."""
        try:
            told = await self._handle.broadcast("facts").results_async(timeout_s=ASK_S, return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        except TimeoutError:
            return None
        return [facts for facts in told if isinstance(facts, ModelFacts)]

    async def answer(self, parts: Sequence[Part], parcels: Sequence[Any]) -> StageAnswer:
        """Have a replica answer. Raises StageError; if the caller is cancelled, so is the call."""
        answer: StageAnswer = await self._awaited(self._handle.answer.remote(list(parts), list(parcels)))
        return answer

    def share(self, columns: Batch) -> Any:
        """Put columns into the object store if they are large; None for what is not."""
        return ray.put(packed(columns)) if _n_bytes(columns) >= SHARED_BYTES else None

    async def _awaited(self, response: Awaitable[Any]) -> Any:
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()  # type: ignore[attr-defined]
            raise
        except BackPressureError as error:
            raise StageError("overloaded", "it has too much to do") from error
        except DeploymentUnavailableError as error:
            raise StageError("down", "it could not be deployed") from error
        except RayError as error:
            raise StageError(*_fault(error)) from error


def _fault(error: RayError) -> tuple[Literal["died", "failed"], str]:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(error, RayActorError) or isinstance(cause, RayActorError):
        return "died", "its replica ended"
    return "failed", printable(f"{type(cause).__name__}: {' '.join(str(cause).split())}")


def _n_bytes(columns: Batch) -> int:
    """Return about how many bytes columns take."""
    return sum(_column_bytes(column) for column in columns.values())


def _column_bytes(column: Any) -> int:
    if column.dtype != object:
        return int(column.nbytes)
    return sum(
        value.nbytes if isinstance(value, np.ndarray) else len(value) if value is not None else 0 for value in column
    )
