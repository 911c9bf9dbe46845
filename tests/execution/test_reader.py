"""Readers and what each reads next, in this process."""

import numpy as np
import pytest

from cauc_ray.data.blocks import InputBlock
from cauc_ray.execution import reader
from cauc_ray.execution.reader import LONG_PAUSES_S, PAUSES_S, BlockReader, ReadPlan


class Source:
    """Two blocks of five rows; each cannot be read for a number of tries."""

    n_groups = 1

    def __init__(self, bad_tries, *, may_return):
        self.left, self.may_return, self.n_read = list(bad_tries), may_return, 0

    def blocks(self, group):
        for number in range(2):
            self.n_read += 1
            ids = [f"row-{5 * number + row}" for row in range(5)]
            if self.left[number]:
                self.left[number] -= 1
                yield number, InputBlock(ids, None, {}, 0, "damaged", self.may_return)
            else:
                yield number, InputBlock(ids, None, {"x": np.arange(5.0) + 5 * number}, 40)


@pytest.fixture
def pauses(monkeypatch):
    waited = []
    monkeypatch.setattr(reader.time, "sleep", waited.append)
    return waited


def test_a_block_comes_in_chunks_and_a_group_is_read_on():
    source = Source([0, 0], may_return=False)
    one = BlockReader(source, chunk_rows=3, n_chunks=2)
    header, names, first, second = one.read(0, 0)
    assert (header.number, header.n_rows, header.unreadable) == (0, 5, None)
    assert header.chunks == ((3, 24), (2, 16))
    assert names.example_ids.to_pylist() == [f"row-{row}" for row in range(5)]
    assert [first.columns["x"].tolist(), second.columns["x"].tolist()] == [[0, 1, 2], [3, 4]]
    assert one.read(0, 1)[0].number == 1
    assert source.n_read == 2  # not from the group's start again
    end, *rest = one.read(0, 2)
    assert (end.last, rest) == (1, [None] * 3)


def test_a_reader_tells_which_rows_it_went_over():
    """What takes the place of one that died is compared with it, so that no row is dropped or comes twice."""
    first = BlockReader(Source([0, 0], may_return=False), chunk_rows=5, n_chunks=1)
    headers = [first.read(0, 0)[0], first.read(0, 1)[0]]
    assert [list(header.ids) for header in headers] == [[0], [1]]
    second = BlockReader(Source([0, 0], may_return=False), chunk_rows=5, n_chunks=1)
    assert second.read(0, 1)[0].ids == headers[0].ids | headers[1].ids
    assert second.read(0, 5)[0].last == 1
    damaged = BlockReader(Source([9, 0], may_return=False), chunk_rows=5, n_chunks=1)
    assert damaged.read(0, 1)[0].ids == headers[1].ids  # of what cannot be read nothing is known


def test_a_file_that_comes_back_is_waited_for(pauses):
    one = BlockReader(Source([3, 0], may_return=True), chunk_rows=5, n_chunks=1)
    header, *_ = one.read(0, 0)
    assert (header.number, header.unreadable) == (0, None)
    assert pauses == list(LONG_PAUSES_S[:3])
    one = BlockReader(Source([3, 99], may_return=True), chunk_rows=5, n_chunks=1)
    one.read(0, 0)
    del pauses[:]
    one.read(0, 1)
    assert pauses == list(LONG_PAUSES_S)  # the first outage passed, and says nothing of the second


def test_damage_is_not_waited_for_and_the_rows_are_named(pauses):
    one = BlockReader(Source([99, 0], may_return=False), chunk_rows=5, n_chunks=1)
    header, names, chunk = one.read(0, 0)
    assert (header.unreadable, header.chunks, chunk) == ("damaged", (), None)
    assert names.example_ids.to_pylist() == [f"row-{row}" for row in range(5)]
    assert pauses == list(PAUSES_S)
    assert one.read(0, 1)[0].unreadable is None


def test_what_stays_away_is_waited_for_less_each_time(pauses):
    one = BlockReader(Source([99, 99], may_return=True), chunk_rows=5, n_chunks=1)
    one.read(0, 0)
    n_first = len(pauses)
    one.read(0, 1)
    assert n_first == len(LONG_PAUSES_S)
    assert len(pauses) - n_first == n_first - 1


def test_each_reader_has_a_group_and_what_was_lost_comes_first():
    plan = ReadPlan(3)
    assert [plan.next_place(0), plan.next_place(1), plan.next_place(0)] == [(0, 0), (1, 0), (0, 1)]
    plan.read_again([(0, 0), (0, 1)])
    assert [plan.next_place(1), plan.next_place(1), plan.next_place(1)] == [(0, 0), (0, 1), (1, 1)]
    plan.group_ended(0, 0)
    assert plan.next_place(0) == (2, 0)
    plan.group_ended(0, 2)
    assert plan.next_place(0) is None
    assert not plan.exhausted
    plan.group_ended(1, 1)
    assert plan.exhausted
