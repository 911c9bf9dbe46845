"""A chain whose logits stay in shards, each an actor on a node of its own: fits and replays ask them for sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError

from cauc_ray.data.logits import ChainHeads
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, kind_of, make_actor, placement, told
from cauc_ray.execution.fit_record import FitRecord
from cauc_ray.execution.session import room_for
from cauc_ray.execution.shards import ShardActor, ShardAnswer, ShardFacts, cut_rows
from cauc_ray.models.resources import Resources
from cauc_ray.numbers.chain import Chain, ChainPart, Fit
from cauc_ray.numbers.likelihood import suits_float32

# A shard whose actor dies again and again is what they die of, or the cluster is.
MOST_DEATHS = 8
# An actor in place of a dead one that has not started by then has no place: those that live take over.
REPLACE_DEADLINE_S = 60.0
# For one answer of all shards, the reading of a large table included.
DEADLINE_S = 3600.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How chains are cut.

    n_shards: into how many actors, None for as many as the cluster has room for.   resources: what each occupies and
    where it may stand.   deadline_s: for one answer of all shards, reading included.
    """

    n_shards: int | None
    resources: Resources
    deadline_s: float = DEADLINE_S


@dataclass(slots=True)
class ShardsWatched:
    """What is noted while shards answer.

    nodes: where each has started.   start_s: seconds until all had.   open_s: seconds until all had read their rows.
    n_passes: answers of all shards.   peak_bytes: the most memory that each shard's process has had.
    """

    nodes: list[str] = field(default_factory=list)
    start_s: float = 0.0
    open_s: float = 0.0
    n_passes: int = 0
    peak_bytes: list[int] = field(default_factory=list)


class Shards:
    """Actors that hold the shards of some chains: one each, until one dies."""

    def __init__(
        self,
        sharding: Sharding,
        chains: Sequence[ChainHeads],
        on_pass: Callable[[int], None] = lambda n_passes: None,
    ) -> None:
        """Start the actors.   on_pass: told how often all shards have answered.

        Raises ExecutionError where they do not fit on the cluster.
        """
        self.watched = ShardsWatched()
        self._sharding, self._chains, self._on_pass = sharding, chains, on_pass
        needs = sharding.resources
        self._kind = make_actor(
            ShardActor, **placement(needs), max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        n = _n_shards(chains, sharding)
        self._rows = [
            [ray.put(rows) for rows in cut_rows(chain.heads, chain.known["labels"], chain.known["models"], n)]
            for chain in chains
        ]
        self._holders = [self._kind.remote() for _ in range(n)]
        self._deaths = [0] * n

    def start(self) -> None:
        """Wait until all have started. Raises ExecutionError where one has not in time."""
        started = time.perf_counter()
        self.watched.nodes = self._all(lambda holder, shard: holder.node.remote(), START_DEADLINE_S)
        self.watched.start_s = time.perf_counter() - started

    def open(self, chain: int) -> int:
        """Have all read their rows of a chain, and return the most options that one of them has.

        Raises DataError for rows that cannot be used, ExecutionError where a shard has no answer in time.
        """
        started, rows = time.perf_counter(), self._rows[chain]
        facts: list[ShardFacts] = self._all(
            lambda holder, shard: holder.open.remote((chain, shard), rows[shard]), self._sharding.deadline_s
        )
        known = self._chains[chain].known
        for own in facts:
            if own.refused is not None:
                rank, why = own.refused
                raise DataError(f"{known['source']}: example {known['example_ids'][rank]!r} {why}")
        self.watched.open_s += time.perf_counter() - started
        return max(own.width for own in facts)

    def ask(self, chain: int, question: Callable[[ChainPart], T], width: int) -> list[T]:
        """Ask all shards about their rows of a chain. Raises as open does, and as the question does."""
        rows = self._rows[chain]
        answers = self._all(
            lambda holder, shard: holder.ask.remote((chain, shard), rows[shard], question, width),
            self._sharding.deadline_s,
        )
        self.watched.n_passes += 1
        self._on_pass(self.watched.n_passes)
        return answers

    def stop(self) -> None:
        """End the actors."""
        for holder in dict.fromkeys(self._holders):
            ray.kill(holder)

    def _all(self, call: Callable[[Any, int], Any], deadline_s: float) -> list[Any]:
        """Call the holders of all shards, and others in place of those that die. Returns what they answer."""
        ends = time.monotonic() + deadline_s
        answers: dict[int, ShardAnswer] = {}
        waiting = list(range(len(self._holders)))
        while waiting:
            refs = {shard: call(self._holders[shard], shard) for shard in waiting}
            waiting = []
            for shard, ref in refs.items():
                try:
                    answers[shard] = ray.get(ref, timeout=max(0.0, ends - time.monotonic()))
                except RayError as error:
                    who = f"shard {shard + 1} of {len(self._holders)}"
                    self._deaths[shard] += 1
                    if kind_of(error) != "died" or self._deaths[shard] > MOST_DEATHS:
                        raise told(error, who, deadline_s) from error
                    waiting.append(shard)
            self._replace({self._holders[shard] for shard in waiting})
        ordered = [answers[shard] for shard in range(len(self._holders))]
        self.watched.peak_bytes = [answer.peak_bytes for answer in ordered]
        return [answer.value for answer in ordered]

    def _replace(self, dead: set[Any]) -> None:
        """Give the shards of dead actors to new ones, or where there is no room for these to those that live."""
        live = [holder for holder in dict.fromkeys(self._holders) if holder not in dead]
        for gone in dead:
            ray.kill(gone)  # one that cannot be reached shall not come back
            shards = [shard for shard, holder in enumerate(self._holders) if holder == gone]
            heir = self._another(len(live) + 1)
            if heir is not None:
                live.append(heir)
            elif live:
                heir = min(live, key=self._holders.count)
            else:
                raise ExecutionError(f"no node is left for a shard of {self._sharding.resources}")
            for shard in shards:
                self._holders[shard] = heir

    def _another(self, n: int) -> Any:
        """Start an actor more, the n-th; None where there is no room for it, or it has not started in time.

        Ray misses a dead node only after a while. An actor that was to stand there would wait for ever.
        """
        if room_for(self._sharding.resources, n) < n:
            return None
        holder = self._kind.remote()
        started, ends = holder.node.remote(), time.monotonic() + REPLACE_DEADLINE_S
        while room_for(self._sharding.resources, n) >= n and time.monotonic() < ends:
            if ray.wait([started], timeout=1.0)[0]:
                return holder  # if it died, its first call tells
        ray.kill(holder)
        return None


@dataclass(frozen=True, kw_only=True)
class ShardedChain(Chain):
    """A chain in shards.

    number: its place among the chains that the shards hold.   width: most options that a row has.   record: where fits
    are kept, None to keep none.   places: of its models among those of which the shards hold logits, None for all.
    """

    shards: Shards
    number: int
    width: int
    record: FitRecord | None
    places: tuple[int, ...] | None = None

    def each(self, ask: Callable[[ChainPart], T]) -> list[T]:
        """Ask all shards. Raises ExecutionError where one has no answer in time, CaucError as the question does."""
        question = ask if self.places is None else partial(_ask_of_models, self.places, ask)
        return self.shards.ask(self.number, question, self.width)

    def of_models(self, places: Sequence[int]) -> ShardedChain:
        """Return the chain of some of the models, in the order of their places here; its fits are not kept."""
        held = range(len(self.models)) if self.places is None else self.places
        return replace(
            self,
            models=tuple(self.models[place] for place in places),
            costs=self.costs.of_models(places),
            record=None,
            places=tuple(held[place] for place in places),
        )

    @property
    def narrow(self) -> bool:
        """Return whether fits on the logits as they are compute in float32."""
        return suits_float32((len(self), self.width), np.dtype(np.float32))

    def remembered(self, what: Any, compute: Callable[[], Fit]) -> Fit:
        """Return a fit that is on record, else compute it and put it there."""
        return compute() if self.record is None else self.record.remembered(what, compute)


def _ask_of_models(places: tuple[int, ...], ask: Callable[[ChainPart], T], part: ChainPart) -> T:
    return ask(part.of_models(places))


@contextmanager
def sharded(
    chains: Sequence[ChainHeads],
    sharding: Sharding,
    *,
    record: FitRecord | None = None,
    on_pass: Callable[[int], None] = lambda n_passes: None,
) -> Iterator[tuple[Shards, list[ShardedChain]]]:
    """Have actors of the current Ray session read chains' shards, and keep them for the length of the block.

    record: where fits on the first chain are kept.   on_pass: told how often all shards have answered.
    Raises ExecutionError where the shards do not fit on the cluster, DataError for rows that cannot be used.
    """
    shards = Shards(sharding, chains, on_pass)
    try:
        shards.start()
        widths = [shards.open(number) for number in range(len(chains))]
        yield (
            shards,
            [
                ShardedChain(
                    **heads.known, shards=shards, number=number, width=width, record=record if number == 0 else None
                )
                for number, (heads, width) in enumerate(zip(chains, widths, strict=True))
            ],
        )
    finally:
        shards.stop()


def _n_shards(chains: Sequence[ChainHeads], sharding: Sharding) -> int:
    """Return how many shards there are, none empty. Raises ExecutionError where they do not fit."""
    needs = sharding.resources
    most = min(len(heads) for heads in chains)
    n = room_for(needs, most) if sharding.n_shards is None else min(sharding.n_shards, most)
    room = room_for(needs, n)
    if not n or room < n:
        raise ExecutionError(
            f"{max(1, n)} shards of {needs} do not fit on the cluster, {room} do; "
            "ask for fewer or for less, or add nodes"
        )
    return n
