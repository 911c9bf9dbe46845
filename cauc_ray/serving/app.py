"""The application that Ray Serve runs, a router and a deployment for each stage; and to run it for a while.

The annotation of build_app must be the class itself, not a text: Serve reads it.
"""

import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingPolicy, HTTPOptions, RequestRouterConfig, gRPCOptions
from ray.serve.exceptions import RayServeException

from cauc_ray.errors import ConfigError, ExecutionError, printable
from cauc_ray.execution.actors import placement
from cauc_ray.execution.cluster import require_fit, require_room
from cauc_ray.execution.session import ray_session
from cauc_ray.files.documents import Settings
from cauc_ray.models.pool import Pool, Replicas, StageSpec, load_pool, pool_of
from cauc_ray.models.resources import Resources
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.on_serve import ROUTER, AppVersion, NamedReplica, Router, StageServer, stage_deployment
from cauc_ray.serving.scaling import replicas_for
from cauc_ray.serving.service import environment, policies_at_start, require_name, require_servable

PROXY_PERIOD = "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S"
START_DEADLINE_S = 900.0
# How long a service that is stopped waits for open requests, and then for Serve's proxy to have sent their answers.
GRACE_S = 4.0
SENT_S = 0.1
# Has Serve's proxies answer gRPC: what `grpc_options.grpc_servicer_functions` names.
ADD_TO_PROXY = "cauc_ray.serving.over_grpc:add_to_proxy"
# Each line of a replica's log is JSON; that of a request has its fields under `cauc`.
LOGGING = {"encoding": "JSON"}
# Within this, requests come to the routers of a new version; then those that are open have their time to end; and a
# replica has this for its own end.
UPDATE_S, END_S = 60.0, 5.0
# The router refuses early by itself; these only keep Serve from refusing before it.
ROUTER_REQUESTS = 10_000

logger = logging.getLogger(__name__)


class ServingArgs(Settings):
    """Arguments of build_app.

    Attributes:
        pool: Path of the pool file, or its content.
        policy: Path of the policy file, or its content.
        name: Name of the model in URLs; by default the pool's.
        surge: Whether a changed application has all of its new replicas before the old ones stop; false where nodes
            have no room for both: requests fail meanwhile.
    """

    pool: str | dict[str, Any]
    policy: str | dict[str, Any]
    name: str | None = None
    surge: bool = True


def build_app(args: ServingArgs) -> Application:
    """Return a pool's cascade as a Serve application: import path `cauc_ray.serving:build_app`.

    Paths are of the node where Serve builds the application, relative ones from its working directory.
    Raises ConfigError, PolicyError or ExecutionError in one line where `cauc serve` would: pool, policy and chain do
    not fit together, or the stages do not fit on the cluster; also where its new replicas do not fit next to those that
    they replace. What ran before goes on.
    """
    pool = load_pool(args.pool) if isinstance(args.pool, str) else pool_of(args.pool, Path.cwd())
    policy = Policy.load(args.policy) if isinstance(args.policy, str) else Policy.of(args.policy)
    return application(pool, policy, args.name, surge=args.surge)


def application(pool: Pool, policy: Policy, name: str | None = None, *, surge: bool = True) -> Application:
    """Return a pool's cascade with a policy as a Serve application."""
    model = require_name(pool.name if name is None else name)
    stages = require_servable(pool, policy, local=False)
    if pool.serving.policy_every_s is not None:
        raise ConfigError("serving.policy_every_s is for a local service; start it with --local")
    running = _running() if ray.is_initialized() else Counter[str]()
    if ray.is_initialized():
        require_fit(stages)
        if surge and running[ROUTER]:
            _require_room(pool, stages, running)
    degrades = pool.on_failure == "degrade"
    # A policy that was set in an earlier version of this application is not this one's.
    names = (ROUTER, *(stage_deployment(spec.name) for spec in stages))
    version = AppVersion(uuid.uuid4().hex, names, replaces=surge and running[ROUTER] > 0)
    router_stops_s = max(spec.serving.timeout_s for spec in stages) + END_S
    # Without a surge, replicas of the next version have room only once these have ended.
    stage_stops_s = router_stops_s + (UPDATE_S if surge else 0.0)
    deployments = [
        _stage(spec, surge, stage_stops_s).bind(spec, stage, version, can_wait=degrades and stage > 0)
        for stage, spec in enumerate(stages)
    ]
    router = _router(pool, surge, router_stops_s)
    return router.bind(model, pool, policies_at_start(pool, policy), deployments, version)


def _running() -> Counter[str]:
    """Return the number of replicas of each deployment of such an application that takes requests.

    Replicas of a version that waits for some of its stages, perhaps in vain, end when the next one is deployed.
    """
    # By their actors' names, SERVE_REPLICA::app#deployment#id: Serve's status lacks them while it builds a new version.
    names = [actor["name"].split("#") for actor in ray.util.list_named_actors(all_namespaces=True)]
    replicas = [parts[1:] for parts in names if len(parts) == 3]
    return Counter(deployment for deployment, name in replicas if deployment == ROUTER or AppVersion.runs(name))


def _require_room(pool: Pool, stages: Sequence[StageSpec], running: Counter[str]) -> None:
    """Raise ExecutionError where an application that runs leaves no room for as many new replicas.

    Its routers would lose their stages to the new ones, and no new router could start.
    """

    def asked(replicas: Replicas, deployment: str) -> int:
        return min(max(replicas.min, running[deployment]), replicas.max)

    router = pool.serving.router
    needs = [("the router", router.resources, asked(router.replicas, ROUTER))]
    for spec in stages:
        needs.append((f"stage {spec.name!r}", spec.resources, asked(spec.replicas, stage_deployment(spec.name))))
    require_room(needs, "free some, lower its resources, add nodes, or set surge: false (old replicas stop first)")


def _stage(spec: StageSpec, surge: bool, stops_s: float) -> Any:
    scale = _scale(
        spec.replicas,
        policy=AutoscalingPolicy(policy_function=replicas_for),
        upscale_delay_s=spec.serving.upscale_delay_s,
        downscale_delay_s=spec.serving.downscale_delay_s,
    )
    return _deployment(
        StageServer,
        stage_deployment(spec.name),
        spec.resources,
        surge,
        # The routers' schedulers decide which replica takes a call, and how many; beyond that it only needs room.
        request_router_config=RequestRouterConfig(request_router_class=NamedReplica),
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=stops_s,
        **scale,
    )


def _router(pool: Pool, surge: bool, stops_s: float) -> Any:
    router = pool.serving.router
    scale = _scale(router.replicas, target_ongoing_requests=100, upscale_delay_s=10.0, downscale_delay_s=300.0)
    options = {"max_ongoing_requests": ROUTER_REQUESTS, "graceful_shutdown_timeout_s": stops_s, **scale}
    return _deployment(serve.ingress()(Router), ROUTER, router.resources, surge, **options)


def _deployment(kind: type, name: str, needs: Resources, surge: bool, **options: Any) -> Any:
    return serve.deployment(
        kind,
        name=name,
        ray_actor_options=placement(needs),
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        max_surge_percent=100 if surge else 0,
        **options,
    )


def _scale(replicas: Replicas, **autoscaling: Any) -> dict[str, Any]:
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.min}
    window_s = min(10.0, max(2.0, autoscaling["upscale_delay_s"]))
    bounds = {"min_replicas": replicas.min, "max_replicas": replicas.max, "look_back_period_s": window_s}
    return {"autoscaling_config": {**bounds, **autoscaling}}


@contextmanager
def serve_service(
    pool: Pool,
    policy: Policy,
    model: str,
    host: str,
    port: int,
    grpc_port: int | None,
    address: str | None,
    on_wait: Callable[[str], None],
) -> Iterator[Callable[[], None]]:
    """Serve a policy's chain at a port for the length of the block, once all stages are ready; end Serve afterwards.

    Args:
        pool: The models.
        policy: The policy to serve.
        model: Name of the model in URLs.
        host: Address to listen at.
        port: Port of HTTP.
        grpc_port: Port of gRPC, None for no gRPC.
        address: Address of a Ray cluster, None for this process's session or a new one.
        on_wait: Takes a line on what is waited for.

    Yields:
        A function that does nothing: Serve restarts any part of the service that ends.

    Raises:
        ExecutionError: The service does not start, or Serve already runs, which keeps listening at its first address.
    """
    stages, router = pool.chain(policy.models), pool.serving.router
    needed = router.resources.num_cpus * router.replicas.max
    needed += sum(stage.resources.num_cpus * stage.replicas.max for stage in stages)
    serve_logger = logging.getLogger("ray.serve")
    # Read by the session that is started here, if one is: else Serve misses a proxy that died for half a minute.
    with environment(PROXY_PERIOD, os.environ.get(PROXY_PERIOD, "1")), ray_session(address, needed + 1):
        on_wait("starting Serve")
        app = application(pool, policy, model)
        if serve.status().proxies:
            raise ConfigError(
                "Ray Serve already runs on this cluster; deploy the application there with serve deploy "
                "(deployments/serve.yaml)"
            )
        level = serve_logger.level
        try:
            serve_logger.setLevel(logging.ERROR)  # this module reports the same in fewer words
            http = HTTPOptions(host=host, port=port, keep_alive_timeout_s=round(pool.serving.keep_alive_s))
            serve.start(http_options=http, grpc_options=_grpc_options(grpc_port))
            target = serve.RunTarget(app, name=model, route_prefix="/", logging_config=LOGGING)
            serve.run_many([target], wait_for_applications_running=False)
            _wait_until_ready(model, on_wait)
            try:
                yield lambda: None
            finally:
                _let_requests_end(model)
        except RayServeException as error:
            raise ExecutionError(printable(f"Serve: {' '.join(str(error).split())}")) from error
        finally:
            serve.shutdown()
            serve_logger.setLevel(level)


def _grpc_options(port: int | None) -> gRPCOptions | None:
    if port is None:
        return None
    # Reflection finds no messages that are in a descriptor pool of their own.
    return gRPCOptions(port=port, grpc_servicer_functions=[ADD_TO_PROXY], enable_reflection=False)


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


def _wait_until_ready(app: str, on_wait: Callable[[str], None]) -> None:
    """Wait until all deployments run. Raises ExecutionError with the reason where they do not."""
    deadline = time.monotonic() + START_DEADLINE_S
    while time.monotonic() < deadline:
        status = serve.status().applications.get(app)
        if status is not None and status.status == "RUNNING":
            return  # a router runs once it knows of the stages' replicas
        if status is not None:
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY") and not _recovers(status):
                raise ExecutionError(f"the service does not start: {_reason(status)}")
            waiting = [name for name, deployment in status.deployments.items() if deployment.status != "HEALTHY"]
            on_wait(f"waiting for {', '.join(waiting) or 'the stages'}")
        time.sleep(0.1)
    raise ExecutionError(f"the service has not started within {START_DEADLINE_S:.0f} s")


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
