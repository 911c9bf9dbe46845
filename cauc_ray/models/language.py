"""Causal language models in torch that choose among options.

Prompts are padded on the left and sorted by length into passes of a bounded number of tokens; positions and the
attention mask leave padding out, so that neither neighbours nor padding change a row's logits beyond rounding.
Of the vocabulary-wide logits, only those of the options leave this module.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Batch, ModelFacts, bucketed
from cauc_ray.models.hub import context_length, fetched, load_placed
from cauc_ray.models.kind import Placement
from cauc_ray.models.passes import Passes
from cauc_ray.models.prompts import LOGITS_ARE
from cauc_ray.models.tokens import Tokenizing, Tokens, scored
from cauc_ray.models.torch_device import TorchModel, compute_in_float32, dtype_name, free_bytes, n_parameters
from cauc_ray.models.transformers import TransformersChoiceSpec
from cauc_ray.numbers.types import Floats

# Of vocabulary-wide logits, at once: 1 GB in float32.
_LOGITS_AT_ONCE = 2**28


def load(spec: TransformersChoiceSpec, placement: Placement) -> ChoiceModel:
    """Load a language model and its tokenizer, the model on one device, or layer by layer over all GPUs.

    Raises ConfigError if they cannot be loaded or are unsuitable.
    """
    import transformers as hub

    if spec.gguf_file is not None:
        spec.require("gguf", "gguf", "accelerate")
    more = {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
    config = fetched(hub.AutoConfig, spec, **more)
    # Those that also see images answer texts as others do.
    causal = type(config) in hub.MODEL_FOR_CAUSAL_LM_MAPPING
    factory = hub.AutoModelForCausalLM if causal else hub.AutoModelForImageTextToText
    tokenizer = fetched(hub.AutoTokenizer, spec, **more)
    network = load_placed(factory, spec, placement, config=config, **more)
    return ChoiceModel(spec, tokenizer, network, num_gpus=placement.num_gpus)


class _Pass(NamedTuple):
    """The tensors of questions that share a forward pass, all int64.

    Attributes:
        tokens: Tokens of the prompts without the head, padded on the left, (n, width).
        mask: Where those are, (n, width).
        owners: Question of each option, (m,).
        starts: First token of each option, (m,).
        longer: Options of several tokens, (l,).
        continued: Tokens of longer options, padded on the right, (l, w).
        rest: Tokens of longer options after the first, (l,).
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    owners: torch.Tensor
    starts: torch.Tensor
    longer: torch.Tensor
    continued: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, questions: list[Tokens], n_cached: int) -> _Pass:
        """Return questions, of whose prompts the cache has the first tokens, as tensors on the host."""
        prompts = [question.prompt[n_cached:] for question in questions]
        width = max(map(len, prompts))
        options = [(row, tokens) for row, question in enumerate(questions) for tokens in question.options]
        longer = {index: tokens for index, (_, tokens) in enumerate(options) if len(tokens) > 1}
        widest = max(map(len, longer.values()), default=1)
        values = (
            [[0] * (width - len(prompt)) + prompt for prompt in prompts],
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts],
            [row for row, _ in options],
            [tokens[0] for _, tokens in options],
            [*longer],
            [tokens + [0] * (widest - len(tokens)) for tokens in longer.values()],
            [len(tokens) - 1 for tokens in longer.values()],
        )
        return cls(*(torch.tensor(numbers, dtype=torch.long) for numbers in values))


# Questions, how many tokens of their prompts the cache has, and their tensors.
_Questions: TypeAlias = tuple[list[Tokens], int, _Pass]


class ChoiceModel(TorchModel):
    """A causal language model that answers multiple-choice questions with one logit for each option."""

    def __init__(
        self,
        spec: TransformersChoiceSpec,
        tokenizer: Any,
        network: Any,
        new_event: Callable[[], Any] | None = None,
        num_gpus: float = 0,
    ) -> None:
        """Wrap a loaded network.

        Args:
            spec: Settings of the model.
            tokenizer: The network's tokenizer.
            network: The network, on its device.
            new_event: As TorchModel has it.
            num_gpus: GPUs of the stage.

        Raises:
            ConfigError: The tokenizer or its chat template cannot be used, or options need a cache that the network
                lacks.
        """
        config = network.config.get_text_config()
        self._tokenizing = Tokenizing(spec, tokenizer, min(spec.max_tokens or 10**9, context_length(network.config)))
        file = f" ({spec.gguf_file})" if spec.gguf_file else ""
        # Of a network that also sees images, what reads texts: towers for images do not run here.
        sees = config is not network.config
        parts = [network.get_decoder(), network.get_output_embeddings()] if sees else [network]
        facts = ModelFacts(
            params_b=n_parameters(*parts) / 1e9,
            source=f"transformers {spec.model}{file}, {dtype_name(network.dtype)}, {self._tokenizing.source}",
            logit_kind=LOGITS_ARE[spec.answers_with],
            labels=spec.label_names,
        )
        super().__init__(network, facts, next(network.parameters()).device, network.dtype, new_event)
        compute_in_float32(network.get_output_embeddings())  # bfloat16 logits between 16 and 32 are 0.125 apart
        self._spec = spec
        self._accepts = set(inspect.signature(network.forward).parameters)
        # transformers 5.24 renamed past_key_values to cache, as it now also calls the state of a network like Mamba.
        attends = "position_ids" in self._accepts or not getattr(network, "_is_stateful", False)
        # The state of linear attention (Qwen3.5) cannot be given to several options.
        attends &= "linear_attention" not in (getattr(config, "layer_types", None) or ())
        names = ("cache", "past_key_values") if attends else ()
        self._cache = next((name for name in names if name in self._accepts), "")
        if spec.answers_with != "letter" and not self._cache:
            raise ConfigError(f"{spec.model} has no cache for options to share; use options: letter")
        self._head = self._tokenizing.head() if self._cache else []
        self._head_cache = self._run_head()  # of the tokens that all prompts begin with
        # A quarter of the free memory each for the prompts' cache, its copy and the options' copies of it.
        self._max_cached = 0
        if self._cache:
            self._max_cached = free_bytes(self._device, num_gpus) // 4 // cache_bytes_per_token(config, network.dtype)
        self._max_logits = _LOGITS_AT_ONCE // config.vocab_size

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn questions of like lengths into passes of a bounded number of tokens, logits and cached tokens.

        Raises DataError when a column is missing.
        """
        asked, faults = self._tokenizing(batch)
        head, passes = len(self._head), []
        n_continued = [len(one.options) * (one.longest - 1) for one in asked]
        lengths = {index: max(1, len(one.prompt) - head) + n_continued[index] for index, one in enumerate(asked)}
        for indices in bucketed(lengths, self._spec.batch_tokens, self.pass_tokens):
            n_rows = len(indices)
            if head or any(n_continued):
                n_rows = self._max_cached // max(len(asked[index].prompt) for index in indices)
            n_rows = max(1, min(n_rows, self._max_logits))
            for start in range(0, len(indices), n_rows):
                together = [asked[index] for index in indices[start : start + n_rows]]
                begins = all(len(one.prompt) > head and one.prompt[:head] == self._head for one in together)
                cached = head if begins else 0
                on_host = _Pass(*map(self.on_host, _Pass.of(together, cached)))
                passes.append(([one.row for one in together], (together, cached, on_host)))
        return passes, faults

    def _run_head(self) -> Any:
        """Run what all prompts begin with, and return its cache; None where there is nothing that they can share."""
        if not self._head:
            return None
        head = torch.tensor([self._head], device=self._device)
        positions = torch.arange(len(self._head), device=self._device)[None]
        with torch.inference_mode():
            output = self._run(head, torch.ones_like(head), positions, logits_to_keep=1, use_cache=True)
            cache = getattr(output, self._cache)
        # A window over the last tokens would count the padding between the head and a prompt.
        if any(getattr(layer, "is_sliding", True) for layer in getattr(cache, "layers", [None])):
            self._head, cache = [], None
        return cache

    def launch(self, inputs: _Questions) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each option's next token's logit, and its log-likelihood, float64, both (m,).

        A letter's logit is the next token's. A longer option's is its log-likelihood: its first token's after the
        prompt, the others' from there on. The prompt is run once; what it leaves in the cache serves every option.
        """
        together, cached, on_host = inputs
        tensors = _Pass(*map(self.on_device, on_host))
        n, mask = len(together), tensors.mask
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0) + cached
        settings: dict[str, Any] = {"use_cache": len(tensors.longer) > 0}
        if cached:
            cache = copy.deepcopy(self._head_cache)
            cache.batch_repeat_interleave(n)
            settings = {"use_cache": True, self._cache: cache}
            mask = torch.cat([mask.new_ones(n, cached), mask], dim=1)
        output = self._run(tensors.tokens, mask, positions, logits_to_keep=1, **settings)
        logits = output.logits[:, -1].float()
        raw = logits[tensors.owners, tensors.starts]
        totals = (raw - torch.logsumexp(logits, dim=1)[tensors.owners]).double()
        if len(tensors.longer):
            owners = on_host.owners[on_host.longer]  # a cache may lie on many devices, which take the host's indices
            totals[tensors.longer] += self._continuations(tensors, owners, getattr(output, self._cache), mask)
        return raw, totals

    def take(
        self, inputs: _Questions, launched: tuple[torch.Tensor, torch.Tensor], counts: Counter[str]
    ) -> list[Floats]:
        """Return each row's logits."""
        ends = np.cumsum([len(question.options) for question in inputs[0]])[:-1]
        raw, logprobs = (np.split(numbers.cpu().numpy(), ends) for numbers in launched)
        scores = scored(self._spec, inputs[0], logprobs, counts)
        return raw if self._spec.answers_with == "letter" else scores

    def _continuations(self, tensors: _Pass, owners: torch.Tensor, cache: Any, mask: torch.Tensor) -> torch.Tensor:
        """Return the log-likelihood of each longer option's tokens after its first, float64 (l,).

        Each option has its own copy of the cache, so that they run in groups that fit into memory.

        Args:
            tensors: Tensors of the pass.
            owners: Question of each longer option, on the host, (l,).
            cache: The cache of the prompts.
            mask: What the cache holds, (n, width).
        """
        n_options, width = tensors.continued.shape
        size = max(1, min(self._max_cached // (mask.shape[1] + width), self._max_logits // width))
        totals = []
        for start in range(0, n_options, size):
            group = slice(start, start + size)
            copied = copy.deepcopy(cache) if start + size < n_options else cache
            copied.batch_select_indices(owners[group])
            inputs, targets = tensors.continued[group, :-1], tensors.continued[group, 1:]
            steps = torch.arange(inputs.shape[1], device=inputs.device)
            option_mask = steps < tensors.rest[group, None]
            before = mask[tensors.owners[tensors.longer[group]]]
            positions = before.sum(dim=1, keepdim=True) + steps
            whole = torch.cat([before, option_mask.long()], dim=1)
            logits = self._run(inputs, whole, positions, use_cache=True, **{self._cache: copied}).logits.float()
            chosen = logits.gather(2, targets[:, :, None])[:, :, 0] - torch.logsumexp(logits, dim=2)
            totals.append(torch.where(option_mask, chosen, 0.0).double().sum(dim=1))
        return torch.cat(totals)

    def _run(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, **settings: Any) -> Any:
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, **settings}
        return self._network(**{name: value for name, value in inputs.items() if name in self._accepts})


def cache_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return how many bytes a network keeps of each token, at most: keys and values of all heads in all layers."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    n_heads = getattr(config, "num_key_value_heads", None) or heads
    return int(2 * config.num_hidden_layers * n_heads * head_size * dtype.itemsize)
