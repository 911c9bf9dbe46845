"""A chain whose logits stay in shards, each an actor on a node of its own: fits and replays ask them for sums."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import ray
from ray.exceptions import RayError

from cauc_ray.data.logits import ChainHeads, require_fit_rows
from cauc_ray.data.model_rows import ShardFiles, SpooledLogits, unfit_row
from cauc_ray.errors import ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, explained, kind_of, placement
from cauc_ray.execution.cluster import room_for, wait_for_nodes
from cauc_ray.models.resources import Resources
from cauc_ray.numbers.arrays import require_no_probabilities
from cauc_ray.numbers.chain import Chain, ChainPart
from cauc_ray.numbers.logits import SumsToOne
from cauc_ray.numbers.types import Ints

# Where so many actors die for each shard, a shard is what they die of, or the cluster is.
MOST_DEATHS = 8
# For one answer of all shards, the reading of a large table included.
DEADLINE_S = 3600.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How chains are cut.

    Attributes:
        n_shards: The number of actors, None for as many as the cluster has room for.
        resources: The resources and the place of each.
        deadline_s: For one answer of all shards, reading included.
        on_pass: Called with how often all shards have answered.
    """

    n_shards: int | None
    resources: Resources
    deadline_s: float = DEADLINE_S
    on_pass: Callable[[int], None] = lambda n_passes: None


@dataclass(slots=True)
class ShardsWatched:
    """What is noted while shards answer.

    Attributes:
        nodes: Where each has started.
        start_s: Seconds until all had.
        open_s: Seconds until all had read their rows.
        n_passes: Answers of all shards.
        peak_bytes: The most memory that each shard's process has had.
    """

    nodes: list[str] = field(default_factory=list)
    start_s: float = 0.0
    open_s: float = 0.0
    n_passes: int = 0
    peak_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows of a shard, in the order in which the first model's files have them.

    Attributes:
        ranks: int64 (n,), positions among all rows in order of example_id.
        labels: int32 (n,).
        files: Of each model.
    """

    ranks: Ints
    labels: Ints
    files: tuple[ShardFiles, ...]


def cut_rows(chain: ChainHeads, n_shards: int) -> list[ShardRows]:
    """Cut a chain's rows into shards of about equal size, none empty, along the first model's files."""
    order = np.argsort(chain.heads[0].positions)
    models = list(zip(chain.models, chain.heads, chain.logit_kinds, strict=True))
    return [
        ShardRows(
            ranks,
            chain.labels[ranks],
            tuple(ShardFiles(model, head.files, head.positions[ranks], kind) for model, head, kind in models),
        )
        for ranks in np.array_split(order, min(n_shards, len(order)))
    ]


class ShardActor:
    """Holds shards of some chains, each read when it is first asked for. Rows come with every call.

    It may come to hold other shards' rows next to its own, when these lose their actors.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], ChainPart] = {}

    def ask(self, key: tuple[int, int], rows: ShardRows, question: Callable[[ChainPart], Any]) -> tuple[Any, int]:
        """Answer a question about the rows of a chain and a shard, by number.

        Returns the answer, and the most memory that this process has had, in bytes. Raises DataError where the rows are
        unfit.
        """
        if key not in self._parts:
            spools = tuple(map(SpooledLogits, rows.files))
            # Copies, so that no block of the object store is held between calls.
            self._parts[key] = ChainPart(spools, rows.labels.copy(), rows.ranks.copy())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return question(self._parts[key]), peak if sys.platform == "darwin" else 1024 * peak


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What is known of a shard's rows once they are read.

    width: most options that a row has.   sums: how near each model's rows are to probabilities.   unfit: as unfit_row
    has it.
    """

    width: int
    sums: tuple[SumsToOne, ...]
    unfit: tuple[int, str] | None


def facts_of(models: Sequence[str], part: ChainPart) -> ShardFacts:
    """Return what is known of a shard's rows.   models: names."""
    spools = cast("tuple[SpooledLogits, ...]", part.logits)
    widest = max(spool.width for spool in spools)
    for spool in spools:
        spool.width = widest
    unfit = unfit_row(models, [spool.n_options for spool in spools], part, gaps=any(spool.has_gaps for spool in spools))
    return ShardFacts(widest, tuple(spool.sums for spool in spools), unfit)


def of_models(places: Sequence[int], width: int, question: Callable[[ChainPart], T], part: ChainPart) -> T:
    """Answer a question about some models of a shard.   width: of the logits, the most options of all shards."""
    for logits in cast("tuple[SpooledLogits, ...]", part.logits):
        logits.width = width
    return question(part.of_models(places))


class Shards:
    """Actors that hold the shards of some chains: one each; the shards of one that dies go to those that live."""

    def __init__(self, sharding: Sharding, chains: Sequence[ChainHeads]) -> None:
        """Cut the chains. Raises ExecutionError where they do not fit on the cluster."""
        self.watched, self._sharding = ShardsWatched(), sharding
        n = _n_shards(chains, sharding)
        self._rows = [[ray.put(rows) for rows in cut_rows(chain, n)] for chain in chains]
        self._holders: list[Any] = []
        self._n_deaths = 0

    def start(self) -> None:
        """Start the actors. Raises ExecutionError where none has started in time."""
        started = time.perf_counter()
        self._holders = [self._new_holder() for _ in self._rows[0]]
        ready = {holder.__ray_ready__.remote(): holder for holder in self._holders}
        _, late = ray.wait(list(ready), num_returns=len(ready), timeout=START_DEADLINE_S)
        if len(late) == len(ready):
            raise ExecutionError(f"no shard of {self._sharding.resources} has started in {START_DEADLINE_S:.0f} s")
        self._hand_over({ready[ref] for ref in late})  # one that has died fails its first call
        self.watched.start_s = time.perf_counter() - started

    def open(self, number: int, heads: ChainHeads) -> ShardedChain:
        """Have all read their rows of a chain, and return it with them.

        Raises DataError for rows that cannot be used, ExecutionError where a shard has no answer in time.
        """
        started = time.perf_counter()
        facts = self.ask(number, partial(facts_of, heads.models))
        # The error names the example that one process would name.
        require_fit_rows(heads, (shard.unfit for shard in facts))
        for place, model in enumerate(heads.models):
            sums = sum((shard.sums[place] for shard in facts), SumsToOne())
            require_no_probabilities(f"{heads.source}: model {model!r}", sums)
        self.watched.nodes = self.ask(number, lambda part: ray.get_runtime_context().get_node_id())
        self.watched.open_s += time.perf_counter() - started
        width, places = max(shard.width for shard in facts), tuple(range(len(heads.models)))
        return heads.held_as(ShardedChain, shards=self, number=number, width=width, places=places)

    def ask(self, number: int, question: Callable[[ChainPart], T]) -> list[T]:
        """Ask all shards about their rows of a chain, again where their holders die.

        Raises ExecutionError where one has no answer in time, CaucError as the question does.
        """
        deadline_s, rows = self._sharding.deadline_s, self._rows[number]
        ends = time.monotonic() + deadline_s
        answers: dict[int, tuple[T, int]] = {}
        while len(answers) < len(rows):
            waiting = [shard for shard in range(len(rows)) if shard not in answers]
            refs = [self._holders[shard].ask.remote((number, shard), rows[shard], question) for shard in waiting]
            dead = set[Any]()
            for shard, ref in zip(waiting, refs, strict=True):
                try:
                    answers[shard] = ray.get(ref, timeout=max(0.0, ends - time.monotonic()))
                except RayError as error:
                    if kind_of(error) != "died" or self._n_deaths >= MOST_DEATHS * len(rows):
                        raise explained(error, f"shard {shard + 1} of {len(rows)}", deadline_s) from error
                    dead.add(self._holders[shard])
            self._n_deaths += len(dead)
            self._hand_over(dead)
        self.watched.peak_bytes = [answers[shard][1] for shard in range(len(rows))]
        self.watched.n_passes += 1
        self._sharding.on_pass(self.watched.n_passes)
        return [answers[shard][0] for shard in range(len(rows))]

    def stop(self) -> None:
        """End the actors."""
        for holder in set(self._holders):
            ray.kill(holder)

    def _hand_over(self, dead: set[Any]) -> None:
        """Give the shards of dead actors to those that live, and to a new one where none does."""
        for holder in dead:
            ray.kill(holder)  # one that cannot be reached must not come back
        live = set(self._holders) - dead or {self._new_holder()}
        for shard, holder in enumerate(self._holders):
            if holder in dead:
                self._holders[shard] = min(live, key=self._holders.count)

    def _new_holder(self) -> Any:
        options = placement(self._sharding.resources)
        kind = ray.remote(**options, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD")
        return kind(ShardActor).remote()


def _n_shards(chains: Sequence[ChainHeads], sharding: Sharding) -> int:
    """Return how many shards there are, none empty. Raises ExecutionError where they do not fit."""
    needs, most = sharding.resources, min(map(len, chains))
    n = max(1, min(sharding.n_shards or room_for(needs, most), most))
    room = room_for(needs, n)
    if room < n:
        what = f"{n} shards of {needs} do not fit on the cluster, {room} do"
        wait_for_nodes(what, "ask for fewer or for less, or add nodes")
    return n


@dataclass(frozen=True, kw_only=True)
class ShardedChain(Chain):
    """A chain in shards.

    number: its position among the chains that the shards hold.   width: most options that a row has.   places: the
    positions of its models among those of which the shards hold logits.
    """

    shards: Shards
    number: int
    width: int
    places: tuple[int, ...]

    def each(self, ask: Callable[[ChainPart], T]) -> list[T]:
        """Ask all shards. Raises ExecutionError where one has no answer in time, CaucError as the question does."""
        return self.shards.ask(self.number, partial(of_models, self.places, self.width, ask))

    def of_models(self, places: Sequence[int]) -> ShardedChain:
        """Return the chain of some of the models, in the order of their positions here."""
        return self.with_models(places, places=tuple(self.places[place] for place in places))


@contextmanager
def sharded(chains: Sequence[ChainHeads], sharding: Sharding) -> Iterator[tuple[Shards, list[ShardedChain]]]:
    """Have actors of the current Ray session read chains' shards, and keep them for the length of the block.

    Raises ExecutionError where the shards do not fit on the cluster, DataError for rows that cannot be used.
    """
    shards = Shards(sharding, chains)
    try:
        shards.start()
        yield shards, [shards.open(number, heads) for number, heads in enumerate(chains)]
    finally:
        shards.stop()
