"""Serve a policy's cascade over HTTP, and change its policy: the Python side of `cauc serve` and `cauc policy set`."""

from __future__ import annotations

import http.client
import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

from cauc_ray.api.options import Common, OnRay, Options, options_of, takes
from cauc_ray.api.summaries import PolicyInForce
from cauc_ray.display import Sheet, Shown, count_text
from cauc_ray.errors import ConfigError, ExecutionError, OptionError, PolicyError, printable, require_packages
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.pool import Pool, load_pool
from cauc_ray.policies.policy import Policy, policy_of
from cauc_ray.serving.policies_live import PolicyChange
from cauc_ray.serving.service import require_name, require_servable

POLICY_TOKEN = "CAUC_POLICY_TOKEN"
HTTP_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, repr=False)
class Service(Shown):
    """A service that runs, until stop() is called or the block of a `with` ends.

    Attributes:
        url: Its address.
        grpc: Its address for gRPC, HOST:PORT, None for nowhere.
        model: Its name in URLs.
        policy_id: Id of the policy it began with.
        require_alive: Raises ExecutionError if the service has ended by itself.
    """

    url: str
    grpc: str | None
    model: str
    policy_id: str
    require_alive: Callable[[], None] = field(repr=False, compare=False)
    _running: ExitStack = field(repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        """Return what `cauc serve --json` prints."""
        return {"url": self.url, "grpc": self.grpc, "model": self.model, "policy_id": self.policy_id}

    def sheet(self) -> Sheet:
        """Return the addresses of the service."""
        title = f"{self.model} with policy {self.policy_id} is served at {self.url}/v2/models/{self.model}"
        grpc = [] if self.grpc is None else [f"gRPC is answered at {self.grpc}"]
        return Sheet(title, [*grpc, f"description of the addresses: {self.url}/openapi.json"])

    def stop(self) -> None:
        """End the service, and the Ray session that was started for it; requests in flight are answered first."""
        self._running.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *error: object) -> bool | None:
        return self._running.__exit__(*error)  # type: ignore[arg-type]


class ServeOptions(Options):
    """Options of a service."""

    def require_agreement(self) -> None:
        """Raise ConfigError for a local service on a cluster."""
        if self.local and self.address is not None:
            raise OptionError("a local service runs without Ray: give either {local} or {address}")


@takes(ServeOptions)
def serve(
    pool: str | AnyPath | Pool,
    policy: str | AnyPath | Policy,
    *,
    host: Common[str] = "127.0.0.1",
    port: Common[int] = 8000,
    local: Common[bool] = False,
    grpc_port: int | None = None,
    name: str | None = None,
    address: OnRay[str | None] = None,
    on_wait: Callable[[str], None] = lambda state: None,
) -> Service:
    """Serve a policy's chain over HTTP, and return once all stages are ready.

    For the length of a block with `with serve(…) as service:`, in a notebook until service.stop().

    Args:
        pool: A pool file. In Python also a Pool.
        policy: A policy file. In Python also a Policy.
        host: Address to listen on; 0.0.0.0 for all networks.
        port: Port to listen on; 0 takes a free one.
        local: Serve from this process, without Ray.
        grpc_port: Port to answer gRPC on as well; 0 takes a free one (default: none).
        name: Name of the model in URLs (default: the pool's).
        address: Address of a Ray cluster (default: RAY_ADDRESS, else a session of this machine).
        on_wait: Called with a few words on what is waited for.

    Returns:
        The service, with its url and model.

    Raises:
        CaucError: where something does not fit, or a stage does not start.
    """
    options: ServeOptions = options_of(serve).of(locals())
    port, grpc_port = options.port, options.grpc_port
    require_packages("serving", "serve", "starlette", "uvicorn", "prometheus_client")
    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    source, policy = policy, policy_of(policy)
    require_servable(pool, policy, local=local or _runs_here(address))
    if pool.serving.policy_every_s is not None and (not local or isinstance(source, Policy)):
        raise ConfigError("serving.policy_every_s is for a local service with a policy file; start it with --local")
    port = _free_port(host, port)
    if grpc_port is not None:
        require_packages("gRPC", "grpc", "grpc")
        if not local and host not in ("0.0.0.0", "::"):
            raise ConfigError(
                f"on Ray gRPC is answered on all networks, whatever the host: give host 0.0.0.0, not {host}"
            )
        grpc_port = _free_port(host, grpc_port)
    model = require_name(pool.name if name is None else name)
    on_wait(f"starting {count_text(len(policy.stages), 'stage')} …")
    if local:
        from cauc_ray.serving.local import local_service  # Ray takes seconds to import, and some have none

        running = local_service(pool, policy, model, host, port, grpc_port, source)
    else:
        from cauc_ray.serving.app import serve_service

        running = serve_service(pool, policy, model, host, port, grpc_port, address, on_wait)
    with ExitStack() as stack:
        require_alive = stack.enter_context(running)
        at = f"[{host}]" if ":" in host else host
        grpc = None if grpc_port is None else f"{at}:{grpc_port}"
        if os.environ.get("CAUC_TOKEN", "").strip() and not local:
            _require_closed(f"http://{at}:{port}/v2/models/{quote(model)}/infer")
        return Service(f"http://{at}:{port}", grpc, model, policy.id, require_alive, stack.pop_all())


def set_policy(
    policy: str | AnyPath | Policy | None = None,
    *,
    url: Common[str] = "http://127.0.0.1:8000",
    name: Common[str | None] = None,
    threshold: Common[float | None] = None,
    budget: Common[float | None] = None,
    share: Common[float | None] = None,
    promote: Common[bool] = False,
    rollback: Common[bool] = False,
) -> PolicyInForce:
    """Change the policies of a running service, on all of its replicas; no model is loaded again.

    Sends the environment's CAUC_POLICY_TOKEN if there is one.

    Args:
        policy: A policy file (default: the policy in force, whose threshold or budget changes). In Python also a
            Policy.
        url: Address of the service.
        name: Name of the model (default: the service's only one).
        threshold: A threshold to use as it is.
        budget: Mean cost per example, looked up on the policy's curve.
        share: Share of the requests that the policy gets as the candidate. Without a policy, threshold and budget:
            another share for the candidate, which 0 ends.
        promote: Give the candidate all requests.
        rollback: End the candidate.

    Returns:
        policy_id, previous, version, shares (by policy id) and replicas, which is None where one has not confirmed the
        change: that one takes the policies before it answers.

    Raises:
        CaucError: PolicyError where the service refuses, also where a change at the same time has replaced this one;
            ExecutionError where it cannot be reached.
    """
    options_of(set_policy).of(locals())
    content = None if policy is None else policy_of(policy).packed()
    numbers = {"threshold": threshold, "budget": budget, "share": share}
    options = {"policy": content, **numbers, "promote": promote or None, "rollback": rollback or None}
    change = PolicyChange.of({key: value for key, value in options.items() if value is not None})
    url = _require_http(url.rstrip("/"))
    name = name or _only_model(url)
    address = f"{url}/v2/models/{quote(name, safe='')}/policy"
    return PolicyInForce(_http("PUT", address, change.model_dump(exclude_unset=True)))


def _only_model(url: str) -> str:
    models = _http("GET", f"{url}/v2").get("models")
    if not isinstance(models, list) or len(models) != 1:
        raise ConfigError(f"{url} has no single model; name one")
    return str(models[0])


def _require_http(url: str) -> str:
    """Return an address of HTTP. Raises ConfigError for another one."""
    with suppress(ValueError):
        if urlsplit(url).scheme in ("http", "https"):
            return url
    raise ConfigError(f"{url} is not an http address, such as http://127.0.0.1:8000")


def _http(method: str, url: str, content: Any = None) -> dict[str, Any]:
    """Make a request of JSON. Raises CaucError in one line."""
    headers: dict[str, Any] = {"Content-Type": "application/json", **_authorization()}
    body = None if content is None else json.dumps(content).encode()
    try:
        request = urllib.request.Request(url, body, headers, method=method)
        with urllib.request.urlopen(request, timeout=HTTP_DEADLINE_S) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise PolicyError(f"the service refuses ({error.code}): {_reason(error)}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise ExecutionError(f"{url} cannot be reached: {printable(text)}") from error
    if not isinstance(answer, dict):
        raise ExecutionError(f"{url} does not answer as a service of cauc-ray does")
    return answer


def _require_closed(url: str) -> None:
    """Raise ConfigError where a service takes requests for inference without a token, ExecutionError if it is gone."""
    try:
        urllib.request.urlopen(url, b"{}", timeout=HTTP_DEADLINE_S).close()
    except urllib.error.HTTPError as error:
        if error.code == 401:
            return
    except OSError as error:
        raise ExecutionError(f"{url} cannot be reached: {printable(str(error))}") from error
    raise ConfigError(
        "CAUC_TOKEN is set here, but not on the nodes, where routers would answer anybody: set it before Ray starts "
        "there, or unset it here"
    )


def _authorization() -> dict[str, bytes]:
    """Return the header that bears the environment's token, if there is one. Raises ConfigError."""
    token = os.fsencode(os.environ.get(POLICY_TOKEN, "")).strip()
    if not token:
        return {}
    if set(token) & set(b"\r\n\0"):
        raise ConfigError(f"{POLICY_TOKEN} contains a line break, which no header can carry")
    return {"Authorization": b"Bearer " + token}


def _reason(error: urllib.error.HTTPError) -> str:
    text = error.read(10_000).decode(errors="replace")
    try:
        return printable(str(json.loads(text)["error"]))
    except (ValueError, KeyError, TypeError):
        return printable(" ".join(text.split()) or error.reason)


def _runs_here(address: str | None) -> bool:
    from cauc_ray.execution.session import runs_here  # Ray takes seconds to import, and some have none

    return runs_here(address)


def _free_port(host: str, port: int) -> int:
    """Return the port if nobody listens there, a free one for 0. Raises ConfigError."""
    if not host.isprintable() or not host.strip():
        raise ConfigError(
            f"host {host!r} is not an address: give 127.0.0.1 for this machine alone, 0.0.0.0 for all of its networks"
        )
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except (OSError, OverflowError, TypeError) as error:
        raise ConfigError(f"cannot listen at {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
