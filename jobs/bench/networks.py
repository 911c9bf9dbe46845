"""TorchVision networks with random weights: what `cauc collect` and a cascade of them take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import cauc_ray
from cauc_ray.data.inputs import open_input
from cauc_ray.data.logits import LogitTable
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.models.pool import load_pool
from cauc_ray.numbers.types import Floats
from cauc_ray.planning.stages import read_earlier_run
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import trace_policy
from jobs.bench.part import LeftOut, by_turns
from jobs.bench.planted import stage, write_input, write_pool, write_split
from jobs.bench.processes import scratch

SIDE = 224
NAMES = ("small", "large")
STEP_REPEATS = 50


def network_model(arch: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Write a network's random weights; return it as a model of a pool file.   options: of that model."""
    import torch
    from torchvision.models import get_model

    torch.manual_seed(0)
    weights = folder / f"{arch}.pth"
    torch.save(get_model(arch, weights=None).state_dict(), weights)
    return {"kind": "torchvision", "arch": arch, "weights": str(weights), **options}


def write_images(path: Path, n: int, seed: int) -> Path:
    """Write an input of n random images, of different brightness and contrast, so that answers to them differ."""
    rng = np.random.default_rng(seed)
    pixels = np.empty((n, SIDE, SIDE, 3), dtype=np.uint8)
    for row in range(n):
        low, high = np.sort(rng.integers(0, 256, 2))
        pixels[row] = rng.integers(low, high + 1, (SIDE, SIDE, 3), dtype=np.uint8)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    columns = {"example_id": [f"{path.name}-{row}" for row in range(n)], "image": column}
    return write_input(path, columns, files=max(1, n // 1024))


def collect(arch: str = "mnasnet0_75", images: int = 2048, batch: int = 64, repeats: int = 3) -> dict[str, Any]:
    """Measure `cauc collect` on one actor against a bare torch loop over the same batches, as ratios from one run.

    Both read the same images, preprocess them as TorchVision says, run the same network with random weights on one
    thread, and keep the logits; collect also writes them. The two take turns. Every figure is the best of the repeats,
    loading left out.

    arch: which of TorchVision's networks.   images: how many.   batch: images of one.   repeats: of each side.
    """
    import torch

    torch.set_num_threads(1)
    with scratch(2) as folder:
        inputs, model = write_images(folder / "images", images, seed=0), network_model(arch, folder)
        pool = write_pool(folder / "pool.yaml", [stage("model", model, batch, num_cpus=1)], "image-classification")
        expected: list[Floats] = []

        def loop(turn: int) -> float:
            seconds, expected[:] = bare_loop(model, inputs, batch)
            return images / seconds

        def collected(turn: int) -> float:
            found = cauc_ray.collect(pool, inputs, folder / f"logits-{turn}", split="all")
            return float(found["models"][0]["rows_per_s"])

        rates = by_turns({"bare": loop, "collect": collected}, repeats, lambda rate: f"{rate:.1f} rows/s")
        saved = pa.concat_tables(map(read_parquet, parquet_files(folder / "logits-0" / "model=model" / "split=all")))
    difference = np.abs(np.stack(saved.column("logits").to_numpy()) - np.concatenate(expected)).max()
    best = {side: max(own) for side, own in rates.items()}
    return {
        **{f"{side}_rows_per_s": rate for side, rate in best.items()},
        "collect_to_bare": best["collect"] / best["bare"],
        "largest_difference": float(difference),
    }


def bare_loop(model: Mapping[str, Any], inputs: Path, batch: int) -> tuple[float, list[Floats]]:
    """Return the seconds of the loop that one would write by hand, and its logits."""
    import torch
    from PIL import Image
    from torchvision.models import get_model, get_model_weights

    network = get_model(model["arch"], weights=None)
    network.load_state_dict(torch.load(model["weights"], weights_only=True))
    network.eval()
    preprocess = get_model_weights(model["arch"]).DEFAULT.transforms()
    logits: list[Floats] = []
    started = time.perf_counter()
    with torch.inference_mode():
        for file in parquet_files(inputs):
            for rows in read_parquet(file, columns=["image"]).to_batches(max_chunksize=batch):
                pictures = map(Image.fromarray, rows.column("image").to_numpy_ndarray())
                logits.append(network(torch.stack([preprocess(picture) for picture in pictures])).numpy())
    return time.perf_counter() - started, logits


def saving(
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
    """Measure what a cascade saves in wall time against what its policy predicts, with two TorchVision networks.

    Images and weights are random; labels are drawn such that a policy can be fitted, and its threshold such that the
    wanted share of the images is deferred. First each network alone answers some images through the same executor, for
    its seconds per image in the same kind of worker, without each replica's first call. With these as costs CAUC-RF is
    fitted. Then the cascade and the large network alone, a policy whose chain is that one stage, answer the same images
    and take turns.

    The replicas of all stages share the cores of this machine, or one GPU. On a GPU, busy is the ledger's device_s over
    the run's time. The policy's step is timed here, on full batches of the collected logits, against the large
    network's time for a full batch.

    For a GPU: --device cuda --large resnet152 --batch 256.

    small, large: the networks.   rows: images to answer.   calibration_rows: images that networks are timed on, and
    the policy is fitted on.   batch: images of one.   deferral: share of the images that the large one answers.
    replicas: of each stage: as many as there are cores, or what a GPU has room for.   cpus: of each replica: with less
    than one, it has one thread.   repeats: turns of each side.   device: cpu or cuda.   dtype: precision of weights.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise LeftOut("there is no GPU here; --device cpu runs the same on the CPU")
    with scratch(max(2.0, 2 * cpus * replicas)) as folder:
        stages = []
        for name, arch in zip(NAMES, (small, large), strict=True):
            model = network_model(arch, folder, device=device, dtype=dtype)
            stages.append(stage(name, model, batch, replicas=replicas, num_cpus=cpus))
            stages[-1]["resources"]["num_gpus"] = 1 / (2 * replicas) if device == "cuda" else 0
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

        def ran(side: str, turn: int) -> dict[str, Any]:
            return cauc_ray.run(pool, sides[side], images, folder / f"{side}-{turn}")

        runs = by_turns({side: partial(ran, side) for side in sides}, repeats, lambda own: f"{own['run_s']:.2f} s")
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
