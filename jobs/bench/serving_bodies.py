"""Measure how long bodies of megabytes, as JSON and as raw bytes, delay the other requests to a local service.

A client asks for single rows all the time; another sends long bodies, with pauses. A delay is of one long request: the
slowest of the first client's answers meanwhile, less the slowest within as long a pause soon after. The median is
given, and the range.
"""

from __future__ import annotations

import argparse
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
from jobs.bench.cascades import EASY_GAP, column_model, stage, write_pool, write_table
from jobs.bench.children import served
from jobs.bench.part import absent
from jobs.bench.serving import spread
from jobs.bench.serving_load import Load, run_load

MODELS = {"small": 1.0, "large": 2.0}
INFER = "/v2/models/bench/infer"
ANSWER_S = 60.0

# By kind: a body and its headers.
Bodies: TypeAlias = Mapping[str, tuple[bytes, dict[str, str]]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--megabytes", type=float, default=9.0, help="of a long body, in 10^6 bytes")
    parser.add_argument("--rows", type=int, default=64, help="rows in a long body")
    parser.add_argument("--times", type=int, default=15, help="long bodies of each kind")


def missing(options: argparse.Namespace) -> str | None:
    """Need what serves HTTP, and the client that makes the load."""
    return absent("starlette", "uvicorn", "prometheus_client", "aiohttp")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Send long bodies of each kind in turn."""
    bodies = long_bodies(round(options.megabytes * 1e6), options.rows)
    with tempfile.TemporaryDirectory(prefix="bodies") as scratch:
        folder = Path(scratch)
        stages = [stage(name, column_model(place), 64) for place, name in enumerate(MODELS)]
        write_pool(folder / "pool.yaml", stages)
        write_table(folder / "LOGITS", MODELS, [0.3]).save(folder / "policy.json")
        with served(folder, local=True) as url:
            for kind in bodies:  # what reads them starts with the first
                _ask(url, *bodies[kind])
            windows, answers = _sent(url, bodies, options.times)
    found: dict[str, Any] = {"quiet_p50_ms": float(np.median(answers[:, 1] - answers[:, 0])) * 1e3}
    for kind, own in windows.items():
        found[kind] = {
            "bytes": len(bodies[kind][0]),
            "seconds": spread([ended - began for began, ended in own]),
            "delay_ms": spread([_slowest_ms(answers, *at) - _slowest_ms(answers, *_after(*at)) for at in own]),
        }
        delay = found[kind]["delay_ms"]
        print(
            f"{kind:>6}: {found[kind]['bytes'] / 1e6:.1f} MB in {found[kind]['seconds']['median']:.2f} s delay others "
            f"by {delay['median']:.1f} ms ({delay['least']:.1f} to {delay['most']:.1f})",
            flush=True,
        )
    return found


def long_bodies(n_bytes: int, n_rows: int) -> Bodies:
    """Return bodies of about so many bytes by kind, with their headers."""
    gaps = np.full(n_rows, EASY_GAP, np.float32)
    digits = len(f"{1 / 3:.6f}, ")
    n_pixels = max(1, (n_bytes - len(_body(gaps, gaps))) // (digits * n_rows))
    in_json = _body(gaps, np.random.default_rng(0).random((n_rows, n_pixels)).round(6))
    raw = np.random.default_rng(0).random((n_rows, n_bytes // (4 * n_rows)), dtype=np.float32)
    described = {"parameters": {"binary_data_size": raw.nbytes}}
    head = _body(gaps, raw[:, :0], shape=raw.shape, **described).replace(b', "data": []', b"")
    return {
        "json": (in_json, {}),
        "binary": (head + raw.tobytes(), {"Inference-Header-Content-Length": str(len(head))}),
    }


def _body(gaps: Floats, pixels: Floats, **of_pixels: Any) -> bytes:
    tensors = {"gap0": gaps, "gap1": gaps, "pixels": pixels}
    inputs = [
        {"name": name, "datatype": "FP32", "shape": values.shape, "data": values.ravel().tolist()}
        for name, values in tensors.items()
    ]
    inputs[-1] |= of_pixels
    return json.dumps({"inputs": inputs}).encode()


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

    single = Load(f"{url}{INFER}", [_body(np.full(1, EASY_GAP, np.float32), np.zeros((1, 1)))], 1.0, warm_up_s=0.0)
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
    said = answer.read()
    connection.close()
    if answer.status != 200:
        raise ExecutionError(f"a long body was answered with {answer.status}: {said[:200]!r}")


def _after(began: float, ended: float) -> tuple[float, float]:
    """Return as long a pause, soon after a long request."""
    return ended + 0.1, 2 * ended - began + 0.1


def _slowest_ms(answers: Floats, began: float, ended: float) -> float:
    """Return the longest that a request took that was open within a time."""
    within = (answers[:, 1] > began) & (answers[:, 0] < ended)
    return float((answers[within, 1] - answers[within, 0]).max()) * 1e3
