"""Models of the transformers library as stages: image classifiers, and language models that choose an option."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from cauc_ray.errors import CaucError, ConfigError, first_line
from cauc_ray.models.answers import Model, ModelFacts
from cauc_ray.models.kind import Device, HubModel, ImageSpec, KindSpec, Precision, TextColumns
from cauc_ray.models.prompts import LanguageSpec
from cauc_ray.numbers.logits import LogitKind

if TYPE_CHECKING:
    from cauc_ray.models.classifiers import ImageModel, TextClassifier


class _Config(BaseModel):
    """What a checkpoint's config.json tells before it is loaded: how the network was saved."""

    architectures: list[str] | None = None


class HubSpec(KindSpec):
    """A model of transformers by hub id or local folder.

    device: where it computes; auto is a GPU where there is one.   revision: of the hub's repository.   dtype: auto is
    bfloat16 on GPUs that have it.
    """

    model: HubModel
    device: Device = "auto"
    # What a checkpoint must be, and the names of the architectures that are saved with the head that it needs.
    COMPLETE: ClassVar[tuple[str, str]] = ("model", "")
    revision: str | None = None
    dtype: Precision = "auto"

    def check(self, here: bool) -> None:
        """Raise ConfigError if a folder's config tells that its model was saved without the head that is needed."""
        path = Path(self.model, "config.json")
        what, head = self.COMPLETE
        saved = None
        if path.is_absolute():
            with suppress(OSError, ValueError):  # what cannot be read is for the library to tell
                saved = _Config.model_validate_json(path.read_bytes()).architectures
        if saved and not any(re.search(head, name) for name in saved):
            raise ConfigError(f"model {self.model!r} is not a complete {what}: it was saved as {saved[0]}")


class TransformersImageSpec(HubSpec, ImageSpec):
    """`{kind: transformers-image, model: google/vit-base-patch16-224}`: any AutoModelForImageClassification.

    model: a hub id or a local folder, which holds the preprocessing too.
    """

    COMPLETE: ClassVar[tuple[str, str]] = ("image classifier", "ForImageClassification")
    kind: Literal["transformers-image"]

    def load(self) -> ImageModel:
        """Load the network and its preprocessing. Raises ConfigError if they cannot be loaded."""
        self.require("transformers", "torch", "transformers", "PIL")
        from transformers import AutoModelForImageClassification

        network = load_network(AutoModelForImageClassification, self)
        return image_model(self, network, option_names(network.config.id2label))


class SpreadSpec(HubSpec):
    """A model of transformers that may be spread over several GPUs."""

    SPANS_GPUS: ClassVar[bool] = True
    HOW: ClassVar[frozenset[str]] = frozenset({"device", "batch_tokens"})

    def load_over_gpus(self) -> Model:
        """Load the model over all GPUs that the process sees. Raises ConfigError as load."""
        return self.load(over_gpus=True)

    @abstractmethod
    def load(self, *, over_gpus: bool = False) -> Model:
        """Load the model and its tokenizer. Raises ConfigError if they cannot be loaded."""


class TransformersClassifierSpec(SpreadSpec):
    """`{kind: transformers-classifier, model: ORG/NAME, text: [text]}`: any AutoModelForSequenceClassification.

    text: the column that it reads, or two for a pair such as a premise and a hypothesis.   max_tokens: longer texts are
    cut, by default at the model's own limit.   batch_tokens: most tokens, padding included, of one forward pass.
    """

    COMPLETE: ClassVar[tuple[str, str]] = ("text classifier", "ForSequenceClassification")
    kind: Literal["transformers-classifier"]
    text: TextColumns = ("text",)
    max_tokens: int | None = Field(default=None, ge=4)
    batch_tokens: int = Field(default=16384, ge=1)

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that it reads."""
        return frozenset(self.text)

    texts = needs

    def load(self, *, over_gpus: bool = False) -> TextClassifier:
        """Load the network and its tokenizer. Raises ConfigError if they cannot be loaded, or it is no classifier."""
        self.require("transformers", "torch", "transformers")
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

        from cauc_ray.models.classifiers import TextClassifier

        config = fetched(AutoConfig, self)
        network = load_placed(AutoModelForSequenceClassification, self, over_gpus=over_gpus, config=config)
        if network.config.num_labels < 2 or network.config.problem_type == "multi_label_classification":
            raise ConfigError(f"model {self.model!r} does not choose one of several classes")
        labels = option_names(network.config.id2label)
        return TextClassifier(self, fetched(AutoTokenizer, self), network, labels)


class HubLanguageSpec(SpreadSpec, LanguageSpec):
    """A language model by hub id or local folder.

    chat_template: whether prompts go through the model's own; by default they do if it has one, unless the texts of
    the options are compared.   chat_template_kwargs: variables of that template, such as enable_thinking: false.
    max_tokens: longest sequence, by default the model's context.
    """

    COMPLETE: ClassVar[tuple[str, str]] = ("causal language model", "CausalLM|LMHead|Generation|Text2Text")
    chat_template: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int | None = Field(default=None, ge=1)


class TransformersChoiceSpec(HubLanguageSpec):
    """`{kind: transformers-choice, model: ORG/NAME}`: a language model in torch that chooses among options.

    gguf_file: a GGUF file there, whose weights are dequantised.   batch_tokens: most tokens, padding included, of one
    forward pass; a batch's prompts are sorted by length into such passes.
    """

    kind: Literal["transformers-choice"]
    gguf_file: str | None = None
    batch_tokens: int = Field(default=8192, ge=1)

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits: of letters as the network gives them."""
        return "raw" if self.answers_with == "letter" else "log-probabilities"

    def load(self, *, over_gpus: bool = False) -> Model:
        """Load the model and its tokenizer. Raises ConfigError if they cannot be loaded."""
        self.require("transformers", "torch", "transformers")
        if self.gguf_file is not None:
            self.require("gguf", "gguf", "accelerate")
        from cauc_ray.models.language import load_choice_model

        return load_choice_model(self, over_gpus)


def load_network(factory: Any, spec: HubSpec, *, optional: str | None = None, **options: Any) -> Any:
    """Load a network by one of transformers' auto classes.

    optional: what the names of weights begin with that the file may lack, in which case the network gets an attribute
    `lacks_optional`: transformers draws them at random. Raises ConfigError if there is no such model, it lacks other
    weights, or they do not fit.
    """
    spec.check(here=True)
    more = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    network, report = fetched(factory, spec, **more, **options)
    for name, found, expected in sorted(report["mismatched_keys"]):
        shapes = f"{tuple(found)} in the file, {tuple(expected)} by its config"
        raise ConfigError(f"model {spec.model!r} cannot be loaded: {name} has shape {shapes}")
    missing = sorted(report["missing_keys"])
    needed = [name for name in missing if optional is None or not name.startswith(optional)]
    if needed:
        lacks = ", ".join(needed[:3])
        raise ConfigError(f"model {spec.model!r} is not a complete {spec.COMPLETE[0]}: it lacks {lacks}")
    network.lacks_optional = bool(missing)
    return network


def load_placed(factory: Any, spec: HubSpec, *, over_gpus: bool, config: Any, **options: Any) -> Any:
    """Load a network of a config on its device, or layer by layer over all GPUs, in its precision.

    Raises ConfigError as load_network, and before any weights are loaded if the GPUs have too little memory for them.
    """
    import torch

    from cauc_ray.models.torch_device import choose_device, choose_dtype, require_memory

    if over_gpus:
        spec.require("multi-gpu", "accelerate")
    device = choose_device(spec.device)
    over_gpus = over_gpus and spec.device != "cpu"
    dtype = choose_dtype(spec.dtype, device)
    if device.type == "cuda":
        spec.check(here=True)
        with loading(spec.model), torch.device("meta"):
            outline = factory.from_config(config)
        if not getattr(config, "quantization_config", None):
            require_memory(spec.model, sum(p.numel() for p in outline.parameters()) * dtype.itemsize, over_gpus)
    spread = "auto" if over_gpus else None
    network = load_network(factory, spec, config=config, dtype=dtype, device_map=spread, **options).eval()
    return network if over_gpus else network.to(device)


def image_model(spec: HubSpec, network: Any, labels: tuple[str, ...] | None = None) -> ImageModel:
    """Return an image network with the preprocessing of its folder or repository. Raises ConfigError without one."""
    from transformers import AutoImageProcessor

    from cauc_ray.models.classifiers import ImageModel

    processor = fetched(AutoImageProcessor, spec)

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


def context_length(config: Any) -> int:
    """Return the most tokens that a model takes, by its config; a large number where it sets none."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9)


def fetched(factory: Any, spec: HubSpec, **options: Any) -> Any:
    """Load a part of a model. Raises ConfigError in one line if it cannot be loaded."""
    with loading(spec.model):
        return factory.from_pretrained(spec.model, revision=spec.revision, **options)


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
