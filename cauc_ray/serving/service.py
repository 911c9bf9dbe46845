"""A service without its shell, which is Ray Serve (`on_serve.py`) or one process (`local.py`)."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from cauc_ray.cascade.allowance import FEWEST_ROWS, Allowance
from cauc_ray.cascade.suspects import VerdictReached
from cauc_ray.cascade.worker import require_agreement
from cauc_ray.errors import CaucError, ConfigError
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import Pool, StageSpec
from cauc_ray.numbers.promotion import Decision
from cauc_ray.policies.policy import Policy
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.bodies import OpenBytes
from cauc_ray.serving.cascade import Cascade, StageClient
from cauc_ray.serving.elsewhere import LONG_JSON, Elsewhere
from cauc_ray.serving.feedback import Feedback
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.observers.candidate import Canary
from cauc_ray.serving.observers.drift_watch import DriftWatch, WatchedHere, report_of
from cauc_ray.serving.observers.logged import Logged
from cauc_ray.serving.observers.service_metrics import NewMetric, ServingMetrics
from cauc_ray.serving.observers.shadow_sample import ShadowSample
from cauc_ray.serving.observers.spans import Spans
from cauc_ray.serving.observers.table_log import TableLog
from cauc_ray.serving.policies_live import MOST_RECEIPTS, WHOLE, Decided, InForce, Member, PolicyChange
from cauc_ray.serving.shared_allowance import SharedAllowance
from cauc_ray.serving.stored import Log, OvertakenError, SeenOnce, Store, StoreError

# How often a replica looks for a policy that was set at another, which asks it to, and for the replicas of stages;
# computes what it has watched, and brings its metrics up to date.
PERIOD_S = 1.0
# What fails again and again is tried at longer and longer intervals, up to this one.
LONGEST_PAUSE_S = 10.0
# A replica that has not looked for a policy for so long looks before it answers. A change is therefore active
# everywhere this long after it was written, also at a replica that cannot be asked whether it has taken it.
LEASE_S = 3.0
# How long a replica that starts waits for stages that have had replicas before, and for those that a request can do
# without: those of a new version begin together, but Serve lists them one after another.
BEGIN_S, LISTED_S = 15.0, 5.0
# How long requests wait for such a look, and calls of the store for their end.
LOOK_S, STORE_S = 1.0, 10.0
STORE_IS_AWAY = "the store of the service's policies cannot be read now; GET the policy to see which one is active"

T = TypeVar("T")

logger = logging.getLogger(__name__)


async def repeat(do: Callable[[], Awaitable[object]], period_s: float) -> None:
    """Call a function periodically until cancelled; its exceptions are logged, and it is called again."""
    pause_s, task = period_s, asyncio.current_task()
    assert task is not None
    while True:
        try:
            await do()
            pause_s = period_s
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise  # this task is to end; otherwise only a call within it was cancelled
            pause_s = max(period_s, min(2 * pause_s, LONGEST_PAUSE_S))
            logger.exception(f"{getattr(do, '__name__', do)} failed; trying again in {pause_s:g} s")
        if task.cancelling():  # before Python 3.12, asyncio.wait_for may keep that to itself
            return
        await asyncio.sleep(pause_s)


def require_name(model: str) -> str:
    """Return a model's name if it can be part of URLs. Raises ConfigError."""
    if not model or set(model) & set("/?#%") or not model.isprintable():
        raise ConfigError(
            f"a model's name is part of URLs: some printable text without '/', '?', '#' and '%', not {model!r}"
        )
    return model


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """Set a variable of the environment for the length of the block; None leaves it as it is."""
    before = os.environ.get(name)
    os.environ.update({} if value is None else {name: value})
    try:
        yield
    finally:
        os.environ.pop(name, None)
        os.environ.update({} if before is None else {name: before})


def policies_at_start(pool: Pool, policy: Policy) -> InForce:
    """Return a policy with the pool's candidate. Raises PolicyError where its file does not fit."""
    in_force, candidate = InForce(Member.of(policy)), pool.serving.candidate
    return in_force if candidate is None else in_force.with_candidate(Policy.load(candidate.file), candidate.share)


def require_servable(pool: Pool, policy: Policy, *, local: bool) -> tuple[StageSpec, ...]:
    """Return the stages of a policy's chain.

    Args:
        pool: The models.
        policy: The policy to serve.
        local: Whether the models run on this machine.

    Raises:
        CaucError: A fault that can be found without loading a model.
    """
    stages = pool.chain(policy.models)
    require_agreement(stages, policy)
    if Allowance.of(pool, policy) is not None and pool.limits is not None and pool.limits.per == "run":
        raise ConfigError("a service has no end: its limits are per: hour")
    for stage in stages:
        stage.model.check(local)
    policies_at_start(pool, policy)
    return stages


class Service(ABC):
    """One replica of what answers requests.

    Args:
        model: Name in URLs.
        pool: Pool of the models.
        policies: Policies at the start.
        clients: Clients of the stages.
        store: Store that all replicas see.
        new_metric: Makes a metric, as ServingMetrics takes it.
        life: Id of the service's life; values of another life are not read.
        imports_s: How long this process has imported; what others do takes longer where that does.
        name: Name of the service in all of its lives.
    """

    def __init__(
        self,
        model: str,
        pool: Pool,
        policies: InForce,
        clients: Sequence[StageClient],
        *,
        store: Store,
        new_metric: NewMetric,
        life: str,
        name: str,
        imports_s: float = 0.0,
    ) -> None:
        self.model, self.pool = model, pool
        policy = policies.policy
        self.specs: tuple[StageSpec, ...] = pool.chain(policy.models)
        self.facts: list[ModelFacts | None] = [None] * len(self.specs)
        self.metrics = ServingMetrics(new_metric, model, policy.models, policy.cost_unit)
        self._clients = clients
        self._imports_s = imports_s
        self._life, self._log = life, Log(store, f"policy:{life}:")
        self._adopting = threading.Lock()
        self._looked_at = time.monotonic()
        version, content = self._log.read()
        self.in_force = InForce.of_json(version, content) if version else policies
        self._reported = SeenOnce(store, f"feedback:{life}:")
        self.elsewhere, self.open_bytes = Elsewhere(), OpenBytes()
        self.table_log = self._new_table_log(policy)
        # What was found of a policy outlives this life of the service.
        alarms, n_replicas = Log(store, f"alarm:{name}:{model}:"), pool.serving.router.replicas.max
        self.drift = DriftWatch(self.in_force, self.metrics, n_replicas, alarms)
        self._shadows = ShadowSample(pool.serving.shadow, self.metrics, self.drift, self.table_log)
        self.canary = Canary(pool.serving.canary, store, life, self._shadows, lambda: self.in_force, self._decide)
        self.observers: list[Observer] = [self.metrics, self.drift, self._shadows, self.canary]
        self.observers += [] if self.table_log is None else [self.table_log]
        self.observers += [] if pool.serving.tracing is None else [Spans(pool.serving.tracing)]
        self._allowance = Allowance.of(pool, policy, fewest_rows=FEWEST_ROWS / n_replicas)
        if self._allowance is not None and self._allowance.max_usd < math.inf:
            spent = Log(store, f"spent:{name}:{model}:")
            self.observers.append(
                SharedAllowance(self._allowance, n_replicas, spent, lambda: self.cascade.scheduler.stages)
            )
        self.metrics.on_policies(self.in_force)
        self._has_begun = False
        self.leaving = False
        self.n_open = 0
        self._cascade: Cascade | None = None
        self._id = uuid.uuid4().hex
        self._look: asyncio.Future[InForce] | None = None
        self._store_threads = ThreadPoolExecutor(4, thread_name_prefix="store")
        self._passing: set[asyncio.Future[list[Any]]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def _new_table_log(self, policy: Policy) -> TableLog | None:
        """Return what writes the shadow sample, if the pool has it written."""
        spec = self.pool.serving.log
        if spec is None:
            return None
        costs = [stage.cost for stage in policy.stages]
        logged = Logged(spec, self.pool.serving.shadow, self.specs, costs, policy.cost_unit, policy.costs == "per-call")
        return TableLog(logged, lambda: self.facts, lambda: self.labels, self.metrics)

    @abstractmethod
    async def ask_all(self, what: str, *arguments: Any) -> list[Any]:
        """Call a method of every replica; return what each returned or raised."""

    @abstractmethod
    async def has_loaded(self) -> bool:
        """Return whether all stages have loaded once in this life of the service."""

    @property
    def cascade(self) -> Cascade:
        """Return the cascade, made at first use: it belongs to the loop that requests run on."""
        if self._cascade is None:
            self._cascade = self._shadows.cascade = Cascade(
                self.specs, self.pool, self._clients, self.observers, self._allowance
            )
            self._cascade.on_news = self._pass_on
            follow = (self.current_policy, self._follow_stages, *(one.settle for one in self.observers), self._count)
            self._tasks = [asyncio.create_task(repeat(do, PERIOD_S)) for do in follow]
        return self._cascade

    def _pass_on(self, news: list[VerdictReached]) -> None:
        """Have the other replicas learn which inputs have ended or hung replicas of stages."""
        task = asyncio.ensure_future(self.ask_all("learn", self._id, news))
        self._passing.add(task)
        task.add_done_callback(self._passing.discard)

    async def learn(self, replica: str, news: list[VerdictReached]) -> None:
        """Take verdicts on inputs from a replica."""
        if replica != self._id:
            self.cascade.learn(news)

    def member(self, in_force: InForce, version: str) -> Member:
        """Return an active policy by its id, the incumbent for the version of the whole. Raises RequestError (404)."""
        member = in_force.incumbent if version == WHOLE else in_force.member(version)
        if member is None:
            versions = ", ".join(in_force.shares)
            raise RequestError(f"model {self.model!r} has no version {version!r:.80}; it has {versions}", 404)
        return member

    @property
    def labels(self) -> tuple[str, ...] | None:
        """Return the names of the options: of the pool, else as the last model that has loaded knows them."""
        if self.pool.label_names is not None:
            return self.pool.label_names
        facts = next((facts for facts in reversed(self.facts) if facts is not None), None)
        return facts.labels if facts is not None else None

    async def check_health(self) -> None:
        """Raise if a background task has ended. The first call begins them, and returns once stages can answer.

        Stages that have had replicas before are not waited for long.
        """
        if self.cascade and any(task.done() for task in self._tasks):
            raise RuntimeError("a background task of the service has ended")
        until = math.inf
        while not self._has_begun and time.monotonic() < until:
            await self._follow_stages()
            awaited = [stage for stage in range(len(self.specs)) if not self.cascade.has_replica(stage)]
            is_enough = not any(stage in self._needed for stage in awaited)
            self._has_begun = is_enough and not any(self._clients[stage].why is None for stage in awaited)
            if not self._has_begun:
                wait_s = (LISTED_S if is_enough else BEGIN_S) + self._imports_s
                until = min(until, time.monotonic() + wait_s) if await self.has_loaded() else math.inf
                await asyncio.sleep(0.1)
        self._has_begun = True

    @property
    def _needed(self) -> range:
        """Return the stages without which no request can be answered."""
        return range(1 if self.pool.on_failure == "degrade" else len(self.specs))

    async def ready(self) -> bool:
        """Return whether requests can be answered: by all stages, or by the first where the pool degrades."""
        return self._has_begun and not self.leaving and not any(map(self.cascade.missing, self._needed))

    @contextmanager
    def one_more_request(self) -> Iterator[None]:
        """Count a request as open for the length of the block. Raises RequestError (503) once the service ends."""
        if self.leaving:
            raise RequestError("the service is being stopped", 503, 1.0)
        self.n_open += 1
        try:
            yield
        finally:
            self.n_open -= 1

    async def leave(self) -> int:
        """Take no more requests; return how many are still open."""
        self.leaving = True
        return self.n_open

    def close(self) -> None:
        """End what the service has started outside of its event loop."""
        self.elsewhere.close()
        self._store_threads.shutdown(wait=False, cancel_futures=True)
        for observer in self.observers:
            observer.close()

    async def policy_for_request(self) -> InForce:
        """Return the active policy, read again if this replica has not checked it recently.

        Raises RequestError (503) where it cannot be read: another one may be active.
        """
        if time.monotonic() - self._looked_at > LEASE_S:
            if self._look is None or self._look.done():  # one look for all requests
                self._look = asyncio.ensure_future(self.current_policy())
            await asyncio.wait([self._look], timeout=LOOK_S)
            if not self._look.done():
                raise RequestError(STORE_IS_AWAY, 503, 1.0)
            self._look.result()
        return self.in_force

    async def current_policy(self) -> InForce:
        """Check for a policy set at another replica, and return the active one. Raises RequestError (503)."""
        return await self._stored(self._adopt_stored)

    async def _stored(self, function: Callable[..., T], *args: Any) -> T:
        """Call what reads or writes the store, in threads that nothing else waits for. Raises RequestError (503)."""
        called = asyncio.get_running_loop().run_in_executor(self._store_threads, function, *args)
        try:
            return await asyncio.wait_for(called, STORE_S)
        except (StoreError, TimeoutError) as error:
            logger.warning(f"the service's store does not answer: {error}")
            raise RequestError(STORE_IS_AWAY, 503, 1.0) from error

    async def policy_version(self) -> int:
        """Check for a policy set at another replica, and return the active one's version."""
        return (await self.current_policy()).version

    def etag(self, in_force: InForce) -> str:
        """Return the tag of a version of the policy; no other life of the service has it."""
        return f'"{self._life[:8]}-{in_force.version}"'

    async def policies(self) -> tuple[dict[str, Any], str]:
        """Return the policies, the candidate's evidence, and receipts; and the version's tag. Raises RequestError."""
        in_force = await self.current_policy()
        evidence = await self._stored(self.canary.evidence, in_force)
        candidate = in_force.candidate and {
            "policy_id": in_force.candidate.id,
            "share": in_force.share,
            "evidence": evidence and self.canary.shown(evidence),
            "policy": in_force.candidate.policy.model_dump(mode="json"),
        }
        content = {
            "policy_id": in_force.id,
            "version": in_force.version,
            "policy": in_force.policy.model_dump(mode="json"),
            "shares": in_force.shares,
            "candidate": candidate,
            "receipts": in_force.receipts,
        }
        return content, self.etag(in_force)

    async def set_policy(
        self, change: PolicyChange, if_match: str | None = None, why: str | None = None
    ) -> tuple[dict[str, Any], str]:
        """Change the policies. The change is active on all replicas when this returns, until a later one.

        Args:
            change: The change.
            if_match: Tag of the version to change, "*" or None for any.
            why: The rule that has decided, None for a manual change.

        Returns:
            The new policies as JSON, and their version's tag.

        Raises:
            RequestError: 409 if the change does not fit the running policies or a later change has replaced it, 412 if
                another version than if_match is active, 503 if the version cannot be written.
        """
        try:
            before, after = await self._stored(self._change, change, if_match, why)
            written = time.monotonic()
            n_replicas = await self._confirmed(after.version)
            if n_replicas is None:
                await asyncio.sleep(max(0.0, written + LEASE_S - time.monotonic()))
            newest = await self.current_policy()
        except CaucError as error:
            self.metrics.count("policy_changes", "refused")
            raise RequestError(str(error), 409) from error
        if newest.shares != after.shares:
            self.metrics.count("policy_changes", "overtaken")
            raise RequestError(
                f"another change at the same time has replaced this one: policy {newest.id} is active (version "
                f"{newest.version}); make yours again if you still want it",
                409,
            )
        self.metrics.count("policy_changes", "taken")
        note = None if n_replicas is not None else "a replica has not confirmed it, but will adopt it before it answers"
        content = {"policy_id": after.id, "previous": before.id, "version": after.version, "shares": after.shares}
        return {**content, "replicas": n_replicas, "note": note}, self.etag(after)

    async def watched(self) -> WatchedHere:
        """Evaluate and return this replica's monitoring of the active policy."""
        return await self._stored(self.drift.evaluate)

    async def watch(self) -> dict[str, Any]:
        """Return all replicas' monitoring of the active policy. Raises RequestError (503)."""
        in_force = self.in_force
        reports = await self.ask_all("watched")
        if silent := [report for report in reports if not isinstance(report, WatchedHere)]:
            logger.warning(f"a replica does not answer: {silent[0]!r:.200}")
            raise RequestError("not every replica has reported", 503, 1.0)
        return report_of(in_force.policy, in_force.id, reports)

    async def feedback(self, body: bytes) -> dict[str, Any]:
        """Take feedback on answers, on each row once. Raises RequestError if it is invalid."""
        in_force = self.in_force
        most_rows, rule = self.pool.serving.max_request_rows, self.pool.rule
        read = (Feedback.read, body, in_force.policy, most_rows, self.labels, rule)
        feedback = await self.elsewhere.call_if(len(body) > LONG_JSON, *read)
        n, member, new = len(feedback), in_force.member(feedback.policy_id), feedback
        if member is not None or self.table_log is not None:
            rows = feedback.rows.tolist()
            new_rows = await self._stored(self._reported.new, feedback.policy_id, feedback.answer, rows)
            new = feedback.at(np.isin(feedback.rows, list(new_rows)))
        counts = [count for one in self.observers if (count := one.on_feedback(new, in_force)) is not None]
        n_counted, note = max(counts, default=0), None
        if member is None:
            note = f"policy {in_force.id} is active; feedback on another policy's answers is not counted"
            self.metrics.count("feedback_rows", "other_policy", n=n)
        elif not counts:
            note = f"policy {member.id} has no reference to compare answers with; feedback is not counted"
            self.metrics.count("feedback_rows", "not_watched", n=n)
        else:
            n_cut, n_repeated = len(new) - n_counted, n - len(new)
            reasons = [f"{n_cut} answers cut short by the request or a failure are not counted"] if n_cut else []
            reasons += [f"{n_repeated} answers already had feedback and are not counted again"] if n_repeated else []
            note = "; ".join(reasons) or None
            for outcome, rows in {"counted": n_counted, "cut_short": n_cut, "repeated": n_repeated}.items():
                self.metrics.count("feedback_rows", outcome, n=rows)
        return {"policy_id": in_force.id, "rows": n, "counted": n_counted, "note": note}

    async def _decide(self, decision: Decision, why: str, in_force: InForce) -> None:
        """Promote the candidate or roll it back, for this very version: of all routers one decides."""
        try:
            await self.set_policy(PolicyChange.of({decision: True}), self.etag(in_force), why)
        except RequestError as error:
            logger.info(f"{decision}: {error.message}")

    async def _confirmed(self, version: int) -> int | None:
        """Return how many replicas there are once all have a version or a later one, None if some do not confirm."""
        versions = await self.ask_all("policy_version")
        silent = [one for one in versions if not isinstance(one, int) or one < version]
        for one in silent:
            logger.warning(f"a replica has not confirmed version {version} of the policy: {one!r:.200}")
        return len(versions) if versions and not silent else None

    def _change(self, change: PolicyChange, if_match: str | None, why: str | None) -> tuple[InForce, InForce]:
        """Write the next version, and return the one before and it. Raises RequestError and CaucError as set_policy."""
        changed: tuple[InForce, InForce, Decided, dict[str, Any]]

        def following(version: int, content: Any) -> dict[str, Any]:
            nonlocal changed
            before, tags = self._adopt_version(version, content), "*" if if_match is None else if_match
            if not {"*", self.etag(before)} & {tag.strip() for tag in tags.split(",")}:
                self.metrics.count("policy_changes", "overtaken")
                raise RequestError(f"policy {before.id} is active with ETag {self.etag(before)}, not {tags:.80}", 412)
            after, decided, member = before.after(change)
            receipt = self.canary.receipt(decided, member, before, after, why)
            after = replace(after, receipts=(*before.receipts, receipt)[-MOST_RECEIPTS:])
            changed = before, after, decided, receipt
            return after.as_json()

        try:
            self._log.update(following)
        except OvertakenError as error:
            raise RequestError("the policy is being changed by others; try again later", 409, 1.0) from error
        before, after, decided, receipt = changed
        logger.info("%s", json.dumps({"event": "policy", "model": self.model, **receipt}))
        self.metrics.count("policy_decisions", decided, receipt["by"])
        return before, after

    def _adopt_stored(self) -> InForce:
        began = time.monotonic()
        in_force = self._adopt_version(*self._log.read())
        self._looked_at = max(self._looked_at, began)
        return in_force

    def _adopt_version(self, version: int, content: Any) -> InForce:
        """Adopt a version of the log unless a later one is active; return the active one."""
        with self._adopting:
            if version > self.in_force.version:
                self._adopt(InForce.of_json(version, content))
            return self.in_force

    def _adopt(self, after: InForce) -> None:
        before, self.in_force = self.in_force, after
        for observer in self.observers:
            observer.on_policies(after)
        for gone in before.shares.keys() - after.shares.keys():
            self._reported.forget(gone)
        if after.shares != before.shares:
            shares = ", ".join(f"{policy_id} {share:.4g}" for policy_id, share in after.shares.items())
            logger.info(f"version {after.version} of the policies is active, with shares of requests: {shares}")

    async def _follow_stages(self) -> None:
        """Update the number of the stages' replicas and their models' facts."""
        answers = await asyncio.gather(*(client.replicas() for client in self._clients), return_exceptions=True)
        for stage, replicas in enumerate(answers):
            if isinstance(replicas, BaseException):
                name = self.specs[stage].name
                logger.warning(f"stage {name!r}: its state is unknown: {type(replicas).__name__}: {replicas}")
            else:
                for facts in replicas.values():
                    self.cascade.scheduler.stages[stage].take_facts(facts)
                client = self._clients[stage]
                self.cascade.replicas(stage, replicas, None if replicas else client.why, client.load_s)
                self.facts[stage] = next(iter(replicas.values()), self.facts[stage])

    async def _count(self) -> None:
        """Bring the metrics up to date."""
        for spec, stage in zip(self.specs, self.cascade.scheduler.stages, strict=True):
            self.metrics.note("queued_rows", stage.n_waiting, spec.name)
        self.metrics.flush()
