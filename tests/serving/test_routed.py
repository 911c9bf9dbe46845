"""Requests whose rows go to any stage, next to others whose rows take them in turn."""

import asyncio

import numpy as np
import pytest
from fake_stages import Stage, a_pool, cascade_of, columns_of, together
from routed import routed
from synthetic import chain
from virtual_time import run_virtually

from cauc_ray.policies.fitting import ThresholdRule, fit_base
from cauc_ray.policies.trace import replay
from cauc_ray.serving.faults import RequestError

DATA = chain(5, n=300, strengths=(1.0, 1.2, 1.7, 2.4))
FITTED = fit_base(DATA, DATA, ThresholdRule(threshold=0.9))
NAMES = list(DATA.models)


def stages():
    return [Stage(f"logits{number}") for number in range(4)]


@pytest.mark.parametrize("begins", [0, 2])
def test_every_request_is_answered_as_in_the_replay(begins):
    policies = [routed(FITTED, begins=begins), FITTED]
    rng = np.random.default_rng(begins)
    requests = [(policies[rng.integers(2)], rng.integers(0, 300, rng.integers(1, 12))) for _ in range(80)]

    async def ask(cascade, policy, rows, after_s):
        await asyncio.sleep(after_s)
        return await cascade.answer(policy, columns_of(DATA.logits, rows), len(rows))

    async def main():
        mine = stages()
        cascade, counts = cascade_of(a_pool(NAMES, batch_wait_s=0.01), mine)
        answers = await asyncio.gather(*(ask(cascade, *request, rng.uniform(0, 0.1)) for request in requests))
        return answers, mine, counts

    answers, mine, counts = run_virtually(main())
    expected = {id(policy): replay(policy, DATA) for policy in policies}
    for answer, (policy, rows) in zip(answers, requests, strict=True):
        of = expected[id(policy)]
        assert np.array_equal(answer.predictions, of.predictions[rows])
        assert np.array_equal(answer.confidences, of.confidences[rows])
        assert np.array_equal(answer.stages, of.stages[rows])
        assert np.array_equal(answer.costs, of.costs[rows])
    n_calls = sum(len(own.batches) for own in mine)
    assert n_calls < 400  # of some 1,000 rows' calls: they share them
    left = sum(counts.outcomes.get((stage, "accepted"), 0) for stage in range(4))
    assert left == sum(len(rows) for _, rows in requests)


def test_rows_of_a_stage_that_fails_keep_the_answer_that_they_have_and_are_refused_without_one():
    policy = routed(FITTED)
    expected = replay(policy, DATA)
    first = 1 + DATA.logits[0].argmax(axis=1) % 3
    sure = np.flatnonzero((first == 1) & (expected.stages == 1))[:4]
    onward = np.flatnonzero((first == 1) & (expected.stages != 1))[:4]  # to the third stage, around the corner
    there = np.flatnonzero(first == 3)[:4]

    assert all(len(rows) > 0 for rows in (sure, onward, there))

    async def main():
        cascade, _ = cascade_of(a_pool(NAMES, "degrade", timeout_s=0.5), stages())
        cascade.replicas(3, [])
        asked = (cascade.answer(policy, columns_of(DATA.logits, rows), len(rows)) for rows in (sure, onward, there))
        return await together(*asked)

    known, kept, refused = run_virtually(main())
    assert not known.degraded.any()
    assert kept.degraded.all()
    assert (kept.stages == 1).all()
    assert isinstance(refused, RequestError)
    assert refused.status == 503


def test_no_stage_can_be_the_last_one_where_stages_are_not_called_in_turn():
    async def main():
        cascade, _ = cascade_of(a_pool(NAMES), stages())
        columns = columns_of(DATA.logits, np.arange(3))
        return (await together(cascade.answer(routed(FITTED), columns, 3, last_stage=1)))[0]

    error = run_virtually(main())
    assert isinstance(error, RequestError)
    assert error.status == 422
