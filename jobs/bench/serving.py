"""The served cascade against a hand-written Ray Serve composition, and what long bodies delay."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from cauc_ray.errors import ExecutionError
from cauc_ray.execution.session import ray_session
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.serving import ServingArgs, build_app
from jobs.bench.load import Load, LoadResult, body_of, run_load
from jobs.bench.part import by_turns, spread
from jobs.bench.planted import (
    EASY_GAP,
    HARD_GAP,
    Columns,
    PlantedRows,
    SleepingStage,
    column_model,
    from_column,
    planted_rows,
    write_cascade,
)
from jobs.bench.processes import free_port, scratch, served

# The fixed rule of the hand-written side: a row whose small gap is nearer to 0 goes on.
SURE_GAP = (EASY_GAP + HARD_GAP) / 2
BATCH, WAIT_S = 64, 0.005
# Rows are shuffled within blocks of this many: any stretch of requests then defers nearly the planted share.
BLOCK = 50
OURS, BY_HAND = "cauc-ray", "by-hand"
# What an ordinary cascade takes, so that what the router adds is small next to it; and models of no time.
CASES = {
    "sleeping": (SleepingStage("small", BATCH, 0.005), SleepingStage("large", BATCH, 0.020, 0.001, cost=2.0)),
    "instant": (SleepingStage("small", BATCH), SleepingStage("large", BATCH, cost=2.0)),
}
FIGURES = ("per_s", "p50_s", "p99_s")
Turn: TypeAlias = dict[str, Any]

# No line of a log for each request, on either side.
QUIET = {"enable_access_log": False}
# Room for every request: of five, Serve's default, no batch would be full.
OPTIONS = {"max_ongoing_requests": 2000, "ray_actor_options": {"num_cpus": 0.1}}
# With a type, which it lacks where Ray's are not looked at.
_batched: Callable[..., Callable[[Any], Any]] = serve.batch
in_batches = _batched(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S, max_concurrent_batches=2)
# What a request carries: the gaps of the small and of the large model.
Row: TypeAlias = tuple[float, float]
STAGES = (SleepingStage("small", 64, deferral=0.3), SleepingStage("large", 64, cost=2.0))
INFER = "/v2/models/bench/infer"
ANSWER_S = 60.0
# By kind: a body and its headers.
Bodies: TypeAlias = Mapping[str, tuple[bytes, dict[str, str]]]


def serving(
    few: int = 16,
    many: int = 128,
    seconds: float = 4.0,
    warm_up: float = 1.0,
    turns: int = 3,
    deferral: float = 0.3,
    rows: int = 2000,
    cases: tuple[str, ...] = tuple(CASES),
) -> dict[str, Any]:
    """Measure the served cascade against a hand-written Ray Serve composition of the same stages, without a policy.

    Both sides of a case are deployed next to each other and take turns under the same load, made by closed-loop clients
    in one process; every answer is checked. A ratio is of one turn of each side, close in time: the median over the
    turns is given, and the range. Cases: an ordinary cascade, and models of no time, of which what is left is what
    serving takes.

    The other side is the same stages behind Ray Serve as a user would put them there by hand: no policy, a fixed rule
    for what is deferred. It reads the JSON of the Open Inference Protocol, one row in a request, batches in the router
    with one array call per batch, and answers in it. It has an ingress that reads the raw request, room for every
    request, and two batches under way at a stage, so that one waits at its replica while the other computes: better
    than one or four, and than one batch through both stages. A model runs in a thread of its own, one call at a time,
    as it would on a device.

    With RAY_SERVE_ENABLE_HA_PROXY=1 in the environment both sides are behind Ray's HAProxy, else behind its own proxy.

    few, many: clients where latency and where throughput is compared.   seconds: what is measured of each turn.
    warm_up: seconds of load before that.   turns: of each side.   deferral: share of the rows that the large model
    answers.   rows: different requests.   cases: which models to measure.
    """
    requests = plant_requests(rows, deferral)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    port = free_port()
    found: dict[str, Any] = {}
    with ray_session(None, 8):
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        try:
            for case in cases:
                with scratch() as folder:
                    deploy(folder, case, requests, deferral)
                    for n in (few, many) if case == "sleeping" else (1,):

                        def turn(number: int, side: str, n: int = n) -> Turn:
                            url = f"http://127.0.0.1:{port}/{side}/v2/models/bench/infer"
                            asked = Load(url, requests.bodies, seconds, n, warm_up_s=warm_up, judge=requests.judge)
                            return figures(run_load(asked))

                        sides = {side: partial(turn, side=side) for side in (OURS, BY_HAND)}
                        found.setdefault(case, {})[f"{n} clients"] = compare(by_turns(sides, turns, shown))
                    for side in (OURS, BY_HAND):
                        serve.delete(side)
        finally:
            serve.shutdown()
    return found


def figures(result: LoadResult) -> Turn:
    """Return what a turn measured."""
    p50_s, p99_s = np.quantile(result.measured_s, [0.5, 0.99]).tolist()
    counts = {kind: n for (_, kind), n in result.counts().items()}
    return {"per_s": result.per_s, "p50_s": p50_s, "p99_s": p99_s, "counts": counts}


def shown(turn: Turn) -> str:
    """Return what people see of a turn."""
    return ", ".join(f"{name} {turn[name]:.4g}" for name in FIGURES)


def compare(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Return each side's medians and the ratios of our turns to the others. Raises ExecutionError for wrong answers."""
    found: dict[str, Any] = {}
    for side, own in turns.items():
        counts = sum((Counter(turn["counts"]) for turn in own), Counter[str]())
        if counts["wrong"]:
            raise ExecutionError(f"{side}: {counts['wrong']} of {counts.total()} answers were wrong")
        found[side] = {name: spread([turn[name] for turn in own]) for name in FIGURES} | {"counts": dict(counts)}
    pairs = list(zip(turns[OURS], turns[BY_HAND], strict=True))
    found["ratio"] = {name: spread([own[name] / other[name] for own, other in pairs]) for name in FIGURES}
    return found


@dataclass(frozen=True, slots=True)
class Requests:
    """One row a request.   planted: what each carries.   bodies: as JSON."""

    planted: PlantedRows
    bodies: tuple[bytes, ...]

    @property
    def deferred_mask(self) -> Bools:
        """Return which rows the fixed rule sends on."""
        mask: Bools = np.abs(self.planted.gaps[:, 0]) < SURE_GAP
        return mask

    @property
    def predictions(self) -> Ints:
        """Return the cascade's answers, int64 (N,)."""
        answering = np.where(self.deferred_mask, self.planted.gaps[:, 1], self.planted.gaps[:, 0])
        predictions: Ints = (answering < 0).astype(np.int64)
        return predictions

    def judge(self, row: int, status: int, body: bytes) -> str:
        """Name an answer by the stage that gave it, or as wrong or no answer."""
        if status != 200:
            return f"status {status}"
        data = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
        stage = int(self.deferred_mask[row])
        right = data["prediction"] == [int(self.predictions[row])] and data["stage"] == [stage]
        return ("small", "large")[stage] if right else "wrong"


def plant_requests(n: int, deferral: float) -> Requests:
    """Plant n requests of which the small model defers a share, and the large one is sure of all.

    Were it not sure, the policy's fusion with the small model's logits would answer some otherwise than it does.
    """
    rng = np.random.default_rng(0)
    sizes = [min(BLOCK, n - start) for start in range(0, n, BLOCK)]
    gaps = np.concatenate([planted_rows(rng, size, [deferral]).gaps for size in sizes])
    gaps[:, 1] = np.copysign(np.float32(EASY_GAP), gaps[:, 1])
    bodies = (body_of({"gap0": [small], "gap1": [large]}, ("prediction", "stage")) for small, large in gaps.tolist())
    return Requests(PlantedRows(gaps, np.zeros(n, np.int32)), tuple(bodies))


def require_same_answers(policy: Policy, requests: Requests) -> None:
    """Raise ExecutionError where a policy answers otherwise than the fixed rule."""
    small, large = requests.planted.logits
    first = policy.start(small)
    deferred = ~first.accepted
    predictions = first.predictions.copy()
    predictions[deferred] = policy.step(1, large[deferred], first.state[deferred]).predictions
    if not np.array_equal(deferred, requests.deferred_mask) or not np.array_equal(predictions, requests.predictions):
        raise ExecutionError("the fitted policy does not answer these rows as the fixed rule does")


class Stage:
    """A stage that answers arrays.   model: keyword arguments of from_column."""

    def __init__(self, model: dict[str, Any]) -> None:
        self._model = from_column(**model)
        self._thread = ThreadPoolExecutor(1)

    async def __call__(self, batch: Columns) -> Floats:
        """Return the logits."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._model, batch)


class Router:
    """Batches before each stage; an answer leaves as soon as it is sure."""

    def __init__(self, small: DeploymentHandle, large: DeploymentHandle) -> None:
        self._small, self._large = small, large

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        data = {tensor["name"]: tensor["data"] for tensor in json.loads(await request.body())["inputs"]}
        row = data["gap0"][0], data["gap1"][0]
        prediction, sure = await self.ask_small(row)
        if not sure:
            prediction = await self.ask_large(row)
        outputs = [
            {"name": "prediction", "datatype": "INT32", "shape": [1], "data": [prediction]},
            {"name": "stage", "datatype": "INT8", "shape": [1], "data": [0 if sure else 1]},
        ]
        return Response(json.dumps({"model_name": "bench", "outputs": outputs}), media_type="application/json")

    @in_batches
    async def ask_small(self, rows: list[Row]) -> list[tuple[int, bool]]:
        """Return the small model's predictions, and which of them are sure."""
        logits = await self._small.remote({"gap0": np.array([row[0] for row in rows], np.float32)})
        sure = np.abs(logits[:, 0] - logits[:, 1]) > SURE_GAP
        return list(zip(logits.argmax(axis=1).tolist(), sure.tolist(), strict=True))

    @in_batches
    async def ask_large(self, rows: list[Row]) -> list[int]:
        """Return the large model's predictions."""
        logits = await self._large.remote({"gap1": np.array([row[1] for row in rows], np.float32)})
        predictions: list[int] = logits.argmax(axis=1).tolist()
        return predictions


def deploy(folder: Path, case: str, requests: Requests, deferral: float) -> None:
    """Deploy both sides of a case, each under its name."""
    small, large = CASES[case]
    stages = (replace(small, deferral=deferral), large)
    pool, policy = write_cascade(folder, stages, of_stage={"serving": {"batch_wait_s": WAIT_S}})
    require_same_answers(policy, requests)
    ours = build_app(ServingArgs(pool=str(pool), policy=f"{folder}/policy.json"))
    by_hand: list[Application] = [
        serve.deployment(Stage, name=f"stage{number}").options(**OPTIONS).bind(column_model(number, at)["kwargs"])
        for number, at in enumerate(stages)
    ]
    router = serve.deployment(Router, name="Router").options(**OPTIONS).bind(*by_hand)
    sides = {OURS: ours, BY_HAND: router}
    serve.run_many([serve.RunTarget(app, side, f"/{side}", logging_config=QUIET) for side, app in sides.items()])


def bodies(megabytes: float = 9.0, rows: int = 64, times: int = 15) -> dict[str, Any]:
    """Measure how long bodies of megabytes, as JSON and as raw bytes, delay the other requests to a local service.

    A client asks for single rows all the time; another sends long bodies, with pauses. A delay is of one long request:
    the slowest of the first client's answers meanwhile, less the slowest within as long a pause soon after. The median
    is given, and the range.

    megabytes, rows: of a long body, in 10^6 bytes.   times: long bodies of each kind.
    """
    bodies = long_bodies(round(megabytes * 1e6), rows)
    with scratch() as folder:
        write_cascade(folder, STAGES)
        with served(folder, local=True) as url:
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
