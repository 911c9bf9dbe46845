"""Endpoints that return a probability for every option: only these are read."""

import numpy as np
import pytest
from batches import column
from completion_server import Fault, scripted_server

from cauc_ray.models.openai import DecisionsSpec

LABELS = {"low": "about x", "mid": "", "high": "about z"}


def spec(server, **settings):
    settings = {"labels": LABELS, "prompt": "Ticket: {{ text }}", **settings}
    return DecisionsSpec(kind="decisions", model="m", base_url=server.url, **settings)


def texts(*values):
    return {"text": column(values)}


def listed(name, values, **more):
    """Return probabilities by option in another order than that of the labels, as the format decisions has them."""
    entries = zip(LABELS, values, strict=True)
    return {"probabilities": [{name: label, "probability": value, **more} for label, value in entries][::-1]}


def described(name):
    return [{name: "low", "description": "about x"}, {name: "mid"}, {name: "high", "description": "about z"}]


def answer(reply):
    return {"answers": [reply]}


# The settings of a question, the question as it is sent, and the answer to it.
QUESTIONS = [
    (
        {},
        {"type": "choice", "choices": described("value")},
        {"choice": "mid", "confidence": 0.1, **listed("value", [0.2, 0.3, 0.5])},
    ),
    (
        {"question": "score"},
        {"type": "score", "levels": described("label")},
        {"score": 2.3, **listed("label", [0.2, 0.3, 0.5], value=0)},
    ),
    ({"question": "predicate"}, {"type": "predicate"}, {"probability": 0.8}),
    (
        {"format": "systemone"},
        {"type": "choice", "criteria": {"low": "about x", "mid": None, "high": "about z"}},
        {"confidence": 0.1, "probabilities": {"high": 0.5, "low": 0.2, "mid": 0.3}},
    ),
    (
        {"format": "systemone", "question": "score"},
        {"type": "score", "criteria": ["low: about x", "mid", "high: about z"]},
        {"probabilities": {"0": 0.2, "1": 0.3, "2": 0.5}},
    ),
    ({"format": "systemone", "question": "predicate"}, {"type": "noul"}, {"noul": 0.8}),
]


@pytest.mark.parametrize(("settings", "question", "reply"), QUESTIONS, ids=range(len(QUESTIONS)))
def test_a_question_is_asked_and_its_probabilities_are_read_as_the_server_has_them(settings, question, reply):
    is_systemone, is_predicate = "format" in settings, settings.get("question") == "predicate"
    labels, expected = (["no", "yes"], [0.2, 0.8]) if is_predicate else (LABELS, [0.2, 0.3, 0.5])
    content = {"answers": {"answer": reply}} if is_systemone else answer(reply)
    more = {"labels": labels, "instructions": "How?", "examples": [{"text": "Pay", "label": 1}]}
    with scripted_server(lambda text, before: content) as server:
        answers = spec(server, **settings, **more).load()(texts("row", None))
        ((path, _, body),) = server.requests
    assert answers.logits[0] == pytest.approx(expected)
    assert answers.failures.keys() == {1}
    assert path == f"/v1/{'systemone' if is_systemone else 'decisions'}"
    sent = body["questions"]["answer"] if is_systemone else body["questions"][0]
    assert sent == {"instructions": "How?", **question}
    prompt = body["state" if is_systemone else "input"]
    assert prompt == f"Ticket: Pay\nAnswer: {[*labels][1]}\n\nTicket: row"


def test_a_system_message_and_an_image_make_the_input_a_conversation():
    with scripted_server(lambda text, before: answer(listed("value", [0.2, 0.3, 0.5]))) as server:
        model = spec(server, system="Be fair.", image=True).load()
        answers = model({**texts("row 1", "row 2"), "image": column([np.zeros((4, 4, 3), np.uint8), None])})
        ((_, _, body),) = server.requests
    assert answers.failures.keys() == {1}
    system, user = body["input"]
    assert system == {"role": "system", "content": "Be fair."}
    image, text = user["content"]
    assert image["image_url"].startswith("data:image/png;base64,")
    assert (image["type"], text) == ("input_image", {"type": "input_text", "text": "Ticket: row 1"})


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (answer({"type": "refusal", "name": None}), "refuses"),
        (answer({"probabilities": [{"value": "mid", "probability": 1.0}]}), "no probability of each option"),
        ({"answers": []}, "no probability of each option"),
        (Fault(422, {"detail": "too many choices"}), "too many choices"),
    ],
)
def test_an_answer_without_probabilities_fails_alone(reply, words):
    sound = answer(listed("value", [0.2, 0.3, 0.5]))
    with scripted_server(lambda text, before: reply if text.endswith("row 1") else sound) as server:
        answers = spec(server).load()(texts("row 1", "row 2"))
    assert answers.failures.keys() == {0}
    assert words in answers.failures[0]
