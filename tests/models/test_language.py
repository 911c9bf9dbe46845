"""Language models that choose an option: networks of random weights, and SmolLM2-135M."""

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from batches import column, question_batch
from language_models import LETTERS, SMOLLM2_FILE, Loaded, question_prompt, smollm2_folder, tiny_network
from plain_scores import plain_scores

from cauc_ray.errors import ConfigError
from cauc_ray.models.prompts import Prompts
from cauc_ray.models.transformers import TransformersChoiceSpec

torch = pytest.importorskip("torch")
from cauc_ray.models.language import ChoiceModel  # noqa: E402

# Of float32 logits in the tens: passes of another shape add the same products in another order.
TOLERANCE = 2e-3


def spec(model, **settings):
    return TransformersChoiceSpec(kind="transformers-choice", model=str(model), **settings)


@pytest.fixture
def loaded(tiny_model):
    return lambda **settings: spec(tiny_model.folder, **settings).load()


# Of two to five options, and of very different lengths.
MIXED = [
    ("Why?", ["yes", "no"]),
    ("Which is the largest of the following numbers, " + "of which there are many, " * 9, ["4", "7", "1", "9", "12"]),
    ("Which is a fruit?", ["stone", "apple", "a long way home through the rain"], "Of food."),
    ("And then?", ["a", "b", "c", "d"], "They left the house, and locked the door. " * 6),
]


@pytest.mark.parametrize("options", ["letter", "name"])
@pytest.mark.parametrize("chat", [False, True])
def test_what_all_prompts_begin_with_is_run_once(tiny_model, options, chat):
    """The list of labels and the examples."""
    labels = {"billing": "about invoices and refunds", "bug": "it worked before", "other": ""}
    examples = [{"text": f"example number {n}", "label": "bug"} for n in range(3)]
    settings = {"labels": labels, "examples": examples, "prompt": "Ticket: {{ text }}", "options": options}
    choice_spec = spec(tiny_model.folder, chat_template=chat, **settings)
    texts = column(["It broke", "Why was I charged twice for the very same thing?", "x"])
    n_tokens = []
    hook = tiny_model.network.register_forward_pre_hook(
        lambda module, args, inputs: n_tokens.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    model = ChoiceModel(choice_spec, tiny_model.tokenizer, tiny_model.network)
    for rows in (slice(None), [0], [2]):
        assert not model({"text": texts[rows]}).failures
    hook.remove()
    head = max(n_tokens)
    assert head > 60
    assert n_tokens.count(head) == 1
    assert max(n for n in n_tokens if n != head) < head


@pytest.mark.parametrize("n_tokens", [0, 100, 300])
def test_copies_of_the_cache_fit_into_memory(tiny_model, monkeypatch, n_tokens):
    """Of options that are longer than one token, each has a copy of its prompt's keys and values."""
    network, config = tiny_model.network, tiny_model.network.config
    head_size = config.hidden_size // config.num_attention_heads
    n_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * 4
    model = ChoiceModel(spec(tiny_model.folder, options="text"), tiny_model.tokenizer, network)
    plain = model(question_batch(*MIXED)).logits
    monkeypatch.setattr("cauc_ray.models.language.free_bytes", lambda device, num_gpus: 4 * n_tokens * n_bytes)
    shapes = []
    hook = network.register_forward_pre_hook(
        lambda module, args, inputs: shapes.append(inputs["attention_mask"].shape), with_kwargs=True
    )
    model = ChoiceModel(spec(tiny_model.folder, options="text"), tiny_model.tokenizer, network)
    answers = model(question_batch(*MIXED))
    hook.remove()
    assert answers.logits == pytest.approx(plain, abs=TOLERANCE)
    assert all(n_copies == 1 or n_copies * width <= n_tokens for n_copies, width in shapes)
    assert n_tokens == 0 or any(n_copies > 1 for n_copies, _ in shapes)


def test_logits_are_not_rounded_to_the_precision_of_the_weights(tiny_model):
    network, states = copy.deepcopy(tiny_model.network).bfloat16(), []
    network.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    model = ChoiceModel(spec(tiny_model.folder), tiny_model.tokenizer, network)
    answers = model(question_batch(("Why?", ["yes", "no"])))
    logits = states[-1][0, -1].float() @ network.get_output_embeddings().weight.float().T
    letters = [tiny_model.tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "AB"]
    assert answers.logits[0] == pytest.approx(logits[letters].detach().numpy(), rel=1e-5)
    assert model.facts.dtype == "bfloat16"


@pytest.mark.parametrize("options", ["letter", "text"])
def test_rows_that_cannot_be_asked_are_reported_and_the_others_answered(loaded, tiny_model, options):
    good, fits = ("Which is a fruit?", ["stone", "apple"]), ("Which number?", [str(n) for n in range(len(LETTERS))])
    long, sixty = ("word " * 10_000, ["yes", "no"]), ("Which number?", [str(n) for n in range(60)])
    empty = ("Which?", ["a", " "])
    rows = [good, long, (None, ["yes", "no"]), ("Why?", None), ("Why?", ["because"]), ("Why?", ["so", None])]
    model = loaded(options=options)
    answers = model(question_batch(*rows, sixty, empty, fits, good))
    assert answers.failures.keys() == {1, 2, 3, 4, 5, 6 if options == "letter" else 7}
    longest = tiny_model.network.config.max_position_embeddings
    assert f"tokens; the model takes up to {longest:,}" in answers.failures[1]
    assert answers.n_options[8:].tolist() == [len(LETTERS), 2]
    assert np.isfinite(answers.logits[8, : len(LETTERS)]).all()
    assert options == "letter" or np.isfinite(answers.logits[6, :60]).all()
    limited = loaded(options=options, max_tokens=50, chat_template=False)
    failures = limited(question_batch(good, ("Why " * 60, ["a", "b"]))).failures
    assert failures.keys() == {1}
    assert "the model takes up to 50" in failures[1]


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "qwen3_vl", "gemma3", "gemma4", "qwen3_5"])
@pytest.mark.parametrize("options", ["letter", "text"])
def test_every_architecture_answers_texts_whatever_their_padding(tiny_model, tmp_path, family, options):
    """Llama sees distances between tokens only; GPT-2 learns a vector for each position. Some also see images."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = tiny_network(family, len(tiny_model.tokenizer)).eval()
    oracle = replace(tiny_model, network=network).save(tmp_path)
    if (family, options) == ("qwen3_5", "text"):
        with pytest.raises(ConfigError, match="has no cache for options to share; use options: letter"):
            spec(tmp_path, options=options, chat_template=False).load()
        return
    model = spec(tmp_path, options=options, chat_template=False, batch_tokens=300).load()  # in several passes
    answers = model(question_batch(*MIXED))
    for row, question in enumerate(MIXED):
        alone = model(question_batch(question))
        assert answers.n_options[row] == len(question[1])
        assert answers.logits[row, : len(question[1])] == pytest.approx(alone.logits[0], abs=TOLERANCE)
    if options == "letter":
        prompt = tiny_model.tokenizer.encode(question_prompt(*MIXED[0]))
        letters = [tiny_model.tokenizer.encode(f" {letter}")[-1] for letter in "AB"]
        assert answers.logits[0, :2] == pytest.approx(oracle.logits(prompt)[-1][letters], abs=TOLERANCE)
    unused = ("vision", "visual", "projector")  # in the names of what reads images
    of_text = [w.numel() for name, w in network.named_parameters() if not any(part in name for part in unused)]
    assert model.facts.params_b == sum(of_text) / 1e9


def test_models_that_threads_load_at_once_have_their_tied_weights(tiny_model, tmp_path):
    """As stages of a local service do. The library replaces functions of the process while it loads one."""
    network = tiny_network("qwen2", len(tiny_model.tokenizer), tie_word_embeddings=True)
    replace(tiny_model, network=network).save(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        models = list(threads.map(lambda _: spec(tmp_path).load(), range(12)))
    answers = [model(question_batch(*MIXED)).logits for model in (*models[-2:], spec(tmp_path).load())]
    assert np.array_equal(answers[0], answers[2])
    assert np.array_equal(answers[1], answers[2])


@pytest.mark.soak("language-models")
def test_a_real_language_model_scores_letters_names_and_texts_as_a_plain_forward_pass_does(monkeypatch):
    """SmolLM2-135M from its GGUF file, which is loaded once: the oracle computes with the same weights."""
    folder, parts = smollm2_folder(), []

    def noted(*arguments, **more):
        parts.extend(arguments)
        return ChoiceModel(*arguments, **more)

    monkeypatch.setattr("cauc_ray.models.language.ChoiceModel", noted)
    model = spec(folder, gguf_file=SMOLLM2_FILE).load()
    oracle = Loaded(folder, parts[1], parts[2])
    assert model.facts.params_b == pytest.approx(0.1345, rel=1e-3)
    assert SMOLLM2_FILE in model.facts.source
    rows = question_batch(*MIXED[:3])
    for options, chat in (("letter", True), ("name", True), ("name", False), ("text", False)):
        settings = spec(oracle.folder, options=options, chat_template=chat)
        answers = ChoiceModel(settings, oracle.tokenizer, oracle.network)(rows)
        for row, question in Prompts(settings, chat)(rows)[0].items():
            expected = plain_scores(oracle, settings, question, chat=chat)
            assert answers.logits[row, : len(expected)] == pytest.approx(expected, abs=TOLERANCE)
