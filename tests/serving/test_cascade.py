"""A cascade of a service in virtual time: answers are those of the replay, or degraded, or refused."""

import asyncio
import time

import numpy as np
import pytest
from fake_stages import Stage, a_pool, cascade_of, columns_of, together
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from routed import routed
from synthetic import chain
from virtual_time import run_virtually

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Answers
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.observers.spans import Spans
from cauc_ray.serving.policies_live import InForce, Member
from cauc_ray.serving.request_state import Question, StageError

DATA = chain(3, n=240, ragged=True)
NAMES = DATA.models


def fitted(method, data=DATA, threshold=0.8):
    return {"base": fit_base, "rf": fit_rf}[method](data, data, ThresholdRule(threshold=threshold))


POLICIES = {method: fitted(method) for method in ("base", "rf")}


def make_stages(n=3, **options):
    return [Stage(f"logits{stage}", **options) for stage in range(n)]


async def answered(cascade, policy, rows, **options):
    return await cascade.answer(policy, columns_of(DATA.logits, rows), len(rows), **options)


def cut(rows, sizes):
    return [part for part in np.split(rows, np.cumsum(sizes)) if len(part)]


@pytest.mark.parametrize("method", ["base", "rf"])
@given(sizes=st.lists(st.integers(1, 30), max_size=20), seed=st.integers(0, 99))
def test_answers_are_those_of_the_replay_however_requests_are_cut(method, sizes, seed):
    policy = POLICIES[method]
    expected = replay(policy, DATA)
    requests = cut(np.random.default_rng(seed).permutation(len(DATA)), sizes)
    waits = np.random.default_rng(seed)

    async def before(call, batch):
        await asyncio.sleep(float(waits.uniform(0, 1e-3)))

    async def main():
        stages = make_stages(before=before)
        cascade, counts = cascade_of(a_pool(NAMES, batch_wait_s=0.001), stages)
        answers = await asyncio.gather(
            *(answered(cascade, policy, rows, asks_for=frozenset({"scores"})) for rows in requests)
        )
        return stages, counts, answers

    stages, counts, answers = run_virtually(main())
    for rows, answer in zip(requests, answers, strict=True):
        assert np.array_equal(answer.predictions, expected.predictions[rows])
        assert np.array_equal(answer.confidences, expected.confidences[rows])
        assert np.array_equal(answer.stages, expected.stages[rows])
        assert np.array_equal(answer.costs, expected.costs[rows])
        assert not answer.degraded.any()
        assert (answer.vectors["scores"].argmax(axis=1) == answer.predictions).all()
    for stage, calls in enumerate(one.batches for one in stages):
        rows = [row for batch in calls for row in batch]
        assert sorted(rows) == sorted(np.flatnonzero(expected.stages >= stage))  # nothing twice, nothing for nothing
        assert max(map(len, calls), default=0) <= 8
        assert counts.of("rows").get((NAMES[stage], "accepted"), 0) == (expected.stages == stage).sum()
    assert sum(counts.of("cost").values()) == pytest.approx(expected.costs.sum())


def test_deferred_rows_of_many_requests_are_gathered():
    async def before(call, batch):
        await asyncio.sleep(0.01)

    async def main():
        stages = make_stages(before=before)
        cascade, _ = cascade_of(a_pool(NAMES, batch_wait_s=0.05), stages)
        await asyncio.gather(*(answered(cascade, POLICIES["rf"], np.array([row])) for row in range(64)))
        return stages

    stages = run_virtually(main())
    deferred = int((replay(POLICIES["rf"], DATA).stages[:64] >= 1).sum())
    assert deferred > 16
    assert len(stages[0].batches) == 8
    assert len(stages[1].batches) <= -(-deferred // 8) + 2


def test_a_client_that_is_alone_does_not_wait_for_others():
    async def main():
        cascade, _ = cascade_of(a_pool(NAMES, batch_wait_s=5.0), make_stages())
        for row in range(5):
            await asyncio.wait_for(answered(cascade, POLICIES["base"], np.array([row])), 1.0)

    run_virtually(main())


def test_a_request_keeps_its_policy_to_the_end_and_may_share_calls_with_another():
    second = fitted("rf", threshold=0.3)
    both = [replay(POLICIES["rf"], DATA), replay(second, DATA)]
    assert (both[0].stages[:8] != both[1].stages[:8]).any()

    async def main():
        stages = make_stages()
        cascade, _ = cascade_of(a_pool(NAMES, batch_wait_s=0.05), stages)
        rows = np.arange(4), np.arange(4, 8)
        answers = await asyncio.gather(answered(cascade, POLICIES["rf"], rows[0]), answered(cascade, second, rows[1]))
        assert stages[0].batches[0] == list(range(8))
        return zip(answers, both, rows, strict=True)

    for answer, expected, rows in run_virtually(main()):
        assert np.array_equal(answer.stages, expected.stages[rows])
        assert np.array_equal(answer.predictions, expected.predictions[rows])


def test_a_cap_stops_rows_with_the_answer_so_far():
    policy = POLICIES["rf"]
    rows = np.arange(40)

    async def main(last):
        stages = make_stages()
        cascade, counts = cascade_of(a_pool(NAMES), stages)
        return stages, counts, await answered(cascade, policy, rows, last_stage=last)

    for last in range(3):
        stages, counts, answer = run_virtually(main(last))
        assert answer.stages.max() <= last
        assert not any(stage.batches for stage in stages[last + 1 :])
        step = policy.start(DATA.logits[0][rows])
        if last == 0:
            assert np.array_equal(answer.predictions, step.predictions)
            assert counts.of("rows").get((NAMES[0], "capped"), 0) == (~step.accepted).sum()
        assert not answer.degraded.any()


async def hang(call, batch):
    await asyncio.sleep(60)


def hanging(stage):
    stages = make_stages()
    stages[stage].before = hang
    return stages


def test_a_stage_that_hangs_degrades_the_request_or_fails_it():
    rows = np.arange(30)
    expected = replay(POLICIES["rf"], DATA)
    first_two = np.minimum(expected.stages[rows], 0)

    async def main(on_failure, hangs=1):
        cascade, counts = cascade_of(a_pool(NAMES, on_failure, timeout_s=0.2), hanging(hangs))
        started = asyncio.get_running_loop().time()
        result = (await together(answered(cascade, POLICIES["rf"], rows)))[0]
        first = asyncio.get_running_loop().time() - started
        again = (await together(answered(cascade, POLICIES["rf"], rows)))[0]
        return result, again, first, asyncio.get_running_loop().time() - started - first, counts

    answer, again, first, second, counts = run_virtually(main("degrade"))
    assert np.array_equal(answer.degraded, expected.stages[rows] > 0)
    assert np.array_equal(answer.stages, first_two)
    assert np.array_equal(answer.predictions, POLICIES["rf"].start(DATA.logits[0][rows]).predictions)
    assert "'m1' has not answered within 0.2 s" in answer.reason
    assert counts.of("degraded")[NAMES[1], "timeout"] > 0
    assert sum(counts.of("degraded").values()) == answer.degraded.sum() + again.degraded.sum()
    assert 0.15 < first < 1.0
    assert second < 0.1  # the stage is left alone for a while
    assert np.array_equal(again.degraded, answer.degraded)
    assert "is down" in again.reason

    for on_failure, hangs in (("fail", 1), ("degrade", 0)):  # without its first stage, a pool that degrades refuses too
        error, again, *_ = run_virtually(main(on_failure, hangs))
        assert isinstance(error, RequestError)
        assert (error.status, again.status) == (503, 503)
        assert error.retry_after_s > 0


def test_a_call_that_fails_is_made_again_for_each_request_alone():
    async def before(call, batch):
        if 3 in batch["row"]:
            raise StageError("failed", "ValueError: no")

    async def main(on_failure, guilty_stage):
        stages = make_stages()
        stages[guilty_stage].before = before
        cascade, _ = cascade_of(a_pool(NAMES, on_failure, batch_wait_s=0.05), stages)
        return await together(*(answered(cascade, fitted("rf", threshold=2.0), np.array([row])) for row in range(8)))

    for on_failure, stage in (("fail", 0), ("fail", 1), ("degrade", 0)):
        results = run_virtually(main(on_failure, stage))
        assert [row for row, result in enumerate(results) if isinstance(result, RequestError)] == [3]
        assert (results[3].status, "ValueError: no" in results[3].message) == (503, True)
    results = run_virtually(main("degrade", 1))
    assert [bool(result.degraded.any()) for result in results] == [row == 3 for row in range(8)]


def test_a_stage_that_always_fails_is_not_called_for_every_row_and_the_reason_given_with_each():
    async def before(call, batch):
        raise StageError("failed", "a logit is NaN")

    async def main():
        stages = make_stages()
        stages[1].before = before
        cascade, _ = cascade_of(a_pool(NAMES, "degrade"), stages)
        answer = await answered(cascade, POLICIES["rf"], np.arange(200))
        stages[0].before = before
        return (
            stages,
            answer,
            await together(*(answered(cascade, POLICIES["rf"], np.array([row])) for row in range(200))),
        )

    stages, answer, refused = run_virtually(main())
    assert answer.degraded.sum() > 60
    assert len(stages[1].batches) < 20
    assert {error.status for error in refused} == {503}
    assert all("a logit is NaN" in error.message for error in refused)  # the reason has the remedy


def test_rows_that_a_model_refuses():
    def refuse(answers, batch):
        places = np.flatnonzero(batch["row"] == 2)
        return Answers(answers.logits, failures={int(place): "not an image" for place in places})

    async def main(on_failure, stage):
        stages = make_stages()
        stages[stage].alter = refuse
        cascade, _ = cascade_of(a_pool(NAMES, on_failure, batch_wait_s=0.05), stages)
        policy = fitted("rf", threshold=2.0)
        return await together(answered(cascade, policy, np.arange(2)), answered(cascade, policy, np.arange(2, 4)))

    for on_failure, stage in (("degrade", 0), ("fail", 0), ("fail", 2)):
        fine, refused = run_virtually(main(on_failure, stage))
        assert not fine.degraded.any()
        assert (refused.status, refused.message.startswith("row 0: not an image")) == (422, True)
    fine, partly = run_virtually(main("degrade", 1))
    assert partly.degraded.tolist() == [True, False]
    assert partly.stages.tolist() == [0, 2]


@pytest.mark.parametrize("image", [np.zeros((1, 2), dtype=np.uint8), np.zeros((1, 3), dtype=np.float32)])
def test_rows_of_different_types_or_shapes_do_not_share_a_call(image):
    async def main():
        stages = make_stages()
        cascade, _ = cascade_of(a_pool(NAMES, batch_wait_s=0.05), stages)
        requests = []
        for row in range(6):
            columns = columns_of(DATA.logits, np.array([row]))
            columns["image"] = image if row % 2 else np.zeros((1, 2), dtype=np.float32)
            requests.append(cascade.answer(POLICIES["base"], columns, 1, last_stage=0))
        await asyncio.gather(*requests)
        return stages[0].batches

    assert [sorted(batch) for batch in run_virtually(main())] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("after_s", [0.2, 0.21, 0.24])
@pytest.mark.parametrize("n_others", [1, 3])
def test_rows_behind_a_long_request_wait_for_what_is_at_the_replica_and_no_more(n_others, after_s):
    """That is a batch which computes and one which waits there; the next one has the rows."""
    takes_s = 0.05

    async def main():
        turn = asyncio.Lock()

        async def before(call, batch):
            async with turn:
                await asyncio.sleep(takes_s)
            return takes_s

        stages = make_stages(before=before)
        cascade, _ = cascade_of(a_pool(NAMES, timeout_s=60.0), stages)
        policy = fitted("base", threshold=0.0)  # every row stops at the first stage
        columns = columns_of(DATA.logits, np.resize(np.arange(10, len(DATA)), 4096))
        long = asyncio.ensure_future(cascade.answer(policy, columns, 4096))
        await asyncio.sleep(after_s)
        n_before, started = len(stages[0].batches), asyncio.get_running_loop().time()
        await together(*(answered(cascade, policy, np.array([row])) for row in range(n_others)))
        took_s = asyncio.get_running_loop().time() - started
        return stages[0].batches[n_before], took_s, len((await long).predictions)

    next_batch, took_s, n = run_virtually(main())
    assert n == 4096
    assert set(range(n_others)) <= set(next_batch)
    assert len(next_batch) == 8  # the long one has the rest of it
    assert took_s <= 3 * takes_s + 0.001  # two batches, and their own


def test_a_queue_is_bounded_in_bytes():
    async def before(call, batch):
        await asyncio.sleep(60)

    async def main():
        cascade, _ = cascade_of(a_pool(NAMES), make_stages(before=before))
        image = np.broadcast_to(np.zeros(1), (1, 250_000))  # 2 MB that take none here
        asks = []
        for row in range(4000):
            columns = {**columns_of(DATA.logits, np.array([row % len(DATA)])), "image": image}
            asks.append(asyncio.ensure_future(cascade.answer(POLICIES["base"], columns, 1)))
        await asyncio.sleep(1)
        n_held = sum(not ask.done() for ask in asks)
        for ask in asks:
            ask.cancel()
        await together(*asks)
        return n_held

    assert run_virtually(main()) < 4000


def test_a_request_has_one_deadline_for_all_stages():
    async def before(call, batch):
        await asyncio.sleep(1.9)

    async def main():
        cascade, _ = cascade_of(a_pool(NAMES, timeout_s=2.0), make_stages(before=before))
        started = asyncio.get_running_loop().time()
        await together(answered(cascade, fitted("rf", threshold=2.0), np.arange(4)))
        return asyncio.get_running_loop().time() - started

    assert run_virtually(main()) < 4.0


@pytest.mark.parametrize("on_failure", ["degrade", "fail"])
def test_a_request_s_own_timeout_ends_it_and_leaves_the_stage_up(on_failure):
    rows = np.flatnonzero(replay(POLICIES["rf"], DATA).stages > 0)[:4]

    async def slow(call, batch):
        await asyncio.sleep(1.0)

    async def main():
        stages = make_stages()
        stages[1].before = slow
        cascade, _ = cascade_of(a_pool(NAMES, on_failure, timeout_s=5.0), stages)
        impatient = (await together(answered(cascade, POLICIES["rf"], rows, timeout_s=0.5)))[0]
        return impatient, await answered(cascade, POLICIES["rf"], rows)

    impatient, patient = run_virtually(main())
    if on_failure == "fail":
        assert (impatient.status, "the request's timeout" in impatient.message) == (503, True)
    else:
        assert (impatient.degraded.all(), impatient.stages.max()) == (True, 0)
    assert not patient.degraded.any()


# Rows that go to any stage, next to others that take them in turn.
R_DATA = chain(5, n=300, strengths=(1.0, 1.2, 1.7, 2.4))
R_FITTED = fit_base(R_DATA, R_DATA, ThresholdRule(threshold=0.9))
R_NAMES = list(R_DATA.models)


@pytest.mark.parametrize("begins", [0, 2])
def test_rows_of_every_policy_are_answered_as_in_the_replay(begins):
    policies = [routed(R_FITTED, begins=begins), R_FITTED]
    rng = np.random.default_rng(begins)
    requests = [(policies[rng.integers(2)], rng.integers(0, 300, rng.integers(1, 12))) for _ in range(80)]

    async def ask(cascade, policy, rows, after_s):
        await asyncio.sleep(after_s)
        return await cascade.answer(policy, columns_of(R_DATA.logits, rows), len(rows))

    async def main():
        stages = make_stages(4)
        cascade, _ = cascade_of(a_pool(R_NAMES, batch_wait_s=0.01), stages)
        answers = await asyncio.gather(*(ask(cascade, *request, rng.uniform(0, 0.1)) for request in requests))
        return answers, stages

    answers, stages = run_virtually(main())
    for answer, (policy, rows) in zip(answers, requests, strict=True):
        expected = replay(policy, R_DATA)
        for name in ("predictions", "confidences", "stages", "costs"):
            assert np.array_equal(getattr(answer, name), getattr(expected, name)[rows])
    assert sum(len(stage.batches) for stage in stages) < 400  # of some 1,000 rows' calls: they share them


def test_rows_of_a_stage_that_is_down_are_degraded_or_refused_without_an_answer():
    policy = routed(R_FITTED)
    expected = replay(policy, R_DATA)
    first = 1 + R_DATA.logits[0].argmax(axis=1) % 3
    accepted = np.flatnonzero((first == 1) & (expected.stages == 1))[:4]
    deferred = np.flatnonzero((first == 1) & (expected.stages != 1))[:4]  # to the third stage
    unanswered = np.flatnonzero(first == 3)[:4]
    requests = (accepted, deferred, unanswered)
    assert all(len(rows) > 0 for rows in requests)

    async def main():
        cascade, _ = cascade_of(a_pool(R_NAMES, "degrade", timeout_s=0.5), make_stages(4))
        cascade.replicas(3, [])
        answers = (cascade.answer(policy, columns_of(R_DATA.logits, rows), len(rows)) for rows in requests)
        return await together(*answers)

    whole, degraded, refused = run_virtually(main())
    assert not whole.degraded.any()
    assert degraded.degraded.all()
    assert (degraded.stages == 1).all()
    assert isinstance(refused, RequestError)
    assert refused.status == 503


def test_no_stage_can_be_the_last_one_where_stages_are_not_called_in_turn():
    async def main():
        cascade, _ = cascade_of(a_pool(R_NAMES), make_stages(4))
        columns = columns_of(R_DATA.logits, np.arange(3))
        return (await together(cascade.answer(routed(R_FITTED), columns, 3, last_stage=1)))[0]

    error = run_virtually(main())
    assert isinstance(error, RequestError)
    assert error.status == 422


def test_what_a_stage_needs_follows_a_change_of_policy_within_seconds():
    """However long the policy before, which sent next to nothing there, has been active."""
    stops, defers = (POLICIES["rf"].model_copy(update={"threshold": threshold}) for threshold in (0.3, 1.0))
    needed = []

    class Watched(Stage):
        async def answer(self, call, on_begin=None):
            needed.append(call.needed_replicas)
            return await super().answer(call, on_begin)

    async def taking(call, batch):
        await asyncio.sleep(0.02)
        return 0.2 * len(batch["row"])

    async def main():
        cascade, _ = cascade_of(a_pool(NAMES), [Stage("logits0"), Watched("logits1", before=taking), Stage("logits2")])

        async def steadily(policy, seconds):
            for _ in range(seconds):
                await asyncio.gather(*(answered(cascade, policy, np.array([row])) for row in range(40)))
                await asyncio.sleep(1.0)

        await steadily(stops, 100)
        before = needed[-1]
        await steadily(defers, 15)
        return before, needed[-1]

    before, after = run_virtually(main())
    assert before < 1.0
    assert after == pytest.approx(40 * 0.2, rel=0.25)


EXPORTER = InMemorySpanExporter()


def set_up():
    """What a user's module does."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    trace.set_tracer_provider(provider)


def test_a_request_is_a_span_of_its_caller_with_one_for_each_stage():
    policy, caller = POLICIES["rf"], f"00-{'ab' * 16}-{'cd' * 8}-01"

    async def main():
        cascade, _ = cascade_of(a_pool(DATA.models), make_stages(), Spans("test_cascade:set_up"))
        in_force = InForce(member := Member.of(policy))
        asked = Question(in_force, member, "0" * 32, False, {"traceparent": caller}, time.time_ns())
        return await cascade.answer(policy, columns_of(DATA.logits, np.arange(40)), 40, question=asked)

    answer = asyncio.run(main())
    import test_cascade  # as the configuration names it

    spans = {span.name: span for span in test_cascade.EXPORTER.get_finished_spans()}
    request = spans["cauc.infer"]
    assert f"{request.context.trace_id:032x}" == "ab" * 16
    assert f"{request.parent.span_id:016x}" == "cd" * 8
    assert request.attributes["cauc.policy_id"] == policy.id
    of_stages = [spans[f"cauc.stage {name}"] for name in DATA.models]
    for span in of_stages:
        assert span.parent.span_id == request.context.span_id
        assert request.start_time < span.start_time <= span.end_time <= request.end_time
    assert [span.attributes["cauc.rows"] for span in of_stages] == [
        int((answer.stages >= stage).sum()) for stage in range(3)
    ]


def test_a_tracing_setup_that_is_nowhere_is_reported():
    with pytest.raises(ConfigError, match="nowhere"):
        Spans("nowhere:set_up")
