"""Language models in a vLLM engine, which scores the tokens of each option exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from cauc_ray.errors import ConfigError, first_line
from cauc_ray.models.answers import Batch, Model, ModelFacts
from cauc_ray.models.kind import HubModel
from cauc_ray.models.passes import LocalModel, Passes
from cauc_ray.models.tokens import Tokenizing, Tokens, log_likelihoods, next_tokens, scored
from cauc_ray.models.transformers import HubLanguageSpec
from cauc_ray.numbers.types import Floats


class VllmSpec(HubLanguageSpec):
    """`{kind: vllm, model: ORG/NAME, engine: {max_model_len: 4096}}`: a language model in a vLLM engine of the stage.

    lora: an adapter's folder or hub id.   engine: arguments of vllm.LLM, such as quantization, max_model_len or
    gpu_memory_utilization; over a stage's several GPUs it is tensor parallel.
    """

    kind: Literal["vllm"]
    lora: HubModel | None = None
    engine: dict[str, Any] = Field(default_factory=dict)

    @property
    def least_gpus(self) -> int:
        """Return how many GPUs its engine is to use."""
        sizes = [self.engine.get(f"{how}_parallel_size", 1) for how in ("tensor", "pipeline", "data")]
        own = math.prod(size for size in sizes if isinstance(size, int))
        return max(super().least_gpus, own if own > 1 and self.device != "cpu" else 0)

    def load(self, *, over_gpus: bool = False) -> Model:
        """Start the engine on the CPU, one GPU, or tensor parallel on all that the process sees. Raises ConfigError."""
        self.require("vllm", "vllm", "torch")
        self.check(here=True)
        import torch
        from vllm import LLM

        n_gpus = torch.cuda.device_count() if over_gpus else 1
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


class VllmModel(LocalModel):
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
            source=f"vllm {spec.model}{adapter}, {precision}, {self._tokenizing.source}",
            logit_kind=spec.answers_kind,
            labels=spec.label_names,
            dtype=precision,
        )

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into tokens. Raises DataError when a column is missing."""
        asked, faults = self._tokenizing(batch)
        return [([question.row for question in asked], asked)] if asked else [], faults

    def launch(self, inputs: Sequence[Tokens]) -> list[Floats]:
        """Return the log-likelihoods of each row's options; the engine makes batches of all requests."""
        asked = [(index, *request) for index, one in enumerate(inputs) for request in next_tokens(one.options)]
        prompts = [{"prompt_token_ids": inputs[index].prompt + before} for index, before, _ in asked]
        params = [
            self._sampling(max_tokens=1, temperature=0, detokenize=False, logprob_token_ids=ids) for *_, ids in asked
        ]
        outputs = self._engine.generate(prompts, params, use_tqdm=False, lora_request=self._lora)
        logprobs: list[dict[tuple[int, ...], float]] = [{} for _ in inputs]
        for (index, before, ids), output in zip(asked, outputs, strict=True):
            following = output.outputs[0].logprobs[0]
            logprobs[index] |= {(*before, token): following[token].logprob for token in ids}
        return [log_likelihoods(one.options, scores) for one, scores in zip(inputs, logprobs, strict=True)]

    def take(self, inputs: Sequence[Tokens], launched: list[Floats], counts: Counter[str]) -> list[Floats]:
        """Return each row's logits."""
        return scored(self._spec, inputs, launched, counts)
