"""Texts labelled by language models with a prompt and labels of one's own, from a CSV to labelled Parquet."""

import csv
from contextlib import ExitStack

import masked
import numpy as np
import openai
import pyarrow.parquet as pq
import pytest
import stored
import yaml
from asking import infer, outputs_of
from completion_server import scripted_server
from language_models import tiny_language_model
from runs import write_pool
from scipy.special import softmax
from synthetic import write_chains

import cauc_ray
from cauc_ray.cli.command import main
from cauc_ray.data.writing import read_info, write_info
from cauc_ray.errors import DataError, PolicyError
from cauc_ray.models.pool import load_pool

pytest.importorskip("transformers")
LABELS = {"billing": "about invoices", "bug": "", "other": ""}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A pool of two language models, and texts with the answers of either as labels, or at random."""
    folder = tmp_path_factory.mktemp("labelling")
    tiny_language_model(folder / "small")
    tiny_language_model(folder / "large", head_size=16)
    (folder / "examples.csv").write_text("text,label\nPay me,billing\n")
    model = {"kind": "transformers-choice"}
    pool = {
        "name": "tickets",
        "task": "classification",
        "labels": LABELS,
        "prompt": "Ticket: {{ text }}",
        "examples": "examples.csv",
        "stages": [
            {"name": "small", "model": {**model, "model": "small"}, "cost": {"params_b": 1}},
            {"name": "large", "model": {**model, "model": "large"}, "cost": {"params_b": 3}, "options": "name"},
        ],
    }
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    (folder / "other.yaml").write_text(yaml.safe_dump({**pool, "prompt": "Mail: {{ text }}"}))
    rng = np.random.default_rng(0)
    texts = np.empty(240, dtype=object)
    texts[:] = [f"{rng.choice(['Pay', 'It broke', 'Hello'])} {n} {rng.integers(1e6)}" for n in range(240)]
    answers = [
        stage.model.load()({"text": texts}).logits.argmax(axis=1) for stage in load_pool(folder / "pool.yaml").stages
    ]
    labels = np.choose(rng.integers(0, 3, 240), [*answers, rng.integers(0, 3, 240)])
    rows = zip(map(str, range(240)), texts, np.array([*LABELS])[labels], strict=True)
    names = ("example_id", "text", "category")
    stored.write(folder / "texts.csv", [dict(zip(names, row, strict=True)) for row in rows])
    return folder


def decide(service, text, labels=("other", "bug", "billing"), model="tickets"):
    """Ask an unmodified client's question, with the labels in another order, and a second one of levels."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        values = [{"value": label} for label in labels]
        choice = {"type": "choice", "instructions": "Which?", "choices": values, "name": "a"}
        levels = {"type": "score", "instructions": "How?", "levels": [{"label": label} for label in LABELS]}
        return client.decisions.create(model=model, input=text, questions=[choice, levels]).answers


def assert_decided(row, choice, score):
    assert (choice.choice, choice.name) == (row["prediction_label"], "a")
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


@pytest.mark.filterwarnings("ignore:.*uninformative:cauc_ray.errors.CaucWarning")  # random weights know little
@pytest.mark.soak("full")
def test_texts_are_collected_fitted_and_labelled_and_another_prompt_is_refused(home, ray_session, capsys):
    columns = {"label": "category"}
    cauc_ray.collect(home / "pool.yaml", home / "texts.csv", home / "logits", columns=columns)
    policy = cauc_ray.fit(home / "logits", budget=2.0)
    small, large = policy.stages
    assert "A. billing: about invoices\nB. bug\nC. other" in small.prompt
    assert "Ticket: Pay me\nAnswer: A\n\nTicket: {{ text }}\nAnswer: <letter>" in small.prompt
    assert "Answer: billing\n\nTicket: {{ text }}\nAnswer: <name>" in large.prompt
    policy.save(home / "policy.json")
    assert policy.noise.logits.keys() == {"small", "large"}
    assert all(0 <= size < 1e-3 for size in policy.noise.logits.values())  # of float32
    assert policy.noise.may_flip <= 2
    assert cauc_ray.Policy.load(home / "policy.json").stages == policy.stages
    for name in ("pool.yaml", "logits", "policy.json"):
        with pytest.raises(SystemExit) as ended:
            main(["show", str(home / name)])
        assert ended.value.code == 0
        assert "{{ text }}" in capsys.readouterr().out

    offline = cauc_ray.evaluate(home / "logits", policy, split="test").predictions
    rows = {row["example_id"]: row for row in offline.to_arrow().to_pylist()}
    with (home / "texts.csv").open(newline="") as file:
        text_of = {row["example_id"]: row["text"] for row in csv.DictReader(file)}
    with cauc_ray.serve(home / "pool.yaml", policy, port=0, name="tickets", local=True) as service:
        ids, texts = zip(*((row, text_of[row]) for row in list(rows)[:20]), strict=True)
        for example, text in zip(ids, texts, strict=True):
            assert_decided(rows[example], *decide(service, text))
        status, answered = infer(service.url, "tickets", {"text": list(texts)}, ["prediction", "prediction_label"])
        assert status == 200, answered
        assert outputs_of(answered)["prediction"].tolist() == [rows[example]["prediction"] for example in ids]
        with pytest.raises(openai.BadRequestError, match="must be the labels"):
            decide(service, "x", labels=["yes", "no"])
        with pytest.raises(openai.NotFoundError, match="unknown model 'other'"):
            decide(service, "x", model="other")

    with pytest.raises(PolicyError, match="another prompt"):
        cauc_ray.run(home / "other.yaml", policy, home / "texts.csv", home / "refused")
    (home / "mails.csv").write_text("example_id,mail\n1,hello\n")
    with pytest.raises(DataError, match="needs a column 'text'"):
        cauc_ray.run(home / "pool.yaml", policy, home / "mails.csv", home / "refused")
    assert not (home / "refused").exists()


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
    """Every row is one question to the first server, and each that the policy defers one to the second."""
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 3, 300)
    rows = [{"id": f"row {n}", "text": f"row {n}", "label": [*LABELS][label]} for n, label in enumerate(truth)]
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
    deferred = [name for name, stage in zip(held_out, replay["stage"].to_pylist(), strict=True) if stage]
    assert [dict(server.asked) for server in servers] == [dict.fromkeys(held_out, 1), dict.fromkeys(deferred, 1)]
    assert 0 < len(deferred) < len(held_out)
    answered = pq.read_table(tmp_path / "out" / "predictions").sort_by("example_id")
    assert answered.select(["prediction", "stage", "cost"]) == replay.select(["prediction", "stage", "cost"])
