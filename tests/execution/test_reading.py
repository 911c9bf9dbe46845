"""What the tasks that read an input give, and what is done about those that end or hang."""

import os
import time
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from ray.exceptions import LocalRayletDiedError, NodeDiedError, WorkerCrashedError

from cauc_ray.data.blocks import InputBlock, ids_digest
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution import reading
from cauc_ray.execution.actors import kind_of
from cauc_ray.execution.commits import FailedBlock
from cauc_ray.execution.reading import LONG_PAUSES_S, PAUSES_S, BlockHeader, Piece, Reading, Work, read_blocks


class Source:
    """Two blocks of five rows; each cannot be read for a number of tries."""

    name = "the input"

    def __init__(self, bad_tries=(0, 0), *, may_return=False):
        self.left, self.may_return = list(bad_tries), may_return

    def blocks(self, group, seen):
        for number in range(2):
            ids = [f"row-{5 * number + row}" for row in range(5)]
            if number not in seen and self.left[number]:
                self.left[number] -= 1
                yield number, InputBlock(ids, None, {}, 0, dict.fromkeys(range(5), "damaged"), self.may_return)
            else:
                yield number, InputBlock(ids, None, {"x": np.arange(5.0) + 5 * number}, 40)


def read(source=None, done=(), again=(), piece=Piece(0, {}), n_away=0, chunk_rows=5):  # noqa: B008
    """Return what a task yields."""
    return list(read_blocks(Work(source or Source(), dict(done), dict(again)), piece, n_away, chunk_rows))


@pytest.fixture
def pauses(monkeypatch):
    waited = []
    monkeypatch.setattr(reading.time, "sleep", waited.append)
    return waited


def test_a_block_comes_in_chunks():
    header, first, second, end, *rest = read(chunk_rows=3)
    assert (header.number, header.unreadable, header.chunks) == (0, {}, ((3, 24), (2, 16)))
    assert header.example_ids.to_pylist() == [f"row-{row}" for row in range(5)]
    assert header.digest == ids_digest(header.example_ids.to_pylist())
    assert [first.columns["x"].tolist(), second.columns["x"].tolist()] == [[0, 1, 2], [3, 4]]
    assert end is None
    assert rest[0].number == 1
    for piece in (Piece(0, {0: ""}), Piece(0, {}, frozenset({1}))):
        header, _, end = read(piece=piece)
        assert (header.number, end) == (1, None)


# Tries that fail for each block, whether what is away may return, blocks that were away before, and the pauses.
AWAY = {
    # The first outage passed, and says nothing of the second.
    "a file that comes back": ((3, 99), True, 0, [*LONG_PAUSES_S[:3], *LONG_PAUSES_S], [None, "damaged"]),
    "damage": ((99, 0), False, 0, PAUSES_S, ["damaged", None]),
    "what stays away": ((99, 99), True, 1, [*LONG_PAUSES_S[:-1], *LONG_PAUSES_S[:-2]], ["damaged", "damaged"]),
}


@pytest.mark.parametrize("case", AWAY)
def test_what_may_return_is_waited_for_and_damage_is_named(pauses, case):
    bad_tries, may_return, n_away, waited, unreadable = AWAY[case]
    items = read(Source(bad_tries, may_return=may_return), n_away=n_away)
    headers = [item for item in items if isinstance(item, BlockHeader)]
    assert [header.unreadable.get(4) for header in headers] == unreadable
    assert pauses == list(waited)
    for header in headers:
        assert len(header.example_ids) == 5
        assert not header.unreadable or (header.chunks, header.digest) == ((), "")


DIGESTS = {number: ids_digest([f"row-{5 * number + row}" for row in range(5)]) for number in range(2)}


def numbers(done, again=(), bad_tries=(0, 0)):
    return [item.number for item in read(Source(bad_tries), done, again) if isinstance(item, BlockHeader)]


def test_blocks_that_are_done_are_compared_with_what_was_committed(pauses):
    assert numbers({0: DIGESTS[0]}) == [1]
    assert numbers(DIGESTS) == []
    assert numbers({0: "", 1: DIGESTS[1]}) == []  # it could not be read when it was committed
    assert numbers(DIGESTS, bad_tries=(9, 0)) == []
    with pytest.raises(DataError, match=r"the input returned other rows.*block 1 has other rows.*start a new run"):
        numbers({0: DIGESTS[0], 1: "of other rows"})


def test_of_blocks_that_are_done_again_only_failed_rows_come(pauses):
    failed = FailedBlock(Counter(small=2), (1, 3))
    header, chunk, _ = read(done=DIGESTS, again={0: failed})
    assert header.example_ids.to_pylist() == ["row-1", "row-3"]
    assert chunk.columns["x"].tolist() == [1, 3]
    header, _ = read(Source((9, 0)), DIGESTS, {0: failed})
    assert header.unreadable == dict.fromkeys(range(2), "damaged")
    assert numbers({0: "", 1: DIGESTS[1]}, {0: FailedBlock(Counter({"": 5}), tuple(range(5)))}) == [0]
    with pytest.raises(DataError, match="block 0 has other rows"):
        numbers({0: "of other rows"}, {0: failed})


def test_of_a_block_that_is_partly_damaged_the_other_rows_come(pauses):
    class Partly(Source):
        def blocks(self, group, seen):
            for number, block in super().blocks(group, seen):
                yield number, replace(block, columns={"x": np.array([0.0, 2.0, 4.0])}, unreadable={1: "a", 3: "b"})

    (header, *chunks, end), rest = (lambda items: (items[:4], items[4:]))(read(Partly(), chunk_rows=2))
    assert (header.unreadable, header.digest) == ({1: "a", 3: "b"}, "")
    assert [chunk.columns["x"].tolist() for chunk in chunks] == [[0, 2], [4]]
    assert (end, len(rest)) == (None, 4)


@dataclass(frozen=True)
class Groups:
    """Two groups of three blocks of two rows.

    folder: where the tasks note what they begin; those of the first group die, or hang, at its last block once.
    """

    folder: object
    fault: str = ""
    name: str = "the input"
    n_groups: int = 2
    anywhere: bool = True
    deadline_s: float | None = None

    def blocks(self, group, seen):
        begun = len(list(self.folder.glob(f"{group}-*")))
        (self.folder / f"{group}-{begun}").touch()
        for number in range(3 * group, 3 * group + 3):
            ids = [f"row-{2 * number + row}" for row in range(2)]
            if number == 2 and not begun:
                if self.fault == "dies":
                    os._exit(1)
                if self.fault == "hangs":
                    time.sleep(600)
            yield number, InputBlock(ids, None, {"x": np.arange(2.0)}, 16)


def plan_of(source):
    return SimpleNamespace(source=source, chunk_rows=1, n_chunks=2, done={}, again={})


def taken(read, n, starved=False):
    """Take so many blocks, or all if there are fewer."""
    blocks, deadline = [], time.time() + 240
    while len(blocks) < n and time.time() < deadline and not (read.exhausted and not read.owes and not read.n_asked):
        while read.ask(time.time()):
            pass
        ray.wait(read.streams, timeout=0.1) if read.streams else time.sleep(0.01)
        for stream in [*read.streams, *read.coming]:
            try:
                block = read.take(stream, time.time())
            except ray.exceptions.RayError as error:
                read.failed(stream, error)
                continue
            blocks += [] if block is None else [block]
        read.watch(time.time(), starved=starved)
    return blocks


@dataclass(frozen=True)
class Slow(Groups):
    """Groups of one block, each of which takes its time; tasks note how many others read at the same time."""

    def blocks(self, group, seen):
        mine = self.folder / f"reads-{group}"
        mine.touch()
        for _ in range(10):  # new readers take seconds to start on a busy machine
            if list(self.folder.glob("side-by-side-[4-9]")):
                break
            (self.folder / f"side-by-side-{len(list(self.folder.glob('reads-*')))}").touch()
            time.sleep(0.05)
        mine.unlink()
        yield group, InputBlock([f"row-{group}"], None, {"x": np.arange(1.0)}, 8)


@pytest.mark.usefixtures("ray_session")
def test_readers_are_added_while_the_first_stage_waits_also_where_each_file_is_one_block(tmp_path):
    blocks = taken(Reading(plan_of(Slow(tmp_path, n_groups=100)), {}), 100, starved=True)
    assert sorted(block.header.number for block in blocks) == list(range(100))
    assert list(tmp_path.glob("side-by-side-[4-9]"))


def rows_of(block):
    return [(header_id, chunk.columns["x"].tolist()) for header_id, chunk in
            zip(block.header.example_ids.to_pylist(), ray.get(block.chunks), strict=True)]  # fmt: skip


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("fault", ["", "dies", pytest.param("hangs", marks=pytest.mark.soak("faults"))])
def test_what_a_task_has_not_given_is_read_by_another(tmp_path, fault):
    read = Reading(plan_of(Groups(tmp_path, fault, deadline_s=20.0 if fault == "hangs" else None)), {})
    blocks = taken(read, 6)
    assert sorted(block.header.number for block in blocks) == list(range(6))
    for block in blocks:
        first = 2 * block.header.number
        assert rows_of(block) == [(f"row-{first}", [0.0]), (f"row-{first + 1}", [1.0])]
    n_attempts = len(list(tmp_path.glob("0-*")))
    assert n_attempts >= 2 if fault else n_attempts == 1
    lost = [block for block in blocks if block.header.group == 0]
    for block in lost:
        read.ask_again(block.header)
        read.ask(time.time())
    assert read.owes
    again = taken(read, 3)
    assert all(block.again for block in again)
    assert [rows_of(block) for block in again] == [rows_of(block) for block in lost]
    assert (taken(read, 1), read.exhausted) == ([], True)
    # Those that were lost while the first was read again, by one task: a group may be costly to read.
    assert len(list(tmp_path.glob("0-*"))) == n_attempts + 2


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("error", [NodeDiedError, LocalRayletDiedError, WorkerCrashedError])
def test_all_tasks_of_a_node_may_die_with_it(tmp_path, error):
    read = Reading(plan_of(Groups(tmp_path, n_groups=6)), {})
    first = {block.header.group: block.header for block in taken(read, 18)}
    for header in first.values():
        read.ask_again(header)
    while read.owes:
        read.ask(time.time())
    streams = [*read.streams, *read.coming]
    assert len(streams) == 6
    for stream in streams:
        read.failed(stream, error("it is gone"))
    assert sorted(block.header.number for block in taken(read, 6)) == sorted(h.number for h in first.values())


@pytest.mark.usefixtures("ray_session")
def test_a_call_whose_input_died_with_its_reader_has_lost_it_and_did_not_die_itself():
    reader = ray.remote(num_cpus=0, max_retries=0)(lambda: os._exit(1)).remote()
    called = ray.remote(num_cpus=0)(lambda rows: rows).remote(reader)
    for ref, kind in ((reader, "died"), (called, "lost")):
        with pytest.raises(ray.exceptions.RayError) as caught:
            ray.get(ref, timeout=60)
        assert kind_of(caught.value) == kind


@pytest.mark.usefixtures("ray_session")
def test_an_input_that_gives_other_rows_when_it_is_read_again_ends_the_run(tmp_path):
    class Changing(Groups):
        def blocks(self, group, seen):
            begun = len(list(self.folder.glob(f"{group}-*")))
            for number, block in super().blocks(group, seen):
                yield number, replace(block, example_ids=[f"{name}-{begun}" for name in block.example_ids])

    with pytest.raises(DataError, match=r"the input returned other rows.*start a new run"):
        taken(Reading(plan_of(Changing(tmp_path, "dies")), {}), 6)


@pytest.mark.usefixtures("ray_session")
def test_an_input_whose_tasks_all_die_ends_the_run(tmp_path):
    class Deadly(Groups):
        def blocks(self, group, seen):
            os._exit(1)

    with pytest.raises(ExecutionError, match="the input cannot be read: a task that reads the input"):
        taken(Reading(plan_of(Deadly(tmp_path)), {}), 1)
