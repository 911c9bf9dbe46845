"""What a router watches, without Ray: the shadow sample, what counts as the policy's own answers, and feedback."""

import asyncio
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from fake_stages import Counts, Stage, a_pool, columns_of, question, sampled_cascade
from synthetic import chain
from virtual_time import run_virtually

from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay, trace_policy
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving import stored
from cauc_ray.serving.answer_ids import sampled_rows
from cauc_ray.serving.feedback import Feedback
from cauc_ray.serving.observers import drift_watch, shadow_sample
from cauc_ray.serving.observers.drift_watch import DriftWatch
from cauc_ray.serving.observers.shadow_sample import MOST_WAITING, PATIENCE_S
from cauc_ray.serving.policies_live import InForce, Member
from cauc_ray.serving.request_state import StageError
from cauc_ray.serving.stored import Log, MemoryStore, SeenOnce

DATA = chain(3, n=400, ragged=True)
POLICY = fit_rf(chain(3, n=1000, shift=1), chain(3, n=1000, shift=2), ThresholdRule(budget=12.0))
EXPECTED = replay(POLICY, DATA)
TRACE = trace_policy(POLICY, DATA, likeliest=True)
COSTS = np.array([stage.cost for stage in POLICY.stages])


IN_FORCE = InForce(Member.of(POLICY))


def id_of(rows):
    return f"1{rows[0]:031x}"


async def ask(cascade, rows):
    return await cascade.answer(
        POLICY, columns_of(DATA.logits, rows), len(rows), question=question(POLICY, id_of(rows))
    )


def test_all_early_answers_are_compared_with_what_the_whole_cascade_makes_of_them():
    async def main():
        mine = [Stage(f"logits{stage}") for stage in range(3)]
        cascade, counts, drift = sampled_cascade(a_pool(DATA.models, shadow=1.0), mine, POLICY)
        answers = [await ask(cascade, rows) for rows in np.arange(len(DATA)).reshape(-1, 5)]
        await asyncio.sleep(PATIENCE_S + 1)
        return counts, drift.evaluate().watched, [sum(map(len, stage.batches)) for stage in mine], answers

    counts, watched, n_rows, answers = run_virtually(main())
    early = EXPECTED.stages < 2
    agreed = EXPECTED.predictions == TRACE.predictions[:, -1]
    for stage in range(2):
        of_stage = agreed[EXPECTED.stages == stage]
        assert watched.stages[stage].n_compared == len(of_stage)
        assert watched.stages[stage].agreement.value == pytest.approx(of_stage.mean())
    assert 0 < agreed[early].mean() < 1
    assert counts.of("shadow_rows") == {"compared": early.sum()}
    # A row goes on from where it stopped; what that costs is counted apart, and no answer is another.
    assert n_rows == [len(DATA)] * 3
    assert sum(counts.of("cost").values()) == pytest.approx(EXPECTED.costs.sum())
    assert sum(counts.of("shadow_cost").values()) == pytest.approx(COSTS.sum() * len(DATA) - EXPECTED.costs.sum())
    assert sum(n for (_, outcome), n in counts.of("rows").items() if outcome == "accepted") == len(DATA)
    predictions = np.concatenate([answer.predictions for answer in answers])
    assert np.array_equal(predictions, EXPECTED.predictions)


@pytest.mark.soak("full")
def test_a_log_takes_rows_of_idle_hours_wherever_they_stopped_and_none_of_busy_ones():
    """While stages are busy, a row that stopped early gets no other logits: those of its time are dropped with it."""

    async def main():
        async def slow(call, batch):
            await asyncio.sleep(0.05)

        logged, late = {}, np.flatnonzero(EXPECTED.stages == 2)[:8]
        log = SimpleNamespace(add=logged.update)
        mine = [Stage("logits0"), Stage("logits1", before=slow), Stage("logits2", before=slow)]
        cascade, counts, _ = sampled_cascade(a_pool(DATA.models, shadow=0.5, timeout_s=60.0), mine, POLICY, log)
        stop = asyncio.get_running_loop().time() + PATIENCE_S + 2

        async def keep_busy():
            while asyncio.get_running_loop().time() < stop:
                await cascade.answer(POLICY, columns_of(DATA.logits, late), len(late))

        async def sample(rows):
            await ask(cascade, rows)
            chosen = sampled_rows(id_of(rows), len(rows), 0.5)
            return {f"{id_of(rows)}-{at}": rows[at] for at in np.flatnonzero(chosen)}

        busy = [asyncio.create_task(keep_busy()) for _ in range(4)]
        await asyncio.sleep(0.01)
        dropped = await sample(np.arange(100))
        await asyncio.gather(*busy)
        await asyncio.sleep(1.0)
        assert (logged, counts.of("log_rows")) == ({}, {"incomplete": len(dropped)})
        taken = {}
        for rows in np.arange(100, 400).reshape(-1, 10):
            taken |= await sample(rows)
        await asyncio.sleep(PATIENCE_S)
        assert counts.of("log_rows") == {"incomplete": len(dropped)}
        return logged, dropped, taken

    logged, dropped, taken = run_virtually(main())
    assert set(EXPECTED.stages[list(dropped.values())]) == {0, 1, 2}
    assert logged.keys() == taken.keys()
    for name, row in taken.items():
        for stage, logits in enumerate(DATA.logits):
            assert np.array_equal(logged[name][stage][0], logits[row])


def test_what_fails_or_is_too_much_is_dropped_and_nobody_hears_of_it(monkeypatch):
    async def fail(call, batch):
        raise StageError("failed", "gone")

    async def main():
        mine = [Stage("logits0"), Stage("logits1", before=fail), Stage("logits2")]
        cascade, counts, drift = sampled_cascade(a_pool(DATA.models, shadow=1.0), mine, POLICY)
        early = np.flatnonzero(EXPECTED.stages == 0)
        await ask(cascade, early[:10])
        await asyncio.sleep(1)
        assert counts.of("shadow_rows") == {"dropped": 10}
        assert not any(stage.n_compared for stage in drift.evaluate().watched.stages)
        await asyncio.gather(*(ask(cascade, early[:20]) for _ in range(3 + MOST_WAITING // 20)))
        assert counts.of("shadow_rows")["dropped"] == 10 + 60
        await asyncio.sleep(PATIENCE_S + 1)
        before = counts.of("shadow_rows")["dropped"]
        monkeypatch.setattr(shadow_sample, "MOST_BYTES", 1000)
        await ask(cascade, early[:20])
        assert counts.of("shadow_rows")["dropped"] == before + 20
        return counts

    counts = run_virtually(main())
    assert not counts.of("degraded")
    assert {outcome for (_, outcome), n in counts.of("rows").items() if n} == {"accepted"}


def test_an_ended_request_keeps_no_input_but_a_row_for_probes():
    """Also while an earlier one waits, whose answer comes before its own for the watch."""

    async def slow(call, batch):
        await asyncio.sleep(5.0)

    async def main():
        mine = [Stage("logits0"), Stage("logits1"), Stage("logits2", before=slow)]
        cascade, _, drift = sampled_cascade(a_pool(DATA.models, timeout_s=60.0), mine, POLICY)
        late, early = (np.flatnonzero(test)[:50] for test in (EXPECTED.stages == 2, EXPECTED.stages == 0))
        first = asyncio.ensure_future(ask(cascade, late))
        await asyncio.sleep(1.0)
        answer = await ask(cascade, early)
        assert not first.done()
        assert not sum(sums.n for sums in drift.evaluate().watched.stages)
        await first
        assert sum(sums.n for sums in drift.evaluate().watched.stages) == 100
        return [column.base.nbytes for column in answer.columns.values() if column.base is not None], answer

    bytes_held, answer = run_virtually(main())
    assert len(bytes_held) == len(answer.columns)
    assert all(
        n_bytes <= column.nbytes / 50 for n_bytes, column in zip(bytes_held, answer.columns.values(), strict=True)
    )


def body(**changes):
    whole = {"policy_id": "p", "prediction": [1, 2], "confidence": [0.99, 0.3], "stage": [0, 0], "label": [1, 1]}
    return json.dumps({**whole, **changes}).encode()


def reported(predictions, labels, stages, confidences, policy=POLICY):
    """Return feedback on answers."""
    columns = {"prediction": predictions, "label": labels, "stage": stages, "confidence": confidences}
    lists = {name: np.asarray(column).tolist() for name, column in columns.items()}
    return Feedback.read(body(policy_id=policy.id, **lists), policy, len(labels))


def reported_early(rows, right, policy=POLICY):
    """Return feedback on so many answers of the first stage."""
    nothing = np.zeros(rows, int)
    return reported(nothing, nothing + (not right), nothing, nothing + 0.9, policy)


def test_only_the_policy_s_own_answers_are_watched_and_drift_is_logged_once(caplog, monkeypatch):
    # Whether Serve's logger passes on what it gets is up to Serve, once a test has run it in this process.
    monkeypatch.setattr(drift_watch, "logger", logging.getLogger(__name__))
    fails = False

    async def before(call, batch):
        if fails:
            raise StageError("failed", "gone")

    async def main():
        nonlocal fails
        stages = [Stage("logits0"), Stage("logits1", before=before), Stage("logits2", before=before)]
        cascade, _, watch = sampled_cascade(a_pool(DATA.models, "degrade"), stages, POLICY)

        async def answered(policy=POLICY, **options):
            columns, asked = columns_of(DATA.logits, np.arange(50)), question(policy)
            return await cascade.answer(policy, columns, 50, question=asked, **options)

        await answered()
        await answered(last_stage=1)
        await answered(POLICY.with_threshold(0.1))
        fails = True
        n_degraded = int((await answered()).degraded.sum())
        fails = False
        seen = watch.evaluate()
        assert n_degraded > 0
        assert sum(sums.n for sums in seen.watched.stages) == 100 - n_degraded
        assert watch.evaluate().watched.stages[0].n == seen.watched.stages[0].n
        assert watch.on_feedback(reported_early(100, True, POLICY.with_threshold(0.1)), IN_FORCE) is None
        assert watch.evaluate().watched.stages[0].outcomes.n == 0
        with caplog.at_level(logging.WARNING, logger=__name__):
            for _ in range(3):
                assert watch.on_feedback(reported_early(4000, False), IN_FORCE) == 4000
                assert not watch.evaluate().watched.valid
        assert [record.message.startswith(f"policy {POLICY.id} has drifted: ") for record in caplog.records] == [True]

    run_virtually(main())


def test_feedback_without_an_id_is_identified_by_its_content():
    read = [Feedback.read(content, POLICY, 10).answer for content in (body(), body(), body(label=[1, 2]))]
    assert read[0] == read[1] != read[2]


def test_a_row_counts_once_at_whichever_router(monkeypatch):
    store = MemoryStore()
    one, two, three = (SeenOnce(store, "life:") for _ in range(3))
    assert [one.new("p", "a", [0]), two.new("p", "a", [0, 1]), three.new("p", "a", [0, 1])] == [{0}, {1}, set()]
    assert three.new("p", "b", [0, 1]) == {0, 1}
    one.forget("p")
    assert two.new("p", "a", [0, 1]) == {0, 1}
    monkeypatch.setattr(stored, "MOST_REMEMBERED", 1)
    four = SeenOnce(store, "life:")
    assert [four.new("p", key, [0]) for key in "cdc"] == [{0}, {0}, {0}]  # the oldest is dropped


def drifted_watch(store, *, by_labels):
    """Return a router's watch of answers that have drifted, or of labels that have."""
    watch = DriftWatch(IN_FORCE, Counts(DATA.models), 2, Log(store, "alarm:"))
    rows = np.tile(np.arange(len(DATA)), 5)
    if by_labels:
        nothing = np.zeros(len(rows), int)
        feedback = reported(nothing, nothing + 1, EXPECTED.stages[rows], EXPECTED.confidences[rows])
        watch.on_feedback(feedback, IN_FORCE)
    else:
        watch.agreements(POLICY.id, EXPECTED.stages[rows], np.zeros(len(rows), bool))
    return watch


def test_alarms_that_two_routers_raise_at_once_both_last():
    class Interrupted(MemoryStore):
        """Has the other router evaluate between what one reads and what it writes."""

        meanwhile = None

        def put(self, key, value, *, overwrite=True):
            peer, self.meanwhile = self.meanwhile, None
            if peer is not None:
                peer.evaluate()
            return super().put(key, value, overwrite=overwrite)

    def alarms(watch):
        return {name for name, one in watch.evaluate().watched.evidence.items() if not one.valid}

    raised = [alarms(drifted_watch(MemoryStore(), by_labels=by_labels)) for by_labels in (False, True)]
    assert raised[0] - raised[1]
    assert raised[1] - raised[0]
    store = Interrupted()
    one, store.meanwhile = (drifted_watch(store, by_labels=by_labels) for by_labels in (False, True))
    one.evaluate()
    assert alarms(DriftWatch(IN_FORCE, Counts(DATA.models), 2, Log(store, "alarm:"))) == raised[0] | raised[1]


@pytest.mark.parametrize(
    ("bad", "status", "reason"),
    [
        (b"[]", 400, "feedback is invalid"),
        (body(label=[1]), 400, "2 of prediction, 2 of confidence, 2 of stage, 1 of label"),
        (body(stage=[0, 3]), 400, "stages are 0 to 2, got 3"),
        (body(extra=1), 400, "extra"),
        (body(rows=[0, 1]), 400, "answer_id"),
        (body(rows=[1, 1], answer_id="0" * 32), 400, "distinct"),
        (body(prediction=[1] * 11, confidence=[0.5] * 11, stage=[0] * 11, label=[1] * 11), 413, "up to 10 rows"),
    ],
)
def test_feedback_that_makes_no_sense_is_refused(bad, status, reason):
    with pytest.raises(RequestError) as error:
        Feedback.read(bad, POLICY, 10)
    assert error.value.status == status
    assert reason in error.value.message
    assert "\n" not in error.value.message
