"""The load client against a real server that answers, errs, hangs and hangs up as its input asks."""

import asyncio
import threading
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from aiohttp import web

from cauc_ray.errors import ExecutionError
from jobs.bench.load import NO_ANSWER, PAUSE_S, REFUSED, RESET, TIMEOUT, Load, LoadResult, run_load
from jobs.bench.processes import free_port


class Server:
    """Does what each body names: `hang`, `hang up`, `503`, or echoes it after 10 ms; counts bodies and connections."""

    def __init__(self):
        self.bodies = Counter()
        self.peers = set()
        self.n_open = self.most_open = 0

    async def answer(self, request):
        body = await request.read()
        self.bodies[body] += 1
        self.peers.add(request.transport.get_extra_info("peername"))
        self.n_open += 1
        self.most_open = max(self.most_open, self.n_open)
        try:
            if body == b"hang":
                await asyncio.sleep(60)
            if body == b"hang up":
                request.transport.abort()
            await asyncio.sleep(0.01)
            if body == b"503":
                return web.Response(status=503, body=body, headers={"Retry-After": "1"})
            return web.Response(body=body)
        finally:
            self.n_open -= 1


@contextmanager
def serving():
    """Run a server on a thread of its own. Yields it and its address."""
    server, loop, port = Server(), asyncio.new_event_loop(), free_port()
    app = web.Application()
    app.router.add_post("/infer", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)

    async def start():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{port}/infer"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def test_clients_keep_their_connections_take_the_bodies_in_turn_and_are_judged_by_what_they_sent():
    bodies = [b"0", b"1", b"2", b"503"]

    def judge(row, status, body):
        return "other" if body != bodies[row] else f"{status // 100}xx of {row % 2}"

    with serving() as (server, url):
        result = run_load(Load(url, bodies, n_clients=5, seconds=0.5, warm_up_s=0.1, judge=judge))
    n0, n1, n2, n503 = (server.bodies[body] for body in bodies)
    assert result.counts() == {(200, "2xx of 0"): n0 + n2, (200, "2xx of 1"): n1, (503, "5xx of 1"): n503}
    assert server.most_open == len(server.peers) == 5
    assert n0 + n1 + n2 + n503 == len(result)
    assert max(n0, n1, n2, n503) - min(n0, n1, n2, n503) <= 1


def test_what_gets_no_answer_is_told_apart():
    with serving() as (_, url):
        load = Load(url, [b"row", b"hang", b"hang up"], n_clients=6, seconds=1.0, warm_up_s=0.0, timeout_s=0.3)
        result = run_load(load)
    assert set(result.counts()) == {(200, "answered"), (NO_ANSWER, TIMEOUT), (NO_ANSWER, RESET)}
    assert (result.latency_s[result.kinds == TIMEOUT] >= 0.3).all()
    assert result.started_s.max() < 1.0 < result.ended_s.max()  # what was under way at the end was waited for


def test_a_port_that_nobody_listens_on_is_not_hammered():
    port = free_port()
    result = run_load(Load(f"http://127.0.0.1:{port}/infer", [b"row"], n_clients=2, seconds=0.4, warm_up_s=0.0))
    assert set(result.counts()) == {(NO_ANSWER, REFUSED)}
    assert len(result) <= 2 * (0.4 / PAUSE_S + 2)
    assert result.per_s == 0.0
    with pytest.raises(ExecutionError, match="no request was answered"):
        _ = result.measured_s


def test_requests_that_are_due_are_sent_whatever_has_become_of_others():
    # Each takes 10 ms; some come together, two hang.
    due_s = np.array([0.0, 0.0, 0.002, 0.004, 0.2, 0.2, 0.3])
    bodies = [b"a", b"hang", b"b", b"hang", b"c", b"d", b"e"]
    with serving() as (server, url):
        result = run_load(Load(url, bodies, seconds=0.4, due_s=due_s, warm_up_s=0.0, timeout_s=0.3))
    assert sorted(np.round(result.started_s, 6)) == due_s.tolist()
    assert result.counts() == {(200, "answered"): 5, (NO_ANSWER, TIMEOUT): 2}
    assert server.bodies == Counter(bodies)
    assert server.most_open >= 3
    assert len(result.measured_s) == 5


def test_only_answers_within_the_window_are_measured():
    # Ends at 0.5, 1.0, 1.5, 2.5, 3.0 and 3.5 s; measured from 1 s up to 3 s, without the refused one.
    result = LoadResult(
        warm_up_s=1.0,
        seconds=2.0,
        began=0.0,
        started_s=np.array([0.0, 0.6, 1.0, 2.3, 2.5, 3.0]),
        latency_s=np.array([0.5, 0.4, 0.5, 0.2, 0.5, 0.5]),
        statuses=np.array([200, 200, 503, 200, 200, 200]),
        kinds=np.array(["a", "a", "b", "a", "a", "a"]),
    )
    assert result.measured_s.tolist() == [0.4, 0.2]
    assert result.per_s == 1.0
    assert result.counts() == {(200, "a"): 5, (503, "b"): 1}
