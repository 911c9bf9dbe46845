"""Texts labelled by language models with a prompt and labels of one's own, from a CSV to labelled Parquet."""

import csv

import numpy as np
import openai
import pyarrow.parquet as pq
import pytest
import yaml
from asking import infer, outputs_of
from completion_server import scripted_server
from language_models import tiny_language_model
from scipy.special import softmax

import cauc_ray
from cauc_ray.cli.command import main
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
    with (folder / "texts.csv").open("w", newline="") as file:
        named = zip(map(str, range(240)), texts, np.array([*LABELS])[labels], strict=True)
        csv.writer(file).writerows([("example_id", "text", "category"), *named])
    return folder


def decide(service, text, labels=("other", "bug", "billing"), model="tickets"):
    """Ask an unmodified client's question, with the labels in another order, and a second one of levels."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        choice = {
            "type": "choice",
            "instructions": "Which?",
            "choices": [{"value": one} for one in labels],
            "name": "a",
        }
        levels = {"type": "score", "instructions": "How?", "levels": [{"label": one} for one in LABELS]}
        return client.decisions.create(model=model, input=text, questions=[choice, levels]).answers


def assert_decided(row, choice, score):
    assert (choice.choice, choice.name) == (row["prediction_label"], "a")
    assert choice.confidence == pytest.approx(row["confidence"], abs=1e-5)
    probabilities = {one.value: one.probability for one in choice.probabilities}
    assert sum(probabilities.values()) == pytest.approx(1)
    assert max(probabilities, key=probabilities.get) == choice.choice
    assert [one.probability for one in score.probabilities] == pytest.approx([probabilities[one] for one in LABELS])
    assert score.score == pytest.approx(sum(n * probabilities[one] for n, one in enumerate(LABELS)))
    assert choice.model_extra["stage"] == ("small", "large")[row["stage"]]
    assert choice.model_extra["cost"] == pytest.approx(row["cost"])


@pytest.mark.filterwarnings("ignore:.*uninformative:cauc_ray.errors.CaucWarning")  # random weights know little
@pytest.mark.slow
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
    for shown in ("pool.yaml", "logits", "policy.json"):
        with pytest.raises(SystemExit) as ended:
            main(["show", str(home / shown)])
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
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            decide(service, "x", model="other")

    with pytest.raises(PolicyError, match="another prompt"):
        cauc_ray.run(home / "other.yaml", policy, home / "texts.csv", home / "refused")
    (home / "mails.csv").write_text("example_id,mail\n1,hello\n")
    with pytest.raises(DataError, match="needs a column 'text'"):
        cauc_ray.run(home / "pool.yaml", policy, home / "mails.csv", home / "refused")
    assert not (home / "refused").exists()


def test_a_policy_counts_the_answers_that_noise_of_its_models_may_flip(tmp_path):
    """Noise of that size, whatever its signs, flips some answers, and never more than the policy says."""
    from cauc_ray.data.writing import read_info, write_info

    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 600)
    ids = [str(n) for n in range(600)]
    z = {name: skill * np.eye(4)[labels] + rng.normal(0, 1.5, (600, 4)) for name, skill in (("small", 1), ("large", 3))}
    for split, rows in (("calibration", slice(0, 300)), ("validation", slice(300, 600))):
        for name, cost in (("small", 1), ("large", 10)):
            cauc_ray.write_logits(
                tmp_path,
                name,
                split,
                ids[rows],
                z[name][rows],
                labels[rows],
                cost=cost,
                cost_unit="s",
                logit_kind="raw",
            )
    assert cauc_ray.fit(tmp_path, budget=5.0).noise is None
    info = read_info(tmp_path)
    models = [model.model_copy(update={"noise": 0.2 if model.name == "small" else 0.1}) for model in info.models]
    write_info(tmp_path, info.model_copy(update={"models": models}))
    for method in ("base", "rf"):
        policy = cauc_ray.fit(tmp_path, method=method, budget=5.0)
        held = {name: logits[300:].astype(np.float32) for name, logits in z.items()}
        before = policy.predict(held)
        most = 0
        for _ in range(30):
            moved = {
                name: logits + rng.choice([-1, 1], logits.shape) * policy.noise.logits[name]
                for name, logits in held.items()
            }
            after = policy.predict(moved)
            most = max(most, int(((after.prediction != before.prediction) | (after.stage != before.stage)).sum()))
        assert 0 < most <= policy.noise.may_flip < 300
        assert (policy.noise.n, policy.noise.split) == (300, "validation")


@pytest.mark.slow
def test_a_run_asks_decision_servers_what_the_replay_says(ray_session, tmp_path):
    """Every row is one question to the first server, and each that the policy defers one to the second."""
    ids, labels = [f"row {n}" for n in range(300)], [*LABELS]
    rng = np.random.default_rng(1)
    truth = rng.integers(0, 3, 300)
    odds = {name: np.eye(3)[truth] * skill + rng.normal(0, 1, (300, 3)) for name, skill in (("small", 1), ("large", 3))}

    def script(name):
        def answer(text, before):
            p = softmax(odds[name][int(text.split()[-1])])
            listed = [{"value": label, "probability": float(q)} for label, q in zip(labels, p, strict=True)]
            return {"answers": [{"type": "choice", "confidence": 0.5, "probabilities": listed}], "usage": usage}

        usage = {"input_tokens": 100, "output_tokens": 1, "total_tokens": 101}
        return answer

    with (tmp_path / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text", "label"), *zip(ids, ids, np.array(labels)[truth], strict=True)])
    with scripted_server(script("small")) as small, scripted_server(script("large")) as large:
        servers = {"small": small, "large": large}
        stages = [
            {
                "name": name,
                "model": {
                    "kind": "decisions",
                    "model": name,
                    "base_url": server.url,
                    "prices": {"input": price, "output": 0},
                },
                "cost": {"usd": price * 1e-4},
            }
            for (name, server), price in zip(servers.items(), (1, 10), strict=True)
        ]
        pool = {"name": "p", "task": "classification", "labels": labels, "prompt": "{{ text }}", "stages": stages}
        (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
        cauc_ray.collect(tmp_path / "pool.yaml", tmp_path / "texts.csv", tmp_path / "logits")
        assert [server.asked.total() for server in servers.values()] == [300, 300]
        policy = cauc_ray.fit(tmp_path / "logits", method="rf", budget=5e-4)
        replay = cauc_ray.evaluate(tmp_path / "logits", policy, split="test").predictions.to_arrow()
        held_out = replay.column("example_id").to_pylist()
        with (tmp_path / "new.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("id", "text"), *zip(held_out, held_out, strict=True)])
        for server in servers.values():
            server.asked.clear()
        cauc_ray.run(tmp_path / "pool.yaml", policy, tmp_path / "new.csv", tmp_path / "out")
    deferred = {id for id, stage in zip(held_out, replay.column("stage").to_pylist(), strict=True) if stage}
    assert dict(small.asked) == dict.fromkeys(held_out, 1)
    assert dict(large.asked) == dict.fromkeys(deferred, 1)
    assert 0 < len(deferred) < len(held_out)
    answered = pq.read_table(tmp_path / "out" / "predictions").sort_by("example_id")
    assert answered.select(["prediction", "stage", "cost"]) == replay.sort_by("example_id").select(
        ["prediction", "stage", "cost"]
    )
