"""Language models that choose an option: one of random weights, and SmolLM2-135M, on real and made-up questions."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import SHARED_DATA
from fake_gpu import Gpu
from language_models import SMOLLM2_FILE, smollm2

from cauc_ray.data.prompts import LETTERS, Question, letter_prompt, letter_request, text_prompt
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.flops import measured_gflops
from cauc_ray.models.pool import load_pool
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


def objects(values):
    column = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):
        column[place] = value
    return column


def batch(questions):
    """Return (question, choices[, context]) as a batch's columns."""
    return {
        "question": objects([q[0] for q in questions]),
        "choices": objects([q[1] for q in questions]),
        "context": objects([q[2] if len(q) > 2 else None for q in questions]),
    }


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
    return [model(batch([question])).logits[0] for question in questions]


def assert_same_answers(rows, answers, questions):
    for place, (row, question) in enumerate(zip(rows, questions, strict=True)):
        k = len(question[1])
        assert answers.n_options[place] == k
        assert np.isneginf(answers.logits[place, k:]).all()
        assert answers.logits[place, :k] == pytest.approx(row[:k], abs=TOLERANCE)


@pytest.mark.parametrize("scoring", ["letter", "text"])
def test_batch_size_padding_and_bucketing_change_no_answer(loaded, scoring):
    questions = real_questions(8)
    assert {len(q[1]) for q in questions} == {2, 3, 4, 5}
    alone = one_by_one(loaded(scoring=scoring), questions)
    together = loaded(scoring=scoring)(batch(questions))  # sorted by length, in passes of many
    assert_same_answers(alone, together, questions)
    narrow = loaded(scoring=scoring, batch_tokens=300)  # passes of one to a few, here in another order
    assert_same_answers(alone[::-1], narrow(batch(questions[::-1])), questions[::-1])
    best = [row[: len(q[1])].argmax() for row, q in zip(alone, questions, strict=True)]
    assert together.logits.argmax(axis=1).tolist() == best


@pytest.mark.parametrize("scoring", ["letter", "text"])
def test_device_time_is_of_every_forward_pass_and_of_nothing_else(language_model, scoring):
    """The device's clock goes on by a second in each of the network's passes, and at no other time."""
    from cauc_ray.models.device_time import DeviceTime
    from cauc_ray.models.language import ChoiceModel

    gpu, passes, network = Gpu(), [], language_model.network
    device_time = DeviceTime(torch.device("cpu"), gpu.event)
    settings = spec(language_model.folder, scoring=scoring, batch_tokens=1)
    model = ChoiceModel(settings, language_model.tokenizer, network, device_time)

    def run(network, inputs, output):
        passes.append(1)
        gpu.now_s += 1.0

    hook = network.register_forward_hook(run)
    try:
        answers = model(batch([("Is it?", ["yes it is", "no"]), ("Which is more?", ["one", "a pair of them"])]))
    finally:
        hook.remove()
    assert answers.device_s == len(passes) == (2 if scoring == "letter" else 4)


@pytest.mark.parametrize("scoring", ["letter", "text"])
def test_padding_shifts_no_position_of_a_network_that_numbers_them(language_model, tmp_path, scoring):
    """Llama sees distances between tokens only; GPT-2 learns a vector for each position."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = GPT2LMHeadModel(GPT2Config(vocab_size=len(language_model.tokenizer), **sizes, **ends)).eval()
    model = spec(replace(language_model, network=network).save(tmp_path).folder, scoring=scoring).load()
    questions = [("Why?", ["yes", "no"]), ("Why, of all things?", ["so", "it depends", "x"]), ("?", ["a", "b"])]
    assert_same_answers(one_by_one(model, questions), model(batch(questions)), questions)


@pytest.mark.parametrize("chat", [False, True])
def test_letters_get_the_next_tokens_raw_logits(loaded, language_model, chat):
    model = loaded(chat_template=chat)
    assert_letters_logits(model, language_model, chat)
    assert model.facts.logit_kind == "raw next-token logits of the options' letters"


def assert_letters_logits(model, oracle, chat):
    questions = [Question("Which is a fruit?", ("stone", "apple", "car")), Question("1 + 1?", ("1", "2"), "Numbers.")]
    answers = model(batch([(q.question, q.choices, q.context) for q in questions]))
    encode = oracle.tokenizer.encode
    for row, question in enumerate(questions):
        if chat:
            tokens = oracle.chat(letter_request(question))
            letters = [encode(letter)[-1] for letter in "ABC"]
        else:
            tokens = encode(letter_prompt(question))
            letters = [encode(f"{letter_prompt(question)} {letter}")[-1] for letter in "ABC"]
        k = len(question.choices)
        assert answers.logits[row, :k] == pytest.approx(oracle.logits(tokens)[-1][letters][:k], abs=TOLERANCE)


def test_texts_get_their_log_likelihood_per_byte(loaded, language_model):
    model = loaded(scoring="text")
    question = Question("What do bees make?", ("honey", "concrete walls and große Brücken", "x"), "About insects.")
    answers = model(batch([(question.question, question.choices, question.context)]))
    encode = language_model.tokenizer.encode
    prompt = encode(text_prompt(question))
    for place, choice in enumerate(question.choices):
        own = encode(f" {choice}")
        logits = language_model.logits(prompt + own).astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total = sum(logs[len(prompt) + step - 1, token] for step, token in enumerate(own))
        assert answers.logits[0, place] == pytest.approx(total / len(choice.encode()), abs=TOLERANCE)


@pytest.mark.parametrize("scoring", ["letter", "text"])
def test_rows_that_cannot_be_asked_are_reported_and_the_others_answered(loaded, language_model, scoring):
    good = ("Which is a fruit?", ["stone", "apple"])
    long = ("word " * 10_000, ["yes", "no"])
    rows = [good, long, (None, ["yes", "no"]), ("Why?", None), ("Why?", ["because"]), ("Why?", ["so", None]), good]
    model = loaded(scoring=scoring)
    answers = model(batch(rows))
    assert answers.failures.keys() == {1, 2, 3, 4, 5}
    longest = language_model.network.config.max_position_embeddings
    assert f"tokens; the model takes up to {longest:,}" in answers.failures[1]
    assert answers.failures[2] == "it has no question"
    for row in (0, 6):
        assert answers.logits[row] == pytest.approx(model(batch([good])).logits[0], abs=TOLERANCE)
    assert model(batch([long])).failures.keys() == {0}
    with pytest.raises(DataError, match="no column 'choices'"):
        model({"question": objects(["Why?"])})


def test_any_number_of_options_is_scored(loaded):
    many = ("Which number?", [str(n) for n in range(60)])
    answers = loaded(scoring="text")(batch([many, ("Which?", ["a", "b"])]))
    assert answers.n_options.tolist() == [60, 2]
    assert np.isfinite(answers.logits[0]).all()
    letters = loaded()
    fits = ("Which number?", [str(n) for n in range(len(LETTERS))])
    answers = letters(batch([many, fits]))
    assert answers.failures == {0: "it has 60 options, more than the 52 letters; scoring: text takes any number"}
    assert np.isfinite(answers.logits[1]).all()
    assert loaded(scoring="text")(batch([("Which?", ["a", " "])])).failures == {0: "one of its choices is empty"}


def test_a_limit_on_tokens_is_the_stages_own(loaded):
    short, long = ("Why?", ["yes", "no"]), ("Why " * 60 + "?", ["yes", "no"])
    answers = loaded(max_tokens=50, chat_template=False)(batch([short, long]))
    assert answers.failures.keys() == {1}
    assert "the model takes up to 50" in answers.failures[1]


def test_operations_follow_the_length_and_leave_padding_out(loaded, language_model):
    model = loaded(chat_template=False)
    short, long = ("Why?", ["yes", "no"]), ("Why " * 200 + "?", ["yes", "no"])
    alone = [measured_gflops(model, batch([q])) for q in (short, long)]
    assert alone[1] > 5 * alone[0]
    assert measured_gflops(model, batch([short, long])) == pytest.approx(np.mean(alone), rel=1e-6)
    network, config = language_model.network, language_model.network.config
    n_tokens = len(language_model.tokenizer.encode(letter_prompt(Question("Why?", ("yes", "no")))))
    # Two operations for each weight and token, of which one is counted. The embedding is looked up, and the head
    # runs for the last token alone. Attention multiplies each token's queries and values with those of all others.
    inside = [p for n, p in network.named_parameters() if not any(part in n for part in ("embed", "norm", "lm_head"))]
    head = network.get_output_embeddings().weight.numel()
    attention = config.num_hidden_layers * 2 * n_tokens**2 * config.hidden_size
    expected = n_tokens * sum(p.numel() for p in inside) + head + attention
    assert alone[0] == pytest.approx(expected / 1e9, rel=0.005)


def test_what_it_says_of_itself(loaded, language_model):
    facts = loaded().facts
    assert facts.params_b == pytest.approx(sum(p.numel() for p in language_model.network.parameters()) / 1e9)
    assert str(language_model.folder) in facts.source
    assert "float32" in facts.source
    assert "through its chat template" in facts.source


@pytest.mark.parametrize("scoring", ["letter", "text"])
def test_a_model_that_is_spread_over_what_devices_there_are_answers_alike(loaded, language_model, scoring):
    """By accelerate's device map, which here has the CPU alone."""
    questions = [("Is it?", ["yes it is", "no"]), ("Which is more?", ["one", "a pair of them", "none"])]
    spread = spec(language_model.folder, scoring=scoring).load_over_gpus()(batch(questions))
    assert (spread.logits == loaded(scoring=scoring)(batch(questions)).logits).all()


def test_several_gpus_need_accelerate(language_model, monkeypatch):
    monkeypatch.setattr("cauc_ray.models.kind.find_spec", lambda name: None)  # it is installed here
    with pytest.raises(ConfigError, match="needs accelerate; install it with: pip install"):
        spec(language_model.folder).load_over_gpus()


@pytest.mark.slow
def test_a_gguf_file_answers_as_its_weights_do():
    oracle = smollm2()
    model = spec(oracle.folder, gguf_file=SMOLLM2_FILE).load()
    assert_letters_logits(model, oracle, chat=True)
    assert model.facts.params_b == pytest.approx(0.1345, rel=1e-3)
    assert SMOLLM2_FILE in model.facts.source


def test_a_missing_model_is_reported_in_one_line(tmp_path):
    for model, file in ((tmp_path, None), ("nobody/nothing", None), (tmp_path, "absent.gguf")):
        with pytest.raises(ConfigError, match="cannot be loaded") as error:
            spec(model, gguf_file=file).load()
        assert "\n" not in str(error.value)
    pool = tmp_path / "pool.yaml"
    (tmp_path / "models").mkdir()
    pool.write_text(
        "name: p\ntask: multiple-choice\nstages:\n"
        "- {name: a, model: {kind: transformers-choice, model: models}}\n"
        "- {name: b, model: {kind: transformers-choice, model: ORG/NAME}}\n"
    )
    here, hub = load_pool(pool).stages
    assert here.model.model == str(tmp_path / "models")
    assert hub.model.model == "ORG/NAME"
