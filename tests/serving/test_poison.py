"""What one client sends, or one replica does, harms no other client: in virtual time, and over HTTP."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from asking import clients, until
from fake_stages import Fleet, a_pool, cascade_of, timed_answer
from hypothesis import given
from hypothesis import strategies as st
from poisoned import SOFT, infer, poisoned, require_harmless
from synthetic import chain
from virtual_time import run_virtually

from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay
from cauc_ray.protocol.tensors import RequestError

DATA = chain(3, n=240, strengths=(1.0, 2.4))
POLICY = fit_rf(DATA, DATA, ThresholdRule(threshold=0.8))
EXPECTED = replay(POLICY, DATA)
# Rows from here on are what the poison client may send.
GOOD = 200
RAISING = ("raises", "nan", "shape")


async def answer_at(cascade, at_s, rows):
    return (await timed_answer(cascade, POLICY, DATA.logits, rows, at_s))[0]


@asynccontextmanager
async def cascade_with(*fleets, **pool):
    """Return a cascade which its fleets tell what runs."""
    cascade, _ = cascade_of(a_pool(DATA.models, **pool), fleets)
    polls = [asyncio.ensure_future(fleet.poll()) for fleet in fleets]
    try:
        yield cascade
    finally:
        for poll in polls:
            poll.cancel()


async def served(requests, poison, n_replicas, failing=(), hangs_s=6.0, **serving):
    """Return what requests (at_s, rows) come to, and the first stage's fleet, which has poison and failing replicas."""
    fleet = Fleet("logits0", n_replicas, poison, failing)
    fleet.hangs_s = hangs_s
    async with cascade_with(fleet, Fleet("logits1", 2, {}), **serving) as cascade:
        results = await asyncio.gather(*(answer_at(cascade, *one) for one in requests))
        assert [(at.in_work, at.health.paused) for at in cascade.scheduler.stages] == [(False, False)] * 2
    return results, fleet


def require_right(requests, results, poison):
    """Good requests were answered as the replay does; others were refused for what they hold."""
    for (_, rows), result in zip(requests, results, strict=True):
        if set(rows) & set(poison):
            assert isinstance(result, RequestError)
            # 503 as long as no row is known to be good: the stage may be at fault.
            assert result.status in (422, 503), result.message
        else:
            assert not isinstance(result, RequestError), result.message
            assert not result.degraded.any()
            assert (result.predictions == EXPECTED.predictions[list(rows)]).all()
            assert (result.stages == EXPECTED.stages[list(rows)]).all()


TIMES = st.floats(0, 3, allow_nan=False)


@given(
    asks=st.lists(
        st.tuples(TIMES, st.lists(st.integers(0, 239), min_size=1, max_size=12, unique=True).map(tuple)),
        min_size=1,
        max_size=60,
    ),
    poison=st.dictionaries(st.integers(0, 239), st.sampled_from(RAISING), max_size=60),
    n_replicas=st.integers(1, 3),
    fails=st.booleans(),
)
def test_every_good_row_is_answered_next_to_poison_and_a_broken_replica(asks, poison, n_replicas, fails):
    failing = (0,) if fails and n_replicas > 1 else ()
    results, _ = run_virtually(served(asks, poison, n_replicas, failing))
    require_right(asks, results, poison)


@pytest.mark.parametrize(
    ("kind", "n_replicas", "n_bad"),
    [*(("kills", n, 240) for n in (1, 2, 3)), ("hangs", 1, 240), ("hangs", 2, 240), ("hangs", 2, 1)],
)
def test_an_input_that_ends_or_hangs_replicas_is_found_and_refused(kind, n_replicas, n_bad):
    """A good row comes each 20 ms, the poison one each 50 ms."""
    # Good rows first: a call that hangs is found by what is known of others.
    requests = [(0.02 * n, (n % GOOD,)) for n in range(650)] + [(1.0 + 0.05 * n, (GOOD,)) for n in range(n_bad)]
    poison = {GOOD: kind}
    results, fleet = run_virtually(served(requests, poison, n_replicas, timeout_s=15.0, hangs_s=2.0))
    require_right(requests, results, poison)
    assert 1 <= fleet.n_ended <= (2 * n_replicas if kind == "hangs" else 2)


def test_the_rows_of_a_replica_that_ends_are_answered_by_the_others_side_by_side():
    """Each call takes 1.2 s, whatever is in it: one row after the other would take 38 s."""

    async def main():
        fleets = [Fleet("logits0", 4, {}), Fleet("logits1", 2, {})]
        fleets[0].takes_s = 1.2
        cascade, _ = cascade_of(a_pool(DATA.models, batch_size=32, timeout_s=10.0), fleets)
        for fleet in fleets:
            fleet.tell()
        asyncio.get_running_loop().call_later(0.6, fleets[0].end, fleets[0].replicas[0])
        return await asyncio.gather(*(answer_at(cascade, 0.0, (row,)) for row in range(128)))

    require_right([(0, (row,)) for row in range(128)], run_virtually(main()), {})


@pytest.mark.parametrize("n_replicas", [1, 2])
def test_of_all_routers_one_learns_which_input_ends_replicas(n_replicas):
    """Its client asks each second, now one router, now the other; replicas take six seconds to start again."""

    async def main():
        first, later = Fleet("logits0", n_replicas, {GOOD: "kills"}), Fleet("logits1", 2, {})
        first.restarts_s = 6.0
        pool = a_pool(DATA.models, timeout_s=10.0)
        routers = [cascade_of(pool, [first, later])[0] for _ in range(2)]
        for router, peer in (routers, routers[::-1]):
            router.on_news = lambda news, peer=peer: asyncio.get_running_loop().call_later(0.01, peer.learn, news)

        async def poll():
            while True:
                for router in routers:
                    for fleet in (first, later):
                        fleet.cascade = router
                        fleet.tell()
                await asyncio.sleep(0.5)

        polling = asyncio.ensure_future(poll())
        good = [answer_at(routers[n % 2], 0.04 * n, (n % GOOD,)) for n in range(1000)]
        bad = [answer_at(routers[n % 2], 2.0 + n, (GOOD,)) for n in range(38)]
        results = await asyncio.gather(*good, *bad)
        polling.cancel()
        return results[:1000], results[1000:], first.n_ended

    good, bad, n_ended = run_virtually(main())
    assert n_ended == 2
    assert all(isinstance(result, RequestError) for result in bad)
    assert {result.status for result in bad[15:]} == {422}
    if n_replicas > 1:  # but for those that were at the same replica with it
        assert sum(isinstance(result, RequestError) for result in good) <= 2


@pytest.mark.parametrize("n_clients", [3, 40])
def test_no_answer_lacks_a_stage_for_one_of_its_replicas_that_breaks(n_clients):
    """Whatever its calls are when it is found bad, the others answer their rows."""

    async def main():
        later = Fleet("logits1", 2, {})
        async with cascade_with(Fleet("logits0", 2, {}), later, on_failure="degrade") as cascade:

            async def client(first):
                return [await answer_at(cascade, 0.0, (row % 240,)) for row in range(first, 1200, n_clients)]

            asyncio.get_running_loop().call_later(0.3, setattr, later.replicas[0], "fails", True)
            answers = await asyncio.gather(*map(client, range(n_clients)))
        return [answer for of_client in answers for answer in of_client], later.n_ended

    answers, n_ended = run_virtually(main())
    assert not [one for one in answers if isinstance(one, RequestError) or one.degraded.any()]
    assert n_ended == 1


class BreaksAgain(Fleet):
    """Each of whose replicas after the first fails in every call."""

    def started(self, fails):
        return super().started(fails or self.n_started > 0)


@pytest.mark.parametrize("kind", [Fleet, BreaksAgain])
def test_a_stage_that_breaks_is_left_alone_and_its_replica_replaced(kind):
    async def main():
        fleet = kind("logits0", 1, {})
        async with cascade_with(fleet, Fleet("logits1", 1, {})) as cascade:
            well = [await answer_at(cascade, 0.0, (row,)) for row in range(20)]
            fleet.replicas[0].fails = True
            before = fleet.n_asked
            broken = await asyncio.gather(*(answer_at(cascade, 0.01 * n, (n % 240,)) for n in range(1000)))
            n_asked = fleet.n_asked - before
            again = [await answer_at(cascade, 10.0, (row,)) for row in range(2)]
        return well, broken, n_asked, again, fleet.n_ended

    well, broken, n_asked, again, n_ended = run_virtually(main())
    assert not any(isinstance(result, RequestError) for result in well)
    refused = [result for result in broken if isinstance(result, RequestError)]
    assert {result.status for result in refused} == {503}
    assert any("no such thing" in result.message for result in refused)
    if kind is Fleet:
        assert not any(isinstance(result, RequestError) for result in again)
        assert n_ended == 1
    else:
        assert n_asked < 150  # asked from time to time


@pytest.fixture(scope="module")
def service(ray_session, tmp_path_factory):
    with poisoned(tmp_path_factory.mktemp("poisoned"), 2) as running:
        yield running


@pytest.mark.slow
def test_a_service_answers_good_rows_next_to_poison(service):
    assert set(require_harmless(service.url, 70, SOFT)) == {422}


@pytest.mark.slow
def test_a_row_that_a_later_stage_cannot_answer_is_degraded_and_one_beyond_its_deadline_refused(service):
    status, content = infer(service.url, [[0.01, 666.0]])
    assert (status, content["parameters"]["degraded"]) == (200, True), content
    assert "cannot look at it" in content["parameters"]["reason"]
    status, content = infer(service.url, [[0.01, 0.0]])
    assert (status, content["parameters"]["degraded"]) == (200, False)
    status, content = infer(service.url, [[672.0, 0.0]], timeout=200_000)
    assert (status, "timeout" in content["error"]) == (503, True)


@pytest.mark.slow
def test_overload_is_refused_with_429_and_over_soon_after(service):
    """Each batch takes a second, and clients go on until one of them is refused."""
    with clients(lambda rng: infer(service.url, [[672.0, 0.0]] * 8)[0], 24) as statuses:
        until(lambda: 429 in statuses)
    assert {200, 429} <= set(statuses) <= {200, 429, 503}
    until(lambda: infer(service.url, [[1.0, 0.0]])[0] == 200)
