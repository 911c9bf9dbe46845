"""Loading parts of a model by the transformers library: from a hub id or a local folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from cauc_ray.errors import CaucError, ConfigError, first_line
from cauc_ray.models.kind import Placement
from cauc_ray.models.torch_device import choose_device, choose_dtype, n_parameters, require_memory
from cauc_ray.models.transformers import PretrainedSpec


def load_network(factory: Any, spec: PretrainedSpec, *, optional: str | None = None, **options: Any) -> Any:
    """Load a network by one of transformers' auto classes.

    Args:
        factory: The auto class.
        spec: The settings.
        optional: Prefix of weights that the file may lack. transformers then draws them at random, and the network's
            attribute `lacks_optional` is true.
        options: Further arguments of from_pretrained.

    Raises:
        ConfigError: There is no such model, it lacks other weights, or they do not fit.
    """
    more = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    network, report = fetched(factory, spec, **more, **spec.settings, **options)
    for name, shape, expected in sorted(report["mismatched_keys"]):
        shapes = f"{tuple(shape)} in the file, {tuple(expected)} by its config"
        raise ConfigError(f"model {spec.model!r} cannot be loaded: {name} has shape {shapes}")
    weights = dict(network.named_parameters(remove_duplicate=False))
    loaded = {id(tensor) for name, tensor in weights.items() if name not in report["missing_keys"]}
    # A weight that is tied to a loaded one is there, whether or not the library lists it.
    missing = [name for name in sorted(report["missing_keys"]) if id(weights.get(name)) not in loaded]
    needed = [name for name in missing if optional is None or not name.startswith(optional)]
    if needed:
        lacks = ", ".join(needed[:3])
        raise ConfigError(f"model {spec.model!r} is not a complete {spec.REQUIRED_HEAD[0]}: it lacks {lacks}")
    network.lacks_optional = bool(missing)
    return network


def load_placed(factory: Any, spec: PretrainedSpec, placement: Placement, *, config: Any, **options: Any) -> Any:
    """Load a network of a config on its device, or layer by layer over all GPUs, in its precision.

    Raises ConfigError as load_network, and before any weights are loaded if the GPUs have too little memory for them.
    """
    is_quantised = "quantization_config" in spec.settings or bool(getattr(config, "quantization_config", None))
    if placement.over_gpus or "quantization_config" in spec.settings:
        spec.require("multi-gpu", "accelerate")
    device = choose_device(spec.device)
    over_gpus = placement.over_gpus and spec.device != "cpu"
    dtype = choose_dtype(spec.dtype, device)
    if device.type == "cuda" and not is_quantised:
        with loading(spec.model), torch.device("meta"):
            outline = factory.from_config(config, trust_remote_code=spec.settings.get("trust_remote_code", False))
        require_memory(spec.model, n_parameters(outline) * dtype.itemsize, placement.num_gpus)
    # What is quantised cannot be moved after it is loaded.
    spread = "auto" if over_gpus else {"": device} if "quantization_config" in spec.settings else None
    network = load_network(factory, spec, config=config, dtype=dtype, device_map=spread, **options).eval()
    return network.to(device) if spread is None else network


def option_names(by_index: Mapping[int, Any]) -> tuple[str, ...] | None:
    """Return the names of a classifier's options in order; None if its config does not name all of them."""
    names = tuple(str(by_index[index]) for index in range(len(by_index)) if index in by_index)
    # The names that transformers writes by default.
    made_up = tuple(f"LABEL_{index}" for index in range(len(by_index)))
    return names if len(names) == len(by_index) and names != made_up else None


def context_length(config: Any) -> int:
    """Return the most tokens that a model takes, by its config; a large number where it sets none."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 10**9)


# Settings of networks that also concern configs, tokenizers and preprocessing.
_OF_ALL_PARTS = frozenset({"trust_remote_code", "code_revision", "subfolder", "cache_dir", "local_files_only"})


def fetched(factory: Any, spec: PretrainedSpec, **options: Any) -> Any:
    """Load a part of a model. Raises ConfigError in one line if it cannot be loaded."""
    common = {name: spec.settings[name] for name in _OF_ALL_PARTS & spec.settings.keys()}
    with loading(spec.model):
        return factory.from_pretrained(spec.model, revision=spec.revision, **{**common, **options})


# transformers replaces functions of the process while it loads a model. Of two loads that overlap, one would leave the
# replacements in place, and no model of the process would tie its weights from then on.
_one_load = RLock()


@contextmanager
def loading(name: str) -> Iterator[None]:
    """Load a model in the block, one at a time in a process, without progress bars and advice on the terminal.

    Errors of the library become a ConfigError of one line.
    """
    from transformers.utils import logging

    with _one_load:
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
