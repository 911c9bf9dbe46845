"""Each kind of model as a stage's worker next to the model by itself, as one would write it by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from cauc_ray.cascade.bundles import Bundle, Part, packed
from cauc_ray.cascade.preparing import PreparingWorker
from cauc_ray.cascade.rows import CallResult
from cauc_ray.cascade.worker import prepare_process
from cauc_ray.errors import ConfigError, ExecutionError
from cauc_ray.models.answers import Batch
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.types import Ints
from jobs.bench.cases import Case, Maker
from jobs.bench.part import LeftOut, by_turns
from jobs.bench.planted import stage, write_table
from jobs.bench.processes import scratch

KINDS = (
    "torchvision",
    "transformers-image",
    "transformers-zero-shot",
    "onnx",
    "transformers-classifier",
    "transformers-choice",
    "shared-prefix",
    "vllm",
    "openai",
    "decisions",
    "python",
)
# Seed of the rows that both sides answer before the first turn.
WARM_UP = 10**6


def stages(
    kinds: tuple[str, ...] = KINDS,
    rows: int = 512,
    batch: int = 64,
    turns: int = 5,
    device: str = "cpu",
    minutes: float = 60.0,
) -> dict[str, Any]:
    """Measure each kind of model as a stage's worker, in rows a second, against the same model by hand.

    The worker is a run's, without Ray: two threads bring it calls, the model answers in a third, and a policy decides
    on every row. By hand are the plain calls of the libraries: TorchVision's and Transformers' image networks behind a
    DataLoader; texts that are tokenised at once, sorted by length over all rows, and padded batch by batch; ONNX
    Runtime's session.run, with images read in threads; vLLM's LLM.generate; openai's client with 32 requests at a time,
    to a server that takes 20 to 60 ms; a Python callable. shared-prefix is transformers-choice with eight examples
    before each question. Weights are random, networks such that a row is real work: 3 to 70 million parameters on a
    CPU, 300 to 900 million on a GPU. Both sides answer the same rows in a turn, and new ones in each turn. Results are
    the medians over the turns of the rates and of their ratios; cpu_ratio is the same of the rows in a second of this
    process's CPU time, which other programs on the machine change less.

    Args:
        kinds: Kinds of models.
        rows: Rows of a turn.
        batch: Rows of a batch.
        turns: Turns of each side.
        device: cpu or cuda.
        minutes: Time after which no further kind and no further turn begins.
    """
    until = time.monotonic() + 60 * minutes
    return {kind: measured(kind, rows, batch, turns, device, until) for kind in kinds}


def measured(kind: str, rows: int, batch: int, turns: int, device: str, until: float = math.inf) -> dict[str, Any]:
    """Return the figures of a kind, or why it was left out.   until: as by_turns has it."""
    if time.monotonic() > until:
        return {"left_out": "the time was over; --kinds names those to measure, --minutes gives them more"}
    print(kind, flush=True)
    try:
        with scratch() as folder, ExitStack() as resources:
            case: Case = getattr(Maker(folder, device, batch, resources), kind.replace("-", "_"))()
            settings = stage("model", case.model, batch)
            settings["resources"]["num_gpus"] = int(device == "cuda")
            spec = StageSpec.model_validate(settings)
            prepare_process(spec)
            worker = PreparingWorker(spec, 0, write_table(folder / "LOGITS", {"model": 1.0}, []))
            worker.load()
            return compared(case, worker, rows, batch, turns, until)
    except (LeftOut, ConfigError) as error:
        return {"left_out": str(error)}
    except ModuleNotFoundError as error:
        return {"left_out": f"{error.name} is not installed"}


def compared(
    case: Case, worker: PreparingWorker, rows: int, batch: int, turns: int, until: float = math.inf
) -> dict[str, Any]:
    """Return the rates of a case's two sides, in turns, after both have answered some rows."""
    columns = {WARM_UP: {case.column: case.rows(2 * batch, WARM_UP)}}
    predictions: dict[tuple[str, int], Ints] = {}

    def timed(side: str, turn: int) -> tuple[float, float]:
        if turn not in columns:
            columns[turn] = {case.column: case.rows(rows, turn)}
        batches, began, cpu_began = columns[turn], time.perf_counter(), time.process_time()
        by_hand = side == "bare"
        predictions[side, turn] = case.bare(batches).argmax(axis=1) if by_hand else answers(worker, batches, batch)
        return rows / (time.perf_counter() - began), rows / (time.process_time() - cpu_began)

    sides = ("bare", "stage")
    for side in sides:
        timed(side, WARM_UP)
    per_s = by_turns(
        {side: partial(timed, side) for side in sides}, turns, lambda rates: f"{rates[0]:.1f} rows/s", until
    )
    ratios, of_cpu = np.divide(per_s["stage"], per_s["bare"]).T.tolist()
    return {
        **{f"{side}_rows_per_s": median(rate for rate, _ in per_s[side]) for side in sides},
        "ratio": median(ratios),
        "ratios": ratios,
        "cpu_ratio": median(of_cpu),
        "same_answers": float(
            np.mean([predictions["bare", turn] == predictions["stage", turn] for turn in range(len(ratios))])
        ),
    }


def answers(worker: PreparingWorker, columns: Batch, batch: int) -> Ints:
    """Have a worker answer rows in full batches, two calls at a time as Ray has it, and return the predictions."""
    bundle, n = Bundle(packed(columns)), len(next(iter(columns.values())))
    calls = [[Part(0, np.arange(start, min(start + batch, n)))] for start in range(0, n, batch)]
    with ThreadPoolExecutor(2) as senders:
        results = [
            result
            for call in senders.map(lambda parts: worker.decide_last(parts, None, bundle), calls)
            for result in call
        ]
    require_answers(results)
    return np.concatenate([result.predictions for result in results])


def require_answers(results: Sequence[CallResult]) -> None:
    """Raise ExecutionError where a row was not answered."""
    wrong = next((result.error or result.failures for result in results if result.error or result.failures), None)
    if wrong:
        raise ExecutionError(f"not all rows were answered: {wrong}")
