"""Networks of images in transformers, tiny checkpoints of real architectures: against the library's forward pass."""

import json
import warnings

import numpy as np
import pytest
from batches import assert_same, column, encoded
from language_models import tiny_language_model
from PIL import Image
from tiny_networks import SQUARE, image_network, saved

from cauc_ray.models.encoders import FeaturesSpec, ImageEncoderSpec
from cauc_ray.models.image_networks import split_preprocessing
from cauc_ray.models.pool import pool_of
from cauc_ray.models.transformers import TransformersImageSpec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RNG = np.random.default_rng(6)
IMAGES = [Image.fromarray(RNG.integers(0, 256, (40, 20 + row, 3), dtype=np.uint8)) for row in range(4)]
COLUMN = column(map(encoded, IMAGES))


@pytest.fixture(scope="module", autouse=True)
def silent_library():
    """Keep the library's own reports of what the tests save off the output."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def pixels(processor):
    return {"pixel_values": processor(images=IMAGES, return_tensors="pt")["pixel_values"]}


# The kind transformers-image.


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Save a classifier with its preprocessing; return the folder, the network and the processor."""
    folder = tmp_path_factory.mktemp("hub") / "vit"
    network, processor = image_network("classifier", num_labels=5)
    return saved(folder, network, processor), network, processor


def classifier(model):
    return TransformersImageSpec(kind="transformers-image", model=str(model))


def test_a_classifier_and_its_features_are_those_of_the_library(vit, capfd):
    folder, net, processor = vit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = classifier(folder).load()
        answers = model({"image": COLUMN})
        (_, pixels_on_host), *_ = model.prepare({"image": COLUMN})[1]
        features = FeaturesSpec(of=classifier(folder)).load()({"image": COLUMN}).logits
    with torch.inference_mode():
        assert_same(answers.logits, net(**pixels(processor)).logits.numpy())
        assert_same(features, net.vit(**pixels(processor)).last_hidden_state[:, 0].numpy())
    assert model.facts.params_b == pytest.approx(sum(p.numel() for p in net.parameters()) / 1e9)
    assert model.facts.gflops is None
    assert pixels_on_host.dtype == torch.uint8  # which the device normalises
    assert capfd.readouterr() == ("", "")


def test_images_of_any_shape_are_read_by_a_processor(vit):
    """One or three pixels look like a channel to a careless reader."""
    grey = [np.full(shape, 7, dtype=np.uint8) for shape in ((1, 1, 3), (3, 9, 3), (9, 3, 3), (3, 3), (1, 90))]
    logits = classifier(vit[0]).load()({"image": column(grey)}).logits
    assert_same(logits, np.repeat(logits[:1], len(grey), axis=0))


@pytest.mark.parametrize("steps", [{"do_normalize": False}, {"do_rescale": False}, {"image_std": [0.2, 0.4, 0.6]}])
def test_the_device_takes_the_last_steps_of_any_processor(vit, tmp_path, steps):
    _, net, _ = vit
    processor = transformers.ViTImageProcessor(size=SQUARE, **steps)
    saved(tmp_path, net, processor)
    with torch.inference_mode():
        assert_same(classifier(tmp_path).load()({"image": COLUMN}).logits, net(**pixels(processor)).logits.numpy())


def test_a_processor_whose_last_steps_are_its_own_does_them_on_the_host():
    def processor(images, return_tensors, **settings):
        return {"pixel_values": torch.from_numpy(np.array(images)).permute(2, 0, 1)[None] / 127.5 - 1}

    preprocess, scale = split_preprocessing(processor)
    assert scale is None
    assert preprocess(np.zeros((2, 3, 3), np.uint8)).unique().tolist() == [-1.0]


@pytest.mark.parametrize(
    ("id2label", "labels"),
    [
        ({str(n): f"LABEL_{n}" for n in range(5)}, None),
        ({"4": "e", "3": "d", "0": "a", "1": "b", "2": "c"}, ("a", "b", "c", "d", "e")),
        ({"0": 0, "1": 1, "2": 2, "3": 3, "4": 4}, ("0", "1", "2", "3", "4")),
        ({"0": "a", "1": "b", "2": "c", "3": "d", "5": "e"}, None),
    ],
)
def test_a_classifier_names_its_options_if_its_config_does(vit, tmp_path, id2label, labels):
    saved(tmp_path, *vit[1:])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": id2label, "label2id": {}}))
    model = classifier(tmp_path).load()
    assert model.facts.labels == labels
    assert model({"image": COLUMN}).logits.shape == (4, 5)
    assert ImageEncoderSpec(model=str(tmp_path)).load().facts.labels is None  # an embedding has no options


# The kind vision-encoder.

POOLED = {
    "vit": lambda net, inputs: net(**inputs).pooler_output,
    "clip": lambda net, inputs: net.vision_model(**inputs).pooler_output,
    "clip tower": lambda net, inputs: net(**inputs).pooler_output,
    "resnet": lambda net, inputs: net(**inputs).last_hidden_state.mean(dim=(2, 3)),
    # The library would draw a pooler at random: no two processes would embed alike.
    "classifier": lambda net, inputs: net.vit(**inputs).last_hidden_state.mean(dim=1),
}


@pytest.mark.parametrize("family", POOLED)
def test_an_encoder_answers_with_its_pooled_output_or_a_mean_over_places(tmp_path, family, capfd):
    net, processor = image_network(family)
    saved(tmp_path, net, processor)
    capfd.readouterr()
    answers = ImageEncoderSpec(model=str(tmp_path)).load()({"image": COLUMN})
    assert capfd.readouterr() == ("", "")
    with torch.inference_mode():
        assert_same(answers.logits, POOLED[family](net, pixels(processor)).numpy())


# The kind transformers-zero-shot.

LABELS = {"cat": "a small animal that purrs", "dog": "", "red car": "it has wheels"}
PHOTOS = ["a photo of a cat", "a photo of a dog", "a photo of a red car"]
DESCRIBED = ["cat, a small animal that purrs", "dog, whatever", "red car, it has wheels"]


@pytest.mark.parametrize("family", ["clip", "siglip"])
@pytest.mark.parametrize(
    ("settings", "texts"), [({}, PHOTOS), ({"prompt": "{{ label }}, {{ description or 'whatever' }}"}, DESCRIBED)]
)
def test_similarities_of_images_and_labels_are_those_of_the_library(tmp_path, family, settings, texts):
    tokenizer = tiny_language_model(tmp_path / "text").tokenizer
    tokenizer.pad_token = tokenizer.eos_token
    net, processor = image_network(family, len(tokenizer))
    saved(tmp_path / "m", net, tokenizer, processor)

    def logits_of(**more):
        stage = {"name": "a", "model": {"kind": "transformers-zero-shot", "model": "m", **settings, **more}}
        pool = pool_of({"name": "p", "task": "image-classification", "labels": LABELS, "stages": [stage]}, tmp_path)
        assert pool.label_names == ("cat", "dog", "red car")
        return pool.stages[0].model.load()({"image": COLUMN}).logits

    padding = "max_length" if family == "siglip" else True
    tokens = tokenizer(texts, padding=padding, max_length=24, truncation=True, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    with torch.inference_mode():
        expected = net(**pixels(processor), **tokens).logits_per_image.numpy()
    assert expected.std(axis=1).min() > 1e-4
    assert logits_of() == pytest.approx(expected, abs=1e-3)
    # In bfloat16 only the towers are rounded: similarities are scaled by up to 100.
    logits = torch.from_numpy(logits_of(dtype="bfloat16"))
    similarities = ((logits - getattr(net, "logit_bias", 0)) / net.logit_scale.exp()).detach()
    assert similarities.numpy() != pytest.approx(similarities.bfloat16().float().numpy(), rel=1e-4)
