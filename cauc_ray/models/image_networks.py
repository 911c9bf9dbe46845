"""Networks in torch that classify or embed images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Batch, ModelFacts
from cauc_ray.models.encoders import ImageEncoderSpec
from cauc_ray.models.hub import context_length, fetched, load_network, option_names
from cauc_ray.models.images import decode_image, read_images
from cauc_ray.models.kind import Placement, TorchSpec
from cauc_ray.models.passes import Passes
from cauc_ray.models.torch_device import TorchModel, choose_device, choose_dtype, compute_in_float32, last_linear
from cauc_ray.models.transformers import HubImageSpec, TransformersImageSpec
from cauc_ray.models.zero_shot import TransformersZeroShotSpec

Preprocess: TypeAlias = Callable[[Any], torch.Tensor]
# Mean and standard deviation of each channel of pixels from 0 to 255.
Scale: TypeAlias = tuple[Sequence[float], Sequence[float]]


class ImageModel(TorchModel):
    """A network with its preprocessing: from the column `image` to logits, or to its penultimate layer.

    On a GPU it computes with channels last. Precisions other than float32 are autocast: weights and logits stay
    float32.

    Args:
        spec: Where and how precisely it computes.
        network: The network.
        preprocess: Turns an image, as decode_image reads it, into a tensor (C, H, W), of one shape for all.
        facts: Facts that the network does not show.
        scale: By what the device normalises the pixels, if that is left of the preprocessing.
        new_event: As TorchModel has it.
    """

    def __init__(
        self,
        spec: TorchSpec,
        network: nn.Module,
        preprocess: Preprocess,
        facts: ModelFacts,
        scale: Scale | None = None,
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        device = choose_device(spec.device)
        self._dtype = choose_dtype(spec.dtype, device)
        self._layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        network = network.eval().to(device, torch.float32).to(memory_format=self._layout)
        compute_in_float32(last_linear(network))
        super().__init__(network, facts, device, self._dtype, new_event)
        self._preprocess = preprocess
        self._scale = None if scale is None else torch.tensor(scale, device=device)[:, :, None, None]
        # As many as torch's own threads: the CPUs of the stage. Next to a GPU each needs no more threads of its own.
        alone = partial(torch.set_num_threads, 1) if self._on_gpu else None
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), initializer=alone)
        self._features: torch.Tensor | None = None

    def features(self) -> ImageModel:
        """Return the input of the network's last linear layer from now on."""
        layer = last_linear(self._network)
        if layer is None:
            raise ConfigError(f"{self.facts.source} has no linear layer whose input could serve as an embedding")
        layer.register_forward_pre_hook(self._note_features)
        return self

    def _note_features(self, layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._features = inputs[0]

    def read(self, batch: Batch) -> tuple[Passes, Mapping[int, str]]:
        """Decode and preprocess a batch's images, in threads, into pinned memory for a GPU."""
        images, faults = read_images(batch, self._preprocess, self._pool.map)
        if not images:
            return [], faults
        first = next(iter(images.values()))
        shape = (len(images), *first.shape)
        pixels = torch.empty(shape, dtype=first.dtype, memory_format=self._layout, pin_memory=self._on_gpu)
        return [(list(images), torch.stack(list(images.values()), out=pixels))], faults

    def launch(self, inputs: torch.Tensor) -> torch.Tensor:
        """Start on images, (m, C, H, W)."""
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            images = self.on_device(inputs).float()
            if self._scale is not None:
                images = (images - self._scale[0]) / self._scale[1]
            output = self._network(images.contiguous(memory_format=self._layout))
        logits: torch.Tensor = getattr(output, "logits", output)
        return logits if self._features is None else self._features.flatten(1)


def load_image_model(spec: TransformersImageSpec, placement: Placement) -> ImageModel:
    """Load an image classifier and its preprocessing. Raises ConfigError if they cannot be loaded."""
    from transformers import AutoModelForImageClassification

    network = load_network(AutoModelForImageClassification, spec)
    return _image_model(spec, network, option_names(network.config.id2label))


def load_image_encoder(spec: ImageEncoderSpec, placement: Placement) -> ImageModel:
    """Load an encoder of images. Raises ConfigError if it cannot be loaded."""
    from transformers import AutoModel

    return _image_model(spec, PooledEncoder(load_network(AutoModel, spec, optional="pooler.")))


def load_zero_shot(spec: TransformersZeroShotSpec, placement: Placement) -> ImageModel:
    """Load the network, its preprocessing and the labels' texts. Raises ConfigError if they cannot be loaded."""
    from transformers import AutoModelForZeroShotImageClassification, AutoTokenizer

    network = load_network(AutoModelForZeroShotImageClassification, spec).float().eval()
    if not hasattr(network, "logit_scale"):
        raise ConfigError(f"model {spec.model!r} does not compare images with texts as CLIP and SigLIP do")
    # SigLIP was trained on texts of one length.
    padding = "max_length" if "siglip" in network.config.model_type else True
    longest = context_length(network.config.text_config)
    settings = {"padding": padding, "truncation": True, "max_length": longest, "return_tensors": "pt"}
    tokens = fetched(AutoTokenizer, spec)(spec.label_texts, **settings)
    with torch.inference_mode():
        texts = _unit_vectors(network.get_text_features(**tokens))
    for name in ("text_model", "text_projection"):  # which have done their work
        setattr(network, name, None)
    return _image_model(spec, ImageTextSimilarity(network, texts.clone()), spec.label_names)


class PooledEncoder(nn.Module):
    """An encoder's pooled output, or the mean over its patches if it has no pooler.

    A classifier's weights often lack the pooler, which transformers then initialises at random: it is unused.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = getattr(encoder, "vision_model", encoder)
        self.pools = not encoder.lacks_optional

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of images."""
        output = self.encoder(pixel_values=images)
        pooled: torch.Tensor | None = getattr(output, "pooler_output", None) if self.pools else None
        if pooled is not None:
            return pooled.flatten(1)
        patches: torch.Tensor = output.last_hidden_state  # (N, patches, C), or (N, C, H, W) of a convolution
        return patches.mean(dim=1 if patches.ndim == 3 else (2, 3))


class ImageTextSimilarity(nn.Module):
    """A network's tower of images, and the embeddings of texts."""

    def __init__(self, network: Any, texts: torch.Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("texts", texts)

    def forward(self, images: torch.Tensor) -> Any:
        """Return the similarities of images with the texts, scaled as in training."""
        output = self.network.get_image_features(pixel_values=images)
        # In bfloat16 a similarity of 0.25, which is scaled by 100, has steps of 0.002.
        with torch.autocast(images.device.type, enabled=False):
            similarities = _unit_vectors(output) @ self.texts.T
        return similarities * self.network.logit_scale.exp() + getattr(self.network, "logit_bias", 0)


def _unit_vectors(output: Any) -> torch.Tensor:
    """Return the embeddings in a tower's output, each of length 1, in float32."""
    vectors: torch.Tensor = getattr(output, "pooler_output", output).float()
    return vectors / vectors.norm(dim=-1, keepdim=True)


def _image_model(spec: HubImageSpec, network: nn.Module, labels: tuple[str, ...] | None = None) -> ImageModel:
    """Return a network with the preprocessing of its folder or repository. Raises ConfigError without one."""
    from transformers import AutoImageProcessor

    preprocess, scale = split_preprocessing(fetched(AutoImageProcessor, spec))
    facts = ModelFacts(source=f"transformers {spec.model}", labels=labels)
    return ImageModel(spec, network, preprocess, facts, scale)


def split_preprocessing(processor: Any) -> tuple[Preprocess, Scale | None]:
    """Return what an image processor does on the host, and by what the device then normalises pixels of 8 bits.

    A processor whose last steps are not those of the library does all of its work on the host.
    """

    def preprocess(image: Any, **settings: Any) -> torch.Tensor:
        pixels: torch.Tensor = processor(images=decode_image(image), return_tensors="pt", **settings)["pixel_values"][0]
        return pixels

    noise = np.random.default_rng(0).integers(0, 256, (96, 64, 3), np.uint8)
    in_bytes = partial(preprocess, do_rescale=False, do_normalize=False)
    try:
        step = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else ([0.0] * 3, [1.0] * 3)
        scale = torch.tensor(mean) / step, torch.tensor(std) / step
        pixels, expected = in_bytes(noise), preprocess(noise)
        normalised = (pixels.float() - scale[0][:, None, None]) / scale[1][:, None, None]
        if pixels.dtype == torch.uint8 and torch.allclose(normalised, expected, atol=1e-5):
            return in_bytes, (scale[0].tolist(), scale[1].tolist())
    except Exception:  # a processor in a repository's own code may lack anything
        pass
    return preprocess, None
