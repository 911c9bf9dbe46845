"""The served cascade against a hand-written Ray Serve composition."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable
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
from jobs.bench.processes import free_port, scratch

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


def serving(
    few_clients: int = 16,
    many_clients: int = 128,
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
    turns is given, and the range. Cases: an ordinary cascade, and models of no time, which show the overhead of
    serving.

    By hand are the same stages behind Ray Serve as a user would write them: a fixed rule defers rows; the ingress reads
    and writes the JSON of the Open Inference Protocol, one row in a request; the router batches, one array call a
    batch, two batches under way at a stage (better than one or four); a model runs in a thread of its own, one call at
    a time, as it would on a device. With RAY_SERVE_ENABLE_HA_PROXY=1 both sides are behind Ray's HAProxy, else behind
    its own proxy.

    Args:
        few_clients: Clients where latency is compared.
        many_clients: Clients where throughput is compared.
        seconds: Measured seconds of each turn.
        warm_up: Seconds of load before that.
        turns: Turns of each side.
        deferral: Share of the rows that the large model answers.
        rows: Different requests.
        cases: Models to measure.
    """
    requests = plant_requests(rows, deferral)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    port = free_port()
    results: dict[str, Any] = {}
    with ray_session(None, 8):
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        try:
            for case in cases:
                with scratch() as folder:
                    deploy(folder, case, requests, deferral)
                    for n in (few_clients, many_clients) if case == "sleeping" else (1,):

                        def turn(number: int, side: str, n: int = n) -> Turn:
                            url = f"http://127.0.0.1:{port}/{side}/v2/models/bench/infer"
                            asked = Load(url, requests.bodies, seconds, n, warm_up_s=warm_up, judge=requests.judge)
                            return figures(run_load(asked))

                        sides = {side: partial(turn, side=side) for side in (OURS, BY_HAND)}
                        results.setdefault(case, {})[f"{n} clients"] = compare(by_turns(sides, turns, text))
                    for side in (OURS, BY_HAND):
                        serve.delete(side)
        finally:
            serve.shutdown()
    return results


def figures(result: LoadResult) -> Turn:
    """Return the figures of a turn."""
    p50_s, p99_s = np.quantile(result.measured_s, [0.5, 0.99]).tolist()
    counts = {kind: n for (_, kind), n in result.counts().items()}
    return {"per_s": result.per_s, "p50_s": p50_s, "p99_s": p99_s, "counts": counts}


def text(turn: Turn) -> str:
    """Return a turn for people."""
    return ", ".join(f"{name} {turn[name]:.4g}" for name in FIGURES)


def compare(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """Return each side's medians and the ratios of our turns to those by hand.

    Raises:
        ExecutionError: An answer was wrong.
    """
    results: dict[str, Any] = {}
    for side, of_side in turns.items():
        counts = sum((Counter(turn["counts"]) for turn in of_side), Counter[str]())
        if counts["wrong"]:
            raise ExecutionError(f"{side}: {counts['wrong']} of {counts.total()} answers were wrong")
        results[side] = {name: spread([turn[name] for turn in of_side]) for name in FIGURES} | {"counts": dict(counts)}
    pairs = list(zip(turns[OURS], turns[BY_HAND], strict=True))
    results["ratio"] = {name: spread([ours[name] / by_hand[name] for ours, by_hand in pairs]) for name in FIGURES}
    return results


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests of one row each.

    Attributes:
        planted: Their rows.
        bodies: Their bodies as JSON.
    """

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
    """A stage that answers arrays, from keyword arguments of from_column."""

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
