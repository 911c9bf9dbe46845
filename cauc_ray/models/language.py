"""Causal language models in torch that choose among a question's options.

Sequences are padded on the left and sorted by length into passes of a bounded number of tokens; positions and
the attention mask leave padding out, so that neither neighbours nor padding change a row's logits beyond
rounding. Of a head as wide as the vocabulary only the options' numbers leave this module.
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
from cauc_ray.models.answers import Answers, Batch, ModelFacts, batch_size, padded
from cauc_ray.models.questions import read_questions
from cauc_ray.models.transformers import TransformersChoiceSpec, fetched, quiet
from cauc_ray.models.vision import choose_device, choose_dtype
from cauc_ray.numbers.types import Floats

# Of vocabulary-wide logits, at once: 1 GB in float32.
_LOGITS_AT_ONCE = 2**28


def load_choice_model(spec: TransformersChoiceSpec) -> ChoiceModel:
    """Load a language model and its tokenizer. Raises ConfigError when they are not to be had or do not serve."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = choose_device(spec.device)
    dtype = choose_dtype(spec.dtype, device)
    options = {"revision": spec.revision, "gguf_file": spec.gguf_file}
    with quiet():
        tokenizer = fetched(AutoTokenizer, spec.model, **options)
        network = fetched(AutoModelForCausalLM, spec.model, dtype=dtype, **options)
    return ChoiceModel(spec, tokenizer, network.eval().to(device))


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Tokens to run: for which row (and option); the last n_scored of them are the option's own, of n_bytes."""

    row: int
    tokens: list[int]
    option: int = 0
    n_scored: int = 0
    n_bytes: int = 0


class ChoiceModel:
    """A causal language model that answers multiple-choice questions with one logit for each option."""

    def __init__(self, spec: TransformersChoiceSpec, tokenizer: Any, network: Any) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._network = network
        self._accepts = set(inspect.signature(network.forward).parameters)
        self._device = next(network.parameters()).device
        self._max_tokens = min(spec.max_tokens or 10**9, _context_length(network.config))
        wanted = spec.scoring == "letter" if spec.chat_template is None else spec.chat_template
        self._chat = bool(wanted and tokenizer.chat_template)
        if spec.chat_template and not tokenizer.chat_template:
            raise ConfigError(f"chat_template: {spec.model} has none")
        self._letters = self._letter_tokens() if spec.scoring == "letter" else torch.zeros(0)
        file = f" ({spec.gguf_file})" if spec.gguf_file else ""
        how = "through its chat template" if self._chat else "without a chat template"
        kinds = {
            "letter": "raw next-token logits of the options' letters",
            "text": "log-likelihoods of the options' texts per byte",
        }
        precision = str(network.dtype).removeprefix("torch.")
        self.facts = ModelFacts(
            source=f"transformers {spec.model}{file}, {precision}, {how}",
            logit_kind=kinds[spec.scoring],
            params_b=sum(p.numel() for p in network.parameters()) / 1e9,
        )

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch; rows without a question, or with one that is too long, are failures."""
        questions, faults = read_questions(batch)
        sequences: list[_Sequence] = []
        for row, question in questions.items():
            own = self._sequences(row, question)
            if isinstance(own, str):
                faults[row] = own
            else:
                sequences += own
        scores = {row: np.zeros(len(question.choices), np.float32) for row, question in questions.items()}
        with torch.inference_mode():
            for together in self._passes(sequences):
                self._answer(together, scores)
        n = batch_size(batch)
        nothing = np.zeros(0, np.float32)
        rows = [nothing if row in faults else scores[row] for row in range(n)]
        return Answers(padded(rows), np.array([len(row) for row in rows]), failures=faults)

    def _sequences(self, row: int, question: Question) -> list[_Sequence] | str:
        """Return what is to be run for a question, or why it cannot be."""
        if self._spec.scoring == "letter":
            n = len(question.choices)
            if n > len(self._letters):
                return f"it has {n} options and there are {len(self._letters)} letters; scoring: text takes any number"
            sequences = [
                _Sequence(row, self._encoded(letter_request(question) if self._chat else letter_prompt(question)))
            ]
        else:
            if not all(choice.strip() for choice in question.choices):
                return "one of its choices is empty"
            sequences = self._texts(row, question)
        longest = max(len(sequence.tokens) for sequence in sequences)
        if longest > self._max_tokens:
            return f"it is {longest:,} tokens long; the model takes {self._max_tokens:,}"
        return sequences

    def _texts(self, row: int, question: Question) -> list[_Sequence]:
        prompt, sequences = self._encoded(text_request(question) if self._chat else text_prompt(question)), []
        for place, choice in enumerate(question.choices):
            text = choice.strip()
            own = self._tokenizer.encode(text if self._chat else f" {text}", add_special_tokens=False)
            sequences.append(_Sequence(row, prompt + own, place, len(own), len(text.encode())))
        return sequences

    def _encoded(self, text: str) -> list[int]:
        if self._chat:
            # As text first: what apply_chat_template returns as tokens has changed between versions.
            turns = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=not self._chat)
        return tokens

    def _letter_tokens(self) -> torch.Tensor:
        """Return the tokens that letters are where the answer begins: after a space, or first in a chat's turn.

        As many letters as are tokens by themselves. Raises ConfigError where those are fewer than two.
        """
        tokens: list[int] = []
        for letter in LETTERS:
            last = self._tokenizer.encode(letter if self._chat else f" {letter}", add_special_tokens=False)[-1]
            if self._tokenizer.decode([last]).strip() != letter:
                break
            tokens.append(last)
        if len(tokens) < 2:
            raise ConfigError(f"{self._spec.model}: its letters are no tokens by themselves; use scoring: text")
        return torch.tensor(tokens, device=self._device)

    def _passes(self, sequences: Sequence[_Sequence]) -> Iterator[list[_Sequence]]:
        """Yield sequences of like length together, padded within the bounds of a pass."""
        together: list[_Sequence] = []
        width = scored = 0
        for sequence in sorted(sequences, key=lambda s: len(s.tokens)):
            n, width, scored = len(together) + 1, len(sequence.tokens), max(scored, sequence.n_scored)
            vocabulary = self._network.config.get_text_config().vocab_size
            too_many = n * width > self._spec.batch_tokens or n * (scored + 1) * vocabulary > _LOGITS_AT_ONCE
            if together and too_many:
                yield together
                together, scored = [], sequence.n_scored
            together.append(sequence)
        if together:
            yield together

    def _answer(self, together: Sequence[_Sequence], scores: dict[int, Floats]) -> None:
        if self._spec.scoring == "letter":
            last = self._forward(together, 1)[:, -1, self._letters].float().cpu().numpy()
            for sequence, logits in zip(together, last, strict=True):
                scores[sequence.row][:] = logits[: len(scores[sequence.row])]
            return
        longest = max(sequence.n_scored for sequence in together)
        logits = self._forward(together, longest + 1)[:, :-1].float()
        targets = torch.tensor(
            [[0] * (longest - s.n_scored) + s.tokens[len(s.tokens) - s.n_scored :] for s in together],
            device=self._device,
        )
        chosen = logits.gather(2, targets[:, :, None])[:, :, 0] - torch.logsumexp(logits, dim=2)
        own = torch.arange(longest, device=self._device) >= longest - torch.tensor(
            [[s.n_scored] for s in together], device=self._device
        )
        totals = torch.where(own, chosen, 0.0).double().sum(dim=1).cpu().numpy()
        for sequence, total in zip(together, totals, strict=True):
            scores[sequence.row][sequence.option] = total / sequence.n_bytes

    def _forward(self, together: Sequence[_Sequence], keep: int) -> torch.Tensor:
        """Return the logits of the last so many positions, (n, keep, vocabulary)."""
        width = max(len(sequence.tokens) for sequence in together)
        tokens = torch.zeros(len(together), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for place, sequence in enumerate(together):
            tokens[place, width - len(sequence.tokens) :] = torch.tensor(sequence.tokens)
            mask[place, width - len(sequence.tokens) :] = 1
        inputs = {
            "input_ids": tokens,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
        }
        given: dict[str, Any] = {k: v.to(self._device) for k, v in inputs.items() if k in self._accepts}
        for name, value in (("logits_to_keep", keep), ("use_cache", False)):
            if name in self._accepts:
                given[name] = value
        logits: torch.Tensor = self._network(**given).logits
        return logits[:, -keep:]


def _context_length(config: Any) -> int:
    text = config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or 10**9)
