"""Ray actors: made, waited for with a deadline, and their faults told in one line."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cauc_ray.errors import CaucError, ExecutionError
from cauc_ray.execution.stage import StageWorker
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec

START_DEADLINE_S = 600.0
# So often a worker whose process died is started again, and a call that it held repeated.
RESTARTS = 3


def make_actor(kind: type, **options: Any) -> Any:
    """Return an actor class of Ray's with the given options."""
    return ray.remote(**options)(kind)


def worker_class(stage: StageSpec) -> Any:
    """Return the actor class of a stage's workers, with the resources that the stage asks for."""
    needs = stage.resources
    return make_actor(
        StageWorker,
        num_cpus=needs.num_cpus,
        num_gpus=needs.num_gpus,
        label_selector=needs.labels or None,
        allow_out_of_order_execution=True,
        max_restarts=RESTARTS,
        max_task_retries=RESTARTS,
    )


def start_workers(names: Sequence[str], handles: Sequence[Any]) -> list[ModelFacts]:
    """Wait until every worker has loaded its model and return what these say of themselves.

    names: each worker's stage. Raises ExecutionError naming the first that has not.
    """
    ready = [handle.load.remote() for handle in handles]
    deadline = time.monotonic() + START_DEADLINE_S
    try:
        return [
            result_of(ref, max(0.1, deadline - time.monotonic()), f"stage {name!r}")
            for name, ref in zip(names, ready, strict=True)
        ]
    except BaseException:
        for handle in handles:
            ray.kill(handle)
        raise


def result_of(ref: Any, timeout_s: float, who: str) -> Any:
    """Return a result, or say in one line why there is none."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        raise ExecutionError(f"{who} has not answered for {timeout_s:.0f} s") from error
    except RayTaskError as error:
        raise _told(error.cause, who) from error
    except RayActorError as error:
        raise ExecutionError(f"{who} died{_last_words(error)}") from error
    except RayError as error:
        raise ExecutionError(f"{who}: {(str(error).splitlines() or [type(error).__name__])[0]}") from error


def _last_words(error: RayActorError) -> str:
    """Return what Ray knows of how a process ended: its exit detail, without the guesses that follow."""
    found = re.search(r"Worker exit detail: (.+?)(?: Some common causes|\n|$)", str(error))
    return f": {found.group(1).rstrip('. ')}" if found else ""


def _told(cause: BaseException, who: str) -> CaucError:
    if isinstance(cause, ExecutionError):
        return cause
    if isinstance(cause, CaucError):
        return type(cause)(f"{who}: {cause}") if who.startswith("stage") else cause
    return ExecutionError(f"{who} failed: {type(cause).__name__}: {' '.join(str(cause).split())}")
