"""Measure what a cascade saves in wall time against what its policy predicts, with two TorchVision networks.

Images and weights are random; labels are drawn such that a policy can be fitted, and its threshold such that the wanted
share of the images is deferred. First each network alone answers some images through the same executor, for its seconds
per image in the same kind of worker, without each replica's first call. With these as costs CAUC-RF is fitted. Then the
cascade and the large network alone, a policy whose chain is that one stage, answer the same images and take turns.

The replicas of all stages share the cores of this machine, or one GPU. On a GPU, busy is the ledger's device_s over the
run's time. The policy's step is timed here, on full batches of the collected logits, against the large network's time
for a full batch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.data.inputs import open_input
from cauc_ray.data.logits import LogitTable
from cauc_ray.execution.session import ray_session
from cauc_ray.models.pool import load_pool
from cauc_ray.numbers.types import Floats
from cauc_ray.planning.timings import read_earlier_run
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import trace_policy
from jobs.bench.networks import network_model, write_images
from jobs.bench.part import LeftOut, require
from jobs.bench.planted import stage, write_pool, write_split

NAMES = ("small", "large")
STEP_REPEATS = 50


def measure(
    small: str = "mnasnet0_5",
    large: str = "resnet50",
    rows: int = 2048,
    calibration_rows: int = 512,
    batch: int = 64,
    deferral: float = 0.3,
    replicas: int = 2,
    cpus: float = 0.45,
    repeats: int = 3,
    device: str = "cpu",
    dtype: str = "auto",
) -> dict[str, Any]:
    """Time the networks, fit, and let the two sides take turns. For a GPU: --device cuda --large resnet152 --batch 256.

    small, large: the networks.   rows: images to answer.   calibration_rows: images that networks are timed on, and the
    policy is fitted on.   batch: images of one.   deferral: share of the images that the large one answers.
    replicas: of each stage: as many as there are cores, or what a GPU has room for.   cpus: of each replica: with less
    than one, it has one thread.   repeats: turns of each side.   device: cpu or cuda.   dtype: precision of weights.
    """
    require("torch", "torchvision", "PIL")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise LeftOut("there is no GPU here; --device cpu runs the same on the CPU")
    with tempfile.TemporaryDirectory() as scratch, ray_session(None, max(2.0, 2 * cpus * replicas)):
        folder = Path(scratch)
        stages = [
            stage(
                name, network_model(arch, folder, device=device, dtype=dtype), batch, replicas=replicas, num_cpus=cpus
            )
            for name, arch in zip(NAMES, (small, large), strict=True)
        ]
        for each in stages:
            each["resources"]["num_gpus"] = 1 / (2 * replicas) if device == "cuda" else 0
        pool, table = write_pool(folder / "pool.yaml", stages, "image-classification"), folder / "LOGITS"
        some = write_images(folder / "calibration", calibration_rows, seed=0)
        images = write_images(folder / "input", rows, seed=1)
        label(pool, table, some)
        seconds = []
        for name in NAMES:
            cauc_ray.run(pool, fitted(table, [name]), some, folder / f"timed-{name}")
            seconds.append(read_earlier_run(folder / f"timed-{name}", [name]).timings[name].seconds.of(batch) / batch)
        trace = trace_policy(fitted(table, NAMES, seconds), LogitTable(table).read_chain(list(NAMES), "calibration"))
        threshold = float(np.quantile(trace.confidences[:, 0], deferral))
        policy = fitted(table, NAMES, seconds, threshold)
        sides = {"cascade": policy, "largest": fitted(table, NAMES[-1:], seconds[-1:])}
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for turn in range(repeats):
            for side, of_side in sides.items():
                runs[side].append(cauc_ray.run(pool, of_side, images, folder / f"{side}-{turn}"))
                print(f"{side:>8}: {runs[side][-1]['run_s']:.2f} s", flush=True)
        step_s = step_seconds(policy, table, batch)
    best = {side: min(own, key=lambda summary: summary["run_s"]) for side, own in runs.items()}
    time_ratio = best["cascade"]["run_s"] / best["largest"]["run_s"]
    return {
        "seconds_per_image": dict(zip(NAMES, seconds, strict=True)),
        **{side: side_figures(summary) for side, summary in best.items()},
        "time_ratio": time_ratio,
        "predicted_ratio": best["cascade"]["relative_cost"],
        "time_to_predicted": time_ratio / best["cascade"]["relative_cost"],
        "step_s": step_s,
        "step_to_largest_batch": step_s / (seconds[-1] * batch),
    }


def label(pool: Path, table: Path, inputs: Path) -> None:
    """Ask both networks about images, and write their logits with labels on which either is right half of the time."""
    source = open_input(inputs).source(256)
    rows = [block for group in range(source.n_groups) for _, block in source.blocks(group) if block is not None]
    answers: list[Floats] = []
    for spec in load_pool(pool).stages:
        model = spec.model.load()
        answers.append(np.concatenate([model(block.columns).logits for block in rows]))
    rng = np.random.default_rng(1)
    chosen = np.stack([logits.argmax(axis=1) for logits in answers])
    n = chosen.shape[1]
    labels = chosen[rng.integers(0, len(chosen), n), np.arange(n)].astype(np.int32)
    labels[rng.random(n) < 0.1] = 0
    ids = [example for block in rows for example in block.example_ids]
    write_split(table, dict.fromkeys(NAMES, 1.0), "calibration", ids, labels, answers)


def fitted(table: Path, models: Sequence[str], costs: Sequence[float] | None = None, threshold: float = 0.0) -> Policy:
    """Fit CAUC-RF at a threshold; at 0 the first model answers everything."""
    return cauc_ray.fit(table, models=list(models), method="rf", costs=costs, threshold=threshold)


def side_figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Return figures of a run's summary."""
    on_device = [stage["device_s"] for stage in summary["stages"] if stage["device_s"] is not None]
    return {
        "rows_per_s": summary["n"] / summary["run_s"],
        "run_s": summary["run_s"],
        "elapsed_s": summary["elapsed_s"],
        "device_busy_share": sum(on_device) / summary["run_s"] if on_device else None,
        "deferral": 1 - summary["stages"][0]["answered"] / summary["n"],
    }


def step_seconds(policy: Policy, table: Path, batch: int) -> float:
    """Return the median time of the last stage's step, which fuses and decides, on one batch."""
    chain = LogitTable(table).read_chain(list(NAMES), "calibration")
    rows = np.arange(batch) % len(chain)
    first, last = (logits[rows] for logits in chain.logits)
    state = policy.start(first).state
    taken = []
    for _ in range(STEP_REPEATS):
        started = time.perf_counter()
        policy.step(1, last, state)
        taken.append(time.perf_counter() - started)
    return float(np.median(taken))
