"""The ingress deployment: it holds the policy, takes requests and has the cascade answer them."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve

from cauc_ray.errors import CaucError, PolicyError
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import Pool, StageSpec
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.cascade import Cascade
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.feedback import Feedback
from cauc_ray.serving.metrics import ServingMetrics
from cauc_ray.serving.policies_live import KeptPolicy, PolicyChange, PolicyStore, digest
from cauc_ray.serving.stages import ServeClient
from cauc_ray.serving.watching import WatchedHere, Watching, report_of

ROUTER = "Router"
# How often a replica looks for a policy that was set at another, and for the replicas of stages.
POLICY_PERIOD_S = 0.25
STAGES_PERIOD_S = 1.0
# How often a replica computes what it has watched.
WATCH_PERIOD_S = 1.0
# All replicas must have taken a policy within this, else it is taken back.
ADOPTION_DEADLINE_S = 3.0

logger = logging.getLogger("ray.serve")


def stage_deployment(name: str) -> str:
    """Return the name of a stage's deployment."""
    return f"stage:{name}"


@dataclass(frozen=True, slots=True)
class InForce:
    """A policy and its id, which takes too long to be worked out for every request."""

    policy: Policy
    id: str

    @classmethod
    def of(cls, policy: Policy) -> InForce:
        """Return a policy with its id."""
        return cls(policy, policy.id)


class Router:
    """A replica of the ingress.

    model: the name in URLs.   policy: what the service begins with.   key: of this deployment's kept policy.
    """

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
        self.model, self.pool = model, pool
        self.specs: tuple[StageSpec, ...] = pool.chain(policy.models)
        self.in_force = InForce.of(policy)
        self.refused: str | None = None
        self.facts: list[ModelFacts | None] = [None] * len(self.specs)
        self.metrics = ServingMetrics(model, policy.models, policy.cost_unit)
        self.watching = Watching(policy, self.in_force.id, self.metrics, pool.serving.router.replicas.max)
        self._clients = [ServeClient(handle) for handle in stages]
        self._store = PolicyStore(key)
        self._adopting = threading.Lock()
        self._config = ""  # the digest of the configuration that the policy in force came from or came after
        self._cascade: Cascade | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._adopt_kept()
        self.metrics.policy(self.in_force.id)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the HTTP face."""
        from cauc_ray.serving.face import build_face

        return build_face(self)

    @property
    def cascade(self) -> Cascade:
        """Return the cascade, made at first use: it belongs to the loop that requests run on."""
        if self._cascade is None:
            self._cascade = Cascade(self.specs, self.pool, self._clients, self.metrics)
            follow = (self._follow_policy(), self._follow_stages(), self._follow_answers())
            self._tasks = [asyncio.create_task(one) for one in follow]
        return self._cascade

    @property
    def ready(self) -> bool:
        """Return whether requests can be answered: by all stages, or by the first where the pool degrades."""
        waiting = [lane.health.n_replicas == 0 for lane in self.cascade.lanes]
        return not (waiting[0] if self.pool.on_failure == "degrade" else any(waiting))

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Take Serve's user_config: a PolicyChange. One that cannot be taken is refused, and the policy stays.

        It never raises: Serve would take the deployment down.
        """
        try:
            await asyncio.to_thread(self._configure, config)
        except Exception:
            logger.exception(f"user_config could not be taken, policy {self.in_force.id} stays")

    async def current_policy(self) -> str:
        """Look for a policy that was set elsewhere, and return the id of the one in force."""
        await asyncio.to_thread(self._adopt_kept)
        return self.in_force.id

    async def set_policy(self, content: Any) -> dict[str, Any]:
        """Change the policy on all replicas, or on none.

        Raises RequestError: 409 for one that does not fit what runs, 503 where a replica has not taken it.
        """
        before = self.in_force
        try:
            after = InForce.of(PolicyChange.of(content).applied(before.policy))
        except CaucError as error:
            self.metrics.policy_change("refused")
            raise RequestError(str(error), 409) from error
        await asyncio.to_thread(self._store.write, KeptPolicy(after.policy, self._config))
        n_replicas = await self._adopted_by_all(after.id)
        if n_replicas is None:
            await asyncio.to_thread(self._store.write, KeptPolicy(before.policy, self._config))
            await self._adopted_by_all(before.id)
            self.metrics.policy_change("rolled_back")
            raise RequestError(f"not every replica took policy {after.id}; {before.id} is in force again", 503, 1.0)
        self.metrics.policy_change("taken")
        return {"policy_id": after.id, "previous": before.id, "replicas": n_replicas}

    async def watched(self) -> WatchedHere:
        """Return what this replica has seen of the answers of the policy in force."""
        return await asyncio.to_thread(self.watching.settle)

    async def watch(self) -> dict[str, Any]:
        """Return what all replicas have seen of the answers of the policy in force. Raises RequestError (503)."""
        handle = serve.get_deployment_handle(ROUTER, serve.get_replica_context().app_name)
        in_force = self.in_force
        try:
            told = await handle.broadcast("watched").results_async(timeout_s=ADOPTION_DEADLINE_S)
        except Exception as error:  # a replica that is just ending fails in many ways
            logger.warning(f"a router has not said what it has watched: {type(error).__name__}")
            raise RequestError("not every replica said what it has seen", 503, 1.0) from error
        return report_of(in_force.policy, in_force.id, told)

    def feedback(self, body: bytes) -> dict[str, Any]:
        """Take what has become known of answers. Raises RequestError where it makes no sense."""
        in_force = self.in_force
        feedback = Feedback.read(body, in_force.policy, self.pool.serving.max_request_rows)
        n, n_counted, says = len(feedback), 0, None
        if feedback.policy_id != in_force.id:
            says = f"policy {in_force.id} is in force; what is known of another's answers is not counted"
            self.metrics.feedback("other_policy", n)
        elif in_force.policy.reference is None:
            says = f"policy {in_force.id} has nothing to compare its answers with; nothing is counted"
            self.metrics.feedback("not_watched", n)
        else:
            own = feedback.given_by(in_force.policy)
            self.watching.outcomes(in_force.id, own.stages, own.confidences, own.correct)
            n_counted = len(own)
            if n_counted < n:
                says = f"{n - n_counted} answers were cut short, by a request or a fault, and are not counted"
            self.metrics.feedback("counted", n_counted)
            self.metrics.feedback("cut_short", n - n_counted)
        return {"policy_id": in_force.id, "rows": n, "counted": n_counted, "says": says}

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Return the names of the options: of the pool, else as the last model knows them."""
        if self.pool.labels is not None:
            return self.pool.labels
        facts = self.facts[-1]
        return facts.labels if facts is not None else None

    async def _adopted_by_all(self, policy_id: str) -> int | None:
        """Return how many replicas have a policy in force, None where some have not in time."""
        handle = serve.get_deployment_handle(ROUTER, serve.get_replica_context().app_name)
        deadline = asyncio.get_running_loop().time() + ADOPTION_DEADLINE_S
        while (remaining := deadline - asyncio.get_running_loop().time()) > 0:
            try:
                ids = await handle.broadcast("current_policy").results_async(timeout_s=remaining)
            except Exception as error:  # a replica that is just ending fails in many ways
                logger.warning(f"a router has not said its policy: {type(error).__name__}")
                ids = []
            if ids and all(one == policy_id for one in ids):
                return len(ids)
            await asyncio.sleep(0.05)
        return None

    def _configure(self, config: dict[str, Any]) -> None:
        own = digest(config)
        with self._adopting:
            kept = self._store.read()
            if kept is None or kept.config != own:
                kept = self._changed(config, own)
                self._store.write(kept)
                self.metrics.policy_change("taken" if kept.refused is None else "refused")
            self._adopt(kept)

    def _changed(self, config: dict[str, Any], own: str) -> KeptPolicy:
        """Return what to keep after a change of the configuration; own: its digest. A refused one changes no policy."""
        try:
            return KeptPolicy(PolicyChange.of(config).applied(self.in_force.policy), own)
        except CaucError as error:
            logger.error(f"user_config refused, policy {self.in_force.id} stays: {error}")
            return KeptPolicy(self.in_force.policy, own, str(error))

    def _adopt_kept(self) -> None:
        # What is read first is adopted first: a policy that has been replaced shall not come back for a moment.
        with self._adopting:
            kept = self._store.read()
            if kept is not None:
                self._adopt(kept)

    def _adopt(self, kept: KeptPolicy) -> None:
        self._config, self.refused = kept.config, kept.refused
        if kept.policy is self.in_force.policy:
            return
        before, after = self.in_force, InForce.of(kept.policy)
        self.in_force = after
        if after.id != before.id or after.policy.reference != before.policy.reference:
            self.watching.begin(after.policy, after.id)
        if after.id != before.id:
            self.metrics.policy(after.id, before.id)
            logger.info(f"policy {after.id} is in force after {before.id}")

    async def _follow_policy(self) -> None:
        """Take what was set at other replicas."""
        while True:
            await asyncio.sleep(POLICY_PERIOD_S)
            try:
                await asyncio.to_thread(self._adopt_kept)
            except (PolicyError, RuntimeError, ConnectionError) as error:
                logger.warning(f"the kept policy cannot be read: {error}")

    async def _follow_answers(self) -> None:
        """Compute what was watched."""
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            try:
                await asyncio.to_thread(self.watching.settle)
            except Exception:  # an answer does not depend on it
                logger.exception("answers could not be watched")

    async def _follow_stages(self) -> None:
        """Learn how many replicas the stages have, and what their models say of themselves."""
        while True:
            told = await asyncio.gather(*(client.replicas() for client in self._clients), return_exceptions=True)
            for place, (lane, facts) in enumerate(zip(self.cascade.lanes, told, strict=True)):
                if isinstance(facts, BaseException):
                    logger.warning(f"stage {lane.name!r}: its state is unknown: {type(facts).__name__}: {facts}")
                elif facts is not None:
                    lane.health.n_replicas = len(facts)
                    self.facts[place] = facts[0] if facts else self.facts[place]
                lane.pump_soon()
            self.metrics.queued([lane.n_queued for lane in self.cascade.lanes])
            await asyncio.sleep(STAGES_PERIOD_S)
