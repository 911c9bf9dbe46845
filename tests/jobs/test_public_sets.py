"""Logit and answer tables from files as public repositories have them: their numbers, and no code of pickle files."""

import json
import os
import pickle
import re

import numpy as np
import pytest

from cauc_ray.data.answer_table import AnswerTable
from cauc_ray.data.logits import LogitTable, read_embeddings
from cauc_ray.models.answers import Answers
from cauc_ray.numbers.answer_keys import NONE_RIGHT, confidences_in, said_keys
from jobs.paper import best_five, embedded
from jobs.paper.folders import convert
from jobs.paper.public_sets import IMAGENET, MMLU_PRO, write_sets

N = 40


class Response:
    """An object of another program."""

    def __reduce__(self):
        return os.mkdir, ("struck",)


def rows_by_id(table, model):
    splits = [LogitTable(table).read_chain([model], split) for split in ("calibration", "validation", "test")]
    ids = [example for chain in splits for example in chain.example_ids]
    logits = np.concatenate([np.asarray(chain.logits[0]) for chain in splits])
    labels = np.concatenate([chain.labels for chain in splits])
    return {example: (row, label) for example, row, label in zip(ids, logits, labels, strict=True)}


@pytest.fixture
def clones(tmp_path):
    rng = np.random.default_rng(0)
    emotions = tmp_path / "LLM-Uncertainty-Bench"
    (emotions / "data").mkdir(parents=True)
    (emotions / "outputs_base").mkdir()
    questions = [{"id": row, "answer": "ABCDEF"[row % 6]} for row in range(N)]
    (emotions / "data" / "emotion_10k_4.json").write_text(json.dumps(questions))
    for prompt in ("task_icl0", "base_icl1", "task_icl1"):
        answers = [{"id": row, "logits_options": rng.random(8, np.float32)} for row in range(N)]
        path = emotions / "outputs_base" / f"Qwen-1_8B_emotion_10k_4_{prompt}.pkl"
        path.write_bytes(pickle.dumps(answers))
    priced = tmp_path / "early-abstention-in-llm-cascades" / "benchmarks" / "data"
    for task, key in (("mmlu", "answer"), ("medmcqa", "cop")):
        (priced / task / "chain_results").mkdir(parents=True)
        (priced / task / f"{task}_test.pkl").write_bytes(pickle.dumps([{key: row % 4} for row in range(N)]))
        for chain, model in (("llama", "llama3.1-8b"), ("qwen_oai", "gpt-4o")):
            saved = {
                "model_answers": {model: ["B"] * (N - 1) + ["none"]},
                "raw_confidences": {model: [np.log(0.7)] * N},
                "model_costs": {model: [1e-4] * N},
                "chain_responses": [Response()],
            }
            path = priced / task / "chain_results" / f"{task}_full_{chain}_chain_results_test.pkl"
            path.write_bytes(pickle.dumps(saved))
    imagenet = tmp_path / "benchmarking-keras-pytorch"
    for name, (framework, _) in IMAGENET.items():
        folder = imagenet / f"{framework}_imagenet"
        folder.mkdir(parents=True, exist_ok=True)
        probabilities = np.tile(np.float32([0.1, 0.5, 0.05, 0.2, 0.05]), (100, 1))
        np.save(folder / f"{name}_{framework}_imagenet_top5probs.npy", probabilities)
        np.save(folder / f"{name}_{framework}_imagenet_top5preds.npy", np.tile([7, 1, 9, 0, 3], (100, 1)))
    (tmp_path / "LLM-Calibration-Study" / "results").mkdir(parents=True)
    for model in MMLU_PRO:
        lines = [f"{row},law,A,{'A' if row % 2 else ''},{'' if row % 3 else 0.5},0.75,0.9,{row}" for row in range(N)]
        head = ",category,correct_answer,extracted_answer,verbal_numerical_confidence,logit_perplexity_confidence"
        path = tmp_path / "LLM-Calibration-Study" / "results" / f"mmlu_pro_{model}_eval_all_None.csv"
        path.write_text("\n".join([f"{head},verbal_linguistic_confidence,token_length", *lines]))
    return tmp_path


def test_tables_hold_the_numbers_of_the_files_and_run_no_code(clones, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert convert("public_sets", "", write_sets, [str(clones), str(tmp_path / "sets")]) == 0
    errors = capsys.readouterr().err
    assert "calibration-framework is missing" in errors
    assert re.search(r"keras-pytorch: 16 of 16 files are not those .* check out [0-9a-f]{40}", errors)
    assert not (tmp_path / "struck").exists()
    emotions = rows_by_id(tmp_path / "sets" / "emotion10k_task_icl0", "qwen-1_8b")
    assert len(emotions) == N - 5  # without those that prompts show
    logits, label = emotions["emotion10k_task_icl0-10"]
    assert (len(logits), label) == (6, 4)
    priced = rows_by_id(tmp_path / "sets" / "priced_mmlu", "gpt-4o")
    assert np.exp(priced["priced_mmlu-6"][0]) == pytest.approx([0.1, 0.7, 0.1, 0.1])
    assert np.exp(priced[f"priced_mmlu-{N - 1}"][0]) == pytest.approx([0.1] * 4)  # no option was named
    assert LogitTable(tmp_path / "sets" / "priced_mmlu").kinds["gpt-4o"] == "surrogate"
    assert LogitTable(tmp_path / "sets" / "priced_mmlu").declared_costs["gpt-4o"] == pytest.approx(0.1)
    logits, label = rows_by_id(tmp_path / "sets" / "imagenet", "xception")["imagenet-50"]
    assert label == 1
    assert np.exp(logits[[1, 0, 7, 9, 3]]) == pytest.approx([0.5, 0.2, 0.1, 0.05, 0.05])
    assert np.exp(np.delete(logits, [1, 0, 7, 9, 3])) == pytest.approx(0.1 / 995)  # what the five best leave
    assert np.exp(np.float64(logits)).sum() == pytest.approx(1)
    # Where only the five best are known, to keep the five best changes nothing.
    best_five.write_best_five(tmp_path / "sets" / "imagenet", tmp_path / "five")
    assert rows_by_id(tmp_path / "five", "xception")["imagenet-50"][0] == pytest.approx(logits, rel=1e-5)
    assert LogitTable(tmp_path / "five").kinds["xception"] == "log-probabilities"
    require_answers(tmp_path / "sets")
    require_embeddings(tmp_path / "sets")


def require_answers(sets):
    """Assert that tables of answers have one confidence or both, and the price of their tokens."""
    for name, confidences in (("mmlu_pro", ("sequence", "verbal")), ("mmlu_pro_verbal", ("verbal",))):
        table = AnswerTable(sets / name)
        assert set(table.models) == set(MMLU_PRO)
        assert table.confidences("gpt-4.1") == confidences
    chain = AnswerTable(sets / "mmlu_pro").read_chain(["gpt-4.1-nano", "gpt-4.1"], "test")
    number = np.array([int(example.removeprefix("mmlu_pro-")) for example in chain.example_ids])
    right = np.array([said_keys(vectors) == chain.labels for vectors in chain.logits])
    np.testing.assert_array_equal(right, np.tile(number % 2 == 1, (2, 1)))
    np.testing.assert_allclose(chain.costs.per_call, np.outer(number, [0.4e-3, 8e-3]), rtol=1e-6)
    assert (chain.labels[number % 2 == 0] == NONE_RIGHT).all()
    verbal = confidences_in(chain.logits[0])[:, 1]
    np.testing.assert_array_equal(np.isnan(verbal), number % 3 > 0)


def require_embeddings(sets):
    """Assert that texts are embedded next to the logits of their rows."""
    texts = ["x" * row for row in range(N)]
    embedded.embed_sets(texts, sets, lambda batch: Answers(np.float32([[len(text)] for text in batch["text"]])))
    for prompt in ("task_icl0", "base_icl1"):
        table = sets / f"emotion10k_{prompt}"
        ids = LogitTable(table).read_chain(["qwen-1_8b"], "test").example_ids
        vectors = read_embeddings(table, embedded.NAME, "test", ids)
        assert vectors[:, 0].tolist() == [int(example.rpartition("-")[2]) for example in ids]


@pytest.mark.parametrize("fault", ["one folder", "no such folder", "nothing in it", "into itself"])
def test_wrong_folders_are_one_line_and_exit_code_2(fault, tmp_path, capsys):
    source, output = tmp_path / "source", tmp_path / "output"
    if fault != "no such folder":
        source.mkdir()
    arguments = [source] if fault == "one folder" else [source, source if fault == "into itself" else output]
    try:
        code = convert("public_sets", "", write_sets, [str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    assert (code, capsys.readouterr().err.count("\n")) == (2, 1)
    assert not output.exists()
