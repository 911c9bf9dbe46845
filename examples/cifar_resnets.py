"""ResNets for CIFAR-10 (He et al., 2016, section 4.2): basic blocks whose shortcuts have no weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Floats

SIDE = 32
# Of the published weights' training: ImageNet's mean and deviation.
MEAN = torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut without weights."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self._stride = stride
        self._missing = channels - channels_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, channels_in, h, w) to (n, channels, h / stride, w / stride)."""
        out = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self._stride, :: self._stride]
        if self._missing:
            half = self._missing // 2
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, half, self._missing - half))
        return functional.relu(out + shortcut)


class CifarResNet(nn.Module):
    """A ResNet of 6 n + 2 layers: n blocks each of 16, 32 and 64 channels."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        n = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for place, channels in enumerate((16, 32, 64), 1):
            first = BasicBlock(max(16, channels // 2), channels, 1 if place == 1 else 2)
            group = nn.Sequential(first, *(BasicBlock(channels, channels, 1) for _ in range(n - 1)))
            setattr(self, f"layer{place}", group)
        self.linear = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map normalised images (n, 3, 32, 32) to logits (n, 10)."""
        x = functional.relu(self.bn1(self.conv1(x)))
        for group in (self.layer1, self.layer2, self.layer3):
            x = group(x)
        return self.linear(x.mean(dim=(2, 3)))


def load(depth: int, weights: str) -> Callable[[Batch], Floats]:
    """Load a network from safetensors as a stage: from `image`, 3,072 bytes in rows of RGB, to logits (n, 10)."""
    network = CifarResNet(depth)
    network.load_state_dict(load_file(weights))
    network.eval()

    def answer(batch: Batch) -> Floats:
        pixels = np.frombuffer(b"".join(batch["image"]), np.uint8).reshape(-1, SIDE, SIDE, 3)
        images = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 255
        with torch.inference_mode():
            logits: Floats = network((images - MEAN) / DEVIATION).numpy()
        return logits

    return answer
