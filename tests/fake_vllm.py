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
    def __init__(self, *, max_tokens, temperature, logprob_token_ids, detokenize=True):
        assert (max_tokens, temperature) == (1, 0)
        if len(logprob_token_ids) > 128:
            raise ValueError("Requested logprob_token_ids of length above 128")
        self.logprob_token_ids = logprob_token_ids


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

    def generate(self, prompts, params, *, use_tqdm, lora_request):
        return [self._answered(p["prompt_token_ids"], settings) for p, settings in zip(prompts, params, strict=True)]

    def _answered(self, tokens, params):
        if len(tokens) >= self.llm_engine.model_config.max_model_len:
            raise ValueError("The decoder prompt is longer than the maximum model length")
        logprobs = log_softmax(self._loaded.logits(tokens)[-1].astype(float))
        following = {t: SimpleNamespace(logprob=float(logprobs[t])) for t in params.logprob_token_ids}
        return SimpleNamespace(outputs=[SimpleNamespace(logprobs=[following])])


def install(monkeypatch):
    """Let `import vllm` find this, and return the settings of the engines that are started."""
    vllm, lora, request = (ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    vllm.__spec__ = vllm.__loader__ = SimpleNamespace(name="vllm")
    vllm.LLM, vllm.SamplingParams = LLM, SamplingParams
    request.LoRARequest = lambda name, number, path: (name, number, path)
    for module in (vllm, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(LLM, "started", [])
    return LLM.started
