"""TorchVision networks with random weights: what `cauc collect` and a cascade of them take."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import cauc_ray
from cauc_ray.data.datasets import DatasetSpec, open_input
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.models.pool import load_pool
from cauc_ray.numbers.types import Floats
from cauc_ray.planning.timings import read_earlier_run
from cauc_ray.policies.policy import Policy
from jobs.bench.cases import Maker
from jobs.bench.checkpoints import network_model, random_pictures
from jobs.bench.part import by_turns
from jobs.bench.planted import drawn_labels, fit_deferring, stage, write_input, write_pool
from jobs.bench.processes import scratch

NAMES = ("small", "large")


def write_images(path: Path, n: int, seed: int) -> Path:
    """Write an input of n JPEG files."""
    columns = {"example_id": [f"{path.name}-{row}" for row in range(n)], "image": random_pictures(n, seed)}
    return write_input(path, columns, files=max(1, n // 1024))


def collect(arch: str = "mnasnet0_75", images: int = 2048, batch: int = 64, repeats: int = 3) -> dict[str, Any]:
    """Measure `cauc collect` on one actor against a bare torch loop over the same batches, as ratios from one run.

    Both read the same JPEG files, preprocess them as TorchVision says, run the same network with random weights on one
    thread, and keep the logits; collect also writes them. The two take turns. Every figure is the best of the repeats,
    loading left out.

    arch: which of TorchVision's networks.   images: how many.   batch: images of one.   repeats: of each side.
    """
    import torch

    torch.set_num_threads(1)
    with scratch(2) as folder, ExitStack() as resources:
        inputs, case = (
            write_images(folder / "images", images, 0),
            Maker(folder, "cpu", batch, resources).torchvision(arch),
        )
        pool = write_pool(folder / "pool.yaml", [stage("model", case.model, batch, num_cpus=1)], "image-classification")
        expected: list[Floats] = []

        def loop(turn: int) -> float:
            began = time.perf_counter()
            columns = pa.concat_tables([read_parquet(file, columns=["image"]) for file in parquet_files(inputs)])
            expected[:] = [case.bare({"image": columns["image"].to_numpy()})]
            return images / (time.perf_counter() - began)

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
) -> dict[str, Any]:
    """Measure what a cascade saves in wall time against what its policy predicts, with two TorchVision networks.

    Images and weights are random; labels are drawn such that a policy can be fitted, and its threshold such that the
    wanted share of the images is deferred. First each network alone answers some images through the same executor, for
    its seconds per image in the same kind of worker, without each replica's first call. With these as costs CAUC-RF is
    fitted. Then the cascade and the large network alone, a policy whose chain is that one stage, answer the same images
    and take turns. The replicas of all stages share the cores of this machine.

    small, large: the networks.   rows: images to answer.   calibration_rows: images that networks are timed on, and
    the policy is fitted on.   batch: images of one.   deferral: share of the images that the large one answers.
    replicas: of each stage: as many as there are cores.   cpus: of each replica: with less than one, it has one
    thread.   repeats: turns of each side.
    """
    with scratch(max(2.0, 2 * cpus * replicas)) as folder:
        models = {name: network_model(arch, folder) for name, arch in zip(NAMES, (small, large), strict=True)}
        stages = [stage(name, model, batch, replicas=replicas, num_cpus=cpus) for name, model in models.items()]
        pool = write_pool(folder / "pool.yaml", stages, "image-classification")
        some = write_images(folder / "calibration", calibration_rows, seed=0)
        images = write_images(folder / "input", rows, seed=1)
        logits = answers(pool, some)
        labels = drawn_labels(logits)

        def alone(name: str, cost: float = 1.0) -> Policy:
            return fit_deferring({name: logits[name]}, labels, {name: cost}, 0.0)

        seconds = {}
        for name in NAMES:
            cauc_ray.run(pool, alone(name), some, folder / f"timed-{name}")
            seconds[name] = read_earlier_run(folder / f"timed-{name}", [name]).timings[name].seconds.of(batch) / batch
        policy = fit_deferring(logits, labels, seconds, deferral)
        sides = {"cascade": policy, "largest": alone(NAMES[-1], seconds[NAMES[-1]])}

        def ran(side: str, turn: int) -> dict[str, Any]:
            return cauc_ray.run(pool, sides[side], images, folder / f"{side}-{turn}")

        runs = by_turns({side: partial(ran, side) for side in sides}, repeats, lambda own: f"{own['run_s']:.2f} s")
    best = {side: min(own, key=lambda summary: summary["run_s"]) for side, own in runs.items()}
    time_ratio = best["cascade"]["run_s"] / best["largest"]["run_s"]
    return {
        "seconds_per_image": seconds,
        **{side: side_figures(summary) for side, summary in best.items()},
        "time_ratio": time_ratio,
        "predicted_ratio": best["cascade"]["relative_cost"],
        "time_to_predicted": time_ratio / best["cascade"]["relative_cost"],
    }


def answers(pool: Path, inputs: Path) -> dict[str, Floats]:
    """Return the logits of each of a pool's models for images, (N, K)."""
    source = open_input(DatasetSpec(str(inputs), "image-classification")).blocks(256)
    rows = [block for group in range(source.n_groups) for _, block in source.blocks(group) if block is not None]
    models = {spec.name: spec.model.load() for spec in load_pool(pool).stages}
    return {name: np.concatenate([model(block.columns).logits for block in rows]) for name, model in models.items()}


def side_figures(summary: dict[str, Any]) -> dict[str, Any]:
    """Return figures of a run's summary."""
    return {
        "rows_per_s": summary["n"] / summary["run_s"],
        "run_s": summary["run_s"],
        "elapsed_s": summary["elapsed_s"],
        "deferral": 1 - summary["stages"][0]["answered"] / summary["n"],
    }
