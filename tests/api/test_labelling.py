"""Texts labelled by decision servers with a prompt and labels of one's own, and how noise may change labels."""

from contextlib import ExitStack

import masked
import numpy as np
import openai
import pyarrow.parquet as pq
import pytest
import stored
from completion_server import scripted_server
from runs import write_pool
from scipy.special import softmax
from synthetic import write_chains

import cauc_ray
from cauc_ray.data.writing import read_info, write_info
from cauc_ray.errors import PolicyError

LABELS = ("billing", "bug", "other")


def decide(service, text, labels=("other", "bug", "billing"), model="test"):
    """Ask an unmodified client's question, with the labels in another order, and a second one of levels."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        values = [{"value": label} for label in labels]
        choice = {"type": "choice", "instructions": "Which?", "choices": values, "name": "a"}
        levels = {"type": "score", "instructions": "How?", "levels": [{"label": label} for label in LABELS]}
        return client.decisions.create(model=model, input=text, questions=[choice, levels]).answers


def assert_decided(row, choice, score):
    assert (choice.choice, choice.name) == (LABELS[row["prediction"]], "a")
    assert choice.confidence == pytest.approx(row["confidence"], abs=1e-5)
    probabilities = {option.value: option.probability for option in choice.probabilities}
    assert sum(probabilities.values()) == pytest.approx(1)
    assert max(probabilities, key=probabilities.get) == choice.choice
    assert [level.probability for level in score.probabilities] == pytest.approx(
        [probabilities[name] for name in LABELS]
    )
    assert score.score == pytest.approx(sum(n * probabilities[name] for n, name in enumerate(LABELS)))
    assert choice.model_extra["stage"] == ("small", "large")[row["stage"]]
    assert choice.model_extra["cost"] == pytest.approx(row["cost"])


def test_a_policy_counts_the_answers_that_noise_of_its_models_may_flip(tmp_path):
    """Noise of that size, whatever its signs, flips some answers, and never more than the policy says."""
    held_out = masked.splits(300, ragged=False)["validation"]
    write_chains(tmp_path, masked.splits(300, ragged=False), lambda logits: logits)
    assert cauc_ray.fit(tmp_path, budget=3.0).noise is None
    info, rng = read_info(tmp_path), np.random.default_rng(0)
    models = [model.model_copy(update={"noise": 0.2 if model.name == "m0" else 0.1}) for model in info.models]
    write_info(tmp_path, info.model_copy(update={"models": models}))
    for method in ("base", "rf"):
        policy = cauc_ray.fit(tmp_path, method=method, budget=3.0)
        logits = dict(zip(masked.MODELS, held_out.logits, strict=True))
        before, flips = policy.predict(logits), []
        for _ in range(30):
            moved = {m: z + rng.choice([-1, 1], z.shape) * policy.noise.logits[m] for m, z in logits.items()}
            after = policy.predict(moved)
            flips.append(int(((after.prediction != before.prediction) | (after.stage != before.stage)).sum()))
        assert 0 < max(flips) <= policy.noise.may_flip < 300
        assert (policy.noise.n, policy.noise.split) == (300, "validation")


def of_labels(probabilities):
    """Return an answer of a decisions server that gives labels these probabilities."""
    listed = [{"value": label, "probability": float(p)} for label, p in zip(LABELS, probabilities, strict=True)]
    usage = {"input_tokens": 100, "output_tokens": 1, "total_tokens": 101}
    return {"answers": [{"type": "choice", "confidence": 0.5, "probabilities": listed}], "usage": usage}


@pytest.mark.slow
def test_a_run_asks_decision_servers_what_the_replay_says(ray_session, tmp_path):
    """Every row is one question to the first server, and each that the policy defers one to the second.

    A service answers decisions as the run does, and a pool that asks with another prompt is refused.
    """
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 3, 300)
    rows = [{"id": f"row {n}", "text": f"row {n}", "label": LABELS[label]} for n, label in enumerate(truth)]
    stored.write(tmp_path / "texts.csv", rows)
    stages = []
    with ExitStack() as stack:
        servers = []
        for name, skill, price in (("small", 1, 1), ("large", 3, 10)):
            odds = softmax(np.eye(3)[truth] * skill + rng.normal(0, 1, (300, 3)), axis=1)
            answer = lambda text, before, odds=odds: of_labels(odds[int(text.split()[-1])])  # noqa: E731
            servers.append(stack.enter_context(scripted_server(answer)))
            prices = {"input": price, "output": 0}
            model = {"kind": "decisions", "model": name, "base_url": servers[-1].url, "prices": prices}
            stages.append({"name": name, "model": model, "cost": {"usd": price * 1e-4}})
        pool = write_pool(tmp_path, stages, "classification", labels=[*LABELS], prompt="{{ text }}")
        cauc_ray.collect(pool, tmp_path / "texts.csv", tmp_path / "logits")
        assert [server.asked.total() for server in servers] == [300, 300]
        policy = cauc_ray.fit(tmp_path / "logits", method="rf", budget=5e-4)
        replay = cauc_ray.evaluate(tmp_path / "logits", policy, split="test").to_arrow().sort_by("example_id")
        held_out = replay["example_id"].to_pylist()
        new = stored.write(tmp_path / "new.csv", [{"id": name, "text": name} for name in held_out])
        for server in servers:
            server.asked.clear()
        cauc_ray.run(pool, policy, new, tmp_path / "out")
        asked = [dict(server.asked) for server in servers]
        with cauc_ray.serve(pool, policy, port=0, local=True) as service:
            for row in replay.to_pylist()[:20]:
                assert_decided(row, *decide(service, row["example_id"]))
            with pytest.raises(openai.BadRequestError, match="must be the labels"):
                decide(service, "row 0", labels=["yes", "no"])
            with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
                decide(service, "row 0", model="other")
    assert "{{ text }}" in policy.stages[0].prompt
    pool = write_pool(tmp_path, stages, "classification", labels=[*LABELS], prompt="Mail: {{ text }}")
    with pytest.raises(PolicyError, match="another prompt"):
        cauc_ray.run(pool, policy, new, tmp_path / "refused")
    deferred = [name for name, stage in zip(held_out, replay["stage"].to_pylist(), strict=True) if stage]
    assert asked == [dict.fromkeys(held_out, 1), dict.fromkeys(deferred, 1)]
    assert 0 < len(deferred) < len(held_out)
    answered = pq.read_table(tmp_path / "out" / "predictions").sort_by("example_id")
    assert answered.select(["prediction", "stage", "cost"]) == replay.select(["prediction", "stage", "cost"])
