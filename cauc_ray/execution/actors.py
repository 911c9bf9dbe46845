"""Ray actors: a stage's worker, creation, waiting with a deadline, and errors in one line."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import ray
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from cauc_ray.cascade.preparing import PreparingWorker
from cauc_ray.cascade.worker import prepare_process
from cauc_ray.errors import CaucError, ExecutionError, printable
from cauc_ray.execution.session import STAGE
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.resources import Resources
from cauc_ray.policies.policy import Policy

Method = TypeVar("Method", bound=Callable[..., Any])

START_DEADLINE_S = 600.0
# An actor's death has one error; a task's has another for each way in which its process may end.
_DEATHS = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError)


def in_group(name: str) -> Callable[[Method], Method]:
    """Have an actor's method run concurrently with the others; Ray's own decorator has no types."""
    return cast("Callable[[Method], Method]", ray.method(concurrency_group=name))


def worker_class(stage: StageSpec) -> Any:
    """Return the actor class of a stage's workers, with the resources that the stage asks for.

    Ray neither starts it again nor repeats its calls: the controller does, elsewhere, and knows of it.
    """
    return ray.remote(
        **placement(stage.resources),
        max_concurrency=2,  # the model answers one call, the next one is prepared
        allow_out_of_order_execution=True,
        max_restarts=0,
        max_task_retries=0,
        enable_task_events=False,  # the ledger has every call
    )(StageWorker)


def placement(needs: Resources) -> dict[str, Any]:
    """Return Ray's options for what an actor occupies and where it may stand."""
    options = {
        "num_cpus": needs.num_cpus,
        "num_gpus": needs.num_gpus,
        "memory": needs.memory or None,
        "resources": needs.custom or None,
        "label_selector": needs.labels or None,
        "fallback_strategy": [{"label_selector": labels} for labels in needs.fallback] or None,
    }
    return {name: value for name, value in options.items() if value is not None}


def result_of(ref: Any, timeout_s: float, who: str) -> Any:
    """Return a result. Raises CaucError in one line if there is none."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except RayError as error:
        raise explained(error, who, timeout_s) from error


def explained(error: RayError, who: str, timeout_s: float = 0.0) -> CaucError:
    """Return what an error of Ray's means, in one line; a CaucError that was raised over there as it is."""
    if isinstance(error, GetTimeoutError):
        return ExecutionError(f"{who} has not answered for {timeout_s:.0f} s")
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, ExecutionError):
            return cause
        if isinstance(cause, CaucError):
            return type(cause)(f"{who}: {cause}") if who.startswith("stage") else cause
        return ExecutionError(printable(f"{who} failed: {type(cause).__name__}: {' '.join(str(cause).split())}"))
    if isinstance(error, RayActorError):
        return ExecutionError(f"{who} died{_last_words(error)}")
    return ExecutionError(f"{who}: {(str(error).splitlines() or [type(error).__name__])[0]}")


def _last_words(error: RayActorError) -> str:
    """Return what Ray knows of how a process ended: its exit detail, without the guesses that follow."""
    match = re.search(r"Worker exit detail: (.+?)(?: Some common causes|\n|$)", str(error))
    if match:
        return f": {match.group(1).rstrip('. ')}"
    if "creation task" in str(error):  # a traceback follows, whose last line is the error
        return f": {str(error).strip().splitlines()[-1]}"
    return ""


def kind_of(error: RayError) -> Literal["died", "lost", "full", "raised"]:
    """Return what ended a call: its process or node died, its objects are lost, the store is full, or it raised.

    What a call needs may be found missing before it begins or while it runs: the error is the same, or the cause. A
    death as the cause is that of whoever made what the call needs.
    """
    is_task_error = isinstance(error, RayTaskError)
    cause = error.cause if is_task_error else error
    if isinstance(cause, _DEATHS):
        return "lost" if is_task_error else "died"
    if isinstance(cause, ObjectStoreFullError | OutOfDiskError):
        return "full"
    return "lost" if isinstance(cause, ObjectLostError) else "raised"


class StageWorker(PreparingWorker):
    """A stage's worker as an actor.

    Ray has it take two calls at a time. Loading is a call of its own: of what a constructor raises, Ray keeps only the
    text. Bundles are arguments of their own, so that Ray fetches them.
    """

    def __init__(self, spec: StageSpec, stage: int, policy: Policy | None) -> None:
        self._name = f"{STAGE}{spec.name!r}"
        os.environ.setdefault("TQDM_DISABLE", "1")  # nobody watches a replica's own progress bars
        prepare_process(spec)
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else socket.gethostname()
        super().__init__(spec, stage, policy, self._node)

    def __repr__(self) -> str:
        """Return what Ray calls this worker where it passes on what the model prints."""
        return self._name

    def place(self) -> str:
        """Return the node that the worker has been placed on."""
        return self._node
