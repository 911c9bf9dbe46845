"""A later stage that goes away: answers so far at once, marked, and all of it again soon after it is back."""

import asyncio
import http.server
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
import yaml
from asking import http as ask_http
from asking import infer, until
from fake_stages import Stage, a_pool, cascade_of, columns_of
from runs import python_pool, two_model_policy
from synthetic import chain
from virtual_time import run_virtually

import cauc_ray
from cauc_ray.errors import ExecutionError
from cauc_ray.policies.fitting import ThresholdRule, fit_rf
from cauc_ray.policies.trace import replay
from cauc_ray.serving.request_state import StageError

DATA = chain(3, n=240, strengths=(1.0, 2.4))
POLICY = fit_rf(DATA, DATA, ThresholdRule(threshold=0.9))
EXPECTED = replay(POLICY, DATA)
TIMEOUT_S, OUTAGE_S, AFTER_S, PER_S = 2.0, 30.0, 8.0, 10
# A request that needs no stage that is away takes less.
AT_ONCE_S = 0.2
# Over HTTP: what a call may take.
WAITS_S = 2.0


class Cloud(Stage):
    """The second stage, some milliseconds away, which refuses, hangs, fails late or has no server while `away` says so.

    calls: when it was called.
    """

    def __init__(self, n_replicas=1):
        super().__init__("logits1", before=self.reached, n_replicas=n_replicas)
        self.away, self.calls = None, []

    async def reached(self, call, batch):
        self.calls.append(asyncio.get_running_loop().time())
        if self.away == "hangs":
            await asyncio.sleep(1e6)
        await asyncio.sleep(0.7 * TIMEOUT_S if self.away == "fails late" else 0.02)
        if self.away == "has no server":
            raise ExecutionError("large does not answer")
        if self.away is not None:
            raise StageError("failed", "ConnectionRefusedError: [Errno 111] Connection refused")


async def asked(cascade, at_s, row):
    """Ask for a row at a time; return it, when it was asked for, the answer, and the seconds that it took."""
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(at_s)
    started = clock()
    return row, started, await cascade.answer(POLICY, columns_of(DATA.logits, np.array([row])), 1), clock() - started


async def through_an_outage(away, from_s, to_s, n_replicas=1):
    """Ask steadily before, while and after the cloud is away; return the answers and its calls."""
    cloud = Cloud(n_replicas)
    cascade, _ = cascade_of(a_pool(DATA.models, "degrade", timeout_s=TIMEOUT_S), [Stage("logits0"), cloud])

    async def switched():
        await asyncio.sleep(from_s)
        cloud.away = away
        await asyncio.sleep(to_s - from_s)
        cloud.away = None

    n = int((to_s + AFTER_S) * PER_S)
    answers = await asyncio.gather(*(asked(cascade, at / PER_S, at % 240) for at in range(n)), switched())
    return answers[:-1], cloud


@pytest.mark.parametrize(
    ("away", "from_s", "n_replicas"),
    [
        ("refuses", 0.0, 1),
        ("refuses", 5.0, 1),
        ("hangs", 0.0, 1),
        ("hangs", 5.0, 1),
        ("hangs", 5.0, 3),
        ("fails late", 0.0, 1),
        ("fails late", 5.0, 2),
        ("has no server", 0.0, 1),
        ("has no server", 5.0, 1),
        ("has no server", 5.0, 3),
    ],
)
def test_answers_come_at_once_while_a_stage_is_away_and_it_is_back_by_itself(away, from_s, n_replicas):
    """from_s: 0 where the stage has never answered."""
    to_s = from_s + OUTAGE_S
    answers, cloud = run_virtually(through_an_outage(away, from_s, to_s, n_replicas))
    assert len(answers) == (to_s + AFTER_S) * PER_S
    noticed_s, back_s = from_s + TIMEOUT_S + 0.5, to_s + TIMEOUT_S + 2.0
    for row, at, answer, took_s in answers:
        goes_on = EXPECTED.stages[row] > 0
        assert took_s < TIMEOUT_S + AT_ONCE_S
        if noticed_s <= at < to_s - AT_ONCE_S:
            assert took_s < AT_ONCE_S
            assert bool(answer.degraded[0]) == goes_on
            assert not goes_on or "is down" in answer.reason
        elif at < from_s - AT_ONCE_S or at > back_s:
            assert not answer.degraded.any()
            assert answer.predictions[0] == EXPECTED.predictions[row]
        if answer.degraded.any():
            assert (answer.stages[0], answer.predictions[0]) == (0, POLICY.start(DATA.logits[0][[row]]).predictions[0])
    probes = [at for at in cloud.calls if noticed_s <= at < to_s]
    assert 5 < len(probes) < 2 * n_replicas * OUTAGE_S
    assert cloud.n_started == n_replicas  # another one would find the same


def test_a_link_that_resets_a_third_of_all_calls_does_not_take_its_stage_away():
    rng = np.random.default_rng(0)

    class Flickers(Cloud):
        async def reached(self, call, batch):
            self.away = "refuses" if rng.random() < 0.3 else None
            await super().reached(call, batch)

    async def main():
        cascade, _ = cascade_of(a_pool(DATA.models, "degrade", timeout_s=TIMEOUT_S), [Stage("logits0"), Flickers()])
        return await asyncio.gather(*(asked(cascade, at / PER_S, at % 240) for at in range(60 * PER_S)))

    degraded = [bool(answer.degraded[0]) for row, _, answer, _ in run_virtually(main()) if EXPECTED.stages[row] > 0]
    assert np.mean(degraded) < 0.1  # each row is asked for three times


def test_no_row_waits_for_a_stage_that_has_no_replica_for_a_known_reason():
    async def main():
        cloud = Cloud(n_replicas=0)
        cascade, _ = cascade_of(a_pool(DATA.models, "degrade", timeout_s=TIMEOUT_S), [Stage("logits0"), cloud])
        cascade.replicas(1, [], "its model cannot be loaded: OSError: no route to host")
        without = await asyncio.gather(*(asked(cascade, at / PER_S, at) for at in range(100)))
        cloud.tell(1)
        return without, await asyncio.gather(*(asked(cascade, at / PER_S, at) for at in range(100)))

    without, with_it = run_virtually(main())
    assert max(took_s for *_, took_s in without) < AT_ONCE_S
    reasons = [answer.reason for row, _, answer, _ in without if EXPECTED.stages[row] > 0]
    assert reasons
    assert all("no route to host" in reason for reason in reasons)
    assert not any(answer.degraded.any() for _, _, answer, _ in with_it)


class Backend:
    """What a stage asks over HTTP, at one port: it answers, refuses connections, or takes them and is silent."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._server, self._silent = None, None

    def answers(self):
        self.refuses()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Answers)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def refuses(self):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._silent is not None:
            self._silent.close()
        self._server = self._silent = None

    def is_silent(self):
        self.refuses()
        self._silent = socket.create_server(("127.0.0.1", self.port), backlog=1000)


class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        x = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps([[5.0 * each, 0.0] for each in x]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def backend():
    backend = Backend()
    yield backend
    backend.refuses()


@pytest.fixture
def edge(tmp_path, backend):
    """Return what starts an edge service whose second stage asks the backend."""
    asks = {"url": f"http://127.0.0.1:{backend.port}", "timeout_s": WAITS_S}
    path = python_pool(tmp_path, [("by_x", {}), ("asks", asks)], serving={"timeout_s": WAITS_S})
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"on_failure": "degrade"}))
    return lambda: cauc_ray.serve(path, two_model_policy(), port=0, local=True)


def one(service):
    """Ask for a row that goes on to the second stage; return whether it was degraded, and why."""
    status, content = infer(service.url, "test", {"x": [0.1]})
    assert status == 200, content
    return content["parameters"]["degraded"], content["parameters"].get("reason")


def test_a_service_starts_without_its_cloud_and_takes_it_in_once_it_is_there(edge, backend):
    backend.refuses()
    with edge() as service:
        assert ask_http("GET", f"{service.url}/v2/health/ready")[0] == 200
        asked_at = time.monotonic()
        degraded, reason = one(service)
        assert degraded
        assert "ConnectionRefusedError" in reason
        assert time.monotonic() - asked_at < 30.0
        backend.answers()
        until(lambda: not one(service)[0])


@pytest.mark.slow
def test_over_http_answers_come_at_once_while_the_backend_is_away(edge, backend):
    backend.answers()
    answers, ends = [], threading.Event()

    def client(service):
        while not ends.wait(0.1):
            at = time.monotonic()
            degraded, _ = one(service)
            answers.append((at, time.monotonic() - at, degraded))

    def within(start, end):
        return [(took_s, degraded) for at, took_s, degraded in list(answers) if start <= at < end]

    def is_back():
        lately = within(time.monotonic() - 1.5, time.monotonic() - 0.2)
        return lately and not any(degraded for _, degraded in lately)

    with edge() as service, ThreadPoolExecutor(4) as clients, ExitStack() as ending:
        ending.callback(ends.set)
        until(lambda: not one(service)[0])
        running = [clients.submit(client, service) for _ in range(4)]
        for away in (backend.refuses, backend.is_silent):
            away()
            away_at = time.monotonic()
            time.sleep(12.0)
            for each in running:
                assert not each.done(), each.exception()
            noticed = within(away_at + 6.0, time.monotonic() - 1.0)
            assert noticed
            assert all(degraded for _, degraded in noticed)
            # None waits for the stage's timeout.
            assert np.quantile([took_s for took_s, _ in noticed], 0.99) < 0.9 * WAITS_S
            backend.answers()
            until(is_back, 20.0)
        ends.set()
        for each in running:
            each.result()
