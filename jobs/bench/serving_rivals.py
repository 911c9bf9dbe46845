"""The same stages behind Ray Serve as a user would put them there by hand: no policy, a fixed rule for what goes on.

All three read the JSON of the Open Inference Protocol, one row in a request, and answer in it. What each is given:
an ingress that reads the raw request, room for every request, and two batches under way at a stage, so that one waits
at its replica while the other computes: better than one or four, and than one batch through both stages.
A model runs in a thread of its own, one call at a time, as it would on a device.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from cauc_ray.numbers.types import Floats
from jobs.bench.models import Columns, from_column
from jobs.bench.serving_cases import BATCHED, LARGEST, PER_SAMPLE, SURE_GAP, Case, StageSetting

# Of a stage, so that one waits at its replica while the other computes.
CALLS_UNDER_WAY = 2
# Room for every request: of five, Serve's default, no batch would be full.
ROOM = {"max_ongoing_requests": 2000}

# With a type, which it lacks where Ray's are not looked at.
in_batches: Callable[..., Callable[[Any], Any]] = serve.batch

# What a request carries: the gaps of the small and of the large model.
Row: TypeAlias = tuple[float, float]


async def row_of(request: Request) -> Row:
    """Read a request's row."""
    data = {tensor["name"]: tensor["data"] for tensor in json.loads(await request.body())["inputs"]}
    return data["gap0"][0], data["gap1"][0]


def answer_of(prediction: int, stage: int) -> Response:
    """Write an answer."""
    outputs = [
        {"name": "prediction", "datatype": "INT32", "shape": [1], "data": [prediction]},
        {"name": "stage", "datatype": "INT8", "shape": [1], "data": [stage]},
    ]
    return Response(json.dumps({"model_name": "bench", "outputs": outputs}), media_type="application/json")


def predictions_of(logits: Floats) -> list[int]:
    """Return the predictions of a batch."""
    predictions: list[int] = logits.argmax(axis=1).tolist()
    return predictions


class ArrayStage:
    """A stage that answers arrays."""

    def __init__(self, setting: StageSetting) -> None:
        self._model = from_column(**setting.model)
        self._thread = ThreadPoolExecutor(1)

    async def __call__(self, batch: Columns) -> Floats:
        """Return the logits."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._model, batch)


class BatchingRouter:
    """Batches in the router before each stage, one array call per batch; an answer leaves as soon as it is sure."""

    def __init__(self, small: DeploymentHandle, large: DeploymentHandle, settings: tuple[StageSetting, ...]) -> None:
        self._small, self._large = small, large
        for method, setting in zip((self.ask_small, self.ask_large), settings, strict=True):
            method.set_max_batch_size(setting.batch)
            method.set_batch_wait_timeout_s(setting.wait_s)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        row = await row_of(request)
        prediction, sure = await self.ask_small(row)
        if sure:
            return answer_of(prediction, 0)
        return answer_of(await self.ask_large(row), 1)

    @in_batches(max_concurrent_batches=CALLS_UNDER_WAY)
    async def ask_small(self, rows: list[Row]) -> list[tuple[int, bool]]:
        """Return the small model's predictions, and which of them are sure."""
        logits = await self._small.remote({"gap0": np.array([row[0] for row in rows], np.float32)})
        sure = np.abs(logits[:, 0] - logits[:, 1]) > SURE_GAP
        return list(zip(predictions_of(logits), sure.tolist(), strict=True))

    @in_batches(max_concurrent_batches=CALLS_UNDER_WAY)
    async def ask_large(self, rows: list[Row]) -> list[int]:
        """Return the large model's predictions."""
        logits = await self._large.remote({"gap1": np.array([row[1] for row in rows], np.float32)})
        return predictions_of(logits)


class SampleStage:
    """A stage that answers one row at a time and batches what comes in together."""

    def __init__(self, setting: StageSetting) -> None:
        self._model = from_column(**setting.model)
        self._column = setting.model["column"]
        self._thread = ThreadPoolExecutor(1)
        self.ask.set_max_batch_size(setting.batch)
        self.ask.set_batch_wait_timeout_s(setting.wait_s)

    async def __call__(self, gap: float) -> list[float]:
        """Return the logits of one row."""
        logits: list[float] = await self.ask(gap)
        return logits

    @in_batches(max_concurrent_batches=CALLS_UNDER_WAY)
    async def ask(self, gaps: list[float]) -> list[list[float]]:
        """Return the logits of many."""
        batch = {self._column: np.array(gaps, np.float32)}
        answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._model, batch)
        logits: list[list[float]] = answers.tolist()
        return logits


class SampleRouter:
    """Calls each stage for each request."""

    def __init__(self, small: DeploymentHandle, large: DeploymentHandle) -> None:
        self._small, self._large = small, large

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        gap0, gap1 = await row_of(request)
        first, second = await self._small.remote(gap0)
        if abs(first - second) > SURE_GAP:
            return answer_of(int(second > first), 0)
        first, second = await self._large.remote(gap1)
        return answer_of(int(second > first), 1)


class LargestRouter:
    """Batches in the router and asks the large model alone."""

    def __init__(self, large: DeploymentHandle, setting: StageSetting) -> None:
        self._large = large
        self.ask.set_max_batch_size(setting.batch)
        self.ask.set_batch_wait_timeout_s(setting.wait_s)

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        return answer_of(await self.ask(await row_of(request)), 0)

    @in_batches(max_concurrent_batches=CALLS_UNDER_WAY)
    async def ask(self, rows: list[Row]) -> list[int]:
        """Return the large model's predictions."""
        logits = await self._large.remote({"gap1": np.array([row[1] for row in rows], np.float32)})
        return predictions_of(logits)


def hand_written(side: str, case: Case) -> Application:
    """Return the application of a hand-written side."""
    small, large = case.settings
    if side == PER_SAMPLE:
        return _router(SampleRouter, _stage(SampleStage, small), _stage(SampleStage, large))
    if side == LARGEST:
        return _router(LargestRouter, _stage(ArrayStage, large), large)
    assert side == BATCHED
    return _router(BatchingRouter, _stage(ArrayStage, small), _stage(ArrayStage, large), case.settings)


def _stage(kind: type, setting: StageSetting) -> Application:
    options = {"num_replicas": setting.replicas, "ray_actor_options": {"num_cpus": setting.num_cpus}}
    return serve.deployment(kind, name=setting.name).options(**ROOM, **options).bind(setting)


def _router(kind: type, *parts: Any) -> Application:
    return serve.deployment(kind, name="Router").options(**ROOM, ray_actor_options={"num_cpus": 0.1}).bind(*parts)
