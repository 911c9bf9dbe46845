"""The wall time that a cascade of TorchVision networks saves, against what its policy predicts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.data.datasets import DatasetSpec, open_input
from cauc_ray.models.pool import load_pool
from cauc_ray.numbers.types import Floats
from cauc_ray.planning.timings import read_earlier_run
from cauc_ray.policies.policy import Policy
from jobs.bench.checkpoints import network_model, random_pictures
from jobs.bench.part import by_turns
from jobs.bench.planted import drawn_labels, fit_deferring, stage, write_input, write_pool
from jobs.bench.processes import scratch

NAMES = ("small", "large")


def write_images(path: Path, n: int, seed: int) -> Path:
    """Write an input of n JPEG files."""
    columns = {"example_id": [f"{path.name}-{row}" for row in range(n)], "image": random_pictures(n, seed)}
    return write_input(path, columns, files=max(1, n // 1024))


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
    """Measure the wall time that a cascade saves against what its policy predicts, with two TorchVision networks.

    Images and weights are random; labels are drawn such that a policy can be fitted, and its threshold such that the
    given share of the images is deferred. First each network alone answers some images through the same executor, for
    its seconds per image, without each replica's first call. With these as costs CAUC-RF is fitted. Then the cascade
    and the large network alone, a policy of that one stage, answer the same images in turns. The replicas of all stages
    share the cores of this machine.

    Args:
        small: The first network.
        large: The second network.
        rows: Images to answer.
        calibration_rows: Images that networks are timed on, and the policy is fitted on.
        batch: Images of a batch.
        deferral: Share of the images that the large network answers.
        replicas: Replicas of each stage: as many as there are cores.
        cpus: CPUs of a replica: with less than one, it has one thread.
        repeats: Turns of each side.
    """
    with scratch(max(2.0, 2 * cpus * replicas)) as folder:
        models = {name: network_model(arch, folder) for name, arch in zip(NAMES, (small, large), strict=True)}
        stages = [stage(name, model, batch, replicas=replicas, num_cpus=cpus) for name, model in models.items()]
        pool = write_pool(folder / "pool.yaml", stages, "image-classification")
        timed = write_images(folder / "calibration", calibration_rows, seed=0)
        images = write_images(folder / "input", rows, seed=1)
        logits = answers(pool, timed)
        labels = drawn_labels(logits)

        def alone(name: str, cost: float = 1.0) -> Policy:
            return fit_deferring({name: logits[name]}, labels, {name: cost}, 0.0)

        seconds = {}
        for name in NAMES:
            cauc_ray.run(pool, alone(name), timed, folder / f"timed-{name}")
            seconds[name] = read_earlier_run(folder / f"timed-{name}", [name]).timings[name].seconds.of(batch) / batch
        policy = fit_deferring(logits, labels, seconds, deferral)
        sides = {"cascade": policy, "largest": alone(NAMES[-1], seconds[NAMES[-1]])}

        def ran(side: str, turn: int) -> dict[str, Any]:
            return cauc_ray.run(pool, sides[side], images, folder / f"{side}-{turn}")

        runs = by_turns({side: partial(ran, side) for side in sides}, repeats, lambda run: f"{run['run_s']:.2f} s")
    best = {side: min(of_side, key=lambda summary: summary["run_s"]) for side, of_side in runs.items()}
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
