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


def answer(text, confidence=max, order=slice(None)):
    p = probabilities(text)
    listed = [{"value": name, "probability": float(q)} for name, q in zip(LABELS, p, strict=True)][order]
    best = [*LABELS][int(p.argmax())]
    reply = {"type": "choice", "choice": best, "confidence": confidence(list(p)), "probabilities": listed, "name": None}
    usage = {"input_tokens": 30, "output_tokens": 1, "total_tokens": 31}
    return {"answers": [reply], "model": "m", "usage": usage}


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


@pytest.mark.parametrize("confidence", [max, min, lambda p: sorted(p)[-1] - sorted(p)[-2]])
@pytest.mark.parametrize("order", [1, -1])
def test_no_formula_of_confidence_and_no_order_changes_an_answer(confidence, order):
    rows = [f"row {n}" for n in range(5)]
    with scripted_server(lambda text, before: answer(text, confidence, slice(None, None, order))) as server:
        logits = spec(server).load()(texts(rows)).logits
    assert logits == pytest.approx(np.array([probabilities(row) for row in rows]))


def test_predicates_and_scores_are_read_by_their_own_probabilities():
    def script(text, before):
        if "levels" in server.requests[-1][2]["questions"][0]:
            listed = [{"label": f"{n}", "value": n, "probability": p} for n, p in ((3, 0.5), (1, 0.2), (2, 0.3))]
            return {"answers": [{"type": "score", "score": 2.3, "confidence": 0.9, "probabilities": listed}]}
        return {"answers": [{"type": "predicate", "probability": 0.8}]}

    with scripted_server(script) as server:
        predicate = spec(server, labels=["no", "yes"], question="predicate", instructions="It is urgent.").load()
        assert predicate(texts(["row 1"])).logits.tolist() == [pytest.approx([0.2, 0.8])]
        assert server.requests[-1][2]["questions"] == [{"type": "predicate", "instructions": "It is urgent."}]
        score = spec(server, labels=["1", "2", "3"], question="score").load()
        assert score(texts(["row 1"])).logits.tolist() == [pytest.approx([0.2, 0.3, 0.5])]


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
