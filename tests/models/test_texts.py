"""Classifiers and encoders of texts by transformers: tiny checkpoints of real architectures, and a real encoder."""

import copy
from itertools import combinations, pairwise
from math import inf

import pytest
from batches import assert_same, column, question_batch, refused
from hypothesis import given
from hypothesis import strategies as st
from language_models import tiny_language_model
from pydantic import ValidationError
from tiny_networks import saved, text_classifier

from cauc_ray.models.answers import bucketed
from cauc_ray.models.encoders import FeaturesSpec, TextEncoderSpec
from cauc_ray.models.kind import Placement
from cauc_ray.models.python import PythonSpec
from cauc_ray.models.torchvision import TorchvisionSpec
from cauc_ray.models.transformers import TransformersClassifierSpec

torch = pytest.importorskip("torch")
NAMES = {0: "calm", 1: "angry", 2: "glad"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tiny_language_model(tmp_path_factory.mktemp("tokenizer")).tokenizer


def spec(folder, **settings):
    return TransformersClassifierSpec(kind="transformers-classifier", model=str(folder), **settings)


TEXTS = ["It broke", "Why was I charged twice for one and the same thing, of all things?", "", "thanks " * 200]


@pytest.mark.parametrize("family", ["bert", "llama", "roberta", "xlm-roberta", "camembert"])
@pytest.mark.parametrize("pair", [False, True])
def test_it_answers_as_the_library_does_for_each_text_alone(tokenizer, tmp_path, family, pair):
    net = text_classifier(family, len(tokenizer), id2label=NAMES)
    columns = ("premise", "hypothesis") if pair else ("text",)
    model = spec(saved(tmp_path, net, tokenizer), text=columns, batch_tokens=100).load()
    texts = [TEXTS, TEXTS[::-1]][: len(columns)]
    answers = model({name: column([*row_texts, None]) for name, row_texts in zip(columns, texts, strict=True)})
    assert answers.failures == {4: "it has no text in 'premise'" if pair else "it has no text in 'text'"}
    assert model.facts.labels == tuple(NAMES.values())
    for row, row_texts in enumerate(zip(*texts, strict=True)):
        tokens = tokenizer(*row_texts, truncation=True, max_length=64, return_tensors="pt")
        tokens.pop("token_type_ids", None) if family == "llama" else None
        if tokens["input_ids"].shape[1]:
            with torch.inference_mode():
                expected = net(**tokens).logits[0].numpy()
            assert answers.logits[row] == pytest.approx(expected, abs=1e-4)


def test_settings_reach_the_library(tokenizer, tmp_path):
    saved(tmp_path / "inner", text_classifier("bert", len(tokenizer)), tokenizer)
    inner = spec(tmp_path, settings={"subfolder": "inner", "attn_implementation": "eager"})
    assert inner.load()({"text": column(["It broke"])}).failures == {}
    assert inner.identity != spec(tmp_path, settings={"subfolder": "inner"}).identity
    assert "cannot be loaded" in refused(spec(tmp_path, settings={"subfolder": "outer"}).load)
    with pytest.raises(ValidationError, match="revision does not belong there"):
        spec(tmp_path, settings={"revision": "main"})


def test_weights_that_no_gpu_of_the_stage_can_hold_are_refused_before_they_are_loaded(tokenizer, tmp_path, monkeypatch):
    network = text_classifier("bert", len(tokenizer))
    folder = saved(tmp_path, network, tokenizer)
    (folder / "model.safetensors").unlink()  # the config tells
    gpu = {"is_available": True, "Stream": None, "set_stream": None, "is_bf16_supported": True, "device_count": 2}
    for name, value in (gpu | {"mem_get_info": (20_000, 20_000)}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    n_bytes = 2 * sum(p.numel() for p in network.parameters())
    advice = f"give it num_gpus: {n_bytes // 20_000 + 1}"
    for n_gpus, gpus in ((0.5, "0.5 GPUs of"), (1, "1 GPU of"), (2, "2 GPUs of")):
        message = refused(lambda: spec(folder).load(Placement(num_gpus=n_gpus)))  # noqa: B023
        assert gpus in message
        assert advice in message


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(20, 200), st.sampled_from([0, 32, 2048]))
def test_no_other_passes_are_cheaper(lengths, most, pass_tokens):
    def cost(passes):
        sizes = [(len(rows), max(lengths[row] for row in rows)) for rows in passes]
        fits = all(n == 1 or n * longest <= most for n, longest in sizes)
        return sum(n * longest + pass_tokens for n, longest in sizes) if fits else inf

    passes = list(bucketed(dict(enumerate(lengths)), most, pass_tokens))
    assert sorted(row for rows in passes for row in rows) == list(range(len(lengths)))
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    cuts = [at for n in range(len(lengths)) for at in combinations(range(1, len(lengths)), n)]
    splits = ([by_length[a:b] for a, b in pairwise([0, *cut, len(lengths)])] for cut in cuts)
    assert cost(passes) == min(map(cost, splits))


# Encoders.

QUESTIONS = [
    ("What is the capital of France?", ["Paris", "Rome", "Madrid"], None),
    ("Which is a prime?", ["4", "7"], "Numbers above one without divisors are primes. " * 8),
    ("Why?", ["because", "no reason"], ""),
]
ENCODED = [
    "What is the capital of France?\nParis\nRome\nMadrid",
    f"{QUESTIONS[1][2]}\nWhich is a prime?\n4\n7",
    "Why?\nbecause\nno reason",
]


def test_a_text_encoder_embeds_questions_as_sentence_transformers_does(minilm, capfd):
    model = TextEncoderSpec(model=str(minilm)).load()
    capfd.readouterr()
    unusable = [(None, ["a", "b"], None), ("What?", [], None), ("What?", None, "")]
    answers = model(question_batch(*QUESTIONS, *unusable))
    assert capfd.readouterr() == ("", "")
    assert answers.failures.keys() == {3, 4, 5}
    from sentence_transformers import SentenceTransformer

    assert_same(answers.logits[:3], SentenceTransformer(str(minilm), device="cpu").encode(ENCODED))


def test_a_text_encoder_computes_in_the_recorded_precision_whatever_that_of_its_file(tokenizer, tmp_path):
    padded = copy.copy(tokenizer)
    padded.pad_token = tokenizer.eos_token
    folder = saved(tmp_path, text_classifier("bert", len(tokenizer)).bfloat16(), padded)
    model = TextEncoderSpec(model=str(folder), columns=("text",), required=()).load()
    vectors = torch.from_numpy(model({"text": column(["It broke"])}).logits)
    assert model.facts.dtype == "float32"
    assert not torch.equal(vectors, vectors.bfloat16().float())


def test_a_model_without_a_last_layer_has_no_features(tmp_path):
    from torchvision.models import squeezenet1_1

    weights = tmp_path / "w.pth"
    torch.save(squeezenet1_1(weights=None).state_dict(), weights)
    for model, words in (
        (PythonSpec(kind="python", factory="user_models:by_x"), "kind 'python' has no layer before its last"),
        (TorchvisionSpec(kind="torchvision", arch="squeezenet1_1", weights=str(weights)), "no linear layer"),
    ):
        assert words in refused(FeaturesSpec(of=model).load)
