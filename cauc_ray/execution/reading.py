"""The readers of a run on Ray: how many there are, what each reads next, what happens when one dies or hangs."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from cauc_ray.errors import CaucError, DataError, ExecutionError
from cauc_ray.execution.actors import kind_of, make_actor, told
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.reader import BlockHeader, BlockReader, GroupEnd, ReadPlan

READS_PER_READER = 2
MOST_READERS = 8
# Another reader is started where the first stage has waited so long for rows.
STARVED_S = 0.3
READ_DEADLINE_S = 600.0
# So often in a row may a reader die before the run ends.
DEATHS = 4


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """A block as it came.   names, chunks: references.   again: its number, if it was read for rows that were lost."""

    header: BlockHeader
    names: Any
    chunks: list[Any]
    again: int | None


@dataclass(slots=True)
class _Read:
    """A block that is being read.   place: its group and the place in it.   rest: the references beside the header."""

    reader: int
    place: tuple[int, int]
    rest: list[Any]
    since: float
    again: int | None


class Reading:
    """The readers that a controller has on Ray, on the node whose files they read, and what they are reading."""

    def __init__(self, plan: RunPlan, here: dict[str, str]) -> None:
        """Start one reader.   here: the label of the node."""
        self._plan = plan
        self._here = here
        self._next = ReadPlan(plan.source.n_groups)
        self._readers: dict[int, Any] = {}
        self._reads: dict[Any, _Read] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._ids: dict[int, dict[int, str]] = {}  # digests by group and block, as first read
        self._lost_blocks: list[int] = []  # to be read again
        self._have_read: set[int] = set()
        self._looks: dict[int, Any] = {}  # by reader, the answer to how many blocks it has gone over
        self._n_seen: dict[int, int] = {}
        self._deaths = 0
        self._starved_since: float | None = None
        self._start_reader(0)

    @property
    def refs(self) -> dict[Any, _Read]:
        """Return what is being read, by the references to wait for."""
        return self._reads

    @property
    def exhausted(self) -> bool:
        """Say whether there is nothing more to ask for: a read that is under way may fail and be asked for again."""
        return self._next.exhausted and all(read.again is not None for read in self._reads.values())

    def ask(self, now: float) -> bool:
        """Have another block read. Returns whether a reader could take one and there was one."""
        busy = [read.reader for read in self._reads.values()]
        for reader in sorted(self._readers, key=busy.count):
            if busy.count(reader) >= READS_PER_READER:
                return False
            place = self._next.next_place(reader)
            if place is not None:
                self._ask(reader, place, None, now)
                return True
        return False

    def ask_again(self, block: int) -> None:
        """Note that a block must be read once more; owes and ask_lost() are for those."""
        self._lost_blocks.append(block)

    @property
    def owes(self) -> bool:
        """Say whether a block must be read again that is not being read."""
        return bool(self._lost_blocks)

    def ask_lost(self, now: float) -> bool:
        """Have a block read again. Returns whether there was one."""
        if not self._lost_blocks:
            return False
        block = self._lost_blocks.pop()
        busy = [read.reader for read in self._reads.values()]
        self._ask(min(self._readers, key=busy.count), self._places[block], block, now)
        return True

    def take(self, ref: Any) -> ReadBlock | None:
        """Take what has been read; None where a group had no further block.

        Raises RayError as failed() takes it, and leaves the reference among those to wait for; DataError where what
        is read again holds other rows than at first.
        """
        header: BlockHeader | GroupEnd = ray.get(ref)
        read = self._reads.pop(ref)
        self._deaths = 0
        self._have_read.add(read.reader)
        group = read.place[0]
        known = self._ids.setdefault(group, {})
        for number, ids in header.ids.items():
            if known.get(number, ids) != ids:
                raise _other_rows(f"block {number} held other rows")
        if isinstance(header, GroupEnd):
            gone = read.again if read.again is not None else max(known, default=-1)
            if read.again is not None or gone > header.last:
                raise _other_rows(f"block {gone} was no longer there")
            self._next.group_ended(read.reader, group)
            self._ids[group] = {number: ids for number, ids in known.items() if number in self._places}
            return None
        if header.unreadable is None:
            known[header.number] = header.ids[header.number]
        self._places[header.number] = read.place
        names, *chunks = read.rest
        return ReadBlock(header, names, chunks, read.again)

    def failed(self, ref: Any, error: RayError) -> int:
        """Have read again what was not, by a new reader where the old one died. Returns how many reads came to nothing.

        Raises what the source raised, and ExecutionError when reader after reader dies.
        """
        fault = told(error, "the reader")
        kind = kind_of(error)
        if kind == "raised":
            raise fault from error
        if kind == "died":
            return self._lost(self._reads[ref].reader, fault)
        return self._anew([ref])

    def forget(self, block: int) -> None:
        """Note that a block will not be asked for again."""
        place = self._places.pop(block, None)
        # Inside a group that has not ended, whoever begins it anew goes over this block once more.
        if place is not None and not self._next.is_begun(place[0]):
            self._ids[place[0]].pop(block, None)

    def watch(self, now: float, *, starved: bool) -> int:
        """Give readers up that hang, and start another where the first stage is starved for rows.

        Returns how many reads came to nothing.
        """
        n_lost = 0
        for reader in self._readers:
            since = [read.since for read in self._reads.values() if read.reader == reader]
            if since and now - min(since) > READ_DEADLINE_S:
                n_lost += self._lost(reader, ExecutionError(f"a reader has not answered for {READ_DEADLINE_S:.0f} s"))
            elif since and now - min(since) > READ_DEADLINE_S / 3:
                self._look_at(reader, now)
        all_work = len(self._have_read) == len(self._readers)  # one that is still being started cannot help yet
        self._starved_since = (self._starved_since or now) if starved and self._reads and all_work else None
        more = len(self._readers) < min(MOST_READERS, self._plan.source.n_groups)
        if more and self._starved_since is not None and now - self._starved_since > STARVED_S:
            self._start_reader(len(self._readers))
            self._starved_since = None
        return n_lost

    def _look_at(self, reader: int, now: float) -> None:
        """Give a reader more time that has gone on since the last look: before a block it may go over many."""
        look = self._looks.get(reader)
        if look is None:
            look = self._looks[reader] = self._readers[reader].n_seen.remote()
        if not ray.wait([look], timeout=0)[0]:
            return
        del self._looks[reader]
        with suppress(RayError):  # what it reads fails, too
            n_seen = ray.get(look)
            if n_seen != self._n_seen.get(reader):
                self._n_seen[reader] = n_seen
                for read in self._reads.values():
                    read.since = now if read.reader == reader else read.since

    def _start_reader(self, number: int) -> None:
        self._looks.pop(number, None)
        self._n_seen.pop(number, None)
        reader = make_actor(BlockReader, num_cpus=0, label_selector=self._here, concurrency_groups={"watch": 1})
        self._readers[number] = reader.remote(self._plan.source, self._plan.chunk_rows, self._plan.n_chunks)

    def _ask(self, reader: int, place: tuple[int, int], again: int | None, now: float) -> None:
        n_returns = 2 + self._plan.n_chunks
        header, *rest = self._readers[reader].read.options(num_returns=n_returns).remote(*place)
        self._reads[header] = _Read(reader, place, rest, now, again)

    def _lost(self, reader: int, fault: CaucError) -> int:
        self._deaths += 1
        if self._deaths >= DEATHS:
            raise ExecutionError(f"the input cannot be read: {fault}")
        ray.kill(self._readers[reader])
        self._start_reader(reader)
        return self._anew([ref for ref, read in self._reads.items() if read.reader == reader])

    def _anew(self, lost: list[Any]) -> int:
        reads = [self._reads.pop(ref) for ref in lost]
        self._next.read_again([read.place for read in reads if read.again is None])
        self._lost_blocks += [read.again for read in reads if read.again is not None]
        return len(reads)


def _other_rows(what: str) -> DataError:
    return DataError(
        f"the input changed during the run: {what} when it was read again. An input must give the same rows in the "
        "same order every time: seed and sort a Ray Dataset, or write it to files first, and leave files as they are; "
        "then start a new run"
    )
