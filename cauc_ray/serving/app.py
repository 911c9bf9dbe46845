"""The application that Ray Serve runs: a router, and a deployment for each stage.

The annotation of build_app must be the class itself, not a text: Serve reads it.
"""

import uuid
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingPolicy, RequestRouterConfig

from cauc_ray.cascade.agreement import require_agreement
from cauc_ray.execution.actors import placement
from cauc_ray.execution.user_code import import_paths
from cauc_ray.models.pool import Pool, StageSpec, load_pool, pool_of
from cauc_ray.models.service import Replicas
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.router import ROUTER, Router, stage_deployment
from cauc_ray.serving.scaling import replicas_for
from cauc_ray.serving.service import require_name
from cauc_ray.serving.stages import NamedReplica, StageServer

# The router refuses early by itself; these only keep Serve from refusing before it.
ROUTER_REQUESTS = 10_000


class ServingArgs(BaseModel):
    """What build_app needs.

    pool, policy: the paths of the files, or their content.   name: of the model in URLs, the pool's without one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    pool: str | dict[str, Any]
    policy: str | dict[str, Any]
    name: str | None = None


def build_app(args: ServingArgs) -> Application:
    """Return a pool's cascade as a Serve application: import path `cauc_ray.serving:build_app`.

    Paths are of the node where Serve builds the application, relative ones from its working directory.
    Raises ConfigError or PolicyError in one line where pool, policy and chain do not fit together.
    """
    pool = load_pool(args.pool) if isinstance(args.pool, str) else pool_of(args.pool, Path.cwd())
    policy = Policy.load(args.policy) if isinstance(args.policy, str) else Policy.of(args.policy)
    return application(pool, policy, args.name)


def application(pool: Pool, policy: Policy, name: str | None = None) -> Application:
    """Return a pool's cascade with a policy as a Serve application."""
    model = require_name(pool.name if name is None else name)
    stages = pool.chain(policy.models)
    require_agreement(stages, policy)
    paths = import_paths(stages, [] if pool.serving.tracing is None else [pool.serving.tracing])
    deployments = [_stage(spec).bind(spec, stage, paths) for stage, spec in enumerate(stages)]
    key = uuid.uuid4().hex  # a policy that was set in an earlier life of this application is not this one's
    return _router(pool).bind(model, pool, policy, deployments, key, paths)


def _stage(spec: StageSpec) -> Any:
    serving = spec.serving
    return serve.deployment(
        StageServer,
        name=stage_deployment(spec.name),
        ray_actor_options=placement(spec.resources),
        # The routers' schedulers decide which replica takes a call, and how many; beyond that it only needs room.
        request_router_config=RequestRouterConfig(request_router_class=NamedReplica),
        max_ongoing_requests=1000,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=5.0,
        **_scale(
            spec.replicas,
            policy=AutoscalingPolicy(policy_function=replicas_for),
            upscale_delay_s=serving.upscale_delay_s,
            downscale_delay_s=serving.downscale_delay_s,
        ),
    )


def _router(pool: Pool) -> Any:
    router = pool.serving.router
    return serve.deployment(
        serve.ingress()(Router),
        name=ROUTER,
        ray_actor_options=placement(router.resources),
        max_ongoing_requests=ROUTER_REQUESTS,
        health_check_period_s=1.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=10.0,
        **_scale(router.replicas, target_ongoing_requests=100, upscale_delay_s=10.0, downscale_delay_s=300.0),
    )


def _scale(replicas: Replicas, **autoscaling: Any) -> dict[str, Any]:
    if replicas.min == replicas.max:
        return {"num_replicas": replicas.min}
    window_s = min(10.0, max(2.0, autoscaling["upscale_delay_s"]))
    bounds = {"min_replicas": replicas.min, "max_replicas": replicas.max, "look_back_period_s": window_s}
    return {"autoscaling_config": {**bounds, **autoscaling}}
