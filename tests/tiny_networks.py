"""Tiny checkpoints of real architectures, with the same random weights each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t

TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
VISION = {**TOWER, "image_size": 32, "patch_size": 8}
TEXT = {**TOWER, "max_position_embeddings": 24, "projection_size": 32}
TEXT |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
SQUARE = {"height": 32, "width": 32}


def image_network(family: str, vocabulary: int = 100, **config: Any) -> tuple[Any, Any]:
    """Return a network that sees images, and its image processor."""
    crop, square = {"size": {"shortest_edge": 32}, "crop_size": SQUARE}, t.ViTImageProcessor(size=SQUARE)
    resnet = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    both = {"text_config": {**TEXT, "vocab_size": vocabulary}, "vision_config": VISION}
    clip = t.CLIPConfig(**both, projection_dim=16)
    vit = t.ViTConfig(**VISION, **config)
    makers = {
        "vit": lambda: (t.ViTModel(vit), square),
        "classifier": lambda: (t.ViTForImageClassification(vit), square),
        "clip": lambda: (t.CLIPModel(clip), t.CLIPImageProcessor(**crop)),
        "clip tower": lambda: (t.CLIPVisionModel(clip.vision_config), t.CLIPImageProcessor(**crop)),
        "siglip": lambda: (t.SiglipModel(t.SiglipConfig(**both)), t.SiglipImageProcessor(size=SQUARE)),
        "resnet": lambda: (t.ResNetModel(t.ResNetConfig(**resnet)), square),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network, processor = makers[family]()
        if family == "classifier":
            torch.nn.init.normal_(network.classifier.weight)
    if family == "siglip":
        torch.nn.init.constant_(network.logit_scale, 2.0)
        torch.nn.init.constant_(network.logit_bias, -3.0)
    return network.eval(), processor


def text_classifier(family: str, vocabulary: int, **config: Any) -> Any:
    """Return a network that classifies texts."""
    settings = {"vocab_size": vocabulary, "max_position_embeddings": 64, **TOWER, **config}
    if family == "llama":
        settings |= {"num_key_value_heads": 2, "initializer_range": 0.3}
    elif family != "bert":  # positions begin after that of padding
        settings |= {"max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = t.AutoModelForSequenceClassification.from_config(t.AutoConfig.for_model(family, **settings))
    return network.eval()


def saved(folder: Path, *parts: Any) -> Path:
    """Save networks and what reads their inputs in a folder."""
    for part in parts:
        part.save_pretrained(folder)
    return folder
