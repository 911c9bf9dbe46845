import numpy as np
import pytest
import torch
from batches import assert_same, column, encoded, question_batch, refused
from PIL import Image

from cauc_ray.models.encoders import FeaturesSpec, ImageEncoderSpec, TextEncoderSpec
from cauc_ray.models.kinds import RegisteredSpec
from cauc_ray.models.python import PythonSpec

transformers = pytest.importorskip("transformers")

RNG = np.random.default_rng(6)
IMAGES = [Image.fromarray(RNG.integers(0, 256, (40, 20 + row, 3), dtype=np.uint8)) for row in range(3)]
QUESTIONS = [
    ("What is the capital of France?", ["Paris", "Rome", "Madrid"], None),
    ("Which is a prime?", ["4", "7"], "Numbers above one without divisors are primes. " * 8),
    ("Why?", ["because", "no reason", "who knows", "it depends", "never"], ""),
]


# Of questions.


def test_a_text_encoder_embeds_as_sentence_transformers_does(minilm, capfd):
    model = TextEncoderSpec(model=str(minilm)).load()
    capfd.readouterr()
    unusable = [(None, ["a", "b"], None), ("What?", [], None), ("What?", None, "")]
    answers = model(question_batch(*QUESTIONS, *unusable))
    assert capfd.readouterr() == ("", "")
    assert answers.logits.dtype == np.float32
    assert answers.failures.keys() == {3, 4, 5}
    from sentence_transformers import SentenceTransformer

    texts = [
        "What is the capital of France?\nParis\nRome\nMadrid",
        f"{QUESTIONS[1][2]}\nWhich is a prime?\n4\n7",
        "Why?\nbecause\nno reason\nwho knows\nit depends\nnever",
    ]
    assert_same(answers.logits[:3], SentenceTransformer(str(minilm), device="cpu").encode(texts))


# Of images.

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SIZES |= {"image_size": 32, "patch_size": 8}


@pytest.fixture(scope="module", autouse=True)
def silent_library():
    """Keep the library's own tales of what the tests save off the output."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def saved(network, folder, processor=None):
    processor = processor or transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    return processor


def embeddings(spec):
    answers = spec.load()({"image": column(map(encoded, IMAGES))})
    assert answers.failures == {}
    return answers.logits


def inputs(processor):
    return processor(images=IMAGES, return_tensors="pt")["pixel_values"]


def test_an_image_encoder_answers_with_its_pooled_output(tmp_path, capfd):
    torch.manual_seed(0)
    network = transformers.ViTModel(transformers.ViTConfig(**SIZES)).eval()
    processor = saved(network, tmp_path / "vit")
    capfd.readouterr()
    vectors = embeddings(ImageEncoderSpec(model=str(tmp_path / "vit")))
    assert capfd.readouterr() == ("", "")
    with torch.inference_mode():
        assert_same(vectors, network(pixel_values=inputs(processor)).pooler_output.numpy())


def test_a_classifiers_weights_without_a_pooler_are_averaged_over_patches(tmp_path):
    """The library would draw the pooler at random: no two processes would embed alike."""
    torch.manual_seed(0)
    network = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, num_labels=4)).eval()
    processor = saved(network, tmp_path)
    spec = ImageEncoderSpec(model=str(tmp_path))
    vectors = embeddings(spec)
    torch.manual_seed(99)
    assert (embeddings(spec) == vectors).all()
    with torch.inference_mode():
        patches = network.vit(pixel_values=inputs(processor)).last_hidden_state
    assert_same(vectors, patches.mean(dim=1).numpy())


@pytest.mark.parametrize("tower_alone", [True, False])
def test_clip_answers_with_its_vision_tower(tmp_path, tower_alone):
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "vocab_size": 100,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        vision_config=SIZES,
        projection_dim=16,
    )
    network = transformers.CLIPModel(config).eval()
    tower = network.vision_model
    if tower_alone:
        network = transformers.CLIPVisionModel(config.vision_config).eval()
        tower = network
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    saved(network, tmp_path, processor)
    with torch.inference_mode():
        expected = tower(pixel_values=inputs(processor)).pooler_output.numpy()
    assert_same(embeddings(ImageEncoderSpec(model=str(tmp_path))), expected)


def test_a_convolutional_encoder_is_pooled_over_its_places(tmp_path):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    network = transformers.ResNetModel(config).eval()
    processor = saved(network, tmp_path)
    with torch.inference_mode():
        last = network(pixel_values=inputs(processor)).last_hidden_state
    assert_same(embeddings(ImageEncoderSpec(model=str(tmp_path))), last.mean(dim=(2, 3)).numpy())


def test_an_encoder_whose_weights_lack_a_layer_is_refused(tmp_path):
    shallow = transformers.ViTModel(transformers.ViTConfig(**{**SIZES, "num_hidden_layers": 1}))
    saved(shallow, tmp_path)
    transformers.ViTConfig(**SIZES).save_pretrained(tmp_path)
    assert "is not a complete image encoder: it lacks" in refused(ImageEncoderSpec(model=str(tmp_path)).load)


# Of a stage.


def test_kinds_that_show_no_last_layer_are_refused():
    python = FeaturesSpec(of=PythonSpec(kind="python", factory="user_models:by_x"))
    assert refused(python.load) == "a model of kind 'python' has no layer before its last one to read"
    registered = FeaturesSpec(of=RegisteredSpec(kind="elsewhere", setting=3))
    assert "kind 'elsewhere'" in refused(registered.load)
