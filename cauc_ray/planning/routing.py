"""What serving itself takes, apart from the models: a router's seconds for a request and for a call, measured here."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from cauc_ray.api.offline import fit
from cauc_ray.api.samples import sample_logits
from cauc_ray.api.serving import serve
from cauc_ray.models.answers import Batch
from cauc_ray.models.pool import pool_of
from cauc_ray.numbers.types import Floats
from cauc_ray.planning.stages import RouterSeconds

# Requests that come a millisecond after one another, and how often these and one alone are measured.
CROWD, REPEATS = 32, 15
GAP_S, MODEL_S = 0.001, 0.04
ANSWER_S = 30.0
NAME = "small"  # a model of the sample table


def sleeping() -> Callable[[Batch], Floats]:
    """Return a model that sleeps, and is sure."""

    def answer(batch: Batch) -> Floats:
        time.sleep(MODEL_S)
        return np.tile(np.array([0.0, -9.0], np.float32), (len(next(iter(batch.values()))), 1))

    return answer


def time_router() -> RouterSeconds:
    """Time a local service of one sleeping model by the CPU that it uses, by requests of one number, on this machine.

    A request alone takes one request's seconds and one call's. Of a crowd, the first goes alone and the others share
    the next call. Medians. Raises ConfigError where a package for serving is missing.
    """
    policy = fit(sample_logits(), models=[NAME], method="rf", threshold=0.0)
    policy = policy.model_copy(update={"reference": None})  # no drift is looked for
    model = {"kind": "python", "factory": f"{__name__}:{sleeping.__name__}", "logit_kind": "log-probabilities"}
    stages = [{"name": NAME, "model": model, "batch_size": CROWD}]
    pool = pool_of({"name": "router", "task": "multiple-choice", "stages": stages}, Path.cwd())
    with serve(pool, policy, port=0, local=True) as service, ExitStack() as opened:
        host, port = service.url.removeprefix("http://").split(":")
        clients = [opened.enter_context(socket.create_connection((host, int(port)), ANSWER_S)) for _ in range(CROWD)]
        body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [0.5]}]})
        head = f"POST /v2/models/router/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        request = (head + body).encode()
        alone, crowd = [], []
        for _ in range(REPEATS):
            alone.append(_served_s(clients[:1], request))
            crowd.append(_served_s(clients, request))
    # n requests and two calls, against one of each.
    per_request = max(0.0, (median(crowd) - 2 * median(alone)) / (CROWD - 2))
    return RouterSeconds(per_request, max(0.0, median(alone) - per_request))


def _served_s(clients: Sequence[socket.socket], request: bytes) -> float:
    """Return the CPU seconds of this process, but for those of this thread, that a request of each client takes."""
    began = time.process_time() - time.thread_time()
    for client in clients:
        client.sendall(request)
        time.sleep(GAP_S)
    for client in clients:
        answer = b""
        while not _is_whole(answer):
            answer += client.recv(65536)
    return time.process_time() - time.thread_time() - began


def _is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length:")]
    return bool(found) and len(body) >= int(lengths[0])
