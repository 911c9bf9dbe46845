"""Endpoints that return a probability for every option: only these are read."""

import numpy as np
import pytest
from batches import column
from completion_server import Fault, scripted_server

from cauc_ray.models.openai import DecisionsSpec

LABELS = {"billing": "about invoices", "bug": "", "other": ""}


def spec(server, **settings):
    settings = {"labels": LABELS, "prompt": "Ticket: {{ text }}", **settings}
    return DecisionsSpec(kind="decisions", model="m", base_url=server.url, **settings)


def texts(values):
    return {"text": column(values)}


def probabilities(text):
    """Return what the server's model thinks of a text, float64 (3,)."""
    odds = np.random.default_rng(int(text.rsplit(" ", 1)[1])).normal(0, 2, 3)
    return np.exp(odds) / np.exp(odds).sum()


def answer(text, order=1):
    listed = [{"value": name, "probability": float(q)} for name, q in zip(LABELS, probabilities(text), strict=True)]
    reply = {"type": "choice", "choice": "bug", "confidence": 0.1, "probabilities": listed[::order]}
    return {"answers": [reply], "usage": {"input_tokens": 30, "output_tokens": 1}}


def test_a_question_is_asked_as_the_protocol_has_it():
    with scripted_server(lambda text, before: answer(text)) as server:
        model = spec(server, prices={"input": 1, "output": 2}, examples=[{"text": "Pay", "label": "billing"}]).load()
        answers = model(texts(["row 1", "row 2", None]))
        path, _, body = server.requests[0]
    assert path == "/v1/decisions"
    listed = [{"value": "billing", "description": "about invoices"}, {"value": "bug"}, {"value": "other"}]
    question = {"type": "choice", "instructions": "Choose the right option.", "choices": listed}
    assert body["questions"] == [question]
    assert body["input"].startswith("Ticket: Pay\nAnswer: billing\n\nTicket: row ")
    assert answers.logits[0] == pytest.approx(probabilities("row 1"))
    assert answers.costs == pytest.approx([32e-6, 32e-6, 0])
    assert answers.failures.keys() == {2}
    assert model.facts.logit_kind == "probabilities"


@pytest.mark.parametrize("order", [1, -1])
def test_no_confidence_and_no_order_changes_an_answer(order):
    rows = [f"row {n}" for n in range(5)]
    with scripted_server(lambda text, before: answer(text, order)) as server:
        logits = spec(server).load()(texts(rows)).logits
    assert logits == pytest.approx(np.array([probabilities(row) for row in rows]))


def levels(format, values):
    """Return probabilities of levels as a server writes them."""
    if format == "systemone":
        return {str(n): value for n, value in enumerate(values)}
    return [{"label": f"{n}", "value": n - 1, "probability": value} for n, value in enumerate(values, 1)][::-1]


@pytest.mark.parametrize("format", ["decisions", "systemone"])
def test_predicates_and_scores_are_read_by_their_own_probabilities(format):
    def script(text, before):
        body = server.requests[-1][2]
        question = body["questions"]["answer"] if format == "systemone" else body["questions"][0]
        is_score = question["type"] == "score"
        reply = {"score": 2.3, "probabilities": levels(format, [0.2, 0.3, 0.5])} if is_score else {"probability": 0.8}
        reply = {"noul": 0.8} if question["type"] == "noul" else reply
        return {"answers": {"answer": reply} if format == "systemone" else [reply]}

    with scripted_server(script) as server:
        predicate = spec(server, labels=["no", "yes"], question="predicate", instructions="Urgent.", format=format)
        assert predicate.load()(texts(["row 1"])).logits.tolist() == [pytest.approx([0.2, 0.8])]
        score = spec(server, labels={"1": "low", "2": "", "3": "high"}, question="score", format=format)
        assert score.load()(texts(["row 1"])).logits.tolist() == [pytest.approx([0.2, 0.3, 0.5])]
        (path, _, first), (_, _, second) = server.requests
    assert path == f"/v1/{format}"
    if format == "systemone":
        assert first["state"] == "Ticket: row 1"
        assert first["questions"] == {"answer": {"type": "noul", "instructions": "Urgent."}}
        assert second["questions"]["answer"]["criteria"] == ["1: low", "2", "3: high"]
    else:
        assert first["questions"] == [{"type": "predicate", "instructions": "Urgent."}]
        described = [{"label": "1", "description": "low"}, {"label": "2"}, {"label": "3", "description": "high"}]
        assert second["questions"][0]["levels"] == described


def test_choices_are_asked_as_system_one_has_them():
    def script(text, before):
        values = dict(zip(LABELS, map(float, probabilities(text)), strict=True))
        replies = {} if text.endswith("row 3") else {"answer": {"type": "choice", "probabilities": values}}
        return {"answers": replies}

    with scripted_server(script) as server:
        answers = spec(server, format="systemone").load()(texts(["row 1", "row 3"]))
        path, _, body = server.requests[0]
    assert path == "/v1/systemone"
    criteria = {"billing": "about invoices", "bug": None, "other": None}
    question = {"type": "choice", "instructions": "Choose the right option.", "criteria": criteria}
    assert body["questions"] == {"answer": question}
    assert answers.logits[0] == pytest.approx(probabilities("row 1"))
    assert answers.failures.keys() == {1}


def test_a_system_message_and_an_image_make_the_input_a_conversation():
    with scripted_server(lambda text, before: answer(text)) as server:
        model = spec(server, system="Be fair.", image=True).load()
        answers = model({**texts(["row 1", "row 2"]), "image": column([np.zeros((4, 4, 3), np.uint8), None])})
        ((_, _, body),) = server.requests
    assert answers.failures.keys() == {1}
    system, user = body["input"]
    assert system == {"role": "system", "content": "Be fair."}
    image, text = user["content"]
    assert image["image_url"].startswith("data:image/png;base64,")
    assert (image["type"], text) == ("input_image", {"type": "input_text", "text": "Ticket: row 1"})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"labels": [f"label {n}" for n in range(256)]}, "255 labels, not 256"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"options": "name"}, "options"),
        ({"question": "predicate"}, "two labels"),
        ({"format": "systemone", "image": True}, "systemone"),
        ({"format": "systemone", "system": "Be fair."}, "systemone"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        DecisionsSpec(kind="decisions", model="m", **{"labels": LABELS, "prompt": "{{ text }}", **settings})


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ({"type": "refusal", "name": None}, "refuses"),
        ({"type": "choice", "choice": "bug", "confidence": 0.9}, "no probability of each option"),
        ({"type": "choice", "probabilities": [{"value": "bug", "probability": 1.0}]}, "no probability of each option"),
        (None, "no probability of each option"),
    ],
)
def test_an_answer_without_probabilities_fails_alone(reply, words):
    def script(text, before):
        return {"answers": [reply] if reply else []} if text.endswith("row 1") else answer(text)

    with scripted_server(script) as server:
        answers = spec(server).load()(texts(["row 1", "row 2"]))
        assert answers.failures.keys() == {0}
        assert words in answers.failures[0]
        server.script = lambda text, before: Fault(422, {"detail": "too many choices"})
        assert "too many choices" in spec(server).load()(texts(["row 3"])).failures[0]
