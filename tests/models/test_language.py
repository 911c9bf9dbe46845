"""Language models that choose an option: one of random weights, and SmolLM2-135M, on real and made-up questions."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from batches import column, question_batch
from conftest import SHARED_DATA
from fake_gpu import Gpu
from language_models import LETTERS, SMOLLM2_FILE, Loaded, question_prompt, smollm2_folder, tiny_network
from scipy.special import log_softmax

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.costs import measured
from cauc_ray.models.prompts import Prompts
from cauc_ray.models.transformers import TransformersChoiceSpec

torch = pytest.importorskip("torch")
QUESTIONS = SHARED_DATA / "questions"
# Of float32 logits in the tens: passes of another shape add the same products in another order.
TOLERANCE = 2e-3


def spec(model, **settings):
    return TransformersChoiceSpec(kind="transformers-choice", model=str(model), **settings)


@pytest.fixture
def loaded(language_model):
    return lambda **settings: spec(language_model.folder, **settings).load()


def real_questions(n):
    """Return n real questions of two to five options, of very different lengths."""
    if not QUESTIONS.is_dir():
        pytest.skip("the real questions (../shared/data/questions) are not here")
    rows = []
    for task, split in (("piqa", "validation"), ("social_iqa", "validation"), ("mathqa", "test"), ("logiqa", "test")):
        table = pq.read_table(QUESTIONS / task / f"{split}.parquet").slice(7, n // 4).to_pylist()
        rows += [(row["question"], row["choices"], row["context"]) for row in table]
    return [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]


def one_by_one(model, questions):
    return [model(question_batch(question)).logits[0] for question in questions]


def assert_same_answers(rows, answers, questions):
    for place, (row, question) in enumerate(zip(rows, questions, strict=True)):
        k = len(question[1])
        assert answers.n_options[place] == k
        assert np.isneginf(answers.logits[place, k:]).all()
        assert answers.logits[place, :k] == pytest.approx(row[:k], abs=TOLERANCE)


@pytest.mark.parametrize("options", ["letter", "text"])
def test_batch_size_padding_and_bucketing_change_no_answer(loaded, options):
    questions = real_questions(8)
    assert {len(q[1]) for q in questions} == {2, 3, 4, 5}
    alone = one_by_one(loaded(options=options), questions)
    together = loaded(options=options)(question_batch(*questions))  # sorted by length, in passes of many
    assert_same_answers(alone, together, questions)
    narrow = loaded(options=options, batch_tokens=300)  # passes of one to a few, here in another order
    assert_same_answers(alone[::-1], narrow(question_batch(*questions[::-1])), questions[::-1])
    best = [row[: len(q[1])].argmax() for row, q in zip(alone, questions, strict=True)]
    assert together.logits.argmax(axis=1).tolist() == best


@pytest.mark.parametrize("options", ["letter", "text"])
def test_device_time_is_of_every_forward_pass_and_of_nothing_else(tiny_model, options):
    """The device's clock goes on by a second in each of the network's passes, and at no other time."""
    from cauc_ray.models.language import ChoiceModel

    gpu, passes, network = Gpu(), [], tiny_model.network
    settings = spec(tiny_model.folder, options=options, batch_tokens=1)
    model = ChoiceModel(settings, tiny_model.tokenizer, network, gpu.event)

    def run(network, inputs):
        passes.append(1)
        gpu.now_s += 1.0

    hook = network.register_forward_pre_hook(run)
    try:
        answers = model(question_batch(("Is it?", ["yes it is", "no"]), ("Which is more?", ["one", "a pair of them"])))
    finally:
        hook.remove()
    assert answers.device_s == len(passes) == (2 if options == "letter" else 4)


@pytest.mark.parametrize("options", ["letter", "text"])
def test_padding_shifts_no_position_of_a_network_that_numbers_them(tiny_model, tmp_path, options):
    """Llama sees distances between tokens only; GPT-2 learns a vector for each position."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = GPT2LMHeadModel(GPT2Config(vocab_size=len(tiny_model.tokenizer), **sizes, **ends)).eval()
    model = spec(replace(tiny_model, network=network).save(tmp_path).folder, options=options).load()
    questions = [("Why?", ["yes", "no"]), ("Why, of all things?", ["so", "it depends", "x"]), ("?", ["a", "b"])]
    assert_same_answers(one_by_one(model, questions), model(question_batch(*questions)), questions)


@pytest.mark.parametrize("options", ["letter", "name"])
@pytest.mark.parametrize("chat", [False, True])
def test_what_all_prompts_begin_with_is_run_once(language_model, options, chat):
    """The list of labels and the examples; the answers are those of a network that sees every prompt whole."""
    labels = {"billing": "about invoices and refunds", "bug": "it worked before", "other": ""}
    examples = [{"text": f"example number {n}", "label": "bug"} for n in range(3)]
    settings = {"labels": labels, "examples": examples, "prompt": "Ticket: {{ text }}", "options": options}
    from cauc_ray.models.language import ChoiceModel

    choice_spec = spec(language_model.folder, chat_template=chat, **settings)
    texts = column(["It broke", "Why was I charged twice for the very same thing?", "x"])
    n_tokens = []
    hook = language_model.network.register_forward_pre_hook(
        lambda module, args, inputs: n_tokens.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    model = ChoiceModel(choice_spec, language_model.tokenizer, language_model.network)
    answers = [model({"text": texts}).logits, np.concatenate([model({"text": texts[[n]]}).logits for n in range(3)])]
    hook.remove()
    head = max(n_tokens)
    assert head > 60
    assert n_tokens.count(head) == 1
    assert max(n for n in n_tokens if n != head) < head
    prompts, _ = Prompts(choice_spec, chat)({"text": texts})
    for row, asked in prompts.items():
        tokens = language_model.chat(asked.text) if chat else language_model.tokenizer.encode(asked.text)
        for option, name in enumerate(labels):
            text = LETTERS[option] if options == "letter" else name
            option_tokens = language_model.tokenizer.encode(text if chat else f" {text}")
            logits = language_model.logits(tokens + option_tokens).astype(np.float64)[len(tokens) - 1 : -1]
            if options == "letter":
                expected = logits[-1, option_tokens[-1]]
            else:
                expected = log_softmax(logits, axis=1)[np.arange(len(option_tokens)), option_tokens].sum()
            for vector in answers:
                assert vector[row, option] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("chat", [False, True])
def test_letters_get_the_next_tokens_raw_logits(loaded, language_model, chat):
    model = loaded(chat_template=chat)
    assert_letters_logits(model, language_model, chat)
    facts = model.facts
    assert facts.logit_kind == "raw next-token logits of the options' letters"
    assert facts.params_b == pytest.approx(sum(p.numel() for p in language_model.network.parameters()) / 1e9)
    assert str(language_model.folder) in facts.source
    assert f"float32, {'through its' if chat else 'without a'} chat template" in facts.source


def assert_letters_logits(model, oracle, chat):
    questions = [("Which is a fruit?", ["stone", "apple", "car"]), ("1 + 1?", ["1", "2"], "Numbers.")]
    answers = model(question_batch(*questions))
    encode = oracle.tokenizer.encode
    for row, question in enumerate(questions):
        prompt = question_prompt(*question, chat=chat)
        tokens = oracle.chat(prompt) if chat else encode(prompt)
        letters = [encode(letter if chat else f"{prompt} {letter}")[-1] for letter in "ABC"]
        k = len(question[1])
        assert answers.logits[row, :k] == pytest.approx(oracle.logits(tokens)[-1][letters][:k], abs=TOLERANCE)


@pytest.mark.parametrize("options", ["name", "text"])
def test_longer_options_get_their_log_likelihood(loaded, language_model, options):
    assert_log_likelihoods(loaded(options=options, chat_template=False), language_model, options)


def assert_log_likelihoods(model, oracle, options):
    """Expect the sum over the tokens of a name; of a text that the model has not been shown, the sum per byte."""
    choices = ["honey", "concrete walls and große Brücken", "x"]
    answers = model(question_batch(("What do bees make?", choices, "About insects.")))
    encode = oracle.tokenizer.encode
    listed = "".join(f"- {choice}\n" for choice in choices) if options == "name" else ""
    prompt = encode(f"About insects.\nQuestion: What do bees make?\n{listed}Answer:")
    for place, choice in enumerate(choices):
        tokens = encode(f" {choice}")
        logs = log_softmax(oracle.logits(prompt + tokens).astype(np.float64), axis=1)
        total = sum(logs[len(prompt) + step - 1, token] for step, token in enumerate(tokens))
        n = len(choice.encode()) if options == "text" else 1
        assert answers.logits[0, place] == pytest.approx(total / n, abs=TOLERANCE)


@pytest.mark.parametrize("options", ["letter", "text"])
def test_rows_that_cannot_be_asked_are_reported_and_the_others_answered(loaded, language_model, options):
    good = ("Which is a fruit?", ["stone", "apple"])
    long = ("word " * 10_000, ["yes", "no"])
    rows = [good, long, (None, ["yes", "no"]), ("Why?", None), ("Why?", ["because"]), ("Why?", ["so", None]), good]
    model = loaded(options=options)
    answers = model(question_batch(*rows))
    assert answers.failures.keys() == {1, 2, 3, 4, 5}
    longest = language_model.network.config.max_position_embeddings
    assert f"tokens; the model takes up to {longest:,}" in answers.failures[1]
    assert answers.failures[2] == "it has no question"
    for row in (0, 6):
        assert answers.logits[row] == pytest.approx(model(question_batch(good)).logits[0], abs=TOLERANCE)
    assert model(question_batch(long)).failures.keys() == {0}
    limited = loaded(options=options, max_tokens=50, chat_template=False)(
        question_batch(good, ("Why " * 60, ["a", "b"]))
    )
    assert limited.failures.keys() == {1}
    assert "the model takes up to 50" in limited.failures[1]
    with pytest.raises(DataError, match="no column 'choices'"):
        model({"question": column(["Why?"])})


def test_any_number_of_options_is_scored(loaded):
    sixty = ("Which number?", [str(n) for n in range(60)])
    answers = loaded(options="text")(question_batch(sixty, ("Which?", ["a", "b"])))
    assert answers.n_options.tolist() == [60, 2]
    assert np.isfinite(answers.logits[0]).all()
    letters = loaded()
    fits = ("Which number?", [str(n) for n in range(len(LETTERS))])
    answers = letters(question_batch(sixty, fits))
    assert answers.failures.keys() == {0}
    assert np.isfinite(answers.logits[1]).all()
    assert loaded(options="text")(question_batch(("Which?", ["a", " "]))).failures == {0: "one of its choices is empty"}


def test_operations_follow_the_length_and_leave_padding_out(loaded, language_model):
    model = loaded(chat_template=False)
    short, long = ("Why?", ["yes", "no"]), ("Why " * 200 + "?", ["yes", "no"])
    alone = [measured(model, question_batch(q)).gflops for q in (short, long)]
    assert alone[1] > 5 * alone[0]
    assert measured(model, question_batch(short, long)).gflops == pytest.approx(np.mean(alone), rel=1e-6)
    network, config = language_model.network, language_model.network.config
    n_tokens = len(language_model.tokenizer.encode(question_prompt("Why?", ["yes", "no"])))
    # Two operations for each weight and token, of which one is counted. The embedding is looked up, and the head
    # runs for the last token alone. Attention multiplies each token's queries and values with those of all others.
    inside = [p for n, p in network.named_parameters() if not any(part in n for part in ("embed", "norm", "lm_head"))]
    head = network.get_output_embeddings().weight.numel()
    attention = config.num_hidden_layers * 2 * n_tokens**2 * config.hidden_size
    expected = n_tokens * sum(p.numel() for p in inside) + head + attention
    assert alone[0] == pytest.approx(expected / 1e9, rel=0.005)


@pytest.mark.parametrize("options", ["letter", "text"])
def test_a_model_that_is_spread_over_what_devices_there_are_answers_alike(loaded, language_model, options, monkeypatch):
    """By accelerate's device map, which here has the CPU alone."""
    questions = [("Is it?", ["yes it is", "no"]), ("Which is more?", ["one", "a pair of them", "none"])]
    settings = spec(language_model.folder, options=options)
    spread = settings.load_over_gpus()(question_batch(*questions))
    assert (spread.logits == loaded(options=options)(question_batch(*questions)).logits).all()
    monkeypatch.setattr("cauc_ray.errors.find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(ConfigError, match="needs accelerate; install with: pip install"):
        settings.load_over_gpus()


@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl", "gemma3", "gemma4", "gemma4-experts", "qwen3_5"])
@pytest.mark.parametrize("options", ["letter", "text"])
def test_a_model_that_also_sees_images_answers_texts(tiny_model, tmp_path, family, options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = tiny_network(family, len(tiny_model.tokenizer)).eval()
    oracle = replace(tiny_model, network=network).save(tmp_path)
    if (family, options) == ("qwen3_5", "text"):
        with pytest.raises(ConfigError, match="has no cache for options to share; use options: letter"):
            spec(tmp_path, options=options, chat_template=False).load()
        return
    model = spec(tmp_path, options=options, chat_template=False).load()
    questions = [("Why?", ["yes", "no"]), ("Why, of all things that there are?", ["so", "it depends", "x"])]
    answers = model(question_batch(*questions))
    assert_same_answers(one_by_one(model, questions), answers, questions)
    if options == "letter":
        prompt = tiny_model.tokenizer.encode(question_prompt(*questions[0]))
        letters = [tiny_model.tokenizer.encode(f" {letter}")[-1] for letter in "AB"]
        assert answers.logits[0, :2] == pytest.approx(oracle.logits(prompt)[-1][letters], abs=TOLERANCE)
    unused = ("vision", "visual", "projector")  # in the names of what reads images
    of_text = [
        weights.numel() for name, weights in network.named_parameters() if not any(part in name for part in unused)
    ]
    assert model.facts.params_b == sum(of_text) / 1e9 < sum(weights.numel() for weights in network.parameters()) / 1e9


@pytest.mark.slow
def test_a_real_language_model_scores_letters_names_and_texts_as_a_plain_forward_pass_does(monkeypatch):
    """SmolLM2-135M from its GGUF file, which is loaded once: the oracle computes with the same weights."""
    from cauc_ray.models.language import ChoiceModel

    folder, parts = smollm2_folder(), []

    def noted(*arguments):
        parts.extend(arguments)
        return ChoiceModel(*arguments)

    monkeypatch.setattr("cauc_ray.models.language.ChoiceModel", noted)
    model = spec(folder, gguf_file=SMOLLM2_FILE).load()
    oracle = Loaded(folder, *parts[1:])
    assert_letters_logits(model, oracle, chat=True)
    assert model.facts.params_b == pytest.approx(0.1345, rel=1e-3)
    assert SMOLLM2_FILE in model.facts.source
    for options in ("name", "text"):
        settings = spec(oracle.folder, options=options, chat_template=False)
        assert_log_likelihoods(ChoiceModel(settings, oracle.tokenizer, oracle.network), oracle, options)
