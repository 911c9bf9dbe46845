"""TorchVision's classifiers as stages."""

from __future__ import annotations

import io
import re
import socket
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ValidationInfo

from cauc_ray.errors import ConfigError, first_line, one_line, unknown_name
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.kind import ImageSpec, Placement, TorchSpec, local_path

if TYPE_CHECKING:
    from cauc_ray.models.image_networks import ImageModel

_SUFFIXES = (".pth", ".pt", ".safetensors")


def _weights(name: str, info: ValidationInfo) -> str:
    return local_path(name, info) if name.endswith(_SUFFIXES) else name


# The timeout of the server of published weights.
FETCH_TIMEOUT_S = 30.0
# TorchVision builds these two for published weights so that they rescale their normalised input.
_INCEPTION = {"aux_logits": False, "init_weights": False, "transform_input": True}
# DenseNet's published files use layer names that are no longer valid module names: norm.1, conv.1.
_DENSE_LAYER = re.compile(r"^(.*denselayer\d+\.(?:norm|conv))\.([12]\.)")


class TorchvisionSpec(TorchSpec, ImageSpec):
    """`{kind: torchvision, arch: resnet50, weights: IMAGENET1K_V2}`.

    The images are resized, cropped and normalised as the weights ask, those of a file as the architecture's default
    weights do.

    Attributes:
        arch: Any classifier that TorchVision builds.
        weights: One of the architecture's published weights, or a file of them (.pth, .pt, .safetensors; the number of
            classes is the file's).
    """

    LOADER: ClassVar[str] = "cauc_ray.models.torchvision:load"
    PACKAGES: ClassVar[tuple[str, ...]] = ("torchvision", "torch", "torchvision", "PIL")
    FILES: ClassVar[tuple[str, ...]] = ("weights",)
    kind: Literal["torchvision"]
    arch: str
    weights: Annotated[str, AfterValidator(_weights)] = "DEFAULT"


def load(spec: TorchvisionSpec, placement: Placement) -> ImageModel:
    """Build the network and load its weights. Raises ConfigError for unknown names and files that do not fit."""
    import torch
    from torchvision import models

    from cauc_ray.models.image_networks import ImageModel
    from cauc_ray.models.images import centre_square

    if spec.arch not in models.list_models(models):
        raise ConfigError(unknown_name("arch", spec.arch, models.list_models(models)))
    published = models.get_model_weights(spec.arch)
    is_file = spec.weights.endswith(_SUFFIXES)
    if not is_file and spec.weights not in published.__members__:
        raise ConfigError(f"{spec.arch}: {unknown_name('weights', spec.weights, published.__members__)}")
    weights = published.DEFAULT if is_file else published[spec.weights]
    state = _current_names(_read(Path(spec.weights)) if is_file else _fetched(spec, weights))
    options = _INCEPTION if spec.arch in ("googlenet", "inception_v3") else {}
    network = models.get_model(spec.arch, weights=None, **options)
    n_classes = classifier_size(network, state)
    if n_classes != classifier_size(network, network.state_dict()):
        network = models.get_model(spec.arch, weights=None, num_classes=n_classes, **options)
    # MNASNet needs the format's version, which a .safetensors file does not have.
    state._metadata = state._metadata or {"": network.state_dict()._metadata[""]}
    try:
        network.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{spec.weights} does not fit {spec.arch}: {one_line(error)[:300]}") from error
    labels = tuple(weights.meta.get("categories") or ())
    facts = ModelFacts(
        source=f"torchvision {spec.arch}, weights {spec.weights}",
        gflops=weights.meta.get("_ops"),
        # A file of other weights may have other classes.
        labels=labels if len(labels) == n_classes else None,
    )
    steps = weights.transforms()
    (size,), (shorter,), resample = steps.crop_size, steps.resize_size, steps.interpolation.value
    square = partial(centre_square, size=size, shorter=shorter, resample=resample)
    scale = [255 * mean for mean in steps.mean], [255 * std for std in steps.std]
    return ImageModel(spec, network, lambda image: torch.from_numpy(square(image)).permute(2, 0, 1), facts, scale)


def _read(path: Path) -> Mapping[str, Any]:
    """Read a file of weights. Raises ConfigError if it has none."""
    import torch

    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise errors of many types
        raise ConfigError(f"{path} is not a readable weight file: {first_line(error)}") from error
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ConfigError(f"{path} has no named weights")
    return state


def _fetched(spec: TorchvisionSpec, weights: Any) -> Mapping[str, Any]:
    """Return published weights from TorchVision's cache or server. Raises ConfigError if they cannot be fetched."""
    before = socket.getdefaulttimeout()
    # torch.hub reports its download on stdout, and waits indefinitely for a server that does not answer.
    socket.setdefaulttimeout(FETCH_TIMEOUT_S)
    try:
        with redirect_stdout(io.StringIO()):
            state: Mapping[str, Any] = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, HTTPException, RuntimeError) as error:  # no network, or a file whose hash is wrong
        raise ConfigError(
            f"the weights {spec.weights} of {spec.arch} cannot be fetched: {one_line(error)[:300]}; "
            "give a local file as weights"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
    return state


def classifier_size(network: Any, state: Mapping[str, Any]) -> int:
    """Return the number of classes that weights were trained for. Raises ConfigError without the last layer's."""
    from torch import nn

    layers = [name for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    weight = state.get(f"{layers[-1]}.weight")
    if weight is None:
        raise ConfigError(f"the weight file has no {layers[-1]}.weight, the network's last layer")
    return int(weight.shape[0])


def _current_names(state: Mapping[str, Any]) -> Any:
    """Return weights by the current module names, without the auxiliary heads, which only training uses."""
    current: Any = OrderedDict(
        (_DENSE_LAYER.sub(r"\1\2", name), tensor)
        for name, tensor in state.items()
        if not name.startswith(("aux1.", "aux2.", "AuxLogits."))
    )
    current._metadata = getattr(state, "_metadata", None)
    return current
