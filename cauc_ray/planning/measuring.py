"""Seconds measured here and now: of stages' calls on Ray, and of a router for a request and for a call."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray

from cauc_ray.api.offline import fit
from cauc_ray.api.samples import sample_logits
from cauc_ray.api.serving import serve
from cauc_ray.cascade.bundles import Bundle, Part, packed
from cauc_ray.cascade.rows import CallResult
from cauc_ray.data.datasets import RunInput
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution.actors import START_DEADLINE_S, result_of, worker_class
from cauc_ray.execution.cluster import require_fit
from cauc_ray.models.answers import Batch
from cauc_ray.models.pool import Replicas, StageSpec, pool_of
from cauc_ray.numbers.types import Floats
from cauc_ray.planning.stages import RouterSeconds, Timing, fit_seconds

# Each size is called so often, after a first call of the full size that counts for nothing.
REPEATS = 5
# Requests that come a millisecond after one another, and how often these and one alone are measured.
CROWD, TURNS = 32, 15
GAP_S, MODEL_S = 0.001, 0.04
ANSWER_S = 30.0
NAME = "small"  # a model of the sample table


def time_stages(
    stages: Sequence[StageSpec], inputs: RunInput, on_stage: Callable[[str], None] = lambda name: None
) -> list[Timing]:
    """Time every stage's model on the first rows of an input, on the current Ray session, one stage after the other.

    Where the input has fewer rows than a batch, they come again.   on_stage: called with each stage's name before it.
    Raises DataError where the input cannot be read, ExecutionError where a stage does not fit, start or answer.
    """
    columns = _first_rows(inputs, max(stage.batch_size for stage in stages))
    alone = [stage.model_copy(update={"replicas": Replicas()}) for stage in stages]
    for stage in alone:
        require_fit([stage])
    timed = []
    for stage in alone:
        on_stage(stage.name)
        timed.append(_timed(stage, columns))
    return timed


def timed_sizes(batch_size: int) -> list[int]:
    """Return the batch sizes to time: a row, a quarter, half and the whole of a batch.

    >>> timed_sizes(64), timed_sizes(2)
    ([1, 16, 32, 64], [1, 2])
    """
    return sorted({1, max(1, batch_size // 4), max(1, batch_size // 2), batch_size})


def _timed(stage: StageSpec, columns: Batch) -> Timing:
    who = f"stage {stage.name!r}"
    worker = worker_class(stage).remote(stage, 0, None)
    try:
        result_of(worker.load.remote(), START_DEADLINE_S, who)
        sizes = timed_sizes(stage.batch_size)
        bundles = {n: ray.put(Bundle(packed({name: column[:n] for name, column in columns.items()}))) for n in sizes}
        _called(worker, bundles[sizes[-1]], sizes[-1], stage)
        # In turns, so that what changes meanwhile changes all sizes alike.
        rows = np.tile(np.array(sizes, dtype=np.int64), REPEATS)
        seconds = [_called(worker, bundles[n], n, stage) for n in rows.tolist()]
        return fit_seconds(rows, np.array(seconds), "measured")
    finally:
        ray.kill(worker)


def _called(worker: Any, bundle: Any, n: int, stage: StageSpec) -> float:
    who = f"stage {stage.name!r}"
    ref, _ = worker.collect.options(num_returns=2).remote([Part(0, slice(0, n))], None, bundle)
    results: list[CallResult] = result_of(ref, stage.call_timeout_s, who)
    result = CallResult.joined(results)
    if result.error is not None or result.failures:
        why = result.error if result.error is not None else next(iter(result.failures.values()))
        raise ExecutionError(f"{who} cannot answer the input's first rows: {why}")
    assert result.compute_s is not None
    return result.compute_s


def _first_rows(inputs: RunInput, n: int) -> Batch:
    """Return the columns of the input's first n rows, the same again where there are fewer."""
    source = inputs.blocks(n)
    block = next((block for group in range(source.n_groups) for _, block in source.blocks(group)), None)
    if block is None:
        raise DataError(f"{inputs.path} has no rows")
    if block.unreadable:
        raise DataError(f"{inputs.path}: its first rows cannot be read: {next(iter(block.unreadable.values()))}")
    positions = np.arange(n) % len(block.example_ids)
    return {name: column[positions] for name, column in block.columns.items()}


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
        for _ in range(TURNS):
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
