import numpy as np
import pytest
import torch
from batches import assert_same, column, encoded, question_batch, refused
from PIL import Image

from cauc_ray.errors import DataError
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


def located(spec, model, folder):
    """Return an encoder by hub id or by a path relative to a folder."""
    return spec.model_validate({"model": model}, context={"folder": folder})


# Of questions.


def test_a_text_encoder_embeds_as_sentence_transformers_does(minilm, capfd):
    model = TextEncoderSpec(model=str(minilm)).load()
    capfd.readouterr()
    answers = model(question_batch(*QUESTIONS))
    assert capfd.readouterr() == ("", "")
    assert answers.logits.dtype == np.float32
    assert answers.failures == {}
    assert model.facts.logit_kind == "embedding"
    from sentence_transformers import SentenceTransformer

    texts = [
        "What is the capital of France?\nParis\nRome\nMadrid",
        f"{QUESTIONS[1][2]}\nWhich is a prime?\n4\n7",
        "Why?\nbecause\nno reason\nwho knows\nit depends\nnever",
    ]
    assert_same(answers.logits, SentenceTransformer(str(minilm), device="cpu").encode(texts))


def test_neighbours_and_batch_size_change_no_embedding(minilm):
    model = TextEncoderSpec(model=str(minilm)).load()
    rows = [(f"{text} {row}", choices, context) for row in range(6) for text, choices, context in QUESTIONS][:16]
    together = model(question_batch(*rows)).logits
    assert len(np.unique(together, axis=0)) == 16
    assert_same(np.concatenate([model(question_batch(row)).logits for row in rows]), together)
    assert_same(model(question_batch(*rows[::-1])).logits[::-1], together)


def test_rows_without_a_question_fail_alone(minilm):
    model = TextEncoderSpec(model=str(minilm)).load()
    answers = model(question_batch((None, ["a", "b"], None), QUESTIONS[0], ("What?", [], None), ("What?", None, "")))
    assert set(answers.failures) == {0, 2, 3}
    assert_same(answers.logits[[1]], model(question_batch(QUESTIONS[0])).logits)
    nothing = model(question_batch(*[(None, None, None)] * 2))
    assert set(nothing.failures) == {0, 1}
    assert len(nothing.logits) == 2
    with pytest.raises(DataError, match="no column 'question'; it has image"):
        model({"image": column([b"", b""])})
    assert located(TextEncoderSpec, minilm.name, minilm.parent).model == str(minilm.resolve())
    assert located(TextEncoderSpec, "org/name", minilm.parent).model == "org/name"
    assert "there is no such folder" in refused(TextEncoderSpec(model="/absent").load)


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
    found = embeddings(located(ImageEncoderSpec, "vit", tmp_path))
    assert capfd.readouterr() == ("", "")
    with torch.inference_mode():
        assert_same(found, network(pixel_values=inputs(processor)).pooler_output.numpy())


def test_a_classifiers_weights_without_a_pooler_are_averaged_over_patches(tmp_path):
    """The library would draw the pooler at random: no two processes would embed alike."""
    torch.manual_seed(0)
    network = transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, num_labels=4)).eval()
    processor = saved(network, tmp_path)
    spec = ImageEncoderSpec(model=str(tmp_path))
    found = embeddings(spec)
    torch.manual_seed(99)
    assert (embeddings(spec) == found).all()
    with torch.inference_mode():
        patches = network.vit(pixel_values=inputs(processor)).last_hidden_state
    assert_same(found, patches.mean(dim=1).numpy())


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


def test_an_image_encoder_that_is_not_to_be_had_is_refused(tmp_path):
    assert "there is no such folder" in refused(ImageEncoderSpec(model=str(tmp_path / "absent")).load)
    assert "'org/absent' cannot be loaded" in refused(ImageEncoderSpec(model="org/absent").load)
    shallow = transformers.ViTModel(transformers.ViTConfig(**{**SIZES, "num_hidden_layers": 1}))
    saved(shallow, tmp_path / "shallow")
    transformers.ViTConfig(**SIZES).save_pretrained(tmp_path / "shallow")
    assert "is not a complete image encoder: it lacks" in refused(
        ImageEncoderSpec(model=str(tmp_path / "shallow")).load
    )


# Of a stage.


def test_kinds_that_show_no_last_layer_are_refused():
    python = FeaturesSpec(of=PythonSpec(kind="python", factory="user_models:by_x"))
    assert refused(python.load) == "a model of kind 'python' has no layer before its last one to read"
    registered = FeaturesSpec(of=RegisteredSpec(kind="elsewhere", setting=3))
    assert "kind 'elsewhere'" in refused(registered.load)
