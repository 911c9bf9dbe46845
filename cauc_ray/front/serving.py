"""Serve a policy's cascade over HTTP, and change its policy: the Python side of `cauc serve` and `cauc policy set`."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cauc_ray.errors import ConfigError, ExecutionError, PolicyError, printable
from cauc_ray.execution.plan import require_agreement
from cauc_ray.execution.session import ray_session, require_fit
from cauc_ray.front.offline import policy_of
from cauc_ray.models.pool import Pool, load_pool
from cauc_ray.policies.policy import Policy

POLICY_TOKEN = "CAUC_POLICY_TOKEN"
START_DEADLINE_S = 900.0
HTTP_DEADLINE_S = 30.0
# Routers that do not say so within this are not ready.
ASK_S = 5.0
# How long a service that is stopped waits for open requests, and then for Serve's proxy to have sent their answers.
GRACE_S = 4.0
SENT_S = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """A service that runs: where it is, the model's name in URLs, and the id of the policy it began with."""

    url: str
    model: str
    policy_id: str


@contextmanager
def serve(
    pool: str | Path | Pool,
    policy: str | Path | Policy,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    address: str | None = None,
    on_wait: Callable[[str], None] = lambda says: None,
) -> Iterator[Service]:
    """Serve a policy's chain over HTTP for the length of the block, once all stages are ready.

    pool, policy: or their files.   host, port: where to listen; port 0 takes a free one.   name: of the model in
    URLs, the pool's without one.   address: of a Ray cluster; without it the session of this process, or one of its
    own for this.   on_wait: told in a few words what is waited for.
    Raises CaucError where something does not fit, or a stage does not start.
    """
    _require_packages()
    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    policy = policy_of(policy)
    stages = pool.chain(policy.models)
    require_agreement(stages, policy)
    port = _free_port(host, port)
    router = pool.serving.router
    needed = router.resources.num_cpus * router.replicas.max
    needed += sum(stage.resources.num_cpus * stage.replicas.max for stage in stages)
    model = pool.name if name is None else name
    # Read by the session that is started here, if one is: else Serve misses a proxy that died for half a minute.
    with _environment("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "1"), ray_session(address, needed + 1):
        require_fit(stages)
        on_wait("starting Serve")
        with _application(pool, policy, model, host, port, on_wait):
            yield Service(f"http://{f'[{host}]' if ':' in host else host}:{port}", model, policy.id)


@contextmanager
def _application(
    pool: Pool, policy: Policy, model: str, host: str, port: int, on_wait: Callable[[str], None]
) -> Iterator[None]:
    """Run the application on the current Ray session, and end Serve afterwards.

    Raises ExecutionError where Serve is there already: it listens where it was told to first, whatever it is told now.
    """
    from ray import serve
    from ray.serve.config import HTTPOptions
    from ray.serve.exceptions import RayServeException

    from cauc_ray.serving.app import application

    app = application(pool, policy, model)
    if serve.status().proxies:
        raise ExecutionError(
            "Ray Serve runs on this cluster already; add the application to what it serves with serve deploy "
            "(deployments/serve.yaml)"
        )
    serve_logger = logging.getLogger("ray.serve")
    level = serve_logger.level
    try:
        serve_logger.setLevel(logging.ERROR)  # what it tells is told here in fewer words
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


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment for the length of the block, unless it is set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _let_requests_end(app: str) -> None:
    """Have the routers take no more requests, and wait for those that are open, not for long."""
    from ray import serve

    from cauc_ray.serving.router import ROUTER

    deadline = time.monotonic() + GRACE_S
    try:
        handle = serve.get_deployment_handle(ROUTER, app)
        while time.monotonic() < deadline and sum(handle.broadcast("leave").results(timeout_s=GRACE_S)):
            time.sleep(0.05)
        time.sleep(SENT_S)
    except Exception as error:  # a router that has died in any way has no open request
        logger.warning(f"open requests are not waited for: {type(error).__name__}: {error}")


def _wait_until_running(app: str, on_wait: Callable[[str], None], deadline: float) -> None:
    """Wait until all deployments run. Raises ExecutionError with the reason where they do not."""
    from ray import serve

    while time.monotonic() < deadline:
        status = serve.status().applications.get(app)
        if status is not None:
            if status.status == "RUNNING":
                return
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise ExecutionError(f"the service does not start: {_reason(status)}")
            waiting = [name for name, deployment in status.deployments.items() if deployment.status != "HEALTHY"]
            on_wait(f"waiting for {', '.join(waiting) or 'the stages'}")
        time.sleep(0.1)
    raise ExecutionError(f"the service has not started within {START_DEADLINE_S:.0f} s")


def _wait_until_ready(app: str, deadline: float) -> None:
    """Wait until all routers know of the stages' replicas, which they hear of later than Serve itself."""
    from ray import serve

    from cauc_ray.serving.router import ROUTER

    handle = serve.get_deployment_handle(ROUTER, app)
    while time.monotonic() < deadline:
        try:
            if all(handle.broadcast("ready").results(timeout_s=ASK_S)):
                return
        except Exception as error:  # a router that is just replaced fails in any way
            logger.warning(f"a router does not say whether it is ready: {type(error).__name__}: {error}")
        time.sleep(0.1)
    raise ExecutionError(f"the service has not been ready within {START_DEADLINE_S:.0f} s")


def _reason(status: Any) -> str:
    """Return the last line of what Serve says of the first deployment that failed: the error itself."""
    failed = {name: d.message for name, d in status.deployments.items() if d.message and d.status != "HEALTHY"}
    name, said = next(iter(failed.items()), ("", status.message))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
    # Of our own errors the words are enough.
    reason = (errors or lines or ["no reason is known"])[-1]
    reason = re.sub(r"^cauc_ray\.errors\.\w+: ", "", reason)
    if reason.startswith("ActorDiedError"):
        reason = "its process ended while it started"
    return printable(f"{name.replace(':', ' ', 1)}: {reason}" if name else reason)


def set_policy(
    policy: str | Path | Policy | None = None,
    *,
    url: str = "http://127.0.0.1:8000",
    name: str | None = None,
    threshold: float | None = None,
    budget: float | None = None,
) -> dict[str, Any]:
    """Change the policy of a running service, on all of its replicas; no model is loaded again.

    policy: or its file; None keeps the one in force and changes its threshold or budget (mean cost per example).
    url: of the service.   name: of its model, needed where it has several.
    The environment's CAUC_POLICY_TOKEN is sent if there is one. Returns policy_id, previous, version and replicas (None
    where one has not confirmed it: it takes the policy before it answers).
    Raises PolicyError where the service refuses, also where a change at the same time has replaced this one, and
    ExecutionError where it cannot be reached.
    """
    change: dict[str, Any] = {"threshold": threshold, "budget": budget}
    if policy is not None:
        change["policy"] = policy_of(policy).model_dump(mode="json")
    change = {key: value for key, value in change.items() if value is not None}
    if not change:
        raise ConfigError("give a policy, a threshold or a budget")
    url = url.rstrip("/")
    name = name or _only_model(url)
    address = f"{url}/v2/models/{quote(name, safe='')}/policy"
    return _http("PUT", address, change)


def _only_model(url: str) -> str:
    models = _http("GET", f"{url}/v2").get("models")
    if not isinstance(models, list) or len(models) != 1:
        raise ConfigError(f"{url} has no single model; name one")
    return str(models[0])


def _http(method: str, url: str, content: Any = None) -> dict[str, Any]:
    """Make a request of JSON. Raises CaucError in one line."""
    headers: dict[str, Any] = {"Content-Type": "application/json", **_authorization()}
    body = None if content is None else json.dumps(content).encode()
    try:
        request = urllib.request.Request(url, body, headers, method=method)
        if request.type not in ("http", "https"):
            raise ConfigError(f"{url} is no http address")
        with urllib.request.urlopen(request, timeout=HTTP_DEADLINE_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise PolicyError(f"the service refuses ({error.code}): {_said(error)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        said = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise ExecutionError(f"{url} cannot be reached: {printable(said)}") from error
    if not isinstance(answer, dict):
        raise ExecutionError(f"{url} does not answer as a service of cauc-ray does")
    return answer


def _authorization() -> dict[str, bytes]:
    """Return the header that bears the environment's token, if there is one. Raises ConfigError."""
    token = os.fsencode(os.environ.get(POLICY_TOKEN, "")).strip()
    if not token:
        return {}
    if set(token) & set(b"\r\n\0"):
        raise ConfigError(f"{POLICY_TOKEN} holds a line break in its midst, which no header can carry")
    return {"Authorization": b"Bearer " + token}


def _said(error: urllib.error.HTTPError) -> str:
    text = error.read(10_000).decode(errors="replace")
    try:
        return printable(str(json.loads(text)["error"]))
    except (ValueError, KeyError, TypeError):
        return printable(" ".join(text.split()) or error.reason)


def _require_packages() -> None:
    for package in ("fastapi", "uvicorn", "fastapi_offline"):
        if find_spec(package) is None:
            raise ConfigError(f"serving needs {package}; install it with: pip install 'cauc-ray[serve]'")


def _free_port(host: str, port: int) -> int:
    """Return the port if nobody listens there, a free one for 0. Raises ConfigError."""
    if not host:
        raise ConfigError("give a host to listen at: 127.0.0.1 for this machine alone, 0.0.0.0 for all of its networks")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
