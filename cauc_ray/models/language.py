"""Causal language models in torch that choose among options.

Prompts are padded on the left and sorted by length into passes of a bounded number of tokens; positions and the
attention mask leave padding out, so that neither neighbours nor padding change a row's logits beyond rounding.
Of the vocabulary-wide logits, only those of the options leave this module.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Batch, ModelFacts, bucketed
from cauc_ray.models.passes import LocalModel, Passes
from cauc_ray.models.prompts import LOGITS_ARE
from cauc_ray.models.tokens import Tokenizing, Tokens, scored
from cauc_ray.models.torch_device import DeviceTime, dtype_name, params_b
from cauc_ray.models.transformers import TransformersChoiceSpec, fetched, load_placed
from cauc_ray.numbers.types import Floats

# Of vocabulary-wide logits, at once: 1 GB in float32.
_LOGITS_AT_ONCE = 2**28


def load_choice_model(spec: TransformersChoiceSpec, over_gpus: bool) -> ChoiceModel:
    """Load a language model and its tokenizer, the model on one device, or layer by layer over all GPUs.

    Raises ConfigError if they cannot be loaded or are unsuitable.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoTokenizer,
    )

    more = {"gguf_file": spec.gguf_file} if spec.gguf_file else {}
    config = fetched(AutoConfig, spec.model, revision=spec.revision, **more)
    # Those that also see images answer texts as others do.
    factory = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    tokenizer = fetched(AutoTokenizer, spec.model, revision=spec.revision, **more)
    return ChoiceModel(spec, tokenizer, load_placed(factory, spec, over_gpus=over_gpus, **more))


@dataclass(frozen=True, slots=True)
class _Pass:
    """Questions that share a forward pass, as tensors on the host, in pinned memory for a GPU.

    All are int64.   tokens, mask: (n, width), of the prompts without the head, padded on the left.   head: tokens that
    the cache has.   owners, starts: (m,), each option's question, and its first token.   longer: (l,), options
    of several tokens.   continued: (l, w), the tokens of these, padded on the right.   rest: (l,), how many of these
    follow the first.
    """

    together: list[Tokens]
    head: int
    tokens: torch.Tensor
    mask: torch.Tensor
    owners: torch.Tensor
    starts: torch.Tensor
    longer: torch.Tensor
    continued: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def of(cls, together: list[Tokens], head: int, *, pinned: bool) -> _Pass:
        """Return questions as a pass."""
        prompts = [one.prompt[head:] for one in together]
        width = max(map(len, prompts))
        options = [(row, tokens) for row, one in enumerate(together) for tokens in one.options]
        longer = [index for index, (_, tokens) in enumerate(options) if len(tokens) > 1]
        widest = max((len(options[index][1]) for index in longer), default=1)
        tensors = (
            [[0] * (width - len(prompt)) + prompt for prompt in prompts],
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts],
            [row for row, _ in options],
            [tokens[0] for _, tokens in options],
            longer,
            [options[index][1] + [0] * (widest - len(options[index][1])) for index in longer],
            [len(options[index][1]) - 1 for index in longer],
        )
        made = (torch.tensor(values, dtype=torch.long) for values in tensors)
        return cls(together, head, *(one.pin_memory() if pinned else one for one in made))

    def on(self, device: torch.device) -> _Pass:
        """Return the pass with its tensors on a device; the host does not wait for them."""
        tensors = {name: value for name in self.__slots__ if isinstance(value := getattr(self, name), torch.Tensor)}
        return replace(self, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()})


class ChoiceModel(LocalModel):
    """A causal language model that answers multiple-choice questions with one logit for each option."""

    def __init__(
        self, spec: TransformersChoiceSpec, tokenizer: Any, network: Any, device_time: DeviceTime | None = None
    ) -> None:
        self._spec = spec
        self._network = network
        self._accepts = set(inspect.signature(network.forward).parameters)
        self._device = next(network.parameters()).device
        self._over_gpus = any(weights.device != self._device for weights in network.parameters())
        self._device_time: DeviceTime = device_time or DeviceTime(self._device)
        self._tokenizing = Tokenizing(spec, tokenizer, min(spec.max_tokens or 10**9, _context_length(network.config)))
        # transformers 5.24 renamed past_key_values to cache, as it now also calls the state of a network like Mamba.
        attends = "position_ids" in self._accepts or not getattr(network, "_is_stateful", False)
        names = ("cache", "past_key_values") if attends else ()
        self._cache = next((name for name in names if name in self._accepts), "")
        if spec.answers_with != "letter" and not self._cache:
            raise ConfigError(f"{spec.model} has no cache for options to share; use options: letter")
        self._head = self._tokenizing.head() if self._cache else []
        self._head_cache = self._run_head()  # of the tokens that all prompts begin with
        file = f" ({spec.gguf_file})" if spec.gguf_file else ""
        precision = dtype_name(network.dtype)
        self.facts = ModelFacts(
            source=f"transformers {spec.model}{file}, {precision}, {self._tokenizing.how}",
            logit_kind=LOGITS_ARE[spec.answers_with],
            params_b=params_b(network),
            labels=spec.label_names,
            dtype=precision,
        )

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into tokens and passes. Raises DataError when a column is missing."""
        asked, faults = self._tokenizing(batch)
        return [([one.row for one in own.together], own) for own in self._passes(asked)], faults

    def _passes(self, asked: Sequence[Tokens]) -> Iterator[_Pass]:
        """Yield questions of like lengths as passes of a bounded number of tokens and of logits."""
        on_gpu, head = self._device.type == "cuda", len(self._head)
        scored = max((1 + len(one.options) * (one.longest - 1) for one in asked), default=1)
        most_rows = max(1, _LOGITS_AT_ONCE // (scored * self._network.config.get_text_config().vocab_size))
        lengths = {
            index: max(1, len(one.prompt) - head) + len(one.options) * (one.longest - 1)
            for index, one in enumerate(asked)
        }
        for own in bucketed(lengths, self._spec.batch_tokens, on_gpu=on_gpu):
            for start in range(0, len(own), most_rows):
                together = [asked[index] for index in own[start : start + most_rows]]
                begins = all(len(one.prompt) > head and one.prompt[:head] == self._head for one in together)
                yield _Pass.of(together, head if begins else 0, pinned=on_gpu)

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

    def launch(self, inputs: _Pass) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each option's next token's logit, and its log-likelihood, float64, both (m,).

        A letter's logit is the next token's. A longer option's is its log-likelihood: its first token's after the
        prompt, the others' from there on. The prompt is run once; what it leaves in the cache serves every option.
        """
        with torch.inference_mode():
            own = inputs.on(self._device)
            n, mask = len(own.together), own.mask
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0) + own.head
            settings: dict[str, Any] = {"use_cache": len(own.longer) > 0}
            if own.head:
                cache = copy.deepcopy(self._head_cache)
                cache.batch_repeat_interleave(n)
                settings = {"use_cache": True, self._cache: cache}
                mask = torch.cat([mask.new_ones(n, own.head), mask], dim=1)
            output = self._run(own.tokens, mask, positions, logits_to_keep=1, **settings)
            logits = output.logits[:, -1].float()
            raw = logits[own.owners, own.starts]
            totals = (raw - torch.logsumexp(logits, dim=1)[own.owners]).double()
            if len(own.longer):
                owners = own.owners[own.longer]
                # A cache of many devices takes the host's.
                kept = inputs.owners[inputs.longer] if self._over_gpus else owners
                cache = getattr(output, self._cache)
                cache.batch_select_indices(kept)
                totals[own.longer] += self._continuations(own, cache, mask[owners])
        return raw, totals

    def take(self, inputs: _Pass, launched: tuple[torch.Tensor, torch.Tensor], counts: Counter[str]) -> list[Floats]:
        """Return each row's logits."""
        ends = np.cumsum([len(one.options) for one in inputs.together])[:-1]
        raw, logprobs = (np.split(given.cpu().numpy(), ends) for given in launched)
        scores = scored(self._spec, inputs.together, logprobs, counts)
        return raw if self._spec.answers_with == "letter" else scores

    def _continuations(self, own: _Pass, cache: Any, before: torch.Tensor) -> torch.Tensor:
        """Return the log-likelihood of each longer option's tokens after its first, float64 (l,).

        before: the mask of what the cache holds, (l, width).
        """
        inputs, targets = own.continued[:, :-1], own.continued[:, 1:]
        steps = torch.arange(inputs.shape[1], device=inputs.device)
        own_mask = steps < own.rest[:, None]
        positions = before.sum(dim=1, keepdim=True) + steps
        mask = torch.cat([before, own_mask.long()], dim=1)
        output = self._run(inputs, mask, positions, use_cache=True, **{self._cache: cache})
        logits = output.logits.float()
        chosen = logits.gather(2, targets[:, :, None])[:, :, 0] - torch.logsumexp(logits, dim=2)
        return torch.where(own_mask, chosen, 0.0).double().sum(dim=1)

    def _run(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, **settings: Any) -> Any:
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, **settings}
        with self._device_time.forward():
            return self._network(**{name: value for name, value in given.items() if name in self._accepts})


def _context_length(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or 10**9)
