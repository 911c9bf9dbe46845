"""What one client sends, or one replica does, harms no other client: in virtual time, and over HTTP."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import yaml
from fake_stages import Fleet, a_pool, cascade_of, columns_of
from hypothesis import given
from hypothesis import strategies as st
from runs import python_pool, two_model_policy
from synthetic import chain
from virtual_time import run_virtually

import cauc_ray
from cauc_ray.policies.fitting import ThresholdRule, fit_rf
from cauc_ray.policies.trace import replay
from cauc_ray.protocol.tensors import RequestError

DATA = chain(3, n=240, strengths=(1.0, 2.4))
POLICY = fit_rf(DATA, DATA, ThresholdRule(threshold=0.8))
EXPECTED = replay(POLICY, DATA)
# Rows from here on are what the poison client may send.
GOOD = 200
RAISING = ("raises", "nan", "shape")


async def asked(cascade, at_s, rows):
    await asyncio.sleep(at_s)
    rows = np.array(rows)
    try:
        return await cascade.answer(POLICY, columns_of(DATA.logits, rows), len(rows))
    except RequestError as error:
        return error


async def served(requests, poison, n_replicas, failing=(), hangs_s=6.0, **serving):
    """Return what requests (at_s, rows) come to, and the fleets; poison and failing replicas: of the first stage."""
    pool = a_pool(DATA.models, **serving)
    fleets = [Fleet("logits0", n_replicas, poison, failing), Fleet("logits1", 2, {})]
    fleets[0].hangs_s = hangs_s
    cascade, _ = cascade_of(pool, fleets)
    polls = []
    for fleet in fleets:
        polls.append(asyncio.ensure_future(fleet.poll()))
    results = await asyncio.gather(*(asked(cascade, *one) for one in requests))
    left = [(at.in_work, at.health.paused) for at in cascade.scheduler.stages]
    for poll in polls:
        poll.cancel()
    assert left == [(False, False)] * 2
    return results, fleets


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


def two_clients(kind, seconds, same=False):
    """Return requests: a good one each 20 ms, a poison one each 50 ms; and what the poison ones do."""
    good = [(0.02 * n, (n % GOOD,)) for n in range(int(50 * seconds))]
    bad = [(0.05 * n, (GOOD + (0 if same else n % 40),)) for n in range(int(20 * seconds))]
    return good + bad, dict.fromkeys(range(GOOD, 240), kind)


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


@pytest.mark.parametrize("n_replicas", [1, 2])
@pytest.mark.parametrize("kind", RAISING)
def test_a_client_that_sends_poison_from_the_start_harms_nobody(kind, n_replicas):
    requests, poison = two_clients(kind, 10)
    results, _ = run_virtually(served(requests, poison, n_replicas))
    require_right(requests, results, poison)


@pytest.mark.parametrize(("n_replicas", "most_deaths"), [(1, 2), (2, 2), (3, 2)])
def test_an_input_that_ends_replicas_is_found_and_refused(n_replicas, most_deaths):
    requests, poison = two_clients("kills", 20, same=True)
    results, fleets = run_virtually(served(requests, poison, n_replicas, timeout_s=10.0))
    require_right(requests, results, poison)
    assert 1 <= fleets[0].n_ended <= most_deaths


@pytest.mark.parametrize("n_replicas", [2, 3])
def test_rows_of_a_replica_that_hangs_are_asked_of_another(n_replicas):
    requests = [(0.02 * n, (n % GOOD,)) for n in range(1000)]
    requests += [(5.0, (GOOD,))]
    poison = {GOOD: "hangs"}
    results, fleets = run_virtually(served(requests, poison, n_replicas, timeout_s=10.0))
    require_right(requests[:-1], results[:-1], poison)
    assert isinstance(results[-1], RequestError)
    assert 1 <= fleets[0].n_ended <= 2


@pytest.mark.parametrize("n_replicas", [1, 2])
def test_an_input_that_hangs_is_found_and_refused(n_replicas):
    requests, poison = two_clients("hangs", 20, same=True)
    served_so_far = [(at_s + 1.0, rows) for at_s, rows in requests] + [(0.02 * n, (n,)) for n in range(50)]
    results, _ = run_virtually(served(served_so_far, poison, n_replicas, timeout_s=15.0, hangs_s=2.0))
    require_right(served_so_far, results, poison)


@pytest.mark.parametrize("n_replicas", [2, 3])
def test_a_replica_that_always_fails_is_replaced_and_its_rows_answered_by_another(n_replicas):
    requests = [(0.02 * n, (n % GOOD,)) for n in range(500)]
    results, fleets = run_virtually(served(requests, {}, n_replicas, failing=(0,)))
    require_right(requests, results, {})
    assert fleets[0].n_ended == 1


@pytest.mark.parametrize("clients", [3, 40])
def test_no_answer_lacks_a_stage_for_one_of_its_replicas_that_breaks(clients):
    """Whatever its calls are when it is found bad, the others answer their rows."""

    async def main():
        fleet = Fleet("logits0", 2, {})
        later = Fleet("logits1", 2, {})
        cascade, _ = cascade_of(a_pool(DATA.models, "degrade"), [fleet, later])
        polls = [asyncio.ensure_future(own.poll()) for own in (fleet, later)]

        async def client(first):
            return [await asked(cascade, 0.0, (row % 240,)) for row in range(first, 2400, clients)]

        asyncio.get_running_loop().call_later(0.3, setattr, later.replicas[0], "fails", True)
        answers = await asyncio.gather(*map(client, range(clients)))
        for poll in polls:
            poll.cancel()
        return [one for own in answers for one in own], later.n_ended

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
        cascade, _ = cascade_of(a_pool(DATA.models), [fleet, Fleet("logits1", 1, {})])
        poll = asyncio.ensure_future(fleet.poll())
        well = [await asked(cascade, 0.0, (row,)) for row in range(20)]
        fleet.replicas[0].fails = True
        before = fleet.n_asked
        broken = await asyncio.gather(*(asked(cascade, 0.01 * n, (n % 240,)) for n in range(1000)))
        n_asked = fleet.n_asked - before
        again = [await asked(cascade, 10.0, (row,)) for row in range(2)]
        poll.cancel()
        return well, broken, n_asked, again, fleet.n_ended

    well, broken, n_asked, again, n_ended = run_virtually(main())
    assert not any(isinstance(result, RequestError) for result in well)
    assert {result.status for result in broken if isinstance(result, RequestError)} == {503}
    if kind is Fleet:
        assert not any(isinstance(result, RequestError) for result in again)
        assert n_ended == 1
    else:
        assert n_asked < 150  # asked from time to time


def infer(url, x, datatype="FP32", binary=False):
    """Ask for one row x, a list of numbers or texts; return the status, and the prediction or the error."""
    tensor = {"name": "x", "datatype": datatype, "shape": [1, *np.shape(x)]}
    raw = np.array(x, "<f4").tobytes() if binary else b""
    tensor |= {"parameters": {"binary_data_size": len(raw)}} if binary else {"data": [x]}
    text = json.dumps({"inputs": [tensor]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))} if binary else {}
    request = urllib.request.Request(f"{url}/v2/models/poisoned/infer", text + raw, headers)
    try:
        with urllib.request.urlopen(request, timeout=150) as answer:
            return answer.status, json.loads(answer.read())["outputs"][0]["data"][0]
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def poisoned(folder, replicas, large=("poisonable", {}), declared=False, timeout_s=30.0, **stage):
    """Serve a stage that may be poisoned, and another.   replicas: of both."""
    pool = python_pool(folder, [("poisonable", {}), large], serving={"timeout_s": timeout_s}, **stage)
    content = yaml.safe_load(pool.read_text())
    if declared:
        content["inputs"] = {"x": {"datatype": "FP32", "shape": [2]}}
    for stage in content["stages"]:
        stage |= {"resources": {"num_cpus": 0.2}, "replicas": {"min": replicas}}
    pool.write_text(yaml.safe_dump(content))
    return cauc_ray.serve(pool, two_model_policy(0.9), port=0, name="poisoned")


# What raises, ends, returns NaN or too few rows; NaN as raw bytes; another shape and another type than good rows have.
SOFT = [([[float(code), 0.0]], {}) for code in (666, 667, 668, 669)]
SOFT += [([[float("nan"), 0.0]], {"binary": True}), ([1.0], {}), ([["a", "b"], "BYTES"], {})]


def require_harmless(url, seconds, bad):
    """Ask for a good row and for a poison one, 20 times a second each; return what the poison ones come to.

    bad: arguments of infer, in turn.
    """
    assert infer(url, [1.0, 0.0])[0] == 200  # before any good row is known, poison may be the stage's own fault: 503
    started, good, poison = time.monotonic(), [], []
    with ThreadPoolExecutor(int(40 * seconds)) as clients:
        for turn in range(int(20 * seconds)):
            arguments, options = bad[turn % len(bad)]
            poison.append(clients.submit(infer, url, *arguments, **options))
            good.append(clients.submit(infer, url, [(-1.0) ** turn * (1.0 + turn / 100), 1.0]))
            time.sleep(max(0.0, started + 0.05 * (turn + 1) - time.monotonic()))
    assert [one.result() for one in good] == [(200, turn % 2) for turn in range(len(good))]
    found = [one.result() for one in poison]
    assert not [answer for status, answer in found if status == 200]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "declared"), [(1, True), (2, False)])
def test_a_service_answers_next_to_poison(ray_session, tmp_path, replicas, declared):
    with poisoned(tmp_path, replicas, declared=declared) as service:
        found = require_harmless(service.url, 8, SOFT)
    assert {status for status, _ in found} == {400, 422}, found


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "code"), [(1, 670), (2, 671)])
def test_an_input_that_ends_or_hangs_its_process_harms_no_other(ray_session, tmp_path, replicas, code):
    # Rows wait while a replica starts, which takes a busy machine long.
    with poisoned(tmp_path, replicas, timeout_s=100.0, call_timeout_s=2.0) as service:
        for turn in range(20):
            assert infer(service.url, [float(turn) + 1, 0.0])[0] == 200
        require_harmless(service.url, 10, [([[float(code), 0.0]], {})])


@pytest.mark.slow
def test_a_replica_that_always_fails_costs_no_answer(ray_session, tmp_path):
    large = ("fails_in_one_process", {"path": str(tmp_path / "failed")})
    with poisoned(tmp_path, 2, large) as service:
        require_harmless(service.url, 8, [([[666.0, 0.0]], {})])
