"""A substitute for the package vllm where that is missing: its engine's calls, limits and answers, by plain torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from language_models import Loaded
from scipy.special import log_softmax


class SamplingParams:
    def __init__(self, *, max_tokens, temperature, logprob_token_ids=(), detokenize=True, **generates):
        assert generates or (max_tokens, temperature) == (1, 0)
        if len(logprob_token_ids) > 128:
            raise ValueError("Requested logprob_token_ids of length above 128")
        assert generates.keys() <= {"n", "seed", "logprobs", "structured_outputs"}
        self.logprob_token_ids, self.max_tokens, self.n = logprob_token_ids, max_tokens, generates.get("n", 1)


class LLM:
    started: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, model, **settings):
        if not Path(model).is_dir():
            raise OSError(f"{model} is not a local folder and is not a valid model identifier\nlisted on a hub")
        self.started.append({"model": model, **settings})
        self._loaded = Loaded.from_folder(Path(model))
        longest = settings.get("max_model_len", self._loaded.network.config.max_position_embeddings)
        quantization = settings.get("quantization")
        config = SimpleNamespace(max_model_len=longest, dtype=torch.float32, quantization=quantization)
        self.llm_engine = SimpleNamespace(model_config=config)

    def get_tokenizer(self):
        return self._loaded.tokenizer

    def chat(self, messages, params, *, chat_template_kwargs, use_tqdm, lora_request):
        texts = [self._template(chat, **chat_template_kwargs) for chat in messages]
        return [self._generated(text, params) for text in texts]

    def _template(self, chat, **settings):
        return self._loaded.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **settings)

    def _generated(self, text, params):
        """Continue a text by the likeliest tokens; the text of a token that ends a character has all of it."""
        tokenizer, ids, steps = self._loaded.tokenizer, [], []
        prompt, before = tokenizer.encode(text, add_special_tokens=False), ""
        while len(ids) < params.max_tokens:
            logprobs = log_softmax(self._loaded.logits(prompt + ids)[-1].astype(float))
            ids.append(token := int(logprobs.argmax()))
            answer = tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
            decoded, before = answer[len(before) :], answer
            steps.append({token: SimpleNamespace(logprob=float(logprobs[token]), decoded_token=decoded)})
        output = SimpleNamespace(text=before, token_ids=ids, logprobs=steps)
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[output] * params.n)

    def generate(self, prompts, params, *, use_tqdm, lora_request):
        if isinstance(prompts[0], str):
            return [self._generated(text, settings) for text, settings in zip(prompts, params, strict=True)]
        return [self._answered(p["prompt_token_ids"], settings) for p, settings in zip(prompts, params, strict=True)]

    def _answered(self, tokens, params):
        if len(tokens) >= self.llm_engine.model_config.max_model_len:
            raise ValueError("The decoder prompt is longer than the maximum model length")
        logprobs = log_softmax(self._loaded.logits(tokens)[-1].astype(float))
        following = {t: SimpleNamespace(logprob=float(logprobs[t])) for t in params.logprob_token_ids}
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[following])])


def install(monkeypatch):
    """Let `import vllm` find this, and return the settings of the engines that are started."""
    names = ("vllm", "vllm.lora", "vllm.lora.request", "vllm.sampling_params")
    vllm, lora, request, sampling = map(ModuleType, names)
    sampling.StructuredOutputsParams = lambda json: {"json": json}
    vllm.__spec__ = vllm.__loader__ = SimpleNamespace(name="vllm")
    vllm.LLM, vllm.SamplingParams = LLM, SamplingParams
    request.LoRARequest = lambda name, number, path: (name, number, path)
    for module in (vllm, lora, request, sampling):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(LLM, "started", [])
    return LLM.started
