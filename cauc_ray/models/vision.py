"""Image networks in torch: images read, preprocessed in threads, answered in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import nn

from cauc_ray.errors import ConfigError, first_line
from cauc_ray.models.answers import Batch, ModelFacts
from cauc_ray.models.images import read_images
from cauc_ray.models.kind import Device, Precision
from cauc_ray.models.passes import LocalModel, Passes
from cauc_ray.models.torch_device import DeviceTime, choose_device, choose_dtype, dtype_name, params_b


class ImageModel(LocalModel):
    """A network with its preprocessing: from the column `image` to logits, or to its penultimate layer.

    On a GPU it computes with channels last. Precisions other than float32 are autocast: weights stay float32.
    preprocess: from one RGB image to a tensor (C, H, W), of one shape for all.   device_time: of its forward passes.
    """

    def __init__(
        self,
        network: nn.Module,
        preprocess: Callable[[Image.Image], torch.Tensor],
        facts: ModelFacts,
        device: Device = "auto",
        dtype: Precision = "auto",
        device_time: DeviceTime | None = None,
    ) -> None:
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device)
        self._on_gpu = self._device.type == "cuda"
        self._layout = torch.channels_last if self._on_gpu else torch.contiguous_format
        self._network = network.eval().to(self._device, torch.float32).to(memory_format=self._layout)
        self._preprocess = preprocess
        self.facts = replace(facts, dtype=dtype_name(self._dtype), params_b=params_b(network))
        self._device_time: DeviceTime = device_time or DeviceTime(self._device)
        # As many as torch's own threads: the CPUs of the stage.
        self._pool = ThreadPoolExecutor(torch.get_num_threads())
        self._last_layer: nn.Module | None = None

    def features(self) -> ImageModel:
        """Return the input of the network's last linear layer from now on."""
        linear = [module for module in self._network.modules() if isinstance(module, nn.Linear)]
        if not linear:
            raise ConfigError(f"{self.facts.source} has no linear layer whose input could serve as an embedding")
        self._last_layer = linear[-1]
        return self

    def read(self, batch: Batch) -> tuple[Passes, Mapping[int, str]]:
        """Decode and preprocess a batch's images, in threads, into pinned memory for a GPU."""
        images, faults = read_images(batch, self._preprocess, self._pool.map)
        if not images:
            return [], faults
        first = next(iter(images.values()))
        pixels = torch.empty(len(images), *first.shape, dtype=first.dtype, pin_memory=self._on_gpu)
        return [(list(images), torch.stack(list(images.values()), out=pixels))], faults

    def launch(self, inputs: torch.Tensor) -> torch.Tensor:
        """Start on images, (m, C, H, W)."""
        precision = torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32)
        with torch.inference_mode(), precision:
            images = inputs.to(self._device, torch.float32, non_blocking=True).contiguous(memory_format=self._layout)
            with self._device_time.forward():
                return self._forward(images)

    def _forward(self, images: torch.Tensor) -> torch.Tensor:
        if self._last_layer is None:
            output = self._network(images)
            logits: torch.Tensor = getattr(output, "logits", output)
            return logits
        entering: list[torch.Tensor] = []
        hook = self._last_layer.register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))
        try:
            self._network(images)
        finally:
            hook.remove()
        return entering[-1].flatten(1)


def load_state(path: Path) -> Mapping[str, torch.Tensor]:
    """Read a file of weights. Raises ConfigError if it is missing or has no weights."""
    if not path.is_file():
        raise ConfigError(f"there is no weight file {path}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            tensors: Mapping[str, torch.Tensor] = load_file(path)
            return tensors
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise errors of many types
        raise ConfigError(f"{path} is not a readable weight file: {first_line(error)}") from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ConfigError(f"{path} has no named weights")
    return state


def classifier_size(network: nn.Module, state: Mapping[str, torch.Tensor]) -> int:
    """Return the number of classes that a file of weights was trained for."""
    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    weight = state.get(f"{layers[-1]}.weight")
    if weight is None:
        raise ConfigError(f"the weight file has no {layers[-1]}.weight, the network's last layer")
    return int(weight.shape[0])
