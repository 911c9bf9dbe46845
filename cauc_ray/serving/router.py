"""The shell of a service on Ray Serve: its ingress deployment."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.serve.exceptions import RayServeException
from ray.util.metrics import Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cauc_ray.models.pool import Pool
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.http_app import http_app
from cauc_ray.serving.metrics import ACTS, Kind, Note
from cauc_ray.serving.service import LEASE_S, Service
from cauc_ray.serving.stages import ServeClient
from cauc_ray.serving.store import Store, StoreError

ROUTER = "Router"
# Of this package's values in Ray's own key-value store.
NAMESPACE = b"cauc_ray"
# If Serve does not report within this that the stages have loaded, they count as not loaded.
READY_S = 5.0
_METRICS: Mapping[Kind, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}

logger = logging.getLogger(__name__)

T = TypeVar("T")


def stage_deployment(name: str) -> str:
    """Return the name of a stage's deployment."""
    return f"stage:{name}"


def ray_metric(
    name: str, kind: Kind, tags: tuple[str, ...], says: str, boundaries: list[float]
) -> Callable[[Mapping[str, str]], Note]:
    """Return a metric that Ray exports."""
    own = {"boundaries": boundaries} if kind == "histogram" else {}
    metric = _METRICS[kind](name, says, tag_keys=tags, **own)
    return lambda tags: partial(getattr(metric, ACTS[kind]), tags=tags)


class RayStore(Store):
    """Values in Ray's head, which outlive every replica. Each call blocks for one to the head, one after another."""

    def _get(self, key: str) -> bytes | None:
        value: bytes | None = _done(_internal_kv_get, key)
        return value

    def _put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        return not _done(_internal_kv_put, key, value, overwrite=overwrite)

    def _delete(self, key: str, *, by_prefix: bool) -> None:
        _done(_internal_kv_del, key, del_by_prefix=by_prefix)


def _done(call: Callable[..., T], key: str, *args: Any, **options: Any) -> T:
    try:
        return call(key.encode(), *args, **options, namespace=NAMESPACE)
    except (RayError, RuntimeError, ConnectionError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error


class Router(Service):
    """A replica of the ingress.   key: of this deployment's life."""

    def __init__(
        self,
        model: str,
        pool: Pool,
        policy: Policy,
        stages: Sequence[Any],
        key: str,
        import_paths: Sequence[str],
    ) -> None:
        sys.path[:0] = [path for path in import_paths if path not in sys.path]
        # Serve's handlers write what we log to its files.
        logging.getLogger("cauc_ray").parent = logging.getLogger("ray.serve")
        self._app = serve.get_replica_context().app_name
        clients = [ServeClient(handle) for handle in stages]
        super().__init__(model, pool, policy, clients, key=key, name=self._app)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the HTTP application."""
        app = http_app(self)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            async def received() -> Message:
                try:
                    return await receive()
                except RayError:  # Serve's proxy has heard first that the client is gone
                    return {"type": "http.disconnect"}

            await app(scope, received, send)

        return answer

    def store(self, prefix: str) -> RayStore:
        """Return Ray's own store."""
        return RayStore(prefix)

    new_metric = staticmethod(ray_metric)

    async def ask_all(self, what: str) -> list[Any]:
        """Call a method of every replica of this deployment, this one included."""
        handle = serve.get_deployment_handle(ROUTER, self._app)
        try:
            answers: list[Any] = await handle.broadcast(what).results_async(timeout_s=LEASE_S, return_exceptions=True)
        except Exception as error:  # a replica that is just ending fails in many ways
            return [error]
        return answers

    async def n_loaded(self) -> list[int] | None:
        """Ask Serve, which gives all replicas of this deployment the same answer."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(self._running_replicas), READY_S)
        except (TimeoutError, RayError, RayServeException) as error:
            logger.warning(f"Serve does not report whether the stages have loaded: {type(error).__name__}: {error}")
            return None

    def _running_replicas(self) -> list[int]:
        application = serve.status().applications.get(self._app)
        deployments = application.deployments if application is not None else {}
        own = [deployments.get(stage_deployment(spec.name)) for spec in self.specs]
        return [0 if one is None else one.replica_states.get("RUNNING", 0) for one in own]
