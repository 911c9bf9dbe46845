"""Models of the transformers library as stages: image classifiers, and language models that choose an option."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from cauc_ray.errors import CaucError, ConfigError, first_line
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.answers import Model, ModelFacts
from cauc_ray.models.kind import Device, KindSpec, Precision, local_or_hub, require
from cauc_ray.models.prompts import LanguageSpec
from cauc_ray.numbers.logits import LogitKind

if TYPE_CHECKING:
    from cauc_ray.models.vision import ImageModel


class HubModelSpec(KindSpec):
    """A model by hub id or local folder.   device: where it computes; auto is a GPU where there is one."""

    model: str = Field(min_length=1)
    device: Device = "auto"

    def located(self, folder: AnyPath) -> Self:
        """Return the same with a relative folder resolved against the pool file's."""
        return self.model_copy(update={"model": local_or_hub(self.model, folder)})


class HubSpec(HubModelSpec):
    """A model of transformers.   revision: of the hub's repository.   dtype: auto is bfloat16 on GPUs that have it."""

    revision: str | None = None
    dtype: Precision = "auto"


class TransformersImageSpec(HubSpec):
    """`{kind: transformers-image, model: google/vit-base-patch16-224}`: any AutoModelForImageClassification.

    model: a hub id or a local folder, which holds the preprocessing too.
    """

    NEEDS: ClassVar[frozenset[str]] = frozenset({"image"})
    READS: ClassVar[frozenset[str] | None] = NEEDS
    kind: Literal["transformers-image"]

    def load(self) -> ImageModel:
        """Load the network and its preprocessing. Raises ConfigError if they cannot be loaded."""
        require("transformers", "torch", "transformers", "PIL")
        from transformers import AutoModelForImageClassification

        network, missing = load_network(AutoModelForImageClassification, self)
        refuse_missing(self.model, "image classifier", missing)
        return image_model(self, network, option_names(network.config.id2label))


class HubLanguageSpec(HubSpec, LanguageSpec):
    """A language model by hub id or local folder.

    chat_template: whether prompts go through the model's own; by default they do if it has one, unless the texts of
    the options are compared.   max_tokens: longest sequence, by default the model's context.
    """

    SPANS_GPUS: ClassVar[bool] = True
    chat_template: bool | None = None
    max_tokens: int | None = Field(default=None, ge=1)


class TransformersChoiceSpec(HubLanguageSpec):
    """`{kind: transformers-choice, model: ORG/NAME}`: a language model in torch that chooses among options.

    gguf_file: a GGUF file there, whose weights are dequantised.   batch_tokens: most tokens, padding included, of one
    forward pass; a batch's prompts are sorted by length into such passes.
    """

    HOW: ClassVar[frozenset[str]] = frozenset({"device", "batch_tokens"})
    kind: Literal["transformers-choice"]
    gguf_file: str | None = None
    batch_tokens: int = Field(default=8192, ge=1)

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits: of letters as the network gives them."""
        return "raw" if self.answers_with == "letter" else "log-probabilities"

    def load_over_gpus(self) -> Model:
        """Load the model with its layers spread over all GPUs. Raises ConfigError as load, and without accelerate."""
        require("multi-gpu", "accelerate")
        return self.load(over_gpus=self.device != "cpu")

    def load(self, *, over_gpus: bool = False) -> Model:
        """Load the model and its tokenizer. Raises ConfigError if they cannot be loaded."""
        require("transformers", "torch", "transformers")
        if self.gguf_file is not None:
            require("gguf", "gguf", "accelerate")
        from cauc_ray.models.language import load_choice_model

        return load_choice_model(self, over_gpus)


def load_network(factory: Any, spec: HubSpec, **options: Any) -> tuple[Any, frozenset[str]]:
    """Load a network by one of transformers' auto classes.

    Returns it with the names of its weights that the file lacks: transformers draws them at random. Raises ConfigError
    if there is no such model, or its weights do not fit.
    """
    more = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    network, report = fetched(factory, spec.model, revision=spec.revision, **more, **options)
    for name, found, expected in sorted(report["mismatched_keys"]):
        shapes = f"{tuple(found)} in the file, {tuple(expected)} by its config"
        raise ConfigError(f"model {spec.model!r} cannot be loaded: {name} has shape {shapes}")
    return network, frozenset(report["missing_keys"])


def refuse_missing(model: str, what: str, missing: Iterable[str]) -> None:
    """Raise ConfigError if a model lacks weights that its task needs."""
    if missing:
        raise ConfigError(f"model {model!r} is not a complete {what}: it lacks {', '.join(sorted(missing)[:3])}")


def image_model(spec: HubSpec, network: Any, labels: tuple[str, ...] | None = None) -> ImageModel:
    """Return an image network with the preprocessing of its folder or repository. Raises ConfigError without one."""
    from transformers import AutoImageProcessor

    from cauc_ray.models.vision import ImageModel

    processor = fetched(AutoImageProcessor, spec.model, revision=spec.revision)

    def preprocess(image: Any) -> Any:
        return processor(images=image, return_tensors="pt")["pixel_values"][0]

    facts = ModelFacts(source=f"transformers {spec.model}", labels=labels)
    return ImageModel(network, preprocess, facts, spec.device, spec.dtype)


def option_names(by_index: Mapping[int, Any]) -> tuple[str, ...] | None:
    """Return the names of a classifier's options in order; None if its config does not name all of them."""
    names = tuple(str(by_index[index]) for index in range(len(by_index)) if index in by_index)
    # The names that transformers writes by default.
    made_up = tuple(f"LABEL_{index}" for index in range(len(by_index)))
    return names if len(names) == len(by_index) and names != made_up else None


def fetched(factory: Any, name: str, **options: Any) -> Any:
    """Load something by hub id or folder. Raises ConfigError in one line if it cannot be loaded."""
    with loading(name):
        return factory.from_pretrained(name, **options)


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Load a model in the block, without progress bars and advice on the terminal.

    Errors of the library become a ConfigError of one line.
    """
    from transformers.utils import logging

    if Path(name).is_absolute() and not Path(name).exists():
        raise ConfigError(f"model {name!r} cannot be loaded: there is no such folder")
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except CaucError:
        raise
    except Exception as error:  # damaged files raise errors of many types
        raise ConfigError(f"model {name!r} cannot be loaded: {first_line(error)}") from error
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
