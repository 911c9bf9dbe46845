"""Language models in a vLLM engine, which scores the tokens of each option exactly, or generates answers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError, first_line
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, PreparingModel, batch_size
from cauc_ray.models.chat import DATE_TEXT
from cauc_ray.models.generating import GeneratingSpec, Generation, Sample, answer_of, read_sample
from cauc_ray.models.kind import Device, HubModel, Placement
from cauc_ray.models.passes import LocalModel, Passes
from cauc_ray.models.prompts import Asked, Prompts
from cauc_ray.models.tokens import Tokenizing, Tokens, log_likelihoods, next_tokens, scored
from cauc_ray.models.transformers import HubLanguageSpec
from cauc_ray.models.words import in_words
from cauc_ray.numbers.types import Floats

# Questions in tokens, and the images that go with them, by row.
Questions: TypeAlias = tuple[Sequence[Tokens], Mapping[int, Any]]
# Ranks of adapters that vLLM reserves memory for; its default, 16, refuses larger ones in the first call.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The part of a share of a GPU that an engine takes.
_OF_SHARE = 0.9


class VllmSpec(HubLanguageSpec, GeneratingSpec):
    """`{kind: vllm, model: ORG/NAME, engine: {max_model_len: 4096}}`: a language model in a vLLM engine of the stage.

    With `generate`, it answers in words.

    Attributes:
        image: Whether the column `image` goes with each prompt, for a vision-language model.
        lora: An adapter's folder or hub id.
        engine: Arguments of vllm.LLM, such as quantization, max_model_len or gpu_memory_utilization. Over a stage's
            several GPUs it is tensor parallel; a share of a GPU is its share of the memory.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.vllm:load"
    PACKAGES: ClassVar[tuple[str, ...]] = ("vllm", "vllm", "torch")
    FILES: ClassVar[tuple[str, ...]] = ("model", "lora")
    kind: Literal["vllm"]
    device: Device = "auto"
    lora: HubModel | None = None
    engine: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _images_have_a_place(self) -> VllmSpec:
        bare = self.chat_template is None and self.answers_with == "text" and self.generate is None
        if self.image and (self.chat_template is False or bare):
            raise ValueError("image needs the model's chat template, which has a place for it; set chat_template: true")
        return self

    @property
    def identity(self) -> str:
        """Return a hash of all settings that its answers depend on: not of the share of the memory that it takes."""
        engine = {name: value for name, value in self.engine.items() if name != "gpu_memory_utilization"}
        return super(VllmSpec, self.model_copy(update={"engine": engine})).identity

    @property
    def least_gpus(self) -> int:
        """Return how many GPUs its engine is to use."""
        sizes = [self.engine.get(f"{how}_parallel_size", 1) for how in ("tensor", "pipeline", "data")]
        n_gpus = math.prod(size for size in sizes if isinstance(size, int))
        return max(super().least_gpus, n_gpus if n_gpus > 1 and self.device != "cpu" else 0)


def load(spec: VllmSpec, placement: Placement) -> Model:
    """Start the engine on the CPU, one GPU, or tensor parallel on all that the process sees. Raises ConfigError."""
    import torch
    from vllm import LLM

    has_gpu = torch.cuda.is_available()
    if spec.device != "auto" and has_gpu != (spec.device == "cuda"):
        visible = "a GPU is" if has_gpu else "no GPU is"
        raise ConfigError(f"device {spec.device}: {visible} visible, where vLLM computes; set num_gpus under resources")
    n_gpus = torch.cuda.device_count() if placement.over_gpus else 1
    settings = {
        "revision": spec.revision,
        "dtype": "float32" if spec.dtype == "auto" and not has_gpu else spec.dtype,
        "tensor_parallel_size": n_gpus,
        "enable_prefix_caching": True,
        **({} if spec.lora is None else {"enable_lora": True, "max_lora_rank": _max_lora_rank(spec.lora)}),
        # Of a whole GPU it takes vLLM's own default.
        **({"gpu_memory_utilization": _OF_SHARE * placement.num_gpus} if 0 < placement.num_gpus < 1 else {}),
        # Without Ray's own placement, which the stage has already.
        **({"distributed_executor_backend": "mp"} if n_gpus > 1 else {}),
        **spec.engine,
    }
    try:
        engine = LLM(model=spec.model, **settings)
    except Exception as error:  # of the engine's own process, of many types
        raise ConfigError(f"model {spec.model!r} cannot be loaded by vLLM: {first_line(error)}") from error
    return VllmModel(spec, engine) if spec.generate is None else VllmGenerator(spec, spec.generate, engine)


def _max_lora_rank(adapter: str) -> int:
    """Return the smallest rank that vLLM supports and an adapter fits in. Raises ConfigError if it cannot be read."""
    from transformers.utils import cached_file

    from cauc_ray.models.hub import loading

    with loading(adapter):
        config = json.loads(Path(cached_file(adapter, "adapter_config.json")).read_bytes())
        ranks = [config["r"], *config.get("rank_pattern", {}).values()]
    return next((rank for rank in _LORA_RANKS if rank >= max(ranks)), max(ranks))


class VllmModel(LocalModel):
    """A vLLM engine that answers with the log-probabilities of the options."""

    def __init__(self, spec: VllmSpec, engine: Any) -> None:
        from vllm import SamplingParams

        self._spec = spec
        self._engine = engine
        self._sampling = SamplingParams
        self._lora = _adapter(spec)
        config = engine.llm_engine.model_config
        longest = min(spec.max_tokens or config.max_model_len, config.max_model_len - 1)  # and one of answer
        self._tokenizing = Tokenizing(spec, engine.get_tokenizer(), longest)
        self.facts = _facts(spec, engine, self._tokenizing.source)

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into tokens. Raises DataError when a column is missing."""
        asked, faults = self._tokenizing(batch)
        images = dict[int, Any]()
        if self._spec.image:
            images, faults = _images(batch, faults)
            asked = [one for one in asked if one.row in images]
        return [([one.row for one in asked], (asked, images))] if asked else [], faults

    def launch(self, questions: Questions) -> list[Floats]:
        """Return the log-likelihoods of each row's options; the engine makes batches of all requests."""
        inputs, images = questions
        asked = [(one, before, ids) for one in inputs for before, ids in next_tokens(one.options)]
        prompts = [
            {"prompt_token_ids": one.prompt + before}
            | ({"multi_modal_data": {"image": images[one.row]}} if images else {})
            for one, before, _ in asked
        ]
        settings = {"max_tokens": 1, "temperature": 0, "detokenize": False}
        params = [self._sampling(**settings, logprob_token_ids=ids) for *_, ids in asked]
        outputs = self._engine.generate(prompts, params, use_tqdm=False, lora_request=self._lora)
        logprobs: dict[int, dict[tuple[int, ...], float]] = {one.row: {} for one in inputs}
        for (one, before, ids), output in zip(asked, outputs, strict=True):
            following = output.outputs[0].logprobs[0]
            logprobs[one.row] |= {(*before, token): following[token].logprob for token in ids}
        return [log_likelihoods(one.options, logprobs[one.row]) for one in inputs]

    def take(self, questions: Questions, launched: list[Floats], counts: Counter[str]) -> list[Floats]:
        """Return each row's logits."""
        return scored(self._spec, questions[0], launched, counts)


class VllmGenerator(PreparingModel):
    """A vLLM engine that generates answers; the same row is sampled alike each time."""

    def __init__(self, spec: VllmSpec, asked: Generation, engine: Any) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        self._spec, self._asked, self._engine, self._lora = spec, asked, engine, _adapter(spec)
        has_template = bool(getattr(engine.get_tokenizer(), "chat_template", None))
        if not has_template and (spec.chat_template or spec.image):
            raise ConfigError(f"{'image' if spec.image else 'chat_template'}: {spec.model} has no chat template")
        self._is_chat = has_template if spec.chat_template is None else spec.chat_template
        self._prompts = Prompts(spec, self._is_chat)
        schema = asked.schema_sent
        self._params = SamplingParams(
            n=asked.samples,
            max_tokens=asked.max_tokens,
            temperature=asked.heat,
            seed=0,
            logprobs=0 if asked.reads_tokens else None,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        )
        how = "through its chat template" if self._is_chat else "without a chat template"
        self.facts = _facts(spec, engine, f"generating {how}")

    def prepare(self, batch: Batch) -> tuple[int, dict[int, Asked], dict[int, Any], dict[int, str]]:
        """Return the batch's size, its prompts and images by row, and why the other rows have none."""
        questions, faults = self._prompts(batch)
        images = dict[int, Any]()
        if self._spec.image:
            images, faults = _images(batch, faults)
            questions = {row: question for row, question in questions.items() if row in images}
        return batch_size(batch), questions, images, faults

    def answer(self, prepared: tuple[int, dict[int, Asked], dict[int, Any], dict[int, str]]) -> Answers:
        """Generate the answers of a batch."""
        n, questions, images, faults = prepared
        settings: dict[str, Any] = {"use_tqdm": False, "lora_request": self._lora}
        if not questions:
            outputs = []
        elif self._is_chat:
            kwargs = {"date_string": DATE_TEXT, **self._spec.chat_template_kwargs}
            chats = [_chat(question.text, images.get(row)) for row, question in questions.items()]
            outputs = self._engine.chat(chats, self._params, chat_template_kwargs=kwargs, **settings)
        else:
            texts = [question.text for question in questions.values()]
            outputs = self._engine.generate(texts, [self._params] * len(texts), **settings)
        words = self._asked.answer_format
        texts_of: list[str | None] = [None] * n
        confidences: dict[str, list[float]] = {name: [math.nan] * n for name in words.confidences}
        tokens = np.zeros((n, 2), dtype=np.int64)
        for row, output in zip(questions, outputs, strict=True):
            texts_of[row], values = answer_of(self._asked, [self._sample(one) for one in output.outputs])
            n_generated = sum(len(one.token_ids) for one in output.outputs)
            tokens[row] = len(output.prompt_token_ids or ()), n_generated
            for name, value in zip(words.confidences, values, strict=True):
                confidences[name][row] = value
        return in_words(texts_of, confidences, words, faults, tokens=tokens)

    def _sample(self, output: Any) -> Sample:
        """Return an answer of the engine."""
        tokens = None
        if output.logprobs is not None:
            pairs = zip(output.token_ids, output.logprobs, strict=True)
            tokens = [((of[token].decoded_token or "").encode(), float(of[token].logprob)) for token, of in pairs]
        return read_sample(self._asked, output.text, tokens)


def _chat(text: str, image: Any) -> list[dict[str, Any]]:
    """Return a prompt as a conversation, with the image before the text that asks about it."""
    if image is None:
        return [{"role": "user", "content": text}]
    parts = [{"type": "image_pil", "image_pil": image}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def _adapter(spec: VllmSpec) -> Any:
    """Return the adapter as the engine takes it, None without one."""
    from vllm.lora.request import LoRARequest

    return None if spec.lora is None else LoRARequest("adapter", 1, spec.lora)


def _facts(spec: VllmSpec, engine: Any, how: str) -> ModelFacts:
    """Return the facts of a model.   how: it is asked."""
    config = engine.llm_engine.model_config
    dtype = str(config.dtype).removeprefix("torch.")
    precision = f"{config.quantization} in {dtype}" if config.quantization else dtype
    adapter = f" with {spec.lora}" if spec.lora else ""
    source = f"vllm {spec.model}{adapter}, {precision}, {how}"
    return ModelFacts(source, logit_kind=spec.answers_kind, labels=spec.label_names, dtype=precision)


def _images(batch: Batch, faults: Mapping[int, str]) -> tuple[dict[int, Any], dict[int, str]]:
    """Return the rows' images, and why the other rows have none, or no prompt."""
    from cauc_ray.models.images import decode_image, read_images

    images, image_faults = read_images(batch, decode_image)
    return dict(images), image_faults | dict(faults)
