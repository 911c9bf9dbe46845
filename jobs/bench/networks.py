"""TorchVision networks with random weights, and random images for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from jobs.bench.planted import write_input

SIDE = 224


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
