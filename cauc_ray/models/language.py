"""Causal language models in torch that choose among a question's options.

Prompts are padded on the left and sorted by length into passes of a bounded number of tokens; positions and the
attention mask leave padding out, so that neither neighbours nor padding change a row's logits beyond rounding.
Of the vocabulary-wide logits, only those of the options leave this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cauc_ray.data.prompts import LETTERS, Question, letter_prompt, letter_request, text_prompt, text_request
from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Answers, Batch, ModelFacts, PreparingModel, batch_size, ragged
from cauc_ray.models.device_time import DeviceTime
from cauc_ray.models.questions import read_questions
from cauc_ray.models.transformers import TransformersChoiceSpec, fetched, load_network, refuse_missing
from cauc_ray.models.vision import choose_device, choose_dtype, dtype_name, params_b
from cauc_ray.numbers.types import Floats

# Of vocabulary-wide logits, at once: 1 GB in float32.
_LOGITS_AT_ONCE = 2**28


def load_choice_model(spec: TransformersChoiceSpec, over_gpus: bool) -> ChoiceModel:
    """Load a language model and its tokenizer, the model on one device, or layer by layer over all GPUs.

    Raises ConfigError if they cannot be loaded or are unsuitable.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = choose_device(spec.device)
    dtype = choose_dtype(spec.dtype, device)
    device_map = "auto" if over_gpus else None
    tokenizer = fetched(AutoTokenizer, spec.model, revision=spec.revision, gguf_file=spec.gguf_file)
    network, missing = load_network(
        AutoModelForCausalLM, spec, dtype=dtype, device_map=device_map, gguf_file=spec.gguf_file
    )
    refuse_missing(spec.model, "causal language model", missing)
    return ChoiceModel(spec, tokenizer, network.eval() if over_gpus else network.eval().to(device))


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question in tokens.   options: those of each option's text and its length in bytes; none for letters."""

    row: int
    prompt: list[int]
    options: tuple[tuple[list[int], int], ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest option."""
        return max((len(tokens) for tokens, _ in self.options), default=0)

    @property
    def n_tokens(self) -> int:
        """Tokens of the longest sequence that the model sees."""
        return len(self.prompt) + self.longest


@dataclass(frozen=True, slots=True)
class _Questions:
    """A batch in tokens.

    n_options: of each row, 0 for those that cannot be asked; faults has the reasons.   passes: questions that share a
    forward pass.
    """

    n_options: list[int]
    faults: dict[int, str]
    passes: list[list[_Asked]]


class ChoiceModel(PreparingModel):
    """A causal language model that answers multiple-choice questions with one logit for each option."""

    def __init__(
        self, spec: TransformersChoiceSpec, tokenizer: Any, network: Any, device_time: DeviceTime | None = None
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._network = network
        self._accepts = set(inspect.signature(network.forward).parameters)
        self._device = next(network.parameters()).device
        self._device_time = device_time or DeviceTime(self._device)
        self._max_tokens = min(spec.max_tokens or 10**9, _context_length(network.config))
        wanted = spec.scoring == "letter" if spec.chat_template is None else spec.chat_template
        self._chat = bool(wanted and tokenizer.chat_template)
        if spec.chat_template and not tokenizer.chat_template:
            raise ConfigError(f"chat_template: {spec.model} has no chat template")
        if spec.scoring == "text" and "past_key_values" not in self._accepts:
            raise ConfigError(f"{spec.model} has no cache for options to share; use scoring: letter")
        self._letters = self._letter_tokens() if spec.scoring == "letter" else torch.zeros(0)
        file = f" ({spec.gguf_file})" if spec.gguf_file else ""
        how = "through its chat template" if self._chat else "without a chat template"
        kinds = {
            "letter": "raw next-token logits of the options' letters",
            "text": "log-likelihoods of the options' texts per byte",
        }
        precision = dtype_name(network.dtype)
        self.facts = ModelFacts(
            source=f"transformers {spec.model}{file}, {precision}, {how}",
            logit_kind=kinds[spec.scoring],
            params_b=params_b(network),
            dtype=precision,
        )

    def prepare(self, batch: Batch) -> _Questions:
        """Turn a batch into tokens and passes. Raises DataError when a column is missing."""
        questions, faults = read_questions(batch)
        asked: list[_Asked] = []
        for row, question in questions.items():
            one = self._asked(row, question)
            if isinstance(one, str):
                faults[row] = one
            else:
                asked.append(one)
        n_options = [0 if row in faults else len(questions[row].choices) for row in range(batch_size(batch))]
        return _Questions(n_options, faults, list(self._passes(asked)))

    def answer(self, prepared: _Questions) -> Answers:
        """Answer a batch; rows without a question, or with one that is too long, are failures."""
        scores: dict[int, Floats] = {}
        self._device_time.start()
        with torch.inference_mode():
            for together in prepared.passes:
                if self._spec.scoring == "text":
                    scores |= self._score_texts(together)
                    continue
                logits = self._ask(together)[0][:, self._letters].float().cpu().numpy()
                scores |= {one.row: row for one, row in zip(together, logits, strict=True)}
        bad = [row for row, found in scores.items() if not np.isfinite(found).all()]
        faults = prepared.faults | dict.fromkeys(bad, "the model's logits for it are NaN or infinite")
        sound = {row: scores[row][:n] for row, n in enumerate(prepared.n_options) if row not in faults}
        logits, n_options = ragged(len(prepared.n_options), sound)
        return Answers(logits, n_options, failures=faults, device_s=self._device_time.seconds())

    def _asked(self, row: int, question: Question) -> _Asked | str:
        """Return a question in tokens, or why it cannot be asked."""
        if self._spec.scoring == "letter":
            n = len(question.choices)
            if n > len(self._letters):
                return f"it has {n} options, more than the {len(self._letters)} letters; scoring: text takes any number"
            asked = _Asked(row, self._encoded(letter_request(question) if self._chat else letter_prompt(question)))
        else:
            texts = [choice.strip() for choice in question.choices]
            if not all(texts):
                return "one of its choices is empty"
            lead = "" if self._chat else " "
            options = [(self._tokenizer.encode(lead + t, add_special_tokens=False), len(t.encode())) for t in texts]
            prompt = self._encoded(text_request(question) if self._chat else text_prompt(question))
            asked = _Asked(row, prompt, tuple(options))
        if asked.n_tokens > self._max_tokens:
            return f"it has {asked.n_tokens:,} tokens; the model takes up to {self._max_tokens:,}"
        return asked

    def _encoded(self, text: str) -> list[int]:
        if self._chat:
            # As text first: what apply_chat_template returns as tokens has changed between versions.
            turns = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=not self._chat)
        return tokens

    def _letter_tokens(self) -> torch.Tensor:
        """Return the letters' tokens at the start of an answer: after a space, or first in a chat's turn.

        Returns as many letters as are single tokens. Raises ConfigError if these are fewer than two.
        """
        tokens: list[int] = []
        for letter in LETTERS:
            last = self._tokenizer.encode(letter if self._chat else f" {letter}", add_special_tokens=False)[-1]
            if self._tokenizer.decode([last]).strip() != letter:
                break
            tokens.append(last)
        if len(tokens) < 2:
            raise ConfigError(f"{self._spec.model}: letters are not single tokens in its vocabulary; use scoring: text")
        return torch.tensor(tokens, device=self._device)

    def _passes(self, asked: Sequence[_Asked]) -> Iterator[list[_Asked]]:
        """Yield questions of like length together, padded within the bounds of a pass."""
        together: list[_Asked] = []
        n_options = longest = 0
        vocabulary = self._network.config.get_text_config().vocab_size
        for one in sorted(asked, key=lambda one: (len(one.prompt), one.longest)):
            n_options, longest = n_options + len(one.options), max(longest, one.longest)
            n = len(together) + 1
            n_tokens = n * len(one.prompt) + n_options * longest
            if together and (
                n_tokens > self._spec.batch_tokens or (n + n_options * longest) * vocabulary > _LOGITS_AT_ONCE
            ):
                yield together
                together, n_options, longest = [], len(one.options), one.longest
            together.append(one)
        if together:
            yield together

    def _ask(self, together: Sequence[_Asked]) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Run the prompts. Returns the next token's logits (n, vocabulary), the cache, the mask of real tokens."""
        width = max(len(one.prompt) for one in together)
        tokens = torch.zeros(len(together), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, one in enumerate(together):
            tokens[row, width - len(one.prompt) :] = torch.tensor(one.prompt)
            mask[row, width - len(one.prompt) :] = 1
        tokens, mask = tokens.to(self._device), mask.to(self._device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        output = self._run(tokens, mask, positions, logits_to_keep=1, use_cache=self._spec.scoring == "text")
        return output.logits[:, -1], getattr(output, "past_key_values", None), mask

    def _score_texts(self, together: Sequence[_Asked]) -> dict[int, Floats]:
        """Return each option's log-likelihood per byte: its first token's after the prompt, the others' from there on.

        The prompt is run once; what it leaves in the cache serves every option.
        """
        first, cache, mask = self._ask(together)
        options = [(row, tokens) for row, one in enumerate(together) for tokens, _ in one.options]
        owners = torch.tensor([row for row, _ in options], device=self._device)
        starts = torch.tensor([tokens[0] for _, tokens in options], device=self._device)
        totals = first.float().log_softmax(dim=1)[owners, starts].double()
        longer = [index for index, (_, tokens) in enumerate(options) if len(tokens) > 1]
        if longer:
            rest = torch.tensor(longer, device=self._device)
            cache.batch_select_indices(owners[rest].cpu())  # its layers may be on several devices
            own_tokens = [options[index][1] for index in longer]
            totals[rest] += self._continuations(own_tokens, cache, mask[owners[rest]])
        likelihoods = iter(totals.cpu().numpy())
        return {
            one.row: np.array([next(likelihoods) / n_bytes for _, n_bytes in one.options], dtype=np.float32)
            for one in together
        }

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
