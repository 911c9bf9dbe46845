"""What language models are asked, and the pool files that say so."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
from batches import column, refused

from cauc_ray.models.pool import pool_of
from cauc_ray.models.prompts import Prompts

TICKETS = {
    "task": "classification",
    "labels": {"billing": "about invoices", "bug": "", "other": None},
    "prompt": "Ticket: {{ text }}",
}
QUESTIONS = {"task": "multiple-choice"}
CHOICE = {"kind": "transformers-choice", "model": "m"}
LETTER, NAME = "Answer with the letter of the right option only.", "Answer with the right option only, word for word."


def spec(settings=TICKETS, folder=Path(), stage=None, **more):
    """Return a language model as a pool file has it."""
    stages = [{"name": "s", "model": CHOICE, **(stage or {})}]
    return pool_of({"name": "p", "stages": stages, **settings, **more}, folder).stages[0].model


def asked(model, chat=False, **columns):
    """Return the text of each row that can be asked, its options, and why the others cannot."""
    rows, faults = Prompts(model, chat)({name: column(values) for name, values in columns.items()})
    return [row.text for row in rows.values()], [row.options for row in rows.values()], faults


def question(chat=False, options=None, prompt=None, **row):
    settings = {**QUESTIONS, **({"options": options} if options else {}), **({"prompt": prompt} if prompt else {})}
    (text,), _, faults = asked(spec(settings), chat, choices=[["3 ", "4"]], **{k: [v] for k, v in row.items()})
    assert not faults
    return text


@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({}, ""),
        ({"context": " About sums. "}, "About sums.\n"),
        ({"context": None, "subject": math.nan}, ""),
        ({"prompt": "mmlu", "subject": "a_b"}, "The following is a multiple choice question about a b.\n\n"),
        ({"prompt": "mmlu", "subject": None}, ""),
        ({"prompt": "medmcqa"}, "The following is a multiple choice question from a medical entrance exam.\n\n"),
        ({"prompt": "logiqa", "context": "All men die."}, "Passage: All men die.\n"),
        ({"prompt": "socialiqa", "context": "Jo left."}, "Situation: Jo left.\n"),
        ({"task": "mmlu", "subject": "a column that nobody reads"}, ""),
    ],
)
def test_a_question_is_asked_as_its_benchmark_has_it(row, before):
    asked = {"question": "2 + 2? ", **row}
    assert question(**asked) == f"{before}Question: 2 + 2?\nA. 3\nB. 4\nAnswer:"
    assert question(chat=True, **asked) == f"{before}Question: 2 + 2?\nA. 3\nB. 4\n{LETTER}"
    assert question(options="name", **asked) == f"{before}Question: 2 + 2?\n- 3\n- 4\nAnswer:"
    assert question(options="text", **asked) == f"{before}Question: 2 + 2?\nAnswer:"
    assert question(chat=True, options="text", **asked) == f"{before}Question: 2 + 2?"


@pytest.mark.parametrize(
    ("options", "chat", "ends", "listed", "answers"),
    [
        ("letter", False, "\nAnswer:", "Options:\nA. billing: about invoices\nB. bug\nC. other\n\n", "ABC"),
        ("letter", True, f"\n{LETTER}", "Options:\nA. billing: about invoices\nB. bug\nC. other\n\n", "ABC"),
        ("name", True, f"\n{NAME}", "Options:\n- billing: about invoices\n- bug\n- other\n\n", TICKETS["labels"]),
        ("text", False, "\nAnswer:", "", TICKETS["labels"]),
        ("text", True, "", "", TICKETS["labels"]),
    ],
)
def test_labels_are_options_with_their_descriptions(options, chat, ends, listed, answers):
    """The list comes first, so that what all rows share is computed once."""
    model = spec(options=options)
    texts, options_given, faults = asked(model, chat, text=["It crashes: {{ 7 * 7 }} {% bad"])
    assert texts == [f"{listed}Ticket: It crashes: {{{{ 7 * 7 }}}} {{% bad{ends}"]
    assert options_given == [tuple(answers)]
    assert not faults
    assert Prompts(model, chat).head == listed


@pytest.mark.parametrize("in_file", [True, False])
def test_examples_precede_each_row_with_their_answers(tmp_path, in_file):
    (tmp_path / "examples.csv").write_text("text,label\nPay me,billing\nIt hangs,1\n")
    rows = [{"text": "Pay me", "label": "billing"}, {"text": "It hangs", "label": "1"}]
    examples = "examples.csv" if in_file else rows
    for options, answers in (("letter", "AB"), ("name", ("billing", "bug")), ("text", ("billing", "bug"))):
        model = spec(folder=tmp_path, examples=examples, options=options)
        (text,), _, _ = asked(model, text=["Why?"])
        block = "Ticket: Pay me\nAnswer: {}\n\nTicket: It hangs\nAnswer: {}\n\n".format(*answers)
        assert text.endswith(f"{block}Ticket: Why?\nAnswer:")
        assert Prompts(model, False).head + "Ticket: Why?\nAnswer:" == text
    asks = {"question": "1 + 1?", "choices": ["2", "3"], "label": 0}
    (text,), _, _ = asked(spec(QUESTIONS, examples=[asks]), question=["2 + 2?"], choices=[["3", "4"]])
    assert text == "Question: 1 + 1?\nA. 2\nB. 3\nAnswer: A\n\nQuestion: 2 + 2?\nA. 3\nB. 4\nAnswer:"


def test_a_template_with_the_options_in_it_is_the_whole_prompt():
    model = spec(prompt="One of:\n{{ options }}\n{% if vip %}Hurry! {% endif %}{{ text }} =>", examples=[
        {"text": "Pay me", "vip": False, "label": 0}
    ])  # fmt: skip
    listed = "One of:\nA. billing: about invoices\nB. bug\nC. other\n"
    texts, _, _ = asked(model, True, text=["a", "b"], vip=[True, None])
    assert texts == [f"{listed}Pay me => A\n\n{listed}{row} =>" for row in ("Hurry! a", "b")]


def test_a_stage_may_be_asked_in_its_own_way():
    german = ["Rechnung", "Fehler", "Sonstiges"]
    models = [
        spec(),
        spec(stage={"prompt": "{{ text }}?", "options": "name"}),
        spec(stage={"model": {**CHOICE, "options": "text"}, "labels": german}),
    ]
    ways = [(model.prompt, model.answers_with, model.label_names) for model in models]
    names = tuple(TICKETS["labels"])
    prompt = TICKETS["prompt"]
    assert ways == [(prompt, "letter", names), ("{{ text }}?", "name", names), (prompt, "text", tuple(german))]
    assert len({model.identity for model in models}) == len({model.shown for model in models}) == 3


def test_any_number_of_labels_has_names_where_letters_end():
    labels_300 = [f"label {n}" for n in range(300)]
    assert spec(labels=labels_300).answers_with == "name"
    assert spec(labels=labels_300[:26]).answers_with == "letter"
    _, (options,), _ = asked(spec(labels=labels_300), text=["?"])
    assert options == tuple(labels_300)


def test_rows_that_cannot_be_asked_say_why():
    texts, _, faults = asked(spec(), text=["a", None, math.nan, "  ", "\ud800", 3, np.float32(0.5)])
    assert [text.split("Ticket: ")[1] for text in texts] == ["a\nAnswer:", "3\nAnswer:", "0.5\nAnswer:"]
    assert faults.keys() == {1, 2, 3, 4}
    assert "nothing in text" in faults[1]
    assert "Unicode" in faults[4]
    _, _, faults = asked(spec(prompt="{{ n / d }} of {{ text }}"), text=["a", "b"], n=[1, 1], d=[2, 0])
    assert faults.keys() == {1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt": "{{ text | shout }}"}, "prompt: .*shout"),
        ({"prompt": None}, "labels need a prompt"),
        ({"labels": None}, "needs labels to choose from"),
        ({"labels": ["a", "a"]}, "two labels have one name"),
        ({"labels": [str(n) for n in range(60)], "options": "letter"}, "letter takes up to 52"),
        ({"examples": "absent.csv"}, "file .*absent.csv"),
        ({"examples": [{"label": "bug"}]}, "example 0 has no 'text'"),
        ({"examples": [{"text": "a", "label": "bugg"}]}, "label 'bugg'.* billing, bug, other"),
        ({"stage": {"model": {"kind": "python", "factory": "a:b"}, "prompt": "{{ x }}"}}, "'python' takes no prompt"),
        ({"stage": {"model": {"kind": "python", "factory": "a:b"}}}, "prompt is for models of kind decisions"),
        ({"stage": {"labels": ["a", "b"]}}, "number of labels"),
    ],
)
def test_a_fault_of_a_prompt_is_one_line_before_anything_is_loaded(tmp_path, settings, words):
    assert re.search(words, refused(lambda: spec(**{"folder": tmp_path, **settings})))


def test_a_template_that_lists_the_options_is_shown_as_the_whole_prompt():
    shown_with = spec(labels={"a": "x", "b": ""}, prompt="{{ options }}\n{{ text }}\nIt is").shown
    assert shown_with == "{{ options }}\n{{ text }}\nIt is <letter>\n\n{{ options }}:\nA. a: x\nB. b"
