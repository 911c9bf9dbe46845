"""Checkpoints of real architectures with random weights, and rows for them to read."""

from __future__ import annotations

import io
import math
import string
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

SIDE = 224
# Words of the vocabulary, the frequent ones short; least and most words of a text.
N_WORDS = 3000
FEWEST, MOST = 4, 60


def network_model(arch: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Write a TorchVision network's random weights; return it as a model of a pool file, with more options."""
    import torch
    from torchvision.models import get_model

    torch.manual_seed(0)
    weights = folder / f"{arch}.pth"
    torch.save(get_model(arch, weights=None).state_dict(), weights)
    return {"kind": "torchvision", "arch": arch, "weights": str(weights), **options}


def onnx_file(arch: str, folder: Path) -> Path:
    """Write a TorchVision network with random weights as an ONNX file, and return its path."""
    import torch
    from torchvision.models import get_model

    torch.manual_seed(0)
    path, pixels = folder / f"{arch}.onnx", torch.zeros(2, 3, SIDE, SIDE)
    names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["logits"]}
    names["dynamic_axes"] = {"pixels": {0: "n"}, "logits": {0: "n"}}
    with warnings.catch_warnings(action="ignore"):  # its successor needs one more package
        torch.onnx.export(get_model(arch, weights=None).eval(), (pixels,), path, dynamo=False, **names)
    return path


def network_folder(kind: str, folder: Path, reads: str | Sequence[str], **sizes: Any) -> Path:
    """Save a network of Transformers with random weights, and return its folder.

    Args:
        kind: Its class.
        folder: A folder that gets one of the kind's name.
        reads: The class of its processor of images, or texts that its tokenizer is trained on.
        sizes: Sizes of its config.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    folder = folder / kind
    settings = _settings(sizes)
    if isinstance(reads, str):
        getattr(transformers, reads)().save_pretrained(folder)
    else:
        tokenizer = trained_tokenizer(reads)
        tokenizer.save_pretrained(folder)
        settings |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    network = getattr(transformers, kind)
    network(network.config_class(**settings)).bfloat16().save_pretrained(folder)
    return folder


def clip_folder(folder: Path, texts: Sequence[str], **sizes: Any) -> Path:
    """Save a CLIP with random weights, from texts of its tokenizer and sizes of both towers; return its folder."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer, settings = trained_tokenizer(texts), _settings(sizes)
    # 2: a text is read at its token of the largest number.
    text = {**settings, "vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 2}
    torch.manual_seed(0)
    network = CLIPModel(CLIPConfig(text_config=text, vision_config={**settings, "patch_size": 16}))
    for part in (tokenizer, CLIPImageProcessor(), network):
        part.save_pretrained(folder)
    return folder


def _settings(sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a transformer's config with some sizes."""
    settings = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "initializer_range": 0.1, **sizes}
    return {**settings, "intermediate_size": 4 * settings["hidden_size"]}


def trained_tokenizer(texts: Sequence[str]) -> Any:
    """Return a tokenizer of bytes that was trained on texts and on random ones; letters are single tokens."""
    from transformers import PreTrainedTokenizerFast

    letters = [f"{letter} {letter}" for letter in string.ascii_letters]
    inner = byte_pairs([*random_texts(500, seed=0), *3 * letters, *3 * list(texts)], 4000, ["<pad>", "<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", model_max_length=1024)


def byte_pairs(texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str]) -> Any:
    """Return byte pairs that were trained on texts, after special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    settings: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(special_tokens), **settings)
    inner.train_from_iterator(texts, trainer)
    return inner


def random_texts(n: int, seed: int) -> npt.NDArray[Any]:
    """Return n texts of random words, object (n,)."""
    vocabulary, rng = np.random.default_rng(0), np.random.default_rng([1, seed])
    letters = list(string.ascii_lowercase)
    words = ["".join(vocabulary.choice(letters, 2 + number // 300)) for number in range(N_WORDS)]
    often = 1 / np.arange(1, N_WORDS + 1)
    lengths = np.exp(rng.uniform(math.log(FEWEST), math.log(MOST), n)).astype(int)
    texts = [" ".join(rng.choice(words, length, p=often / often.sum())) for length in lengths]
    return np.array(texts, dtype=object)


def random_pictures(n: int, seed: int) -> npt.NDArray[Any]:
    """Return n JPEG files of soft random patterns, bytes, object (n,)."""
    from PIL import Image

    rng = np.random.default_rng([2, seed])
    encoded = np.empty(n, dtype=object)
    for row in range(n):
        file = io.BytesIO()
        darkest, lightest = np.sort(rng.integers(0, 256, 2))  # so that answers of random networks differ
        pattern = Image.fromarray(rng.integers(darkest, lightest + 1, (9, 12, 3), dtype=np.uint8))
        pattern.resize((400, 300), Image.Resampling.BICUBIC).save(file, "JPEG")
        encoded[row] = file.getvalue()
    return encoded
