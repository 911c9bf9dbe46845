"""Requests of higher priority are answered first, and refused last, in virtual time."""

import asyncio

import numpy as np
from fake_stages import Stage, a_pool, cascade_of, columns_of, together
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain
from virtual_time import run_virtually

from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay
from cauc_ray.protocol.tensors import RequestError

DATA = chain(3, n=240, ragged=True)
POLICY = fit_rf(DATA, rule=ThresholdRule(threshold=0.8))
EXPECTED = replay(POLICY, DATA)
CALL_S, BATCH = 0.1, 8


async def slow(call, batch):
    await asyncio.sleep(CALL_S)


def served(**serving):
    """Return stages that take a while for each call, and a cascade of them."""
    stages = [Stage(f"logits{stage}", before=slow) for stage in range(3)]
    return stages, *cascade_of(a_pool(DATA.models, batch_wait_s=0.0, timeout_s=60.0, **serving), stages)


def ask(cascade, rows, priority=2):
    return cascade.answer(POLICY, columns_of(DATA.logits, rows), len(rows), priority=priority)


@given(requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), min_size=1, max_size=12))
def test_rows_that_wait_together_go_by_priority_whatever_their_requests_sizes(requests):
    ends = np.cumsum([n for n, _ in requests])
    rows = [np.arange(end - n, end) % len(DATA) for end, (n, _) in zip(ends, requests, strict=True)]
    of_row = np.concatenate([np.full(n, priority) for n, priority in requests])[: len(DATA)]

    async def main():
        stages, cascade, _ = served()
        asked = zip(rows, requests, strict=True)
        answers = await together(*(ask(cascade, rows_of_request, priority) for rows_of_request, (_, priority) in asked))
        return stages[0].batches, answers

    batches, answers = run_virtually(main())
    for rows_of_request, answer in zip(rows, answers, strict=True):
        assert np.array_equal(answer.predictions, EXPECTED.predictions[rows_of_request])
    if ends[-1] <= len(DATA):
        assert [len(batch) for batch in batches[:-1]] == [BATCH] * (len(batches) - 1)
        assert (np.diff(of_row[np.concatenate(batches)]) >= 0).all()


def test_one_that_comes_later_overtakes_at_every_stage():
    async def main():
        _, cascade, _ = served()
        crowd = [asyncio.create_task(ask(cascade, np.arange(at, at + 4))) for at in range(0, 160, 4)]
        await asyncio.sleep(3.5 * CALL_S)
        began = asyncio.get_running_loop().time()
        late = np.flatnonzero(EXPECTED.stages == 2)[-1:]
        await ask(cascade, late, 1)
        took_s = asyncio.get_running_loop().time() - began
        left = sum(not task.done() for task in crowd)
        await asyncio.gather(*crowd)
        return took_s, left

    took_s, left = run_virtually(main())
    assert took_s < 10 * CALL_S  # at each stage: what a replica has already, and its rows_of_request call
    assert left > 10


def test_a_full_queue_refuses_the_lowest_priority_first():
    async def main():
        _, cascade, _ = served(max_queued_rows=20)
        rows = np.array_split(np.arange(40), 10)
        first = [asyncio.create_task(ask(cascade, rows_of_request, 3)) for rows_of_request in rows[:5]]
        await asyncio.sleep(CALL_S / 2)  # some are computed, and the others wait
        waiting = [asyncio.create_task(ask(cascade, rows_of_request, 3)) for rows_of_request in rows[5:7]]
        high = [asyncio.create_task(ask(cascade, rows_of_request, 1)) for rows_of_request in rows[7:]]
        more = await together(ask(cascade, np.arange(40, 60), 3), ask(cascade, np.arange(40, 61), 1))
        return await together(*first, *waiting), await together(*high), more

    low, high, more = run_virtually(main())
    refused = [one for one in low if isinstance(one, RequestError)]
    assert {one.status for one in (*refused, *more)} == {429}  # also 21 rows, which no queue has room for
    assert 0 < len(refused) < 7
    assert not any(isinstance(one, Exception) for one in high)
