"""One rule scores options in torch, in vLLM and behind servers: the log-likelihood of an option's own tokens."""

import fake_vllm
import pytest
from batches import question_batch
from completion_server import language_server

from cauc_ray.models.answers import BELOW
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.transformers import TransformersChoiceSpec
from cauc_ray.models.vllm import VllmSpec

ROWS = question_batch(
    ("Which is a fruit?", ["stone", "apple"]),
    ("What do bees make?", ["honey", "concrete walls", "x"]),
    ("1 + 1?", ["1", "2", "3", "4"]),
    (None, ["a", "b"]),
)


@pytest.fixture(scope="module")
def server_url(language_model):
    """A server that scores given tokens, as vLLM's does."""
    with language_server(language_model, scores_tokens=True) as url:
        yield url


@pytest.mark.parametrize("options", ["letter", "name", "text"])
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("backend", ["vllm", "vllm with an adapter", "server"])
def test_backends_score_options_as_torch_does(language_model, server_url, monkeypatch, backend, options, chat):
    fake_vllm.install(monkeypatch)  # it does nothing with an adapter, but has its limit
    folder, settings = str(language_model.folder), {"options": options, "chat_template": chat}
    if backend == "server":
        endpoint = "chat" if chat else "completions"
        spec = OpenAISpec(kind="openai", model="m", base_url=server_url, endpoint=endpoint, options=options)
    else:
        spec = VllmSpec(kind="vllm", model=folder, lora="/adapter" if "adapter" in backend else None, **settings)
    answers = spec.load()(ROWS)
    expected = TransformersChoiceSpec(kind="transformers-choice", model=folder, **settings).load()(ROWS)
    assert answers.failures == expected.failures == {3: "it has no question"}
    assert BELOW not in answers.counts
    for row, n in enumerate(expected.n_options[:3]):
        scores, plain = answers.logits[row, :n], expected.logits[row, :n]
        if options == "letter":  # raw logits there, log-probabilities here
            scores, plain = scores - scores.max(), plain - plain.max()
        assert scores == pytest.approx(plain, abs=2e-3)
