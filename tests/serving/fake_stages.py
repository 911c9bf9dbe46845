"""A cascade without Ray: stages are coroutines of the test."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scripted_models import worker_of

from cauc_ray.cascade.bundles import gathered
from cauc_ray.cascade.rows import CallResult
from cauc_ray.errors import ExecutionError
from cauc_ray.models.answers import Answers, as_answers
from cauc_ray.models.pool import Pool, pool_of
from cauc_ray.policies.policy import Policy
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.cascade import Cascade
from cauc_ray.serving.observers.drift_watch import DriftWatch
from cauc_ray.serving.observers.service_metrics import Metric, ServingMetrics
from cauc_ray.serving.observers.shadow_sample import ShadowSample
from cauc_ray.serving.policies_live import InForce, Member
from cauc_ray.serving.request_state import Question, StageError
from cauc_ray.serving.stored import Log, MemoryStore


def stage_of(column: str) -> int:
    """Return the number of the stage that reads a column."""
    return int(column.removeprefix("logits"))


@dataclass
class Stage:
    """Answers rows from their column `logits<stage>`, and remembers each call's rows.

    before: awaited with the number of the call, it may sleep or raise, and return the
    seconds that the model takes.   alter: changes answers.
    """

    column: str
    before: Callable[[int, dict[str, Any]], Any] | None = None
    alter: Callable[[Answers, dict[str, Any]], Answers] = lambda answers, batch: answers
    batches: list[list[int]] = field(default_factory=list)
    cascade: Any = None
    n_replicas: int = 1
    replicas: list[str] = field(default_factory=list)
    n_started: int = 0
    policies: dict[str, Policy] = field(default_factory=dict)

    def tell(self, n: int | None = None) -> None:
        """Tell the cascade which replicas there are, once there are so many."""
        self.n_replicas = self.n_replicas if n is None else n
        del self.replicas[self.n_replicas :]
        while len(self.replicas) < self.n_replicas:
            self.replicas.append(f"{self.column}-{self.n_started}")
            self.n_started += 1
        self.cascade.replicas(stage_of(self.column), self.replicas)

    def replace(self, name: str) -> None:
        """End a replica, and start another."""
        if name in self.replicas:
            self.replicas.remove(name)
            asyncio.get_running_loop().call_soon(self.tell)

    async def answer(self, call, on_begin=None):
        try:
            return await self.answered(call, on_begin)
        except StageError as error:
            if error.kind == "died":
                self.replace(call.replica)
            raise

    async def answered(self, call, on_begin):
        self.policies |= call.policies
        if unknown := {part.policy for part in call.parts} - self.policies.keys():
            return CallResult.broken(0.0, "", f"unknown policies: {unknown}", "policy"), None
        batch = dict(gathered(call.parts, call.bundles))
        self.batches.append(batch["row"].tolist())
        started = asyncio.get_running_loop().time()
        if on_begin is not None:
            on_begin()
        try:
            compute_s = None if self.before is None else await self.before(len(self.batches), batch)
        except ExecutionError as error:
            return CallResult.broken(started, "", str(error), "stage"), None
        result, goes_on = decided(worker_of(self.answers, stage_of(self.column)), call, self.policies)
        compute_s = asyncio.get_running_loop().time() - started if compute_s is None else compute_s
        return replace(result, compute_s=compute_s), goes_on.state

    def answers(self, batch):
        return self.alter(Answers(np.array(batch[self.column], dtype=np.float32)), batch)


class Counts(ServingMetrics):
    """What a cascade counts of its stages, in memory."""

    def __init__(self, stages: Sequence[str]) -> None:
        self._seen: Counter[tuple[str, ...]] = Counter()
        super().__init__(self._noted, "m", stages, "")

    def _noted(self, name, kind, tags, description, boundaries):
        return Metric(lambda labels: lambda amount: self._seen.update({(name, *labels.values()): amount}))

    def of(self, name):
        """Return a metric's sums, by its tags but the model and the unit."""
        self.flush()
        return {
            tags[0] if len(tags) == 1 else tags: n
            for (metric, _, *more), n in self._seen.items()
            if metric == f"cauc_serve_{name}" and (tags := tuple(tag for tag in more if tag))
        }


def a_pool(names: Sequence[str], on_failure: str = "fail", **serving: Any) -> Pool:
    """Return a pool of models that nobody loads; serving: of each stage, `max_queued_rows` and `shadow` of the pool."""
    of_pool = {"max_queued_rows": serving.pop("max_queued_rows", 8192), "shadow": serving.pop("shadow", 0.0)}
    stages = [
        {"name": name, "model": {"kind": "python", "factory": "a:b"}, "batch_size": 8, "serving": serving}
        for name in names
    ]
    content = {"name": "p", "task": "image-classification", "on_failure": on_failure, "stages": stages}
    return pool_of({**content, "serving": of_pool}, Path())


def cascade_of(pool: Pool, stages: Sequence[Stage], *observers: Any) -> tuple[Cascade, Counts]:
    """Return a cascade of the test's stages and what is counted of it."""
    counts = Counts([spec.name for spec in pool.stages])
    cascade = Cascade(pool.stages, pool, stages, [counts, *observers])
    for stage in stages:
        stage.cascade = cascade
        stage.tell()
    return cascade, counts


def sampled_cascade(pool: Pool, stages: Sequence[Stage], policy: Policy, log: Any = None) -> tuple[Any, ...]:
    """Return what cascade_of does and the watch of a policy's drift, with a shadow sample.   log: takes the sample."""
    metrics = Counts([spec.name for spec in pool.stages])
    drift = DriftWatch(InForce(Member.of(policy)), metrics, 1, Log(MemoryStore(), "alarm:"))
    shadows = ShadowSample(pool.serving.shadow, metrics, drift, log)
    shadows.cascade, _ = cascade_of(pool, stages, metrics, drift, shadows)
    return shadows.cascade, metrics, drift


def question(policy: Policy, answer_id: str = "0" * 32) -> Question:
    """Return what a client asks of a policy."""
    return Question(InForce(member := Member.of(policy)), member, answer_id, drawn=False, headers={}, started_ns=0)


def columns_of(logits: Sequence[np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return rows' columns: their number and each stage's logits for them."""
    return {"row": rows, **{f"logits{stage}": of_stage[rows] for stage, of_stage in enumerate(logits)}}


async def timed_answer(
    cascade: Cascade,
    policy: Policy,
    logits: Sequence[np.ndarray],
    rows: Sequence[int],
    at_s: float = 0.0,
    patience_s: float | None = None,
) -> tuple[Any, float]:
    """Ask for rows at a time; return the answer or the refusal, and the seconds that it took; None if given up."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(at_s)
    started = clock()
    answer = cascade.answer(policy, columns_of(logits, np.array(rows)), len(rows))
    try:
        result = await (answer if patience_s is None else asyncio.wait_for(answer, patience_s))
    except RequestError as error:
        result = error
    except TimeoutError:
        result = None
    return result, clock() - started


def decided(worker: Any, call: Any, policies: dict[str, Policy]) -> tuple[CallResult, Any]:
    """Have a worker answer a call and decide."""
    return worker.decide(
        call.parts,
        call.bundles,
        policies=policies,
        keeps=call.keeps,
        wants=call.wants,
        carries_columns=False,
        good_row=call.good_row,
    )


async def together(*coroutines: Any) -> list[Any]:
    """Await all, with what they raise in the place of what they return."""
    return await asyncio.gather(*coroutines, return_exceptions=True)


@dataclass(eq=False)
class Replica:
    """A process of a fleet.   fails: whether it fails in every call.   good_row: one that it has answered."""

    name: str
    fails: bool
    ended: asyncio.Future[None]
    worker: Any = None
    free: asyncio.Lock = field(default_factory=asyncio.Lock)


class Fleet:
    """Replicas of a stage as Serve runs them: a call goes to one that has few, and what ends one ends all of its calls.

    Args:
        column: Column `logits<stage>`, from which rows are answered.
        poison: What some rows do: "raises", "nan", "shape", "kills", "hangs".
        failing: Replicas that fail in every call, by their number.

    Attributes:
        cascade: Learns which run.
    """

    takes_s, restarts_s, hangs_s = 0.01, 3.0, 6.0

    def __init__(self, column: str, n: int, poison: dict[int, str], failing: Sequence[int] = ()) -> None:
        self.column, self.poison = column, poison
        self.n_started = self.n_ended = self.n_asked = 0
        self.cascade: Any = None
        self.replicas = [self.started(number in failing) for number in range(n)]

    def started(self, fails: bool) -> Replica:
        self.n_started += 1
        replica = Replica(f"replica-{self.n_started}", fails, asyncio.get_running_loop().create_future())
        replica.worker = worker_of(lambda batch: self.asked(replica, batch), stage_of(self.column))
        return replica

    def replace(self, name):
        for replica in [one for one in self.replicas if one.name == name]:
            self.end(replica)

    def end(self, replica):
        if replica in self.replicas:
            self.n_ended += 1
            self.replicas.remove(replica)
            replica.ended.set_result(None)
            asyncio.get_running_loop().call_later(self.restarts_s, lambda: self.replicas.append(self.started(False)))

    async def poll(self):
        """Tell the cascade which replicas run, as the router does."""
        while True:
            self.tell()
            await asyncio.sleep(1.0)

    def tell(self):
        self.cascade.replicas(stage_of(self.column), [one.name for one in self.replicas])

    async def answer(self, call, on_begin=None):
        replica = next((one for one in self.replicas if one.name == call.replica), None)
        if replica is None:
            raise StageError("gone", "it is not there")
        computing = asyncio.ensure_future(self.computed(replica, call, on_begin))
        await asyncio.wait([computing, replica.ended], return_when=asyncio.FIRST_COMPLETED)
        if replica.ended.done():
            raise StageError("died", "its replica ended")
        return computing.result()

    async def computed(self, replica, call, on_begin):
        """Compute a call when its turn comes. A caller that goes away does not end it."""
        rows = gathered(call.parts, call.bundles)["row"].tolist()
        async with replica.free:
            if replica.ended.done():
                return None
            if on_begin is not None:
                on_begin()
            kinds = {self.poison.get(row) for row in rows}
            if "kills" in kinds:
                self.end(replica)
                return None
            if "hangs" in kinds:
                await asyncio.sleep(self.hangs_s)
                self.end(replica)
                return None
            before = self.n_asked
            result, goes_on = decided(replica.worker, call, call.policies)
            await asyncio.sleep(self.takes_s * (self.n_asked - before))
        return replace(result, compute_s=self.takes_s), goes_on.state

    def asked(self, replica, batch):
        """Answer as the model would."""
        self.n_asked += 1
        kinds = {self.poison.get(row) for row in batch["row"].tolist()}
        if replica.fails or "raises" in kinds:
            raise ValueError("no such thing")
        logits = np.array(batch[self.column], dtype=np.float32)
        if "nan" in kinds:
            logits[[self.poison.get(row) == "nan" for row in batch["row"].tolist()]] = np.nan
        return as_answers(logits[1:] if "shape" in kinds else logits, len(logits))
