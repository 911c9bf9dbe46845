"""Measure what a cascade saves in wall time against what its policy predicts, on CIFAR-10 with real ResNets.

First each model alone answers some images through the same executor, for its seconds per image in the same kind of
worker: one thread, as many replicas as in the run. With these as costs CAUC-RF is fitted on the collected logits, at
its default threshold. Then the cascade and the largest model alone, a policy whose chain is that one stage, answer the
same test images, which the fit has not seen, and take turns. Every stage has a replica for each core, so that no core
idles while any stage has rows; in the cascade the replicas share the cores.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import cauc_ray
from cauc_ray.execution.session import ray_session
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.policies.policy import Policy
from jobs.bench.cascades import stage, write_pool
from jobs.bench.ledgers import read_calls
from jobs.bench.part import absent


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--depths", type=int, nargs="+", default=[20, 56], help="layers of the chain's ResNets")
    parser.add_argument("--rows", type=int, default=5000, help="test images to answer, 5,000 at most")
    parser.add_argument("--copies", type=int, default=4, help="so often each image comes, so that starts weigh little")
    parser.add_argument("--timed-rows", type=int, default=1024, help="images that each model is timed on before")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--replicas", type=int, default=2, help="replicas of each stage: as many as there are cores")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each side")
    parser.add_argument(
        "--data", type=Path, help="folder with cifar10_test.parquet, cifar10_resnets/ (the weights) and logits/cifar10/"
    )


def missing(options: argparse.Namespace) -> str | None:
    """Need the images, the weights and torch."""
    if options.data is None:
        return "--data names no folder of CIFAR-10 images and ResNets"
    if not (options.data / "cifar10_resnets").is_dir():
        return f"the CIFAR-10 images and ResNets are not in {options.data}"
    return absent("torch", "safetensors")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time the models, fit, and let the two sides take turns."""
    with tempfile.TemporaryDirectory() as folder, ray_session(None, options.replicas):
        return compare(Path(folder), options)


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return both sides' seconds and the ratios."""
    table = options.data / "logits" / "cifar10"
    models = [f"resnet{depth}" for depth in options.depths]
    pool = write_pool(
        folder / "pool.yaml", [resnet(depth, options) for depth in options.depths], "image-classification"
    )
    images = test_images(options.data, table, models[-1])
    write_rows(folder / "timed", images.slice(0, options.timed_rows))
    write_rows(folder / "input", copied(images.slice(0, options.rows), options.copies))
    seconds = {}
    for model in models:
        seconds[model] = seconds_per_image(folder / f"timed-{model}", pool, one_stage(table, model), folder / "timed")
        print(f"{model}: {seconds[model] * 1e3:.2f} ms per image", flush=True)
    policy = cauc_ray.fit(table, models=models, method="rf", costs=list(seconds.values()))
    assert policy.expected is not None
    expected = policy.expected.relative_cost
    assert expected is not None  # the largest model's cost was measured, so it is not 0
    sides = {"cascade": policy, "largest": one_stage(table, models[-1], seconds[models[-1]])}
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(options.repeats):
        for side, of_side in sides.items():
            summary = cauc_ray.run(pool, of_side, folder / "input", folder / f"{side}-{turn}")
            runs[side].append(summary)
            print(f"{side:>8}: {summary['run_s']:.2f} s, {summary['elapsed_s']:.2f} s with its start", flush=True)
    warm = {side: min(summary["run_s"] for summary in own) for side, own in runs.items()}
    cold = {side: min(summary["elapsed_s"] for summary in own) for side, own in runs.items()}
    ratio, realised = warm["cascade"] / warm["largest"], runs["cascade"][0]["relative_cost"]
    print(f"the cascade takes {ratio:.3f} of the largest model's time; the policy predicts {expected:.3f} of its cost")
    print(f"  that is {ratio / expected:.3f} times the prediction; on these images the cost was {realised:.3f}")
    return {
        "models": models,
        "rows": runs["cascade"][0]["n"],
        "seconds_per_image": seconds,
        "run_s": warm,
        "elapsed_s": cold,
        "time_ratio": ratio,
        "time_ratio_with_start": cold["cascade"] / cold["largest"],
        "predicted_cost_ratio": expected,
        "realised_cost_ratio": realised,
        "time_to_predicted": ratio / expected,
        "time_to_realised": ratio / realised,
        "accuracy": {side: runs[side][0]["accuracy"]["value"] for side in sides},
    }


def resnet(depth: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return a ResNet as a stage whose replicas have one thread each."""
    weights = str((options.data / "cifar10_resnets" / f"resnet{depth}.safetensors").resolve())
    kwargs = {"depth": depth, "weights": weights}
    model = {"kind": "python", "factory": "examples.cifar_resnets:load", "kwargs": kwargs}
    # Less than a CPU, so that all stages' replicas fit; Ray gives such an actor one thread.
    num_cpus = 0.9 / len(options.depths)
    return stage(f"resnet{depth}", model, options.batch, replicas=options.replicas, num_cpus=num_cpus)


def one_stage(table: Path, model: str, cost: float = 1.0) -> Policy:
    """Return a policy that lets one model answer everything."""
    return cauc_ray.fit(table, models=[model], method="rf", threshold=0.0, costs=[cost])


def seconds_per_image(out: Path, pool: Path, alone: Policy, images: Path) -> float:
    """Run a model alone and return its seconds per image, the first call of each replica left out."""
    cauc_ray.run(pool, alone, images, out)
    (calls,) = read_calls(out, alone.models)
    first = np.unique(calls.replica, return_index=True)[1]  # a network's first call allocates and tunes
    later = np.setdiff1d(np.arange(len(calls)), first)
    later = later if len(later) else first
    return float(calls.compute_s[later].sum() / calls.batch[later].sum())


def test_images(data: Path, table: Path, model: str) -> pa.Table:
    """Return the images of the logit table's test split: example_id, label and image."""
    files = parquet_files(table / f"model={model}" / "split=test")
    ids = pa.concat_tables(read_parquet(file) for file in files).column("example_id")
    images = pq.read_table(data / "cifar10_test.parquet", columns=["example_id", "label", "image"])
    named = pc.binary_join_element_wise("cifar10", images.column("example_id").cast(pa.string()), "-")
    images = images.set_column(0, "example_id", named)
    return images.filter(pc.is_in(images.column("example_id"), value_set=ids.combine_chunks()))


def copied(images: pa.Table, copies: int) -> pa.Table:
    """Return every image so often, under as many ids."""
    ids = images.column("example_id")
    named = [pc.binary_join_element_wise(ids, f"copy{n}", "-") for n in range(copies)]
    return pa.concat_tables([images.set_column(0, "example_id", own) for own in named])


def write_rows(path: Path, rows: pa.Table) -> None:
    """Write an input of one file."""
    path.mkdir()
    pq.write_table(rows, path / "part-0.parquet")
