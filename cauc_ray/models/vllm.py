"""Language models in a vLLM engine, which scores the tokens of each option exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field

from cauc_ray.errors import ConfigError, first_line
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, PreparingModel
from cauc_ray.models.kind import local_or_hub, require
from cauc_ray.models.prompts import IDS_AT_ONCE
from cauc_ray.models.tokens import Tokenizing, Tokens, answered
from cauc_ray.models.transformers import HubLanguageSpec
from cauc_ray.numbers.logits import LogitKind
from cauc_ray.numbers.types import Floats


class VllmSpec(HubLanguageSpec):
    """`{kind: vllm, model: ORG/NAME, engine: {max_model_len: 4096}}`: a language model in a vLLM engine of the stage.

    lora: an adapter's folder or hub id.   engine: arguments of vllm.LLM, such as quantization, max_model_len or
    gpu_memory_utilization; over a stage's several GPUs it is tensor parallel.
    """

    kind: Literal["vllm"]
    lora: str | None = Field(default=None, min_length=1)
    engine: dict[str, Any] = Field(default_factory=dict)

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits."""
        return "log-probabilities"

    def located(self, folder: AnyPath) -> Self:
        """Return the same with relative folders resolved against the pool file's."""
        lora = None if self.lora is None else local_or_hub(self.lora, folder)
        return super().located(folder).model_copy(update={"lora": lora})

    def load(self) -> Model:
        """Start the engine on one GPU, or on the CPU. Raises ConfigError if the model cannot be loaded."""
        return self._started(1)

    def load_over_gpus(self) -> Model:
        """Start the engine on all GPUs that the process sees, tensor parallel. Raises ConfigError as load."""
        require("vllm", "torch")
        import torch

        return self._started(torch.cuda.device_count())

    def _started(self, n_gpus: int) -> Model:
        require("vllm", "vllm", "torch")
        import torch
        from vllm import LLM

        settings = {
            "revision": self.revision,
            "dtype": "float32" if self.dtype == "auto" and not torch.cuda.is_available() else self.dtype,
            "tensor_parallel_size": n_gpus,
            "enable_prefix_caching": True,
            "enable_lora": self.lora is not None,
            # Without Ray's own placement, which the stage has already.
            **({"distributed_executor_backend": "mp"} if n_gpus > 1 else {}),
            **self.engine,
        }
        try:
            engine = LLM(model=self.model, **settings)
        except Exception as error:  # of the engine's own process, of many types
            raise ConfigError(f"model {self.model!r} cannot be loaded by vLLM: {first_line(error)}") from error
        return VllmModel(self, engine)


class VllmModel(PreparingModel):
    """A vLLM engine that answers with the log-probabilities of the options."""

    def __init__(self, spec: VllmSpec, engine: Any) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._spec = spec
        self._engine = engine
        self._sampling = SamplingParams
        self._lora = None if spec.lora is None else LoRARequest("adapter", 1, spec.lora)
        config = engine.llm_engine.model_config
        longest = min(spec.max_tokens or config.max_model_len, config.max_model_len - 1)  # and one of answer
        self._tokenizing = Tokenizing(spec, engine.get_tokenizer(), longest)
        precision = str(config.dtype).removeprefix("torch.")
        if config.quantization:
            precision = f"{config.quantization} in {precision}"
        adapter = f" with {spec.lora}" if spec.lora else ""
        self.facts = ModelFacts(
            source=f"vllm {spec.model}{adapter}, {precision}, {self._tokenizing.how}",
            logit_kind=spec.answers_kind,
            labels=spec.label_names,
            dtype=precision,
        )

    def prepare(self, batch: Batch) -> tuple[list[Tokens], list[int], dict[int, str]]:
        """Turn a batch into tokens. Raises DataError when a column is missing."""
        return self._tokenizing(batch)

    def answer(self, prepared: tuple[list[Tokens], list[int], dict[int, str]]) -> Answers:
        """Answer a batch; rows without a question, or with one that is too long, are failures."""
        asked, n_options, faults = prepared
        requests = [(one, *request) for one in asked for request in self._requests(one)]
        prompts = [{"prompt_token_ids": one.prompt + tokens} for one, tokens, _ in requests]
        params = [self._params(ids) for *_, ids in requests]
        outputs = self._engine.generate(prompts, params, use_tqdm=False, lora_request=self._lora) if prompts else []
        scores: dict[int, dict[tuple[int, ...], float]] = {one.row: {} for one in asked}
        for (one, tokens, ids), output in zip(requests, outputs, strict=True):
            if ids:
                following = output.outputs[0].logprobs[0]
                scores[one.row] |= {(*tokens, token): following[token].logprob for token in ids}
            else:
                own = enumerate(tokens, len(one.prompt))
                scores[one.row][tuple(tokens)] = sum(output.prompt_logprobs[at][token].logprob for at, token in own)
        found = {one.row: self._logits(one, scores[one.row]) for one in asked}
        finite = [logits for logits in found.values() if np.isfinite(logits).all()]
        compared = self._spec.answers_with != "text"
        n_little = sum(np.exp(logits, dtype=np.float64).sum() < 0.5 for logits in finite) if compared else 0
        return answered(len(n_options), found, faults, int(n_little))

    def _params(self, ids: Sequence[int]) -> Any:
        if ids:
            return self._sampling(max_tokens=1, temperature=0, logprob_token_ids=list(ids), detokenize=False)
        return self._sampling(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)

    def _requests(self, asked: Tokens) -> Iterator[tuple[list[int], list[int]]]:
        """Yield a row's requests: what follows its prompt, and which next tokens are scored, or none but those."""
        following: dict[tuple[int, ...], set[int]] = {}
        for part in {part for option in asked.options for part in self._parts(option)}:
            if len(part) == 1 or self._lora is not None:
                following.setdefault(part[:-1], set()).add(part[-1])
            else:
                yield list(part), []
        for tokens, own in following.items():
            ids = sorted(own)
            for start in range(0, len(ids), IDS_AT_ONCE):
                yield list(tokens), ids[start : start + IDS_AT_ONCE]

    def _parts(self, option: list[int]) -> list[tuple[int, ...]]:
        """Return an option's beginnings whose log-probabilities make up its own: it as a whole where that can be had.

        With an adapter, vLLM 0.32 ends when asked for a prompt's log-probabilities: each token is then a next one.
        """
        return [tuple(option[:n]) for n in range(1 if self._lora is not None else len(option), len(option) + 1)]

    def _logits(self, asked: Tokens, scores: dict[tuple[int, ...], float]) -> Floats:
        found = [sum(scores[part] for part in self._parts(option)) for option in asked.options]
        per_byte = self._spec.answers_with == "text"
        logits: Floats = np.array(found) / (np.array(asked.n_bytes) if per_byte else 1)
        return logits.astype(np.float32)
