"""Measure how long bodies of megabytes, as JSON and as raw bytes, delay the other requests to a local service.

A client in a process of its own asks for single rows all the time; another sends long bodies, with pauses. A delay is
of one long request: the slowest of the first client's answers meanwhile, less the slowest within as long a pause soon
after. The median is given, and the range.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from cauc_ray.errors import ExecutionError
from jobs.bench.cascades import EASY_GAP, write_pool, write_table
from jobs.bench.part import absent
from jobs.bench.serving_ratios import spread

ROOT = Path(__file__).parents[2]
MODELS = ("small", "large")
INFER = "/v2/models/bench/infer"
ANSWER_S = 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--megabytes", type=float, default=9.0, help="of a long body, in 10^6 bytes")
    parser.add_argument("--rows", type=int, default=64, help="rows in a long body")
    parser.add_argument("--times", type=int, default=15, help="long bodies of each kind")


def missing(options: argparse.Namespace) -> str | None:
    """Need what serves HTTP."""
    return absent("starlette", "uvicorn", "prometheus_client")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Send long bodies of each kind in turn."""
    bodies = long_bodies(round(options.megabytes * 1e6), options.rows)
    with ExitStack() as resources:
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="bodies", dir="/tmp")))
        address = _served(resources, folder)
        for body, headers in bodies.values():  # what reads them starts with the first
            _ask(address, body, headers)
        asking = resources.enter_context(
            subprocess.Popen([sys.executable, "-m", __name__, address], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        )
        resources.callback(asking.kill)
        assert asking.stdout is not None
        asking.stdout.readline()
        windows: dict[str, list[tuple[float, float]]] = {kind: [] for kind in bodies}
        for _ in range(options.times):
            for kind, (body, headers) in bodies.items():
                began = time.monotonic()
                _ask(address, body, headers)
                ended = time.monotonic()
                windows[kind].append((began, ended))
                time.sleep(2 * (ended - began) + 0.2)
        asking.terminate()
        answers = np.array(json.loads(asking.stdout.read()))  # (n, 2): when asked and when answered, monotonic seconds
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


def long_bodies(n_bytes: int, n_rows: int) -> dict[str, tuple[bytes, dict[str, str]]]:
    """Return bodies of about so many bytes by kind, with their headers."""
    gaps = np.full(n_rows, EASY_GAP, np.float32)
    text = json.dumps({"inputs": [_tensor("gap0", gaps), _tensor("gap1", gaps), _tensor("pixels", gaps)]})
    digits = len(f"{1 / 3:.6f}, ")
    pixels = np.random.default_rng(0).random((n_rows, max(1, (n_bytes - len(text)) // (digits * n_rows)))).round(6)
    in_json = json.dumps({"inputs": [_tensor("gap0", gaps), _tensor("gap1", gaps), _tensor("pixels", pixels)]}).encode()
    raw = np.random.default_rng(0).random((n_rows, n_bytes // (4 * n_rows)), dtype=np.float32)
    described = {
        "name": "pixels",
        "datatype": "FP32",
        "shape": raw.shape,
        "parameters": {"binary_data_size": raw.nbytes},
    }
    head = json.dumps({"inputs": [_tensor("gap0", gaps), _tensor("gap1", gaps), described]}).encode()
    return {
        "json": (in_json, {}),
        "binary": (head + raw.tobytes(), {"Inference-Header-Content-Length": str(len(head))}),
    }


def _tensor(name: str, values: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "FP32", "shape": values.shape, "data": values.ravel().tolist()}


def _served(resources: ExitStack, folder: Path) -> str:
    """Serve two models of no time; return where. Raises ExecutionError."""
    stages = [
        {
            "name": name,
            "model": {
                "kind": "python",
                "factory": "jobs.bench.models:from_column",
                "kwargs": {"column": f"gap{place}"},
            },
        }
        for place, name in enumerate(MODELS)
    ]
    write_pool(folder / "pool.yaml", stages)
    write_table(folder / "LOGITS", {name: place + 1.0 for place, name in enumerate(MODELS)}, [0.3]).save(
        folder / "policy.json"
    )
    command = [str(Path(sys.executable).with_name("cauc")), "serve", "pool.yaml", "--policy", "policy.json"]
    log = resources.enter_context((folder / "log").open("w+"))
    service = resources.enter_context(
        subprocess.Popen(
            [*command, "--local", "--port", "0", "--json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    )
    resources.callback(service.terminate)
    assert service.stdout is not None
    said = service.stdout.readline()
    if not said:
        log.seek(0)
        raise ExecutionError(f"the service does not start: {log.read()[-500:]}")
    url: str = json.loads(said)["url"]
    return url.removeprefix("http://")


def _ask(address: str, body: bytes, headers: dict[str, str]) -> None:
    connection = http.client.HTTPConnection(address, timeout=ANSWER_S)
    connection.request("POST", INFER, body, headers)
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    if answer.status != 200:
        raise ExecutionError(f"a long body was answered with {answer.status}: {said[:200]!r}")


def _after(began: float, ended: float) -> tuple[float, float]:
    """Return as long a pause, soon after a long request."""
    return ended + 0.1, 2 * ended - began + 0.1


def _slowest_ms(answers: Any, began: float, ended: float) -> float:
    """Return the longest that a request took that was open within a time."""
    within = (answers[:, 1] > began) & (answers[:, 0] < ended)
    return float((answers[within, 1] - answers[within, 0]).max()) * 1e3


def main(address: str) -> None:
    """Ask for a row again and again until terminated; print when each was asked and answered."""
    import signal

    going = [True]
    signal.signal(signal.SIGTERM, lambda *_: going.clear())
    row = np.full(1, EASY_GAP, np.float32)
    pixels = np.zeros((1, 1))
    body = json.dumps({"inputs": [_tensor("gap0", row), _tensor("gap1", row), _tensor("pixels", pixels)]}).encode()
    connection, times = http.client.HTTPConnection(address, timeout=ANSWER_S), []
    print(flush=True)
    while going:
        began = time.monotonic()
        connection.request("POST", INFER, body)
        connection.getresponse().read()
        times.append((began, time.monotonic()))
    print(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1])
