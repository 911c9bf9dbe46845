"""Models of the transformers library as stages: image classifiers, and language models that choose an option."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from cauc_ray.errors import CaucError, ConfigError
from cauc_ray.models.answers import Model, ModelFacts
from cauc_ray.models.kind import Device, KindSpec, Precision, local_or_hub, require
from cauc_ray.numbers.logits import LogitKind

if TYPE_CHECKING:
    from cauc_ray.models.vision import ImageModel


class HubSpec(KindSpec):
    """A model by hub id or local folder.   revision: of the hub's repository."""

    model: str = Field(min_length=1)
    revision: str | None = None
    device: Device = "auto"
    dtype: Precision = "auto"

    def located(self, folder: Path) -> Self:
        """Return the same with a relative folder taken from the pool file's."""
        return self.model_copy(update={"model": local_or_hub(self.model, folder)})


class TransformersImageSpec(HubSpec):
    """`{kind: transformers-image, model: google/vit-base-patch16-224}`: any AutoModelForImageClassification.

    model: a hub id or a local folder, which holds the preprocessing too.
    """

    kind: Literal["transformers-image"]

    def load(self) -> ImageModel:
        """Load the network and its preprocessing. Raises ConfigError when they are not to be had."""
        require("transformers", "torch", "transformers", "PIL")
        from transformers import AutoModelForImageClassification

        return load_image_network(AutoModelForImageClassification, self.model, self.revision, self.device, self.dtype)

    def load_features(self) -> ImageModel:
        """Load the network to answer with what enters its last linear layer."""
        return self.load().features()


class TransformersChoiceSpec(HubSpec):
    """`{kind: transformers-choice, model: ORG/NAME, scoring: letter}`: a causal language model.

    model: a hub id or a local folder.   gguf_file: a GGUF file there, whose weights are dequantised.
    scoring: "letter", the next-token logits of the options' letters after a prompt that lists them, one forward
    pass; or "text", the log-likelihood of each option's text after the question, divided by its length in bytes.
    chat_template: whether questions go through the model's own; by default letters do if it has one, texts do not.
    batch_tokens: most tokens, padding included, of one forward pass; a batch's questions are sorted by length
    into such passes.   max_tokens: longest sequence, by default the model's context.
    """

    HOW: ClassVar[frozenset[str]] = frozenset({"device", "batch_tokens"})
    SPANS_GPUS: ClassVar[bool] = True
    kind: Literal["transformers-choice"]
    gguf_file: str | None = None
    scoring: Literal["letter", "text"] = "letter"
    chat_template: bool | None = None
    batch_tokens: int = Field(default=8192, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits: texts have logarithms of probabilities."""
        return "raw" if self.scoring == "letter" else "log-probabilities"

    def load_over_gpus(self) -> Model:
        """Load the model with its layers spread over all GPUs. Raises ConfigError as load, and without accelerate."""
        require("multi-gpu", "accelerate")
        return self.load(over_gpus=self.device != "cpu")

    def load(self, *, over_gpus: bool = False) -> Model:
        """Load the model and its tokenizer. Raises ConfigError when they are not to be had."""
        require("transformers", "torch", "transformers")
        if self.gguf_file is not None:
            require("gguf", "gguf", "accelerate")
        from cauc_ray.models.language import load_choice_model

        return load_choice_model(self, over_gpus)


def load_image_network(
    factory: Any,
    model: str,
    revision: str | None,
    device: Device,
    dtype: Precision,
    wrapped: Callable[[Any, frozenset[str]], Any] | None = None,
) -> ImageModel:
    """Load an image network of one of transformers' auto classes with its own preprocessing.

    wrapped: what answers in the network's place, given it and the names of its weights that the file lacks.
    Raises ConfigError when there is no such model, or weights are missing (and not dealt with) or do not fit:
    transformers would draw them at random.
    """
    from transformers import AutoImageProcessor

    from cauc_ray.models.vision import ImageModel

    with quiet():
        processor = fetched(AutoImageProcessor, model, revision=revision)
        network, told = fetched(
            factory, model, revision=revision, output_loading_info=True, ignore_mismatched_sizes=True
        )
    for name, found, expected in sorted(told["mismatched_keys"]):
        shapes = f"{tuple(found)} in the file, {tuple(expected)} by its config"
        raise ConfigError(f"model {model!r} cannot be loaded: {name} has shape {shapes}")
    missing = frozenset(told["missing_keys"])
    if wrapped is not None:
        network = wrapped(network, missing)
    elif missing:
        raise ConfigError(f"model {model!r} is no image classifier: it has no weights {', '.join(sorted(missing)[:3])}")
    facts = ModelFacts(
        source=f"transformers {model}",
        params_b=sum(p.numel() for p in network.parameters()) / 1e9,
        labels=None if wrapped is not None else option_names(network.config.id2label),
    )

    def preprocess(image: Any) -> Any:
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    return ImageModel(network, preprocess, facts, device, dtype)


def option_names(by_index: Mapping[int, Any]) -> tuple[str, ...] | None:
    """Return the names of a classifier's options in order; None where its config names none or not all of them."""
    names = tuple(str(by_index[index]) for index in range(len(by_index)) if index in by_index)
    # What transformers writes where nobody gave any names.
    made_up = tuple(f"LABEL_{index}" for index in range(len(by_index)))
    return names if len(names) == len(by_index) and names != made_up else None


def fetched(factory: Any, name: str, **options: Any) -> Any:
    """Load something by hub id or folder. Raises ConfigError in one line when it is not to be had."""
    with loading(name):
        return factory.from_pretrained(name, **options)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Turn what the library raises when a model is not to be had into a ConfigError of one line."""
    if Path(name).is_absolute() and not Path(name).exists():
        raise ConfigError(f"model {name!r} cannot be loaded: there is no such folder")
    try:
        yield
    except CaucError:
        raise
    except Exception as error:  # transformers, safetensors and torch raise whatever the damage leads to
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model {name!r} cannot be loaded: {reason}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal for the length of the block."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
