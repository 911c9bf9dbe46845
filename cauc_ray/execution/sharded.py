"""A chain whose logits stay in shards, each an actor on a node of its own: fits and replays ask them for sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError

from cauc_ray.data.logits import ChainHeads
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, kind_of, make_actor, placement, told
from cauc_ray.execution.session import room_for
from cauc_ray.execution.shards import ShardActor, cut_rows, facts_of, node_of
from cauc_ray.models.resources import Resources
from cauc_ray.numbers.arrays import require_no_probabilities
from cauc_ray.numbers.chain import Chain, ChainPart
from cauc_ray.numbers.likelihood import suits_float32
from cauc_ray.numbers.logits import SumsToOne

# A shard whose actor dies again and again is what they die of, or the cluster is.
MOST_DEATHS = 8
# A new actor that has not started by then is given up: those that live take its shards over.
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

    def __init__(self, sharding: Sharding, chains: Sequence[ChainHeads], on_pass: Callable[[int], None]) -> None:
        """Cut the chains.   on_pass: called with how often all shards have answered.

        Raises ExecutionError where they do not fit on the cluster.
        """
        self.watched = ShardsWatched()
        self._sharding, self._on_pass = sharding, on_pass
        n = _n_shards(chains, sharding)
        self._rows = [
            [
                ray.put(rows)
                for rows in cut_rows(
                    chain.heads, chain.known["labels"], chain.known["models"], chain.known["logit_kind"], n
                )
            ]
            for chain in chains
        ]
        self._holders: list[Any] = [None] * n
        self._deaths = [0] * n

    def start(self) -> None:
        """Start the actors. Raises ExecutionError where none has started in time."""
        started = time.perf_counter()
        self._hold({None}, START_DEADLINE_S)
        self.watched.start_s = time.perf_counter() - started

    def open(self, number: int, known: dict[str, Any]) -> int:
        """Have all read their rows of a chain, and return the most options that one of them has.

        known: of the chain. Raises DataError for rows that cannot be used, ExecutionError where a shard has no answer
        in time.
        """
        started = time.perf_counter()
        facts = self._ask(number, partial(facts_of, known["models"]), 0)
        refused = [own.refused for own in facts if own.refused is not None]
        if refused:
            rank, why = min(refused)  # the example that one process would name
            raise DataError(f"{known['source']}: example {known['example_ids'][rank]!r} {why}")
        for place, model in enumerate(known["models"]):
            sums = sum((own.sums[place] for own in facts), SumsToOne())
            require_no_probabilities(f"{known['source']}: model {model!r}", sums)
        self.watched.nodes = self._ask(number, node_of, 0)
        self.watched.open_s += time.perf_counter() - started
        return max(own.width for own in facts)

    def ask(self, number: int, question: Callable[[ChainPart], T], width: int) -> list[T]:
        """Ask all shards about their rows of a chain. Raises as open does, and as the question does."""
        answers = self._ask(number, question, width)
        self.watched.n_passes += 1
        self._on_pass(self.watched.n_passes)
        return answers

    def stop(self) -> None:
        """End the actors."""
        for holder in set(self._holders) - {None}:
            ray.kill(holder)

    def _ask(self, number: int, question: Callable[[ChainPart], T], width: int) -> list[T]:
        """Ask the holders of all shards, and others in place of those that die."""
        deadline_s, rows = self._sharding.deadline_s, self._rows[number]
        ends = time.monotonic() + deadline_s
        answers: dict[int, tuple[T, int]] = {}
        while len(answers) < len(rows):
            waiting = [shard for shard in range(len(rows)) if shard not in answers]
            refs = [self._holders[shard].ask.remote((number, shard), rows[shard], question, width) for shard in waiting]
            dead = set()
            for shard, ref in zip(waiting, refs, strict=True):
                try:
                    answers[shard] = ray.get(ref, timeout=max(0.0, ends - time.monotonic()))
                except RayError as error:
                    self._deaths[shard] += 1
                    if kind_of(error) != "died" or self._deaths[shard] > MOST_DEATHS:
                        raise told(error, f"shard {shard + 1} of {len(rows)}", deadline_s) from error
                    dead.add(self._holders[shard])
            if dead:
                self._hold(dead, REPLACE_DEADLINE_S)
        ordered = [answers[shard] for shard in range(len(rows))]
        self.watched.peak_bytes = [peak for _, peak in ordered]
        return [answer for answer, _ in ordered]

    def _hold(self, dead: set[Any], deadline_s: float) -> None:
        """Give the shards of dead actors, at first of none, to new ones, and where these do not fit to those alive."""
        needs = self._sharding.resources
        for gone in dead - {None}:
            ray.kill(gone)  # one that cannot be reached shall not come back
        free = [shard for shard, holder in enumerate(self._holders) if holder in dead]
        live = set(self._holders) - dead
        n_new = len(free) if None in dead else len(dead)
        kind = make_actor(
            ShardActor, **placement(needs), max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        ready = {new.__ray_ready__.remote(): new for new in (kind.remote() for _ in range(n_new))}
        started: list[Any] = []
        ends = time.monotonic() + deadline_s
        # Ray misses a dead node only after a while. An actor that was to be there would wait indefinitely.
        while len(started) < room_for(needs, len(live) + n_new) - len(live) and time.monotonic() < ends:
            started, _ = ray.wait(list(ready), num_returns=n_new, timeout=1.0)
        for ref, new in ready.items():
            if ref in started:
                live.add(new)  # if it died, its first call fails
            else:
                ray.kill(new)
        if not live:
            raise ExecutionError(f"no node is left for a shard of {needs}")
        for shard in free:
            self._holders[shard] = min(live, key=self._holders.count)


@dataclass(frozen=True, kw_only=True)
class ShardedChain(Chain):
    """A chain in shards.

    number: its position among the chains that the shards hold.   width: most options that a row has.   places: the
    positions of its models among those of which the shards hold logits, None for all.
    """

    shards: Shards
    number: int
    width: int
    places: tuple[int, ...] | None = None

    def each(self, ask: Callable[[ChainPart], T]) -> list[T]:
        """Ask all shards. Raises ExecutionError where one has no answer in time, CaucError as the question does."""
        question = ask if self.places is None else partial(_ask_of_models, self.places, ask)
        return self.shards.ask(self.number, question, self.width)

    def of_models(self, places: Sequence[int]) -> ShardedChain:
        """Return the chain of some of the models, in the order of their positions here."""
        held = range(len(self.models)) if self.places is None else self.places
        return self.with_models(places, places=tuple(held[place] for place in places))

    @property
    def narrow(self) -> bool:
        """Return whether fits on the logits as they are compute in float32."""
        return suits_float32((len(self), self.width), np.dtype(np.float32))


def _ask_of_models(places: tuple[int, ...], ask: Callable[[ChainPart], T], part: ChainPart) -> T:
    return ask(part.of_models(places))


@contextmanager
def sharded(
    chains: Sequence[ChainHeads],
    sharding: Sharding,
    *,
    on_pass: Callable[[int], None] = lambda n_passes: None,
) -> Iterator[tuple[Shards, list[ShardedChain]]]:
    """Have actors of the current Ray session read chains' shards, and keep them for the length of the block.

    on_pass: called with how often all shards have answered.
    Raises ExecutionError where the shards do not fit on the cluster, DataError for rows that cannot be used.
    """
    shards = Shards(sharding, chains, on_pass)
    try:
        shards.start()
        widths = [shards.open(number, heads.known) for number, heads in enumerate(chains)]
        yield (
            shards,
            [
                ShardedChain(**heads.known, shards=shards, number=number, width=width)
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
