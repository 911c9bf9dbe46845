"""TorchVision's classifiers as stages."""

from __future__ import annotations

import io
import re
import socket
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ValidationInfo

from cauc_ray.errors import ConfigError, one_line, unknown_name
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.kind import ImageSpec, Placement, Precision, TorchDevice, local_path, require_file

if TYPE_CHECKING:
    from cauc_ray.models.classifiers import ImageModel

_FILES = (".pth", ".pt", ".safetensors")


def _weights(name: str, info: ValidationInfo) -> str:
    return local_path(name, info) if name.endswith(_FILES) else name


# The timeout of the server of published weights.
FETCH_TIMEOUT_S = 30.0
# TorchVision builds these two for published weights so that they rescale their normalised input.
_INCEPTION = {"aux_logits": False, "init_weights": False, "transform_input": True}
# DenseNet's published files use layer names that are no longer valid module names: norm.1, conv.1.
_DENSE_LAYER = re.compile(r"^(.*denselayer\d+\.(?:norm|conv))\.([12]\.)")


class TorchvisionSpec(ImageSpec):
    """`{kind: torchvision, arch: resnet50, weights: IMAGENET1K_V2}`.

    arch: any classifier that TorchVision builds.   weights: one of the architecture's published weights, or a
    file of them (.pth, .pt, .safetensors; the number of classes is the file's).   The images are resized,
    cropped and normalised as the weights ask, those of a file as the architecture's default weights do.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.torchvision:load"
    PACKAGES: ClassVar[tuple[str, ...]] = ("torchvision", "torch", "torchvision", "PIL")
    kind: Literal["torchvision"]
    arch: str
    weights: Annotated[str, AfterValidator(_weights)] = "DEFAULT"
    device: TorchDevice = "auto"
    dtype: Precision = "auto"

    def check(self, local: bool) -> None:
        """Raise ConfigError for a file of weights that does not exist."""
        if self.weights.endswith(_FILES):
            require_file(self.weights, local)


def load(spec: TorchvisionSpec, placement: Placement) -> ImageModel:
    """Build the network and load its weights. Raises ConfigError for unknown names and files that do not fit."""
    from torchvision import models

    from cauc_ray.models.classifiers import ImageModel, classifier_size

    if spec.arch not in models.list_models(models):
        raise ConfigError(unknown_name("arch", spec.arch, models.list_models(models)))
    published = models.get_model_weights(spec.arch)
    if spec.weights.endswith(_FILES):
        weights = published.DEFAULT
        network = _from_file(spec, models)
    else:
        if spec.weights not in published.__members__:
            raise ConfigError(f"{spec.arch}: {unknown_name('weights', spec.weights, published.__members__)}")
        weights = published[spec.weights]
        network = _downloaded(spec, models, weights)
    labels = tuple(weights.meta.get("categories") or ())
    n_classes = classifier_size(network, network.state_dict())
    facts = ModelFacts(
        source=f"torchvision {spec.arch}, weights {spec.weights}",
        gflops=weights.meta.get("_ops"),
        # A file of other weights may have other classes.
        labels=labels if len(labels) == n_classes else None,
    )
    return ImageModel(network, weights.transforms(), facts, spec.device, spec.dtype)


def _from_file(spec: TorchvisionSpec, models: Any) -> Any:
    """Build the network as TorchVision does for published weights, with the weights of a file."""
    from cauc_ray.models.classifiers import classifier_size, load_state

    state = _current_names(load_state(Path(spec.weights)))
    options = _INCEPTION if spec.arch in ("googlenet", "inception_v3") else {}
    network = models.get_model(spec.arch, weights=None, **options)
    n_classes = classifier_size(network, state)
    if n_classes != classifier_size(network, network.state_dict()):
        network = models.get_model(spec.arch, weights=None, num_classes=n_classes, **options)
    # MNASNet needs the format's version, which a .safetensors file does not have.
    state._metadata = getattr(state, "_metadata", None) or {"": network.state_dict()._metadata[""]}
    try:
        network.load_state_dict(state)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{spec.weights} does not fit {spec.arch}: {one_line(error)[:300]}") from error
    return network


def _downloaded(spec: TorchvisionSpec, models: Any, weights: Any) -> Any:
    try:
        # torch.hub reports its download on stdout, and waits indefinitely for a server that does not answer.
        with redirect_stdout(io.StringIO()), _socket_timeout(FETCH_TIMEOUT_S):
            return models.get_model(spec.arch, weights=weights, progress=False)
    except (OSError, HTTPException, RuntimeError) as error:  # no network, or a file whose hash is wrong
        raise ConfigError(
            f"the weights {spec.weights} of {spec.arch} cannot be fetched: {one_line(error)[:300]}; "
            "give a local file as weights"
        ) from error


def _current_names(state: Mapping[str, Any]) -> Any:
    """Return weights by the current module names, without the auxiliary heads, which only training uses."""
    current: Any = OrderedDict(
        (_DENSE_LAYER.sub(r"\1\2", name), tensor)
        for name, tensor in state.items()
        if not name.startswith(("aux1.", "aux2.", "AuxLogits."))
    )
    if hasattr(state, "_metadata"):
        current._metadata = state._metadata
    return current


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
