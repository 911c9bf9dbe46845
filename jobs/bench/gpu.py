"""Measurements on a GPU, on one machine without Ray and without a network."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeAlias

from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.bundles import Bundle, Part, packed
from cauc_ray.cascade.patience import RunPatience
from cauc_ray.cascade.preparing import PreparingWorker
from cauc_ray.cascade.rows import Call, CallResult, Owner
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage import StageLimits, queue_rows
from cauc_ray.cascade.worker import prepare_process
from cauc_ray.models.answers import Batch
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy
from jobs.bench.cases import Maker, language
from jobs.bench.checkpoints import random_texts
from jobs.bench.part import LeftOut, by_turns
from jobs.bench.planted import drawn_labels, fit_deferring, stage
from jobs.bench.processes import scratch
from jobs.bench.stages import KINDS, require_answers, stages

NAMES = ("small", "large")
# Hidden sizes on a CPU and on a GPU.
SIZES = {"small": (96, 768), "large": (384, 2048)}
COSTS = {"small": 1.0, "large": 10.0}
# A call, and the results of its batches with the deferred rows.
Ending: TypeAlias = tuple[Call, "Future[tuple[list[CallResult], Bundle]]"]


def gpu(
    rows: int = 30_000,
    batch: int = 256,
    deferral: float = 0.5,
    turns: int = 3,
    stage_rows: int = 1024,
    kinds: tuple[str, ...] = KINDS,
    device: str = "cuda",
    minutes: float = 8.0,
) -> dict[str, Any]:
    """Measure on a GPU how busy a cascade keeps it, the time of a policy's step, and each kind's stage.

    The cascade is of two language models with random weights, of 0.2 and 1.6 billion parameters, on one GPU. They are a
    run's workers under a run's scheduler, in threads of this one process. busy_share is the large one's share of the
    run's time: of the GPU by its own clock, which counts what the small one computes in between, and of the wall
    clock. The policy's step is set against the large one's time for its batches. The stages are those of the part
    `stages`.

    It needs neither Ray nor a network, but numpy, scipy, pyarrow, pydantic, pyyaml, jinja2, psutil, torch, torchvision,
    transformers and pillow. --device cpu runs the same with small models.

    Args:
        rows: Rows that the cascade answers.
        batch: Rows of a batch.
        deferral: Share of the rows that the large model answers.
        turns: Turns of each side of a stage, and of the cascade.
        stage_rows: Rows of `stages`.
        kinds: Kinds of `stages`.
        device: cuda or cpu.
        minutes: Time after which nothing more begins. The stages may take three fifths of it; kinds that are left over
            are named, and the cascade takes at least one turn.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise LeftOut("no GPU found; --device cpu runs the same on the CPU")
    until = time.monotonic() + 60 * minutes
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        # First: a DataLoader's processes are forked, best before there are many threads.
        "stages": stages(kinds, stage_rows, min(batch, 64), turns, device, 0.6 * minutes),
        "cascade": cascade(rows, batch, deferral, turns, device, until),
    }


def cascade(rows: int, batch: int, deferral: float, turns: int, device: str, until: float = math.inf) -> dict[str, Any]:
    """Return how busy two language models are, one behind the other.   until: as by_turns has it."""
    with scratch() as folder, ExitStack() as resources:
        specs = []
        for name in NAMES:
            saved = Maker(folder / name, device, batch, resources).language_model(*SIZES[name])
            settings = stage(name, language(saved, kind="transformers-choice", device=device), batch)
            settings["resources"]["num_gpus"] = 0.5 if device == "cuda" else 0
            specs.append(StageSpec.model_validate(settings))
        prepare_process(specs[0])
        texts = {"text": random_texts(max(4 * batch, 400), seed=0)}
        logits = {spec.name: spec.load()(texts).logits for spec in specs}
        policy = fit_deferring(logits, drawn_labels(logits), COSTS, deferral)
        workers = [PreparingWorker(spec, number, policy) for number, spec in enumerate(specs)]
        with ThreadPoolExecutor(len(workers)) as loading:
            prepares = [facts.prepares for facts in loading.map(PreparingWorker.load, workers)]
        assert all(prepares)
        answered(workers, policy, texts, batch)

        def turn(number: int) -> dict[str, Any]:
            return figures(answered(workers, policy, {"text": random_texts(rows, seed=1 + number)}, batch), rows)

        sides = {"cascade": turn}
        runs = by_turns(sides, turns, lambda run: f"{run['rows_per_s']:.1f} rows/s", until)["cascade"]
    return {name: median(run[name] for run in runs) for name in runs[0] if runs[0][name] is not None}


@dataclass(frozen=True, slots=True)
class Answered:
    """A run's seconds, and the results of each stage's batches."""

    run_s: float
    results: Sequence[Sequence[CallResult]]


def figures(run: Answered, rows: int) -> dict[str, float | None]:
    """Return the figures of a run of two stages over a number of rows."""
    large = run.results[-1]
    of_gpu = [result.device_s for result in large if result.device_s is not None]
    compute_s, policy_s = (sum(getattr(result, name) or 0.0 for result in large) for name in ("compute_s", "policy_s"))
    on_gpu_s = sum(of_gpu) if of_gpu else None
    return {
        "rows_per_s": rows / run.run_s,
        "deferral": sum(len(result.accepted) for result in large) / rows,
        "large_gpu_busy_share": None if on_gpu_s is None else on_gpu_s / run.run_s,
        "large_busy_share": compute_s / run.run_s,
        "step_to_large_batch": policy_s / (on_gpu_s or compute_s),
    }


def answered(workers: Sequence[PreparingWorker], policy: Policy, columns: Batch, batch: int) -> Answered:
    """Have workers answer rows under a run's scheduler, in threads: two calls at a time each."""
    n = len(next(iter(columns.values())))
    limits = StageLimits(batch, 1.0, queue_rows(batch, 1, n), float("inf"))
    scheduler = Scheduler([limits] * len(workers), RunPatience(), Blame("row"), n)
    for number in range(len(workers)):
        scheduler.replica_ready(number, number, time.time())
    sources, ended = [Bundle(packed(columns))], queue.SimpleQueue[Ending]()
    results: list[list[CallResult]] = [[] for _ in workers]
    with ThreadPoolExecutor(2 * len(workers)) as senders:
        began = time.perf_counter()
        scheduler.submit(Owner(0, n), [Chunk(0, n, 0.0)], time.time(), policy.first(n, None))
        scheduler.end_input()
        while not scheduler.finished:
            for call in scheduler.schedule(time.time()):
                held = list(dict.fromkeys(rows.source for rows in call.rows))
                parts = [Part(held.index(rows.source), rows.positions) for rows in call.rows]
                sent = senders.submit(workers[call.stage].decide, parts, None, *(sources[at] for at in held))
                sent.add_done_callback(lambda done, call=call: ended.put((call, done)))  # type: ignore[misc]
            try:
                call, done = ended.get(timeout=scheduler.wait_s(time.time()))
            except queue.Empty:  # a partial batch is due
                continue
            batches, goes_on = done.result()
            require_answers(batches)
            results[call.stage] += batches
            sources.append(goes_on)
            scheduler.call_ended(call, CallResult.joined(batches), len(sources) - 1, time.time())
        return Answered(time.perf_counter() - began, results)
