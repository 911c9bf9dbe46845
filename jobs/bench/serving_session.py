"""Turns of the serving part on one Serve instance: its plan is the argument, as JSON, and so is what it prints.

The other sides are the same stages behind Ray Serve as a user would put them there by hand: no policy, a fixed rule for
what goes on. They read the JSON of the Open Inference Protocol, one row in a request, and answer in it. One batches in
the router; the other calls each stage for each request, and stages batch what comes together. What they are given: an
ingress that reads the raw request, room for every request, and two batches under way at a stage, so that one waits at
its replica while the other computes: better than one or four, and than one batch through both stages. A model runs in a
thread of its own, one call at a time, as it would on a device.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from ray import serve
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from cauc_ray.execution.session import ray_session
from cauc_ray.numbers.types import Floats
from cauc_ray.serving import ServingArgs, build_app
from jobs.bench.children import free_ports
from jobs.bench.models import Columns, from_column
from jobs.bench.serving_cases import (
    BATCH,
    BATCHED,
    CALL_EACH,
    CASES,
    OURS,
    SURE_GAP,
    WAIT_S,
    Plan,
    plant_requests,
    write_cascade,
)
from jobs.bench.serving_load import Load, LoadResult, run_load

# No line of a log for each request, on either side.
QUIET = {"enable_access_log": False}
# Room for every request: of five, Serve's default, no batch would be full.
OPTIONS = {"max_ongoing_requests": 2000, "ray_actor_options": {"num_cpus": 0.1}}

# With a type, which it lacks where Ray's are not looked at.
_batched: Callable[..., Callable[[Any], Any]] = serve.batch
in_batches = _batched(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_S, max_concurrent_batches=2)

# What a request carries: the gaps of the small and of the large model.
Row: TypeAlias = tuple[float, float]


class Stage:
    """A stage that answers arrays.   model: keyword arguments of from_column."""

    def __init__(self, model: dict[str, Any]) -> None:
        self._model = from_column(**model)
        self._thread = ThreadPoolExecutor(1)

    async def __call__(self, batch: Columns) -> Floats:
        """Return the logits."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._model, batch)


class RowStage(Stage):
    """A stage that answers one row at a time, and batches what comes together."""

    async def __call__(self, row: Columns) -> Floats:
        """Return the logits of a row."""
        logits: Floats = await self.ask(row)
        return logits

    @in_batches
    async def ask(self, rows: list[Columns]) -> list[Floats]:
        """Return the logits of many."""
        batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        return list((await super().__call__(batch))[:, None])


class CallingRouter:
    """Calls each stage for each request; an answer leaves as soon as it is sure."""

    def __init__(self, small: DeploymentHandle, large: DeploymentHandle) -> None:
        self._small, self._large = small, large

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        data = {tensor["name"]: tensor["data"] for tensor in json.loads(await request.body())["inputs"]}
        row = data["gap0"][0], data["gap1"][0]
        prediction, sure = await self.ask_small(row)
        stage = 0 if sure else 1
        if not sure:
            prediction = await self.ask_large(row)
        outputs = [
            {"name": "prediction", "datatype": "INT32", "shape": [1], "data": [prediction]},
            {"name": "stage", "datatype": "INT8", "shape": [1], "data": [stage]},
        ]
        return Response(json.dumps({"model_name": "bench", "outputs": outputs}), media_type="application/json")

    async def ask_small(self, row: Row) -> tuple[int, bool]:
        """Return the small model's prediction, and whether it is sure."""
        logits = await self._small.remote({"gap0": np.array([row[0]], np.float32)})
        return int(logits.argmax()), abs(logits[0, 0] - logits[0, 1]) > SURE_GAP

    async def ask_large(self, row: Row) -> int:
        """Return the large model's prediction."""
        return int((await self._large.remote({"gap1": np.array([row[1]], np.float32)})).argmax())


class BatchingRouter(CallingRouter):
    """Batches in the router before each stage, one array call per batch."""

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


def by_hand(side: str, models: Sequence[dict[str, Any]]) -> Application:
    """Return a hand-written application.   models: as a pool has them."""
    stage, router = {BATCHED: (Stage, BatchingRouter), CALL_EACH: (RowStage, CallingRouter)}[side]
    stages = [
        serve.deployment(stage, name=f"stage{place}").options(**OPTIONS).bind(model["kwargs"])
        for place, model in enumerate(models)
    ]
    return serve.deployment(router, name="Router").options(**OPTIONS).bind(*stages)


def turns(plan: Plan, name: str, port: int) -> Iterator[dict[str, Any]]:
    """Deploy a case's sides next to each other, let them take turns, and yield what each turn measured."""
    case, requests = CASES[name], plant_requests(plan.rows, plan.deferral)
    with tempfile.TemporaryDirectory() as folder:
        pool, policy = write_cascade(Path(folder), case, requests, plan.deferral)
        policy.save(Path(folder) / "policy.json")
        ours = build_app(ServingArgs(pool=str(pool), policy=f"{folder}/policy.json"))
        applications = {side: ours if side == OURS else by_hand(side, case.models) for side in case.sides}
        serve.run_many(
            [serve.RunTarget(app, side, f"/{side}", logging_config=QUIET) for side, app in applications.items()]
        )
        for load, sides in case.loads.items():
            for turn in range(plan.turns):
                # The second of a pair has the other's heat and garbage: each side is it in its turn.
                for side in sides if turn % 2 == 0 else reversed(sides):
                    asked = Load(
                        url=f"http://127.0.0.1:{port}/{side}/v2/models/bench/infer",
                        bodies=requests.bodies,
                        n_clients=plan.clients[load],
                        seconds=plan.seconds,
                        warm_up_s=plan.warm_up_s,
                        judge=requests.judge,
                    )
                    yield {"case": name, "load": load, "side": side, **figures(run_load(asked))}
        for side in case.sides:
            serve.delete(side)


def figures(result: LoadResult) -> dict[str, Any]:
    """Return what a turn measured."""
    p50_s, p99_s = np.quantile(result.measured_s, [0.5, 0.99]).tolist()
    counts = {kind: n for (_, kind), n in result.counts().items()}
    return {"per_s": result.per_s, "p50_s": p50_s, "p99_s": p99_s, "n": len(result), "counts": counts}


def main(argv: Sequence[str]) -> None:
    """Make the turns of all cases."""
    plan = Plan(**json.loads(argv[0]))
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    [port] = free_ports(1)
    with ray_session(None, 8):
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        try:
            for name in plan.cases:
                for found in turns(plan, name, port):
                    print(json.dumps(found), flush=True)
        finally:
            serve.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
