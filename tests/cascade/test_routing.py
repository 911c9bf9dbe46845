"""Rows that go to any stage: an encoder first, then models in an order of their own. Live is the replay."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routed import routed
from scripted_models import worker_of
from synthetic import chain

from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.bundles import Bundle, Part, in_batches
from cauc_ray.cascade.bundles import joined as together
from cauc_ray.cascade.patience import RunPatience
from cauc_ray.cascade.rows import CallResult, Owner
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage import StageLimits
from cauc_ray.models.answers import Answers, ModelFacts
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

DATA = chain(5, n=300, strengths=(1.0, 1.2, 1.7, 2.4))
FITTED = fit_base(DATA, DATA, ThresholdRule(threshold=0.9))
FACTS = [ModelFacts("encoder", "embedding"), *[ModelFacts("model")] * 3]


def workers(policy):
    def answers(stage):
        return lambda batch: Answers(np.array(DATA.logits[stage][batch["row"]], np.float32))

    return [worker_of(answers(stage), stage, {"": policy}, facts=FACTS[stage]) for stage in range(4)]


def answered(worker, parts, sources, batch):
    """Answer a call batch by batch, as a run's replicas do."""
    results, onward = zip(*(worker.decide(one_batch, sources) for one_batch in in_batches(parts, batch)), strict=True)
    assert all(len(result.accepted) <= batch for result in results)
    return CallResult.joined(results), together(onward)


def run(policy, *, seed=0, batch=16, queue=10**9, down=(), per_call=1):
    """Answer all rows, in blocks, by a scheduler and real workers whose calls end in any order; return the owners."""
    rng, of_stage, now = np.random.default_rng(seed), workers(policy), 0.0
    scheduler = Scheduler([StageLimits(batch, 1.0, queue, 10**9, per_call)] * 4, RunPatience(), Blame("row"))
    for stage in set(range(4)) - set(down):
        for number in range(2):
            scheduler.replica_ready(stage, 10 * stage + number, now)
    for stage in down:
        scheduler.stage_down(stage, now)
    owners = []
    for block, rows in enumerate(np.array_split(np.arange(len(DATA.labels)), 7)):
        owners.append(Owner(block, len(rows), names=rows))
        source = Bundle({"row": rows})
        scheduler.submit(owners[-1], [Chunk(source, len(rows), len(rows))], now, policy.first(len(rows), None))
    scheduler.end_input()
    calls, sizes = [], [[], [], [], []]
    while not scheduler.finished or scheduler.done:
        scheduler.done.clear()
        for call in scheduler.schedule(now):
            calls.append(call)
            sizes[call.stage].append(len(call))
        now += 0.1
        if calls:
            call = calls.pop(rng.integers(len(calls)))
            sources = list({id(rows.source): rows.source for rows in call.rows}.values())
            parts = [
                Part([id(source) for source in sources].index(id(rows.source)), rows.positions) for rows in call.rows
            ]
            answer = answered(of_stage[call.stage], parts, sources, batch)
            scheduler.call_ended(call, *answer, now)
        assert now < 1000
    return scheduler, owners, sizes


def joined(owners, name):
    return np.concatenate([getattr(owner, name) for owner in owners])


@given(
    seed=st.integers(0, 2**32 - 1),
    begins=st.sampled_from([0, 2]),
    batch=st.integers(1, 40),
    queue=st.integers(40, 400),
    per_call=st.integers(1, 5),
)
def test_every_row_ends_as_in_the_replay(seed, begins, batch, queue, per_call):
    policy = routed(FITTED, begins=begins)
    expected = replay(policy, DATA)
    _, owners, sizes = run(policy, seed=seed, batch=batch, queue=queue, per_call=per_call)
    for name, of in [("predictions", expected.predictions), ("stages", expected.stages), ("costs", expected.costs)]:
        assert np.array_equal(joined(owners, name), of)
    assert np.array_equal(joined(owners, "confidences"), expected.confidences)
    assert not any(owner.failures or owner.degraded.any() for owner in owners)
    assert sum(sizes[0]) == (len(DATA.labels) if begins == 0 else 0)


def test_where_a_stage_is_down_rows_keep_the_answer_that_they_have_and_fail_without_one():
    """Of those that would go there, some come from the encoder, which answers nothing."""
    policy = routed(FITTED)
    _, whole, _ = run(policy)
    scheduler, owners, _ = run(policy, down=[2])
    first = 1 + DATA.logits[0].argmax(axis=1) % 3
    failed = np.concatenate([np.isin(np.arange(owner.n), list(owner.failures)) for owner in owners])
    degraded, stages = joined(owners, "degraded"), joined(owners, "stages")
    assert np.array_equal(failed, first == 2)
    assert degraded.any()
    assert (stages[failed] == -1).all()
    assert np.isin(stages[degraded], [1, 3]).all()
    same = ~failed & ~degraded
    assert np.array_equal(joined(owners, "predictions")[same], joined(whole, "predictions")[same])
    at = scheduler.stages[2]
    assert (at.failed, at.degraded) == (failed.sum(), degraded.sum())


def test_an_embedding_is_not_held_against_the_number_of_choices_nor_taken_for_probabilities():
    policy, rows = routed(FITTED), np.arange(6)
    choices = np.empty(6, dtype=object)
    choices[:] = [["a", "b"]] * 6
    worker = worker_of(lambda batch: Answers(np.full((6, 4), 0.25, np.float32)), 0, {"": policy}, facts=FACTS[0])
    result, goes_on = worker.decide([Part(0, rows)], [Bundle({"row": rows, "choices": choices})])
    assert (result.n_answered, result.n_deferred, list(result.failures)) == (6, 6, [])
    assert len(goes_on.columns["row"]) == 6
    model = worker_of(lambda batch: Answers(np.full((6, 4), 0.25, np.float32)), 1, {"": policy}, facts=FACTS[1])
    result, _ = model.decide([Part(0, rows)], [Bundle({"row": rows, "choices": choices})])
    assert result.failures == dict.fromkeys(range(6), "the model returned 4 logits for its 2 choices")


@pytest.mark.parametrize("stage", [1, 3])
def test_rows_that_come_by_different_ways_share_a_call(stage):
    """Some bring a state, others none."""
    policy = routed(FITTED)
    worker, rows = workers(policy)[stage], np.arange(4)
    been = np.zeros((4, 4))
    been[:, 2] = 1.0
    parts, bundles = [Part(0, rows[:2]), Part(1, rows[2:])], [Bundle({"row": rows}), Bundle({"row": rows}, been)]
    result, _ = worker.decide(parts, bundles)
    alone = [worker.decide([part], bundles)[0] for part in parts]
    for name in ("predictions", "accepted", "next"):
        assert np.array_equal(getattr(result, name), np.concatenate([getattr(one, name) for one in alone]))
    assert not (result.next[2:] == 2).any()
