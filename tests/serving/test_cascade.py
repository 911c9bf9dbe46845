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


def fitted(method, threshold=0.8):
    return {"base": fit_base, "rf": fit_rf}[method](DATA, DATA, ThresholdRule(threshold=threshold))


POLICIES = {"base": fitted("base"), "rf": fitted("rf"), "hasty": fitted("rf", threshold=0.3)}
POLICIES |= {f"begins at {stage}": routed(POLICIES["base"], begins=stage) for stage in (0, 2)}
EXPECTED = {name: replay(policy, DATA) for name, policy in POLICIES.items()}
# No row stops before the last stage.
ALWAYS_DEFERS = fitted("rf", threshold=2.0)


def make_stages(n=3, **options):
    return [Stage(f"logits{stage}", **options) for stage in range(n)]


async def answered(cascade, policy, rows, **options):
    return await cascade.answer(policy, columns_of(DATA.logits, rows), len(rows), **options)


def cut(rows, sizes):
    return [part for part in np.split(rows, np.cumsum(sizes)) if len(part)]


@pytest.mark.parametrize("names", [("base",), ("rf", "hasty"), ("begins at 0", "begins at 2", "base")], ids=str)
@given(sizes=st.lists(st.integers(1, 30), max_size=20), seed=st.integers(0, 99))
def test_answers_are_those_of_the_replay_however_requests_are_cut(names, sizes, seed):
    """Each request keeps its policy, whichever others there are meanwhile."""
    rng = np.random.default_rng(seed)
    requests = [(str(rng.choice(names)), rows) for rows in cut(rng.permutation(len(DATA)), sizes)]

    async def before(call, batch):
        await asyncio.sleep(float(rng.uniform(0, 1e-3)))

    async def main():
        stages = make_stages(before=before)
        cascade, counts = cascade_of(a_pool(NAMES, batch_wait_s=0.001), stages)
        scores = frozenset({"scores"})
        answers = (answered(cascade, POLICIES[name], rows, asks_for=scores) for name, rows in requests)
        return stages, counts, await asyncio.gather(*answers)

    stages, counts, answers = run_virtually(main())
    last_stages, costs = np.zeros(len(DATA), int), np.zeros(len(DATA))
    for (name, rows), answer in zip(requests, answers, strict=True):
        for field in ("predictions", "confidences", "stages", "costs"):
            assert np.array_equal(getattr(answer, field), getattr(EXPECTED[name], field)[rows]), field
        assert not answer.degraded.any()
        assert (answer.vectors["scores"].argmax(axis=1) == answer.predictions).all()
        last_stages[rows], costs[rows] = answer.stages, answer.costs
    for stage, calls in enumerate(one.batches for one in stages):
        rows = [row for batch in calls for row in batch]
        if all(POLICIES[name].in_turn for name in names):
            assert sorted(rows) == sorted(np.flatnonzero(last_stages >= stage))  # nothing twice, nothing for nothing
        assert max(map(len, calls), default=0) <= 8
        assert counts.of("rows").get((NAMES[stage], "accepted"), 0) == (last_stages == stage).sum()
    assert sum(counts.of("cost").values()) == pytest.approx(costs.sum())


def test_deferred_rows_of_many_requests_are_gathered_whatever_their_policies():
    async def before(call, batch):
        await asyncio.sleep(0.01)

    async def main():
        stages = make_stages(before=before)
        cascade, _ = cascade_of(a_pool(NAMES, batch_wait_s=0.05), stages)
        policies = [POLICIES["rf"], ALWAYS_DEFERS] * 32
        await asyncio.gather(*(answered(cascade, policy, np.array([row])) for row, policy in enumerate(policies)))
        return stages

    stages = run_virtually(main())
    deferred = 32 + int((EXPECTED["rf"].stages[:64:2] >= 1).sum())
    assert deferred > 40
    assert len(stages[0].batches) == 8
    assert len(stages[1].batches) <= -(-deferred // 8) + 2


def test_a_client_that_is_alone_does_not_wait_for_others():
    async def main():
        cascade, _ = cascade_of(a_pool(NAMES, batch_wait_s=5.0), make_stages())
        for row in range(5):
            await asyncio.wait_for(answered(cascade, POLICIES["base"], np.array([row])), 1.0)

    run_virtually(main())


@pytest.mark.parametrize("fault", ["fails", "names"])
@pytest.mark.parametrize(("on_failure", "stage"), [("fail", 0), ("fail", 2), ("degrade", 0), ("degrade", 1)])
def test_a_row_that_a_stage_cannot_answer_costs_its_own_request_alone(fault, on_failure, stage):
    """A call that fails is made again for each request alone; a model that names the row has answered the others."""

    async def before(call, batch):
        if fault == "fails" and 2 in batch["row"]:
            raise StageError("failed", "ValueError: no")

    def alter(answers, batch):
        places = np.flatnonzero((batch["row"] == 2) & (fault == "names"))
        return Answers(answers.logits, failures={int(place): "not an image" for place in places})

    async def main():
        stages = make_stages()
        stages[stage].before, stages[stage].alter = before, alter
        cascade, _ = cascade_of(a_pool(NAMES, on_failure, batch_wait_s=0.05), stages)
        return await together(*(answered(cascade, ALWAYS_DEFERS, rows) for rows in np.arange(8).reshape(4, 2)))

    _, bad, *_ = results = run_virtually(main())
    if (on_failure, stage) == ("degrade", 1):
        assert [bool(result.degraded.any()) for result in results] == [False, True, False, False]
        assert bad.stages[0] == 0
        assert fault == "fails" or bad.stages[1] == 2
    else:
        assert [isinstance(result, RequestError) for result in results] == [False, True, False, False]
        status, reason = {"fails": (503, "ValueError: no"), "names": (422, "row 0: not an image")}[fault]
        assert (bad.status, reason in bad.message) == (status, True)


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
        await together(answered(cascade, ALWAYS_DEFERS, np.arange(4)))
        return asyncio.get_running_loop().time() - started

    assert run_virtually(main()) < 4.0


@pytest.mark.parametrize("on_failure", ["degrade", "fail"])
def test_a_request_s_own_timeout_ends_it_and_leaves_the_stage_up(on_failure):
    rows = np.flatnonzero(EXPECTED["rf"].stages > 0)[:4]

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


def test_no_row_waits_for_a_stage_whose_model_cannot_be_loaded():
    async def main():
        cascade, _ = cascade_of(a_pool(NAMES, "degrade"), make_stages())
        cascade.replicas(2, [], "its model cannot be loaded: OSError: no route to host")
        return await asyncio.wait_for(answered(cascade, ALWAYS_DEFERS, np.arange(4)), 0.1)

    answer = run_virtually(main())
    assert answer.degraded.all()
    assert (answer.stages == 1).all()
    assert "no route to host" in answer.reason


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
