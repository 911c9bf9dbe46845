"""The shell of a service without Ray, a process and one for each replica: for edge boxes, development and tests."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cauc_ray.cascade.isolation import reason_of
from cauc_ray.errors import CaucError, ExecutionError
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import Pool, StageSpec
from cauc_ray.policies.policy import Policy, policy_of
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.connections import Connection
from cauc_ray.serving.http_app import Tokens, http_app
from cauc_ray.serving.observers.service_metrics import ACTS, Kind, Metric
from cauc_ray.serving.policies_live import InForce, PolicyChange
from cauc_ray.serving.replica_process import ReplicaProcess
from cauc_ray.serving.request_state import Answer, StageCall, StageError
from cauc_ray.serving.service import Service, policies_at_start, repeat
from cauc_ray.serving.stored import MemoryStore

# Seconds that a stopped service waits for open requests, and then for their answers to be sent.
GRACE_S, SENT_S = 7.0, 1
LOAD_DEADLINE_S = 900.0
# A pool that degrades starts without its later stages where they have not loaded within this.
LATER_STAGES_S = 2.0
_METRICS: Mapping[Kind, Any] = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}

logger = logging.getLogger(__name__)


class LocalClient:
    """Calls a stage's replicas, which are processes; why and load_s are StageClient's."""

    def __init__(self, spec: StageSpec, stage: int) -> None:
        self._spec, self._stage = spec, stage
        self._n_started = 0
        self.why: str | None = "its model is being loaded"
        self.load_s = 0.0
        self._replicas = [self._started() for _ in range(spec.replicas.min)]

    def load(self, timeout_s: float) -> str | None:
        """Wait until all replicas have loaded; return why one has not, None where all have."""
        try:
            failed = next(filter(None, (replica.facts.exception(timeout_s) for replica in self._replicas)), None)
        except TimeoutError:
            return f"it has not loaded within {timeout_s:g} s"
        return None if failed is None else reason_of(failed)

    async def replicas(self) -> dict[str, ModelFacts]:
        """Return the model facts of the replicas that have loaded, by name.

        Those whose call hangs or whose process has ended are replaced, and those that could not be loaded.
        """
        for one in list(self._replicas):
            if one.has_ended:
                logger.error(f"a replica of stage {self._spec.name!r} has ended; another is started")
                self.replace(one.name)
            elif one.facts.done() and (failed := one.facts.exception()) is not None:
                why = f"its model cannot be loaded: {reason_of(failed)}"
                if why != self.why:  # not once more for each attempt
                    logger.error(f"stage {self._spec.name!r} is loaded again: {why}")
                self.why = why
                one.load()
            elif (longest_s := one.hangs()) is not None:
                logger.error(
                    f"a call of stage {self._spec.name!r} has not ended for {longest_s:g} s; its model is loaded again"
                )
                self.replace(one.name)
        loaded = [one for one in self._replicas if one.facts.done() and one.facts.exception() is None]
        if loaded:
            self.why, self.load_s = None, max(replica.load_s for replica in loaded)
        return {one.name: one.facts.result() for one in loaded}

    async def answer(self, call: StageCall, on_begin: Callable[[], None] | None = None) -> Answer:
        """Have the call's replica answer; if the caller is cancelled, what has not begun is. Raises StageError."""
        replica = next((one for one in self._replicas if one.name == call.replica), None)
        if replica is None:
            raise StageError("gone", f"replica {call.replica} no longer exists")
        loop = asyncio.get_running_loop()

        def begin() -> None:
            if on_begin is not None:
                loop.call_soon_threadsafe(on_begin)

        return await replica.answer(call, begin)

    def replace(self, replica: str) -> None:
        """End a replica, and start another."""
        for place, one in enumerate(self._replicas):
            if one.name == replica:
                one.end("its model is loaded again")
                self._replicas[place] = self._started()

    def close(self) -> None:
        """End all replicas."""
        for replica in self._replicas:
            replica.close("the service ends")

    def _started(self) -> ReplicaProcess:
        self._n_started += 1
        return ReplicaProcess(self._spec, self._stage, f"{self._spec.name}-{self._n_started}")


class LocalService(Service):
    """The only replica of a service."""

    def __init__(self, model: str, pool: Pool, policies: InForce, stages: Sequence[LocalClient]) -> None:
        self._registry, self._stages = CollectorRegistry(), stages
        self._file_policy = policies.policy.packed()
        super().__init__(
            model,
            pool,
            policies,
            stages,
            store=MemoryStore(),
            new_metric=self._new_metric,
            life=uuid.uuid4().hex,
            name="local",
        )

    def _new_metric(
        self, name: str, kind: Kind, tags: tuple[str, ...], description: str, boundaries: list[float]
    ) -> Metric:
        """Return a metric of this service's own registry."""
        options = {"buckets": boundaries} if kind == "histogram" else {}
        metric = _METRICS[kind](name, description, tags, registry=self._registry, **options)
        return Metric(
            lambda tags: getattr(metric.labels(**tags), ACTS[kind]), lambda tags: metric.remove(*tags.values())
        )

    async def ask_all(self, what: str, *arguments: Any) -> list[Any]:
        """Call a method of this replica."""
        return [await getattr(self, what)(*arguments)]

    async def read_policy(self, source: str | AnyPath | Policy) -> None:
        """Read the policy file again, and set its policy where that has changed since the last time."""
        try:
            policy = (await asyncio.to_thread(policy_of, source)).packed()
            if policy != self._file_policy:
                self._file_policy = policy
                await self.set_policy(PolicyChange(policy=policy))
        except (CaucError, RequestError) as error:
            logger.warning(f"policy {self.in_force.id} stays active: {error}")

    async def has_loaded(self) -> bool:
        """Return True: the service is made once its stages have."""
        return True

    def app(self) -> ASGIApp:
        """Return the HTTP application, with the metrics as Prometheus reads them."""
        tokens = Tokens()

        async def metrics(request: Request) -> Response:
            tokens.require_reader(request.headers)
            self.metrics.flush()
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

        return _like_serve(http_app(self, Route("/metrics", metrics)))


def _like_serve(app: ASGIApp) -> ASGIApp:
    """Do what Ray Serve's proxy does: echo a request's id, or make one up, and end what no client waits for."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request_id = MutableHeaders(scope=scope).setdefault("x-request-id", str(uuid.uuid4()))
        asked, answered = asyncio.Event(), asyncio.Event()

        async def received() -> Message:
            message = await receive()
            if not message.get("more_body", False):
                asked.set()
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                answered.set()

        async def hung_up() -> None:
            await asked.wait()
            await receive()  # once all is received, this returns when the client is gone
            if not answered.is_set():
                answering.cancel()

        answering = asyncio.ensure_future(app(scope, received, sent))
        listening = asyncio.create_task(hung_up())
        try:
            await asyncio.wait({answering})
        finally:
            answering.cancel()
            listening.cancel()
        if not answering.cancelled():
            answering.result()

    return answer


@contextmanager
def local_service(
    pool: Pool,
    policy: Policy,
    model: str,
    host: str,
    port: int,
    grpc_port: int | None,
    source: str | AnyPath | Policy,
) -> Iterator[Callable[[], None]]:
    """Serve a policy's chain at a port for the length of the block.

    Open requests are answered at the end, up to GRACE_S.

    Args:
        pool: The models.
        policy: The policy to serve.
        model: Name of the model in URLs.
        host: Address to listen at.
        port: Port of HTTP.
        grpc_port: Port of gRPC, None for no gRPC.
        source: The policy's file, read again if the pool sets policy_every_s.

    Yields:
        A function that raises ExecutionError if the service has ended early.

    Raises:
        ExecutionError: The service does not start.
    """
    stages, policies = pool.chain(policy.models), policies_at_start(pool, policy)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=2048)
    with listening as listener, _loaded_clients(pool, stages) as clients:
        service = LocalService(model, pool, policies, clients)
        server = uvicorn.Server(_config(service))
        ended = _run_in_thread(partial(_answer, service, server, listener, host, grpc_port, source), server.config)

        def require_alive() -> None:
            if ended.done():
                error = ended.exception()
                reason = "" if error is None else f": {reason_of(error)}"
                raise ExecutionError(f"the service ended unexpectedly{reason}") from error

        try:
            while not server.started:
                require_alive()
                time.sleep(0.01)
            yield require_alive
            require_alive()
        finally:
            deadline = time.monotonic() + GRACE_S
            service.leaving = True
            while service.n_open and not ended.done() and time.monotonic() < deadline:
                time.sleep(0.01)
            server.should_exit = True
            wait([ended], GRACE_S)
            service.close()


async def _answer(
    service: LocalService,
    server: uvicorn.Server,
    listener: socket.socket,
    host: str,
    grpc_port: int | None,
    source: str | AnyPath | Policy,
) -> None:
    """Answer requests at the service's ports until the server is to end."""
    await service.check_health()
    async with AsyncExitStack() as resources:
        if grpc_port is not None:
            from cauc_ray.serving.over_grpc import grpc_server  # edge boxes may have no gRPC

            await resources.enter_async_context(grpc_server(service, host, grpc_port, SENT_S))
        if (every_s := service.pool.serving.policy_every_s) is not None:
            read = repeat(partial(service.read_policy, source), every_s)
            resources.callback(asyncio.create_task(read).cancel)
        await server.serve([listener])


@contextmanager
def _loaded_clients(pool: Pool, stages: Sequence[StageSpec]) -> Iterator[list[LocalClient]]:
    """Start the stages' replicas for the length of the block. Raises ExecutionError where a needed one cannot load."""
    with ExitStack() as started:
        clients = [LocalClient(spec, stage) for stage, spec in enumerate(stages)]
        for client in clients:
            started.callback(client.close)
        for spec, client in zip(stages, clients, strict=True):
            may_wait = pool.on_failure == "degrade" and client is not clients[0]
            if (why := client.load(LATER_STAGES_S if may_wait else LOAD_DEADLINE_S)) is None:
                continue
            if not may_wait:
                raise ExecutionError(f"the service does not start: stage {spec.name}: {why}")
            logger.warning(f"stage {spec.name!r} is left out until it has loaded: {why}")
        yield clients


def _config(service: LocalService) -> uvicorn.Config:
    options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
    options["timeout_keep_alive"] = round(service.pool.serving.keep_alive_s)
    return uvicorn.Config(service.app(), http=Connection, timeout_graceful_shutdown=SENT_S, **options)


def _run_in_thread(main: Callable[[], Coroutine[Any, Any, None]], config: uvicorn.Config) -> Future[None]:
    """Run a coroutine on an event loop of its own; return what is done once that has ended."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(main())
            ended.set_result(None)
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name="service", daemon=True).start()
    return ended
