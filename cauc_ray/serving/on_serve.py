"""Run a service on the current Ray session, on Ray Serve, for the length of a block."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from cauc_ray.errors import ExecutionError, printable
from cauc_ray.execution.session import ray_session, require_fit
from cauc_ray.models.pool import Pool
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.app import application
from cauc_ray.serving.router import ROUTER
from cauc_ray.serving.service import environment

PROXY_PERIOD = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"
START_DEADLINE_S = 900.0
# Routers that do not report within this are not ready.
ASK_S = 5.0
# How long a service that is stopped waits for open requests, and then for Serve's proxy to have sent their answers.
GRACE_S = 4.0
SENT_S = 0.1

logger = logging.getLogger(__name__)


@contextmanager
def serve_service(
    pool: Pool, policy: Policy, model: str, host: str, port: int, address: str | None, on_wait: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Serve a policy's chain at a port for the length of the block, once all stages are ready.

    Returns what does nothing: whatever of it ends, Serve starts again.

    address: of a Ray cluster; without it the session of this process, or one of its own for this.
    """
    stages, router = pool.chain(policy.models), pool.serving.router
    needed = router.resources.num_cpus * router.replicas.max
    needed += sum(stage.resources.num_cpus * stage.replicas.max for stage in stages)
    # Read by the session that is started here, if one is: else Serve misses a proxy that died for half a minute.
    with environment(PROXY_PERIOD, os.environ.get(PROXY_PERIOD, "1")), ray_session(address, needed + 1):
        require_fit(stages)
        on_wait("starting Serve")
        with _application(pool, policy, model, host, port, on_wait):
            yield lambda: None


@contextmanager
def _application(
    pool: Pool, policy: Policy, model: str, host: str, port: int, on_wait: Callable[[str], None]
) -> Iterator[None]:
    """Run the application on the current Ray session, and end Serve afterwards.

    Raises ExecutionError where Serve is there already: it keeps listening at its first address.
    """
    app = application(pool, policy, model)
    if serve.status().proxies:
        raise ExecutionError(
            "Ray Serve already runs on this cluster; deploy the application there with serve deploy "
            "(deployments/serve.yaml)"
        )
    serve_logger = logging.getLogger("ray.serve")
    level = serve_logger.level
    try:
        serve_logger.setLevel(logging.ERROR)  # this module reports the same in fewer words
        serve.start(http_options=HTTPOptions(host=host, port=port))
        serve.run_many(
            [serve.RunTarget(app, name=model, route_prefix="/", logging_config=None)],
            wait_for_applications_running=False,
        )
        deadline = time.monotonic() + START_DEADLINE_S
        _wait_until_running(model, on_wait, deadline)
        _wait_until_ready(model, deadline)
        try:
            yield
        finally:
            _let_requests_end(model)
    except RayServeException as error:
        raise ExecutionError(printable(f"Serve: {' '.join(str(error).split())}")) from error
    finally:
        serve.shutdown()
        serve_logger.setLevel(level)


def _let_requests_end(app: str) -> None:
    """Have the routers take no more requests, and wait for those that are open, not for long."""
    deadline = time.monotonic() + GRACE_S
    try:
        handle = serve.get_deployment_handle(ROUTER, app)
        while time.monotonic() < deadline and sum(handle.broadcast("leave").results(timeout_s=GRACE_S)):
            time.sleep(0.05)
        time.sleep(SENT_S)
    except Exception as error:  # a router that has died in any way has no open request
        logger.warning(f"not waiting for open requests: {type(error).__name__}: {error}")


def _wait_until_running(app: str, on_wait: Callable[[str], None], deadline: float) -> None:
    """Wait until all deployments run. Raises ExecutionError with the reason where they do not."""
    while time.monotonic() < deadline:
        status = serve.status().applications.get(app)
        if status is not None:
            if status.status == "RUNNING":
                return
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY") and not _recovers(status):
                raise ExecutionError(f"the service does not start: {_reason(status)}")
            waiting = [name for name, deployment in status.deployments.items() if deployment.status != "HEALTHY"]
            on_wait(f"waiting for {', '.join(waiting) or 'the stages'}")
        time.sleep(0.1)
    raise ExecutionError(f"the service has not started within {START_DEADLINE_S:.0f} s")


def _wait_until_ready(app: str, deadline: float) -> None:
    """Wait until all routers know of the stages' replicas, which they hear of later than Serve itself."""
    handle = serve.get_deployment_handle(ROUTER, app)
    while time.monotonic() < deadline:
        try:
            if all(handle.broadcast("ready").results(timeout_s=ASK_S)):
                return
        except Exception as error:  # a router that is just replaced fails in any way
            logger.warning(f"cannot check whether a router is ready: {type(error).__name__}: {error}")
        time.sleep(0.1)
    raise ExecutionError(f"the service was not ready within {START_DEADLINE_S:.0f} s")


def _recovers(status: Any) -> bool:
    """Return whether all that has failed are replicas which ran before: Serve starts others in their place."""
    failed = [one for one in status.deployments.values() if one.status in ("DEPLOY_FAILED", "UNHEALTHY")]
    return bool(failed) and all(one.status_trigger == "HEALTH_CHECK_FAILED" for one in failed)


def _reason(status: Any) -> str:
    """Return the last line of Serve's message on the first failed deployment, which is the error."""
    failed = {name: d.message for name, d in status.deployments.items() if d.message and d.status != "HEALTHY"}
    name, message = next(iter(failed.items()), ("", status.message))
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
    # Our own errors need no type.
    reason = (errors or lines or ["no reason is known"])[-1]
    reason = re.sub(r"^cauc_ray\.errors\.\w+: ", "", reason)
    if reason.startswith("ActorDiedError"):
        reason = "its process ended while it started"
    return printable(f"{name.replace(':', ' ', 1)}: {reason}" if name else reason)
