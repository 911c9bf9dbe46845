"""Images against texts of labels: tiny CLIP and SigLIP checkpoints, against the library's own forward pass."""

import numpy as np
import pytest
from batches import column, encoded
from language_models import tiny_language_model
from PIL import Image

from cauc_ray.models.pool import pool_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
LABELS = {"cat": "a small animal that purrs", "dog": "", "red car": "it has wheels"}
RNG = np.random.default_rng(3)
IMAGES = [Image.fromarray(RNG.integers(0, 256, (40 + row, 30, 3), dtype=np.uint8)) for row in range(4)]


def saved(family, folder):
    """Save a tiny checkpoint with random weights; return the network, its tokenizer and its image processor."""
    tokenizer = tiny_language_model(folder / "text").tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**sizes, "vocab_size": len(tokenizer), "max_position_embeddings": 24, "projection_size": 32}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if family == "clip":
            config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
            network = transformers.CLIPModel(config)
            crop = {"height": 32, "width": 32}
            processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=crop)
        else:
            network = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
            torch.nn.init.constant_(network.logit_scale, 2.0)
            torch.nn.init.constant_(network.logit_bias, -3.0)
            processor = transformers.SiglipImageProcessor(size={"height": 32, "width": 32})
    for part in (network, tokenizer, processor):
        part.save_pretrained(folder)
    return network.eval(), tokenizer, processor


def pool(folder, **settings):
    model = {"kind": "transformers-zero-shot", "model": "m", **settings}
    stages = [{"name": "a", "model": model}, {"name": "b", "model": {"kind": "torchvision", "arch": "resnet18"}}]
    return pool_of({"name": "p", "task": "image-classification", "labels": LABELS, "stages": stages}, folder)


@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize("prompt", [None, "{{ label }}, {{ description or 'whatever' }}"])
def test_similarities_are_those_of_a_plain_forward_pass(tmp_path, family, prompt):
    network, tokenizer, processor = saved(family, tmp_path / "m")
    read = pool(tmp_path, **({"prompt": prompt} if prompt else {}))
    model = read.stages[0].model.load()
    answers = model({"image": column([*map(encoded, IMAGES), b"no image"])})
    texts = ["a photo of a cat", "a photo of a dog", "a photo of a red car"]
    if prompt:
        texts = ["cat, a small animal that purrs", "dog, whatever", "red car, it has wheels"]
    padding = "max_length" if family == "siglip" else True
    tokens = tokenizer(texts, padding=padding, max_length=24, truncation=True, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    pixels = processor(images=IMAGES, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        expected = network(pixel_values=pixels, **tokens).logits_per_image.numpy()
    assert expected.std(axis=1).min() > 1e-4
    assert answers.logits[:4] == pytest.approx(expected, abs=1e-3)
    assert answers.failures.keys() == {4}
    assert model.facts.labels == read.label_names == ("cat", "dog", "red car")
