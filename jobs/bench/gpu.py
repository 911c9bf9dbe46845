"""Measure a cascade of two TorchVision networks on a GPU: throughput, how busy the device is, what the policy costs.

The images are random, 224 x 224 x 3 of uint8, and so are the weights; labels are drawn such that a policy can be
fitted, and its threshold such that the wanted share of the images is deferred. The cascade and each network alone run
through the same executor. Busy is the sum of the ledger's device_s over the run's time, of all replicas on the one
device together. The policy's step is timed here, on full batches of the collected logits, against the largest
network's time for a full batch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import cauc_ray
from cauc_ray.data.inputs import open_input
from cauc_ray.data.logits import LogitTable
from cauc_ray.execution.session import ray_session
from cauc_ray.models.pool import load_pool
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import trace_policy
from jobs.bench.cascades import stage, write_input, write_pool, write_split
from jobs.bench.ledgers import StageCalls, read_calls
from jobs.bench.part import absent

SIDE = 224
NAMES = ("small", "large")
STEP_REPEATS = 50


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--archs", nargs=2, default=["resnet18", "resnet152"], help="the small and the large network")
    parser.add_argument("--rows", type=int, default=16_384, help="images to answer")
    parser.add_argument("--calibration-rows", type=int, default=2048, help="images that the policy is fitted on")
    parser.add_argument("--batch", type=int, default=256, help="images in a batch")
    parser.add_argument("--deferral", type=float, default=0.3, help="share of the images that the large one answers")
    parser.add_argument("--replicas", type=int, nargs=2, default=[1, 1], help="replicas of each, all on one device")
    parser.add_argument("--cpus", type=int, default=4, help="CPUs, and preprocessing threads, of each replica")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="precision")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only shows that the part works")


def missing(options: argparse.Namespace) -> str | None:
    """Need TorchVision and, unless told otherwise, a GPU."""
    if reason := absent("torch", "torchvision", "PIL"):
        return reason
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return "there is no GPU here; --device cpu runs the same on the CPU, at sizes such as --rows 64 --batch 16"
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the cascade and each network alone."""
    n_cpus = options.cpus * sum(options.replicas)
    with tempfile.TemporaryDirectory() as folder, ray_session(None, n_cpus):
        return compare(Path(folder), options)


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of the three runs and of the policy's step."""
    pool = write_pool(folder / "pool.yaml", stages(folder, options), "image-classification")
    rng = np.random.default_rng(0)
    table = folder / "LOGITS"
    collect(pool, table, images(folder / "calibration", rng, options.calibration_rows))
    policy = fitted(table, options.deferral)
    inputs = images(folder / "input", rng, options.rows)
    figures: dict[str, Any] = {"device": options.device, "archs": options.archs, "rows": options.rows}
    sides = {"cascade": policy}
    sides |= {name: cauc_ray.fit(table, models=[name], method="rf", threshold=0.0) for name in NAMES}
    largest_batch_s = float("nan")
    for side, of_side in sides.items():
        summary = cauc_ray.run(pool, of_side, inputs, folder / side)
        calls = read_calls(folder / side, of_side.models)
        figures[side] = side_figures(summary, calls)
        tell(side, figures[side])
        if side == NAMES[-1]:
            largest_batch_s = batch_seconds(calls[0], options.batch)
    step_s = step_seconds(policy, table, options.batch)
    print(
        f"the policy takes {step_s * 1e3:.3f} ms per batch of {options.batch}, {step_s / largest_batch_s:.2%} of the "
        f"{largest_batch_s * 1e3:.1f} ms of {options.archs[-1]}"
    )
    return figures | {
        "step_s": step_s,
        "largest_batch_s": largest_batch_s,
        "step_to_largest_batch": step_s / largest_batch_s,
        "cascade_to_largest": figures["cascade"]["rows_per_s"] / figures["large"]["rows_per_s"],
    }


def stages(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Write random weights and return the networks as stages that share the device."""
    import torch
    from torchvision.models import get_model

    torch.manual_seed(0)
    share = 1 / sum(options.replicas) if options.device == "cuda" else 0
    listed = []
    for name, arch, replicas in zip(NAMES, options.archs, options.replicas, strict=True):
        weights = folder / f"{name}.pth"
        torch.save(get_model(arch, weights=None).state_dict(), weights)
        model = {"kind": "torchvision", "arch": arch, "weights": str(weights)}
        model |= {"device": options.device, "dtype": options.dtype}
        made = stage(name, model, options.batch, replicas=replicas, num_cpus=options.cpus)
        made["resources"]["num_gpus"] = share
        listed.append(made)
    return listed


def images(path: Path, rng: np.random.Generator, n: int) -> Path:
    """Write random images, of many brightnesses and contrasts, so that networks tell them apart."""
    ids = [f"{path.name}-{row}" for row in range(n)]
    pixels = np.empty((n, SIDE, SIDE, 3), dtype=np.uint8)
    for row in range(n):
        low, high = np.sort(rng.integers(0, 256, 2))
        pixels[row] = rng.integers(low, high + 1, (SIDE, SIDE, 3), dtype=np.uint8)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    return write_input(path, {"example_id": ids, "image": column}, files=max(1, n // 1024))


def collect(pool: Path, table: Path, inputs: Path) -> None:
    """Ask both networks about the calibration images, and label half of them as each network would."""
    source = open_input(inputs).source(256)
    rows = [block for group in range(source.n_groups) for _, block in source.blocks(group) if block is not None]
    answers: dict[str, Floats] = {}
    for spec in load_pool(pool).stages:
        model = spec.model.load()
        answers[spec.name] = np.concatenate([model(block.columns).logits for block in rows])
    labels = planted_labels(answers)
    ids = [example for block in rows for example in block.example_ids]
    costs = {name: place + 1.0 for place, name in enumerate(NAMES)}
    write_split(table, costs, "calibration", ids, labels, list(answers.values()))


def planted_labels(answers: dict[str, Floats]) -> Ints:
    """Return labels on which either network is right about half of the time."""
    rng = np.random.default_rng(1)
    chosen = np.stack([logits.argmax(axis=1) for logits in answers.values()])
    n = chosen.shape[1]
    labels: Ints = chosen[rng.integers(0, len(chosen), n), np.arange(n)].astype(np.int32)
    labels[rng.random(n) < 0.1] = 0
    return labels


def fitted(table: Path, deferral: float) -> Policy:
    """Fit CAUC-RF with the threshold at which the wanted share of the calibration images is deferred."""
    first = cauc_ray.fit(table, models=list(NAMES), method="rf", threshold=0.5)
    trace = trace_policy(first, LogitTable(table).read_chain(list(NAMES), "calibration"))
    threshold = float(np.quantile(trace.confidences[:, 0], deferral))
    return cauc_ray.fit(table, models=list(NAMES), method="rf", threshold=threshold)


def side_figures(summary: dict[str, Any], calls: list[StageCalls]) -> dict[str, Any]:
    """Return what a run's summary and ledger say."""
    on_device = np.concatenate([own.device_s for own in calls])
    device_s = None if np.isnan(on_device).all() else float(np.nansum(on_device))
    return {
        "rows_per_s": summary["n"] / summary["run_s"],
        "run_s": summary["run_s"],
        "elapsed_s": summary["elapsed_s"],
        "device_s": device_s,
        "device_busy_share": None if device_s is None else device_s / summary["run_s"],
        "deferral": 1 - summary["stages"][0]["answered"] / summary["n"],
    }


def tell(side: str, figures: dict[str, Any]) -> None:
    """Print a run's figures."""
    busy = figures["device_busy_share"]
    said = "time on the device not measured" if busy is None else f"device busy {busy:.1%}"
    print(f"{side:>7}: {figures['rows_per_s']:,.1f} images/s, {said}, deferred {figures['deferral']:.2f}", flush=True)


def batch_seconds(calls: StageCalls, batch: int) -> float:
    """Return the median time of a full batch: on the device where that is known, else of the call."""
    seconds = np.where(np.isnan(calls.device_s), calls.compute_s, calls.device_s)
    full = calls.batch == batch
    return float(np.median(seconds[full] if full.any() else seconds))


def step_seconds(policy: Policy, table: Path, batch: int) -> float:
    """Return the median time of the last stage's step, which folds and decides, on one batch."""
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
