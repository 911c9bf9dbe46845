"""Language models in a vLLM engine, which scores the tokens of each option exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.errors import ConfigError, first_line
from cauc_ray.models.answers import Batch, ModelFacts
from cauc_ray.models.kind import HubModel, Placement
from cauc_ray.models.passes import LocalModel, Passes
from cauc_ray.models.tokens import Tokenizing, Tokens, parts, requests, scored
from cauc_ray.models.transformers import HubLanguageSpec
from cauc_ray.numbers.types import Floats


class VllmSpec(HubLanguageSpec):
    """`{kind: vllm, model: ORG/NAME, engine: {max_model_len: 4096}}`: a language model in a vLLM engine of the stage.

    lora: an adapter's folder or hub id.   engine: arguments of vllm.LLM, such as quantization, max_model_len or
    gpu_memory_utilization; over a stage's several GPUs it is tensor parallel.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.vllm:load"
    PACKAGES: ClassVar[tuple[str, ...]] = ("vllm", "vllm", "torch")
    kind: Literal["vllm"]
    lora: HubModel | None = None
    engine: dict[str, Any] = Field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Return a hash of all settings that its answers depend on: not of the share of the memory that it takes."""
        engine = {name: value for name, value in self.engine.items() if name != "gpu_memory_utilization"}
        return super(VllmSpec, self.model_copy(update={"engine": engine})).identity

    @property
    def least_gpus(self) -> int:
        """Return how many GPUs its engine is to use."""
        sizes = [self.engine.get(f"{how}_parallel_size", 1) for how in ("tensor", "pipeline", "data")]
        own = math.prod(size for size in sizes if isinstance(size, int))
        return max(super().least_gpus, own if own > 1 and self.device != "cpu" else 0)


def load(spec: VllmSpec, placement: Placement) -> VllmModel:
    """Start the engine on the CPU, one GPU, or tensor parallel on all that the process sees. Raises ConfigError."""
    spec.check(local=True)
    import torch
    from vllm import LLM

    n_gpus = torch.cuda.device_count() if placement.over_gpus else 1
    settings = {
        "revision": spec.revision,
        "dtype": "float32" if spec.dtype == "auto" and not torch.cuda.is_available() else spec.dtype,
        "tensor_parallel_size": n_gpus,
        "enable_prefix_caching": True,
        "enable_lora": spec.lora is not None,
        # Without Ray's own placement, which the stage has already.
        **({"distributed_executor_backend": "mp"} if n_gpus > 1 else {}),
        **spec.engine,
    }
    try:
        engine = LLM(model=spec.model, **settings)
    except Exception as error:  # of the engine's own process, of many types
        raise ConfigError(f"model {spec.model!r} cannot be loaded by vLLM: {first_line(error)}") from error
    return VllmModel(spec, engine)


class VllmModel(LocalModel):
    """A vLLM engine that answers with the log-probabilities of the options."""

    def __init__(self, spec: VllmSpec, engine: Any) -> None:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        self._spec = spec
        self._engine = engine
        self._sampling = SamplingParams
        self._lora = None if spec.lora is None else LoRARequest("adapter", 1, spec.lora)
        self._by_token = spec.lora is not None  # vLLM 0.32 ends when asked for a prompt's log-probabilities with one
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

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into tokens. Raises DataError when a column is missing."""
        asked, faults = self._tokenizing(batch)
        return [([one.row for one in asked], asked)] if asked else [], faults

    def launch(self, inputs: Sequence[Tokens]) -> list[Floats]:
        """Return the log-likelihoods of each row's options; the engine makes batches of all requests."""
        asked = [(one, *request) for one in inputs for request in requests(one.options, by_token=self._by_token)]
        prompts = [{"prompt_token_ids": one.prompt + tokens} for one, tokens, _ in asked]
        params = [self._params(ids) for *_, ids in asked]
        outputs = self._engine.generate(prompts, params, use_tqdm=False, lora_request=self._lora)
        scores: dict[int, dict[tuple[int, ...], float]] = {one.row: {} for one in inputs}
        for (one, tokens, ids), output in zip(asked, outputs, strict=True):
            if ids:
                following = output.outputs[0].logprobs[0]
                scores[one.row] |= {(*tokens, token): following[token].logprob for token in ids}
            else:
                own = enumerate(tokens, len(one.prompt))
                scores[one.row][tuple(tokens)] = sum(output.prompt_logprobs[at][token].logprob for at, token in own)

        def logprob(row: int, option: list[int]) -> float:
            return sum(scores[row][part] for part in parts(option, by_token=self._by_token))

        return [np.array([logprob(one.row, option) for option in one.options]) for one in inputs]

    def take(self, inputs: Sequence[Tokens], launched: list[Floats], counts: Counter[str]) -> list[Floats]:
        """Return each row's logits."""
        return scored(self._spec, inputs, launched, counts)

    def _params(self, ids: Sequence[int]) -> Any:
        what = {"logprob_token_ids": list(ids)} if ids else {"prompt_logprobs": 0}
        return self._sampling(max_tokens=1, temperature=0, detokenize=False, **what)
