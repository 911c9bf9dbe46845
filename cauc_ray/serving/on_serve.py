"""The shell of a service on Ray Serve: its ingress deployment, and a deployment for each stage."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.util.metrics import Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cauc_ray.cascade.isolation import reason_of
from cauc_ray.cascade.worker import find_user_code, prepare_process
from cauc_ray.errors import printable
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import Pool, StageSpec
from cauc_ray.protocol.grpc_messages import CALLS
from cauc_ray.serving import IMPORTED_AT, membership
from cauc_ray.serving.http_app import http_app
from cauc_ray.serving.observers.service_metrics import ACTS, Kind, Metric
from cauc_ray.serving.over_grpc import GrpcCalls, ProxyResponse
from cauc_ray.serving.policies_live import InForce
from cauc_ray.serving.replica import Replica
from cauc_ray.serving.request_state import Answer, FactsCall, StageCall, StageError
from cauc_ray.serving.scaling import NEEDED, Needs
from cauc_ray.serving.service import LEASE_S, Service
from cauc_ray.serving.stored import Store, StoreError

ROUTER = "Router"
# Of a replica whose model has not been loaded yet.
LOADING = "its model is being loaded"
# What Ray 2.60 says of an actor that died with its node.
_NODE_DIED = "node has died"
# Of this package's values in Ray's own key-value store.
NAMESPACE = b"cauc_ray"
_METRICS: Mapping[Kind, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
# Replicas that compute answer within this, too.
ASK_S = 2.0
# That a call has begun reaches its router within this, also where the call then ends the process.
SENT_S = 0.02
# A replica that is replaced answers so long that it is, so that calls on their way go elsewhere, and then ends.
LEAVES_S = 0.2
# How often a replica looks whether the other stages have loaded.
LOOK_S = 0.2
# Seconds that a replica which Serve stops goes on for a router of its own version, each time that the router asks; a
# router asks again after the others.
HOLD_S, HOLD_AGAIN_S = 15.0, 5.0

logger = logging.getLogger("ray.serve")

T = TypeVar("T")


class GoneError(Exception):
    """The replica of a call no longer exists, and another replica got the call."""


class StageServer:
    """A replica of a stage as Serve has it.

    It runs once all stages have loaded and a router has started: until then the version before answers.

    Args:
        spec: Settings of the stage.
        stage: Its index.
        version: The version of pool and policy.
        can_wait: Whether the service answers without a model that cannot be loaded; loading is tried until it succeeds.
            A version that replaces another waits for none: that one answers with all of its models.
    """

    def __init__(self, spec: StageSpec, stage: int, version: AppVersion, *, can_wait: bool = False) -> None:
        prepare_process(spec)
        self._spec, self._version = spec, version
        self._imports_s = time.monotonic() - IMPORTED_AT
        self._needs = Needs()
        self._holds: dict[str, asyncio.Event] = {}
        self._runs = False
        self._replica = Replica(spec, stage, serve.get_replica_context().replica_id.unique_id)
        try:
            failed = self._replica.facts.exception()
            if failed is not None and (not can_wait or (version.replaces and not version.has_loaded())):
                raise failed
            version.note_loaded(stage_deployment(spec.name))
            while not version.has_loaded():
                time.sleep(LOOK_S)
            version.note_runs(self._replica.name)
            self._runs = True
        except BaseException:
            self._replica.close()
            raise

    async def facts(self, call: FactsCall) -> tuple[ModelFacts | str, float] | None:
        """Return the model's facts or why there are none yet, and how long the process took to import and load it.

        None for a router of another version.
        """
        self._require_meant(call)
        if call.life != self._version.life:
            return None
        loading = self._replica.facts
        if not loading.done():
            return LOADING, 0.0
        if (failed := loading.exception()) is None:
            return loading.result(), self._imports_s + self._replica.load_s
        self._replica.load()
        return f"its model cannot be loaded: {reason_of(failed)}", 0.0

    def __del__(self) -> None:
        """End, as Serve asks a replica to: close the model. A collector, later, finds it done."""
        self._replica.close()
        if self._runs:
            self._runs = False
            with suppress(StoreError):
                self._version.note_runs(self._replica.name, runs=False)

    async def answer(self, call: StageCall) -> Answer:
        """Answer a call's rows. A fault of the model is a result.

        Returns:
            The result, and the states of deferred rows.
        """
        self._take(call)
        return await self._answer(call)

    async def answer_watched(self, call: StageCall) -> AsyncIterator[Answer | None]:
        """Yield None once the model begins, whatever it then does to the process, and what answer returns."""
        self._take(call)
        loop, begins, sent = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

        def begin() -> None:
            loop.call_soon_threadsafe(begins.set)
            sent.wait(ASK_S)

        answering = asyncio.ensure_future(self._answer(call, begin))
        try:
            await begins.wait()
            yield None
            await asyncio.sleep(SENT_S)
            sent.set()
            yield await answering
        finally:
            sent.set()
            answering.cancel()

    async def hold(self, life: str, router: str, replicas: Collection[str]) -> None:
        """Go on for HOLD_S for a router of this version, also if Serve stops the replica.

        Args:
            life: The router's version.
            router: The router, whose last hold this one replaces.
            replicas: Those that it holds: others go on no longer for it.
        """
        if life != self._version.life:
            return
        if (before := self._holds.pop(router, None)) is not None:
            before.set()
        if self._replica.name in replicas:
            released = self._holds[router] = asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(released.wait(), HOLD_S)

    async def leave(self, replica: str) -> None:
        """End this replica if it is the one meant: it is broken, and Serve starts another."""
        if replica == self._replica.name and not self._replica.leaves:
            self._replica.leaves = True
            logger.error("this replica fails on what others answer; it ends, and another is started")
            asyncio.get_running_loop().call_later(LEAVES_S, os._exit, 1)

    def _require_meant(self, call: StageCall | FactsCall) -> None:
        if call.replica not in ("", self._replica.name):
            raise GoneError(f"replica {call.replica} no longer exists")

    def _take(self, call: StageCall) -> None:
        self._require_meant(call)
        self._needs.note(call.router, call.needed_replicas)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to Serve how many replicas the routers need at the pool's target share of busy time."""
        return {NEEDED: self._needs.total() / self._spec.serving.target_busy}

    def check_health(self) -> None:
        """End the process where a call hangs, so that Serve replaces the replica."""
        if (longest_s := self._replica.hangs()) is not None:
            logger.error(f"a call has not ended for {longest_s:g} s; this replica ends, and another is started")
            os._exit(1)  # to ask it to stop would be to wait for the call

    async def _answer(self, call: StageCall, begin: Callable[[], None] = lambda: None) -> Answer:
        try:
            return await self._replica.answer(call, begin)
        except StageError as error:
            logger.error(f"this replica ends, and another is started: {error.message}")
            os._exit(1)


class ServeClient:
    """Calls replicas of a stage through its handle, of one version only; why and load_s are StageClient's."""

    def __init__(self, handle: DeploymentHandle[Any], life: str) -> None:
        self._handle, self._life = handle, life
        self.why: str | None = None
        self.load_s = 0.0
        self._id = uuid.uuid4().hex
        # What replicas have answered, by name; None for those of other versions.
        self._facts: dict[str, ModelFacts | str | None] = {}
        self._held: frozenset[str] | None = None
        self._held_at = -math.inf
        self._tasks: set[asyncio.Task[None]] = set()

    async def replicas(self) -> dict[str, ModelFacts]:
        """Return the model facts of the replicas that take calls, by name.

        A replica is asked until it has loaded, and again once Serve stops it. One that does not answer is as it was.
        """
        running = membership.replicas_of(self._handle.deployment_name)
        self._facts = {name: facts for name, facts in self._facts.items() if name in running}
        asked = [name for name in running if isinstance(self._facts.get(name, ""), str)]
        asked += [name for name, runs in running.items() if not runs and isinstance(self._facts.get(name), ModelFacts)]
        await asyncio.gather(*(self._ask(name) for name in asked))
        # One whose model is loaded again will soon answer, unless that fails.
        reasons = (facts for facts in self._facts.values() if isinstance(facts, str))
        self.why = next((why for why in reasons if why != LOADING or not self.load_s), None)
        loaded = {name: facts for name, facts in self._facts.items() if isinstance(facts, ModelFacts)}
        # Where Serve stops all of them, another version takes over.
        takes_calls = {name: facts for name, facts in loaded.items() if running[name]} or loaded
        self._hold(frozenset(takes_calls))
        return takes_calls

    async def _ask(self, name: str) -> None:
        """Learn a replica's facts, or that it has ended."""
        response = self._handle.facts.remote(FactsCall(self._life, name))
        try:
            answer = await asyncio.wait_for(response, ASK_S)
        except TimeoutError:
            response.cancel()
        except (RayError, RayServeException):
            self._facts.pop(name, None)
        else:
            self._facts[name], load_s = (None, 0.0) if answer is None else answer
            self.load_s = max(self.load_s, load_s)

    def _hold(self, replicas: frozenset[str]) -> None:
        """Have replicas go on if Serve stops them, long before it does: a busy router may learn of that too late."""
        if replicas != self._held or time.monotonic() - self._held_at > HOLD_AGAIN_S:
            self._held, self._held_at = replicas, time.monotonic()
            self._in_background(self._handle.broadcast("hold", self._life, self._id, replicas), HOLD_S + ASK_S)

    def close(self) -> None:
        """Have the replicas go on no longer if Serve stops them."""
        self._in_background(self._handle.broadcast("hold", self._life, self._id, frozenset()), ASK_S)

    async def answer(self, call: StageCall, on_begin: Callable[[], None] | None = None) -> Answer:
        """Have the call's replica answer. Raises StageError; if the caller is cancelled, so is the call."""
        handle: Any = self._handle
        method = handle.answer if on_begin is None else handle.options(stream=True).answer_watched
        response, answer = method.remote(call), None
        try:
            if on_begin is None:
                answer = await response
            else:
                async for answer in response:
                    if answer is None:
                        on_begin()
        except asyncio.CancelledError:
            response.cancel()
            raise
        except (RayError, RayServeException) as error:
            raise _fault(error) from error
        if answer is None:
            raise StageError("failed", "the replica gave no answer")
        last_answer: Answer = answer
        return last_answer

    def replace(self, replica: str) -> None:
        """Have a replica ended, so that Serve starts another."""
        self._in_background(self._handle.broadcast("leave", replica), ASK_S)

    def _in_background(self, response: Any, timeout_s: float) -> None:
        async def done() -> None:
            with suppress(TimeoutError, DeploymentUnavailableError):
                await response.results_async(timeout_s=timeout_s, return_exceptions=True)

        task = asyncio.ensure_future(done())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fault(error: Exception) -> StageError:
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, GoneError):
        return StageError("gone", str(cause))
    if isinstance(cause, DeploymentUnavailableError):
        return StageError("gone", "it has no replica at this moment")
    if isinstance(cause, RayActorError) and _NODE_DIED in str(cause):
        return StageError("gone", "its node died")
    if isinstance(error, RayActorError) or isinstance(cause, RayActorError | ReplicaUnavailableError):
        return StageError("died", "its replica ended")
    return StageError("failed", printable(f"{type(cause).__name__}: {' '.join(str(cause).split())}"))


class NamedReplica(RequestRouter):  # type: ignore[misc]  # Ray's classes have no types
    """Routes a call to the replica that it names, also while Serve stops it. If that is gone, another reports it."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the replicas that run, and keep those that are being stopped."""
        running = {replica.replica_id for replica in replicas}
        stopped = [replica for replica_id, replica in self.curr_replicas.items() if replica_id not in running]
        for one in [*running, *(replica.replica_id for replica in stopped)]:
            membership.note(one.deployment_id.name, one.unique_id, runs=one in running)
        super().update_replicas([*replicas, *stopped])

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Forget a replica that has ended."""
        membership.forget(replica_id.deployment_id.name, replica_id.unique_id)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas that may take a call."""
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(call, StageCall | FactsCall):
            return [candidate_replicas]
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True  # else what cannot be routed is tried without a pause
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == call.replica]
        return [named or candidate_replicas]


def stage_deployment(name: str) -> str:
    """Return the name of a stage's deployment."""
    return f"stage:{name}"


def ray_metric(name: str, kind: Kind, tags: tuple[str, ...], description: str, boundaries: list[float]) -> Metric:
    """Return a metric that Ray exports."""
    options = {"boundaries": boundaries} if kind == "histogram" else {}
    metric = _METRICS[kind](name, description, tag_keys=tags, **options)
    return Metric(lambda tags: partial(getattr(metric, ACTS[kind]), tags=tags))


class RayStore(Store):
    """Values in Ray's head, which outlive every replica. Each call blocks for one to the head, one after another."""

    def get(self, key: str) -> bytes | None:
        """Return a value."""
        value: bytes | None = _done(_internal_kv_get, key)
        return value

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """Set a value."""
        return not _done(_internal_kv_put, key, value, overwrite=overwrite)

    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        """Delete a value, or all whose keys begin so."""
        _done(_internal_kv_del, key, del_by_prefix=by_prefix)


def _done(call: Callable[..., T], key: str, *args: Any, **options: Any) -> T:
    try:
        return call(key.encode(), *args, **options, namespace=NAMESPACE)
    except (RayError, RuntimeError, ConnectionError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class AppVersion:
    """A version of pool and policy, of one `serve deploy`.

    Attributes:
        life: Its id.
        deployments: Names of its deployments, the router's included.
        replaces: Whether a version before it answers until it has loaded.
    """

    life: str
    deployments: tuple[str, ...]
    replaces: bool

    def note_loaded(self, deployment: str) -> None:
        """Note that a replica of a deployment has loaded. Raises StoreError."""
        RayStore().put(f"loaded:{self.life}:{deployment}", b"1")

    @staticmethod
    def note_runs(replica: str, *, runs: bool = True) -> None:
        """Note that a replica of a stage takes calls, or no longer does. Raises StoreError."""
        if runs:
            RayStore().put(f"runs:{replica}", b"1")
        else:
            RayStore().delete(f"runs:{replica}")

    @staticmethod
    def runs(replica: str) -> bool:
        """Return whether a replica of a stage takes calls: it may wait for other stages. Raises StoreError."""
        return RayStore().get(f"runs:{replica}") is not None

    def has_loaded(self) -> bool:
        """Return whether a replica of each deployment has ever loaded; False where that cannot be known now."""
        try:
            return all(RayStore().get(f"loaded:{self.life}:{deployment}") for deployment in self.deployments)
        except StoreError as error:
            logger.warning(f"it is unknown whether the other stages have loaded: {error}")
            return False


class Router(Service):
    """A replica of the ingress, for one version of pool and policy."""

    def __init__(
        self,
        model: str,
        pool: Pool,
        policies: InForce,
        stages: Sequence[Any],
        version: AppVersion,
    ) -> None:
        # Serve's handlers write what we log to its files.
        logging.getLogger("cauc_ray").parent = logging.getLogger("ray.serve")
        self._app = serve.get_replica_context().app_name
        self._version = version
        self._stages = [ServeClient(handle, version.life) for handle in stages]
        shell: dict[str, Any] = {"store": RayStore(), "new_metric": ray_metric, "name": self._app}
        imports_s = time.monotonic() - IMPORTED_AT
        super().__init__(model, pool, policies, self._stages, **shell, life=version.life, imports_s=imports_s)
        for spec in self.specs:
            find_user_code(spec)
        self.grpc_calls = GrpcCalls(self)
        version.note_loaded(ROUTER)

    def __del__(self) -> None:
        """End, as Serve asks a replica to: release the stages, and write what is left of the log."""
        with suppress(RuntimeError):  # no event loop runs any more
            asyncio.get_running_loop()
            for stage in self._stages:
                stage.close()
        self.close()

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

    async def ask_all(self, what: str, *arguments: Any) -> list[Any]:
        """Call a method of every replica of this deployment, this one included."""
        handle = serve.get_deployment_handle(ROUTER, self._app)
        try:
            answers: list[Any] = await handle.broadcast(what, *arguments).results_async(
                timeout_s=LEASE_S, return_exceptions=True
            )
        except Exception as error:  # a replica that is just ending fails in many ways
            return [error]
        return answers

    async def has_loaded(self) -> bool:
        """Return whether all deployments have loaded once in this life."""
        return await asyncio.to_thread(self._version.has_loaded)


def _call_of(name: str) -> Callable[[Router, bytes, Any], Awaitable[ProxyResponse]]:
    async def call(self: Router, body: bytes, grpc_context: Any) -> ProxyResponse:
        return ProxyResponse(await self.grpc_calls.answer(name, body, grpc_context))

    return call


for _name in CALLS:  # as Serve's proxies call them
    setattr(Router, _name, _call_of(_name))
