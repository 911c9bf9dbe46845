"""Causal language models in torch that choose among options.

Prompts are padded on the left and sorted by length into passes of a bounded number of tokens; positions and the
attention mask leave padding out, so that neither neighbours nor padding change a row's logits beyond rounding.
Of the vocabulary-wide logits, only those of the options leave this module.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Answers, Batch, ModelFacts, PreparingModel
from cauc_ray.models.prompts import LOGITS_ARE
from cauc_ray.models.tokens import Tokenizing, Tokens, answered
from cauc_ray.models.torch_device import DeviceTime, choose_device, choose_dtype, dtype_name, params_b
from cauc_ray.models.transformers import TransformersChoiceSpec, fetched, load_network, refuse_missing
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

    device = choose_device(spec.device)
    dtype = choose_dtype(spec.dtype, device)
    device_map = "auto" if over_gpus else None
    config = fetched(AutoConfig, spec.model, revision=spec.revision, gguf_file=spec.gguf_file)
    # Those that also see images answer texts as others do.
    factory = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    tokenizer = fetched(AutoTokenizer, spec.model, revision=spec.revision, gguf_file=spec.gguf_file)
    network, missing = load_network(factory, spec, dtype=dtype, device_map=device_map, gguf_file=spec.gguf_file)
    refuse_missing(spec.model, "causal language model", missing)
    return ChoiceModel(spec, tokenizer, network.eval() if over_gpus else network.eval().to(device))


@dataclass(frozen=True, slots=True)
class _Questions:
    """A batch in tokens.

    n_options: of each row, 0 for those that cannot be asked; faults has the reasons.   passes: questions that share a
    forward pass.
    """

    n_options: list[int]
    faults: dict[int, str]
    passes: list[list[Tokens]]


class ChoiceModel(PreparingModel):
    """A causal language model that answers multiple-choice questions with one logit for each option."""

    def __init__(
        self, spec: TransformersChoiceSpec, tokenizer: Any, network: Any, device_time: DeviceTime | None = None
    ) -> None:
        self._spec = spec
        self._network = network
        self._accepts = set(inspect.signature(network.forward).parameters)
        self._device = next(network.parameters()).device
        self._device_time = device_time or DeviceTime(self._device)
        self._tokenizing = Tokenizing(spec, tokenizer, min(spec.max_tokens or 10**9, _context_length(network.config)))
        if spec.answers_with != "letter" and "past_key_values" not in self._accepts:
            raise ConfigError(f"{spec.model} has no cache for options to share; use options: letter")
        self._head = self._tokenizing.head() if "past_key_values" in self._accepts else []
        self._head_cache: Any = None  # of the tokens that all prompts begin with, once they have been run
        file = f" ({spec.gguf_file})" if spec.gguf_file else ""
        precision = dtype_name(network.dtype)
        self.facts = ModelFacts(
            source=f"transformers {spec.model}{file}, {precision}, {self._tokenizing.how}",
            logit_kind=LOGITS_ARE[spec.answers_with],
            params_b=params_b(network),
            labels=spec.label_names,
            dtype=precision,
        )

    def prepare(self, batch: Batch) -> _Questions:
        """Turn a batch into tokens and passes. Raises DataError when a column is missing."""
        asked, n_options, faults = self._tokenizing(batch)
        return _Questions(n_options, faults, list(self._passes(asked)))

    def answer(self, prepared: _Questions) -> Answers:
        """Answer a batch; rows without a question, or with one that is too long, are failures."""
        scores: dict[int, Floats] = {}
        n_little = 0
        self._device_time.start()
        with torch.inference_mode():
            for together in prepared.passes:
                found, little = self._score(together)
                scores |= found
                n_little += little
        return answered(len(prepared.n_options), scores, prepared.faults, n_little, self._device_time.seconds())

    def _passes(self, asked: Sequence[Tokens]) -> Iterator[list[Tokens]]:
        """Yield questions of like length together, padded within the bounds of a pass."""
        together: list[Tokens] = []
        n_options = longest = 0
        vocabulary = self._network.config.get_text_config().vocab_size
        for one in sorted(asked, key=lambda one: (len(one.prompt), one.longest)):
            n_options, longest = n_options + len(one.options), max(longest, one.longest - 1)
            n = len(together) + 1
            n_tokens = n * (len(one.prompt) - len(self._head)) + n_options * longest
            if together and (
                n_tokens > self._spec.batch_tokens or (n + n_options * longest) * vocabulary > _LOGITS_AT_ONCE
            ):
                yield together
                together, n_options, longest = [], len(one.options), one.longest - 1
            together.append(one)
        if together:
            yield together

    def _ask(self, together: Sequence[Tokens]) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Run the prompts. Returns the next token's logits (n, vocabulary), the cache, the mask of real tokens."""
        head = len(self._head) if self._runs_head_once(together) else 0
        prompts = [one.prompt[head:] for one in together]
        width = max(map(len, prompts))
        tokens = torch.zeros(len(together), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0) + head
        settings: dict[str, Any] = {"use_cache": any(one.longest > 1 for one in together)}
        if head:
            cache = copy.deepcopy(self._head_cache)
            cache.batch_repeat_interleave(len(together))
            settings = {"use_cache": True, "past_key_values": cache}
            mask = torch.cat([mask.new_ones(len(together), head), mask], dim=1)
        output = self._run(tokens, mask, positions, logits_to_keep=1, **settings)
        return output.logits[:, -1], getattr(output, "past_key_values", None), mask

    def _runs_head_once(self, together: Sequence[Tokens]) -> bool:
        """Return whether what all prompts begin with is in a cache that these can share; run it at the first call."""
        n = len(self._head)
        if not n or any(len(one.prompt) <= n or one.prompt[:n] != self._head for one in together):
            return False
        if self._head_cache is None:
            head = torch.tensor([self._head], device=self._device)
            positions = torch.arange(n, device=self._device)[None]
            self._head_cache = self._run(head, torch.ones_like(head), positions, logits_to_keep=1, use_cache=True)
            self._head_cache = self._head_cache.past_key_values
            # A window over the last tokens would count the padding between the head and a prompt.
            if any(getattr(layer, "is_sliding", True) for layer in getattr(self._head_cache, "layers", [None])):
                self._head = []
        return bool(self._head)

    def _score(self, together: Sequence[Tokens]) -> tuple[dict[int, Floats], int]:
        """Return each row's logits, and in how many rows the options have less than half of the probability.

        A letter's logit is the next token's. A longer option's is its log-likelihood: its first token's after the
        prompt, the others' from there on. The prompt is run once; what it leaves in the cache serves every option.
        """
        first, cache, mask = self._ask(together)
        options = [(row, tokens) for row, one in enumerate(together) for tokens in one.options]
        owners = torch.tensor([row for row, _ in options], device=self._device)
        starts = torch.tensor([tokens[0] for _, tokens in options], device=self._device)
        logits = first.float()
        raw = logits[owners, starts]
        totals = (raw - torch.logsumexp(logits, dim=1)[owners]).double()
        mass = _mass(totals, owners, starts, len(together))
        if self._spec.answers_with == "letter":
            totals = raw
        longer = [index for index, (_, tokens) in enumerate(options) if len(tokens) > 1]
        if longer:
            rest = torch.tensor(longer, device=self._device)
            cache.batch_select_indices(owners[rest].cpu())  # its layers may be on several devices
            own_tokens = [options[index][1] for index in longer]
            totals[rest] += self._continuations(own_tokens, cache, mask[owners[rest]])
        found = iter(totals.cpu().numpy())
        per_byte = self._spec.answers_with == "text"
        scores = {
            one.row: np.array([next(found) / (n if per_byte else 1) for n in one.n_bytes], dtype=np.float32)
            for one in together
        }
        return scores, 0 if per_byte else int((mass < 0.5).sum())

    def _continuations(self, options: Sequence[list[int]], cache: Any, before: torch.Tensor) -> torch.Tensor:
        """Return the log-likelihood of each option's tokens after its first, float64 (m,).

        before: the mask of what the cache holds, (m, width).
        """
        width = max(map(len, options)) - 1
        padded_tokens = torch.tensor([o + [0] * (width + 1 - len(o)) for o in options], device=self._device)
        inputs, targets = padded_tokens[:, :-1], padded_tokens[:, 1:]
        own = torch.arange(width, device=self._device) < torch.tensor([[len(o) - 1] for o in options]).to(self._device)
        positions = before.sum(dim=1, keepdim=True) + torch.arange(width, device=self._device)
        mask = torch.cat([before, own.long()], dim=1)
        output = self._run(inputs, mask, positions, past_key_values=cache, use_cache=True)
        logits = output.logits.float()
        chosen = logits.gather(2, targets[:, :, None])[:, :, 0] - torch.logsumexp(logits, dim=2)
        return torch.where(own, chosen, 0.0).double().sum(dim=1)

    def _run(self, tokens: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, **settings: Any) -> Any:
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, **settings}
        with self._device_time.forward():
            return self._network(**{name: value for name, value in given.items() if name in self._accepts})


def _context_length(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or 10**9)


def _mass(logprobs: torch.Tensor, owners: torch.Tensor, starts: torch.Tensor, n: int) -> torch.Tensor:
    """Return each row's probability of the tokens that its options begin with, float64 (n,); equal ones count once."""
    pairs = torch.stack([owners, starts], dim=1)
    distinct, index = torch.unique(pairs, dim=0, return_inverse=True)
    probability = torch.zeros(len(distinct), dtype=torch.float64, device=logprobs.device)
    probability[index] = logprobs.exp()
    return torch.zeros(n, dtype=torch.float64, device=logprobs.device).index_add(0, distinct[:, 0], probability)
