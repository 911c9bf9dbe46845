"""Measure `cauc collect` on one actor against a bare torch loop over the same batches, as ratios from one run.

Both read the same JPEG files from one Parquet file, decode and preprocess them as TorchVision says, run the same
network with random weights on one thread, and keep the logits; collect also writes them. The two take turns.
Every figure is the best of the repeats, loading left out.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import cauc_ray
from cauc_ray.execution.session import ray_session
from jobs.bench.cascades import stage, write_pool
from jobs.bench.part import absent


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--arch", default="mnasnet0_75", help="which of TorchVision's networks")
    parser.add_argument("--images", type=int, default=2048, help="how many images")
    parser.add_argument("--batch", type=int, default=64, help="images in a batch")
    parser.add_argument("--repeats", type=int, default=3, help="how often each side is measured")


def missing(options: argparse.Namespace) -> str | None:
    """Need TorchVision."""
    return absent("torch", "torchvision", "PIL")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides in turn. Returns rows per second of each, and collect's share of the loop's."""
    with tempfile.TemporaryDirectory() as folder:
        return compare(Path(folder), options.arch, options.images, options.batch, options.repeats)


def compare(folder: Path, arch: str, n: int, batch: int, repeats: int) -> dict[str, Any]:
    """Write the images and run both sides over them."""
    import torch
    from torchvision.models import get_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = folder / "weights.pth"
    torch.save(get_model(arch, weights=None).state_dict(), weights)
    images = folder / "images.parquet"
    write_images(images, n)
    model = {"kind": "torchvision", "arch": arch, "weights": str(weights)}
    pool = write_pool(folder / "pool.yaml", [stage("model", model, batch, num_cpus=1)], "image-classification")
    bare, collected = [], []
    with ray_session(None, 2):
        for repeat in range(repeats):
            seconds, expected = bare_loop(arch, weights, images, batch)
            bare.append(n / seconds)
            out = folder / f"logits-{repeat}"
            summary = cauc_ray.collect(pool, images, out, split="all")
            collected.append(summary["models"][0]["rows_per_s"])
            print(f"bare torch loop {bare[-1]:.1f} rows/s, collect {collected[-1]:.1f} rows/s")
    saved = pa.concat_tables(
        pq.read_table(file) for file in sorted((out / "model=model" / "split=all").glob("*.parquet"))
    )
    difference = float(np.abs(np.stack(saved.column("logits").to_numpy()) - expected).max())
    ratio = max(collected) / max(bare)
    print(f"{arch}, {n:,} images in batches of {batch}: collect has {ratio:.1%} of the bare loop's throughput")
    print(f"their logits differ by at most {difference:.1g}")
    return {
        "arch": arch,
        "images": n,
        "batch": batch,
        "bare_rows_per_s": max(bare),
        "collect_rows_per_s": max(collected),
        "collect_to_bare": ratio,
        "largest_difference": difference,
    }


def bare_loop(arch: str, weights: Path, images: Path, batch: int) -> tuple[float, Any]:
    """Return the seconds of the loop that one would write by hand, and its logits."""
    import torch
    from PIL import Image
    from torchvision.models import get_model, get_model_weights

    network = get_model(arch, weights=None)
    network.load_state_dict(torch.load(weights, weights_only=True))
    network.eval()
    preprocess = get_model_weights(arch).DEFAULT.transforms()
    logits = []
    started = time.perf_counter()
    with torch.inference_mode():
        for rows in pq.ParquetFile(images).iter_batches(batch_size=batch, columns=["image"]):
            pictures = [Image.open(io.BytesIO(jpeg)).convert("RGB") for jpeg in rows.column("image").to_pylist()]
            logits.append(network(torch.stack([preprocess(picture) for picture in pictures])).numpy())
    return time.perf_counter() - started, np.concatenate(logits)


def write_images(path: Path, n: int) -> None:
    """Write n JPEG images of 320 x 240, smooth as photographs are."""
    from PIL import Image

    rng = np.random.default_rng(0)
    content = []
    for _ in range(n):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((320, 240), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        content.append(buffer.getvalue())
    pq.write_table(pa.table({"example_id": [str(row) for row in range(n)], "image": content}), path)
