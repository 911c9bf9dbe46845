"""Measure `cauc collect` on one actor against a bare torch loop over the same batches, as ratios from one run.

Both read the same images, preprocess them as TorchVision says, run the same network with random weights on one thread,
and keep the logits; collect also writes them. The two take turns. Every figure is the best of the repeats, loading left
out.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import cauc_ray
from cauc_ray.execution.session import ray_session
from cauc_ray.files.parquet import parquet_files, read_parquet
from jobs.bench.networks import network_model, write_images
from jobs.bench.part import require
from jobs.bench.planted import stage, write_pool


def measure(arch: str = "mnasnet0_75", images: int = 2048, batch: int = 64, repeats: int = 3) -> dict[str, Any]:
    """Measure both sides in turn: rows per second of each, and collect's share of the loop's.

    arch: which of TorchVision's networks.   images: how many.   batch: images of one.   repeats: of each side.
    """
    require("torch", "torchvision", "PIL")
    import torch

    torch.set_num_threads(1)
    bare, collected = [], []
    with tempfile.TemporaryDirectory() as scratch, ray_session(None, 2):
        folder = Path(scratch)
        inputs, model = write_images(folder / "images", images, seed=0), network_model(arch, folder)
        pool = write_pool(folder / "pool.yaml", [stage("model", model, batch, num_cpus=1)], "image-classification")
        for repeat in range(repeats):
            seconds, expected = bare_loop(model, inputs, batch)
            bare.append(images / seconds)
            out = folder / f"logits-{repeat}"
            collected.append(cauc_ray.collect(pool, inputs, out, split="all")["models"][0]["rows_per_s"])
            print(f"bare torch loop {bare[-1]:.1f} rows/s, collect {collected[-1]:.1f} rows/s", flush=True)
        saved = pa.concat_tables(map(read_parquet, parquet_files(out / "model=model" / "split=all")))
    difference = float(np.abs(np.stack(saved.column("logits").to_numpy()) - expected).max())
    return {
        "bare_rows_per_s": max(bare),
        "collect_rows_per_s": max(collected),
        "collect_to_bare": max(collected) / max(bare),
        "largest_difference": difference,
    }


def bare_loop(model: Mapping[str, Any], inputs: Path, batch: int) -> tuple[float, Any]:
    """Return the seconds of the loop that one would write by hand, and its logits."""
    import torch
    from PIL import Image
    from torchvision.models import get_model, get_model_weights

    network = get_model(model["arch"], weights=None)
    network.load_state_dict(torch.load(model["weights"], weights_only=True))
    network.eval()
    preprocess = get_model_weights(model["arch"]).DEFAULT.transforms()
    logits = []
    started = time.perf_counter()
    with torch.inference_mode():
        for file in parquet_files(inputs):
            for rows in read_parquet(file, columns=["image"]).to_batches(max_chunksize=batch):
                pictures = map(Image.fromarray, rows.column("image").to_numpy_ndarray())
                logits.append(network(torch.stack([preprocess(picture) for picture in pictures])).numpy())
    return time.perf_counter() - started, np.concatenate(logits)
