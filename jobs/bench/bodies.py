"""Measure how long bodies of megabytes, as JSON and as raw bytes, delay the other requests to a local service.

A client asks for single rows all the time; another sends long bodies, with pauses. A delay is of one long request: the
slowest of the first client's answers meanwhile, less the slowest within as long a pause soon after. The median is
given, and the range.
"""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cauc_ray.errors import ExecutionError
from cauc_ray.numbers.types import Floats
from jobs.bench.load import Load, body_of, run_load
from jobs.bench.part import require
from jobs.bench.planted import EASY_GAP, SleepingStage, write_cascade
from jobs.bench.processes import served
from jobs.bench.serving import spread

STAGES = (SleepingStage("small", 64, deferral=0.3), SleepingStage("large", 64, cost=2.0))
INFER = "/v2/models/bench/infer"
ANSWER_S = 60.0

# By kind: a body and its headers.
Bodies: TypeAlias = Mapping[str, tuple[bytes, dict[str, str]]]


def measure(megabytes: float = 9.0, rows: int = 64, times: int = 15) -> dict[str, Any]:
    """Send long bodies of each kind in turn.

    megabytes, rows: of a long body, in 10^6 bytes.   times: long bodies of each kind.
    """
    require("uvicorn", "prometheus_client")
    bodies = long_bodies(round(megabytes * 1e6), rows)
    with tempfile.TemporaryDirectory(prefix="bodies") as scratch:
        write_cascade(Path(scratch), STAGES)
        with served(Path(scratch), local=True) as url:
            for kind in bodies:  # what reads them starts with the first
                _ask(url, *bodies[kind])
            windows, answers = _sent(url, bodies, times)
    found: dict[str, Any] = {"quiet_p50_ms": float(np.median(answers[:, 1] - answers[:, 0])) * 1e3}
    for kind, own in windows.items():
        found[kind] = {
            "megabytes": len(bodies[kind][0]) / 1e6,
            "seconds": spread([ended - began for began, ended in own]),
            "delay_ms": spread([_slowest_ms(answers, *at) - _slowest_ms(answers, *_after(*at)) for at in own]),
        }
    return found


def long_bodies(n_bytes: int, n_rows: int) -> Bodies:
    """Return bodies of about this many bytes by kind, with their headers."""
    gaps = {name: np.full(n_rows, EASY_GAP, np.float32) for name in ("gap0", "gap1")}
    digits = len(f"{1 / 3:.6f}, ")
    n_pixels = max(1, (n_bytes - len(body_of(gaps))) // (digits * n_rows))
    rng = np.random.default_rng(0)
    in_json = body_of({**gaps, "pixels": rng.random((n_rows, n_pixels)).round(6)})
    raw = rng.random((n_rows, n_bytes // (4 * n_rows)), dtype=np.float32)
    described = json.loads(body_of({**gaps, "pixels": raw[:, :0]}))
    del described["inputs"][-1]["data"]
    described["inputs"][-1] |= {"shape": raw.shape, "parameters": {"binary_data_size": raw.nbytes}}
    head = json.dumps(described).encode()
    return {
        "json": (in_json, {}),
        "binary": (head + raw.tobytes(), {"Inference-Header-Content-Length": str(len(head))}),
    }


def _sent(url: str, bodies: Bodies, times: int) -> tuple[dict[str, list[tuple[float, float]]], Floats]:
    """Send long bodies while a client asks for single rows.

    Returns when each was sent and answered, by kind; and the same of the single rows, float (n, 2): in seconds by
    time.perf_counter().
    """
    windows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in bodies}

    def send() -> None:
        for _ in range(times):
            for kind, (body, headers) in bodies.items():
                began = time.perf_counter()
                _ask(url, body, headers)
                ended = time.perf_counter()
                windows[kind].append((began, ended))
                time.sleep(2 * (ended - began) + 0.2)

    single = Load(
        f"{url}{INFER}", [body_of({"gap0": [EASY_GAP], "gap1": [EASY_GAP], "pixels": [[0.0]]})], 1.0, warm_up_s=0.0
    )
    answers = []
    with ThreadPoolExecutor(1) as other:
        sending = other.submit(send)
        while not sending.done():
            asked = run_load(single)
            answers.append(asked.began + np.stack([asked.started_s, asked.ended_s], axis=1))
        sending.result()
    return windows, np.concatenate(answers)


def _ask(url: str, body: bytes, headers: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_S)
    connection.request("POST", INFER, body, headers)
    answer = connection.getresponse()
    reason = answer.read()
    connection.close()
    if answer.status != 200:
        raise ExecutionError(f"a long body was answered with {answer.status}: {reason[:200]!r}")


def _after(began: float, ended: float) -> tuple[float, float]:
    """Return as long a pause, soon after a long request."""
    return ended + 0.1, 2 * ended - began + 0.1


def _slowest_ms(answers: Floats, began: float, ended: float) -> float:
    """Return the longest that a request took that was open within a time."""
    within = (answers[:, 1] > began) & (answers[:, 0] < ended)
    return float((answers[within, 1] - answers[within, 0]).max()) * 1e3
