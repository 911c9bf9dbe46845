"""Networks in torch that classify images or texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from cauc_ray.errors import ConfigError, first_line
from cauc_ray.models.answers import Batch, ModelFacts
from cauc_ray.models.hub import context_length, fetched, load_network, load_placed, option_names
from cauc_ray.models.images import read_images
from cauc_ray.models.kind import Placement, Precision, TorchDevice
from cauc_ray.models.passes import Passes, text_passes
from cauc_ray.models.torch_device import TorchModel, choose_device, choose_dtype, compute_in_float32
from cauc_ray.models.transformers import HubImageSpec, TransformersClassifierSpec, TransformersImageSpec


class ImageModel(TorchModel):
    """A network with its preprocessing: from the column `image` to logits, or to its penultimate layer.

    On a GPU it computes with channels last. Precisions other than float32 are autocast: weights and logits stay
    float32.

    Args:
        network: The network.
        preprocess: Turns an RGB image into a tensor (C, H, W), of one shape for all.
        facts: Facts that the network does not show.
        device: Where it computes.
        dtype: The precision in which it computes.
        new_event: As TorchModel has it.
    """

    def __init__(
        self,
        network: nn.Module,
        preprocess: Callable[[Image.Image], torch.Tensor],
        facts: ModelFacts,
        device: TorchDevice = "auto",
        dtype: Precision = "auto",
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        chosen = choose_device(device)
        self._dtype = choose_dtype(dtype, chosen)
        self._layout = torch.channels_last if chosen.type == "cuda" else torch.contiguous_format
        network = network.eval().to(chosen, torch.float32).to(memory_format=self._layout)
        compute_in_float32(last_linear(network))
        super().__init__(network, facts, chosen, self._dtype, new_event)
        self._preprocess = preprocess
        # As many as torch's own threads: the CPUs of the stage. Next to a GPU each needs no more threads of its own.
        alone = partial(torch.set_num_threads, 1) if self._on_gpu else None
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), initializer=alone)
        self._last_layer: nn.Module | None = None

    def features(self) -> ImageModel:
        """Return the input of the network's last linear layer from now on."""
        self._last_layer = last_linear(self._network)
        if self._last_layer is None:
            raise ConfigError(f"{self.facts.source} has no linear layer whose input could serve as an embedding")
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
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            images = inputs.to(self._device, torch.float32, non_blocking=True).contiguous(memory_format=self._layout)
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


class TextClassifier(TorchModel):
    """A network that classifies texts; those of like lengths share a forward pass, and padding changes no answer."""

    def __init__(
        self, spec: TransformersClassifierSpec, tokenizer: Any, network: Any, labels: tuple[str, ...] | None
    ) -> None:
        facts = ModelFacts(f"transformers {spec.model}", labels=labels)
        super().__init__(network, facts, network.device, network.dtype)
        self._spec = spec
        self._tokenizer = tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        config = network.config
        config.pad_token_id = tokenizer.pad_token_id  # decoders look at the last token that is not padding
        compute_in_float32(last_linear(network))
        limits = (spec.max_tokens or tokenizer.model_max_length, context_length(config), max_positions(network))
        self._max_tokens = min(limits)

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into padded passes of tokens. Raises DataError when a column is missing."""

        def encode(texts: list[list[str]]) -> list[dict[str, Any]]:
            columns = map(list, zip(*texts, strict=True))
            encoded = self._tokenizer(*columns, truncation=True, max_length=self._max_tokens)
            return [{key: values[row] for key, values in encoded.items()} for row in range(len(texts))]

        def collate(encodings: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            padded = self._tokenizer.pad(encodings, return_tensors="pt")
            return {name: self.on_host(tensor) for name, tensor in padded.items()}

        return text_passes(batch, self._spec.text, encode, collate, self._spec.batch_tokens, self.pass_tokens)

    def launch(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Start on padded texts."""
        logits: torch.Tensor = self._network(**{name: self.on_device(tensor) for name, tensor in inputs.items()}).logits
        return logits


def last_linear(network: nn.Module) -> nn.Module | None:
    """Return a network's last linear layer, None without one."""
    return next((module for module in reversed([*network.modules()]) if isinstance(module, nn.Linear)), None)


def max_positions(network: nn.Module) -> int:
    """Return how many tokens a network's learned positions allow; a large number without any.

    Positions of RoBERTa and its kin begin after that of padding.
    """
    tables = [module for name, module in network.named_modules() if name.endswith("position_embeddings")]
    offsets = [table for table in tables if getattr(table, "padding_idx", None) is not None]
    return min((int(table.num_embeddings - table.padding_idx - 1) for table in offsets), default=10**9)


def load_image_model(spec: TransformersImageSpec, placement: Placement) -> ImageModel:
    """Load an image classifier and its preprocessing. Raises ConfigError if they cannot be loaded."""
    from transformers import AutoModelForImageClassification

    network = load_network(AutoModelForImageClassification, spec)
    return image_model(spec, network, option_names(network.config.id2label))


def image_model(spec: HubImageSpec, network: Any, labels: tuple[str, ...] | None = None) -> ImageModel:
    """Return an image network with the preprocessing of its folder or repository. Raises ConfigError without one."""
    from transformers import AutoImageProcessor

    processor = fetched(AutoImageProcessor, spec)

    def preprocess(image: Any) -> Any:
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    facts = ModelFacts(source=f"transformers {spec.model}", labels=labels)
    return ImageModel(network, preprocess, facts, spec.device, spec.dtype)


def load_text_model(spec: TransformersClassifierSpec, placement: Placement) -> TextClassifier:
    """Load a text classifier and its tokenizer. Raises ConfigError if they cannot be loaded."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    config = fetched(AutoConfig, spec)
    network = load_placed(AutoModelForSequenceClassification, spec, placement, config=config)
    if network.config.num_labels < 2 or network.config.problem_type == "multi_label_classification":
        raise ConfigError(f"model {spec.model!r} does not choose one of several classes")
    return TextClassifier(spec, fetched(AutoTokenizer, spec), network, option_names(network.config.id2label))


def load_state(path: Path) -> Mapping[str, torch.Tensor]:
    """Read a file of weights. Raises ConfigError if it is missing or has no weights."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: expected a file of weights")
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
