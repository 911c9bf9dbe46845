"""TorchVision's classifiers as stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.kind import Device, KindSpec, Precision, require

if TYPE_CHECKING:
    from cauc_ray.models.vision import ImageModel

_FILES = (".pth", ".pt", ".safetensors")


class TorchvisionSpec(KindSpec):
    """`{kind: torchvision, arch: resnet50, weights: IMAGENET1K_V2}`.

    arch: any classifier that TorchVision builds.   weights: one of the architecture's published weights, or a
    file of them (.pth, .pt, .safetensors; the number of classes is the file's).   The images are resized,
    cropped and normalised as the weights ask, those of a file as the architecture's default weights do.
    """

    kind: Literal["torchvision"]
    arch: str
    weights: str = "DEFAULT"
    device: Device = "auto"
    dtype: Precision = "auto"

    def located(self, folder: Path) -> Self:
        """Return the same with a relative weight file taken from the pool file's folder."""
        if not self.weights.endswith(_FILES):
            return self
        return self.model_copy(update={"weights": str((folder / self.weights).resolve())})

    def load(self) -> ImageModel:
        """Build the network and load its weights. Raises ConfigError for unknown names and files that do not fit."""
        require("torchvision", "torch", "torchvision", "PIL")
        from torchvision import models

        from cauc_ray.models.vision import ImageModel, classifier_size, load_state

        if self.arch not in models.list_models(models):
            raise ConfigError(unknown_name("arch", self.arch, models.list_models(models)))
        published = models.get_model_weights(self.arch)
        if self.weights.endswith(_FILES):
            weights = published.DEFAULT
            state = load_state(Path(self.weights))
            n_classes = classifier_size(models.get_model(self.arch, weights=None), state)
            network = models.get_model(self.arch, weights=None, num_classes=n_classes)
            try:
                network.load_state_dict(state)
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:300]
                raise ConfigError(f"{self.weights} does not fit {self.arch}: {reason}") from error
        else:
            if self.weights not in published.__members__:
                raise ConfigError(f"{self.arch}: {unknown_name('weights', self.weights, published.__members__)}")
            weights = published[self.weights]
            network = self._fetched(models, weights)
        facts = ModelFacts(
            source=f"torchvision {self.arch}, weights {self.weights}",
            gflops=weights.meta.get("_ops"),
            params_b=sum(p.numel() for p in network.parameters()) / 1e9,
        )
        return ImageModel(network, weights.transforms(), facts, self.device, self.dtype)

    def load_features(self) -> ImageModel:
        """Load the network to answer with what enters its last linear layer."""
        return self.load().features()

    def _fetched(self, models: Any, weights: Any) -> Any:
        try:
            return models.get_model(self.arch, weights=weights)
        except (OSError, RuntimeError) as error:  # no network, or a file whose hash is wrong
            raise ConfigError(
                f"the weights {self.weights} of {self.arch} cannot be fetched: {' '.join(str(error).split())}; "
                "give a local file as weights"
            ) from error
