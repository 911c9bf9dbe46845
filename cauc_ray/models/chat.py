"""Chat templates: what precedes a model's answer, and what ends it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

from jinja2 import TemplateError

from cauc_ray.errors import ConfigError

# Templates that print today's date would change a model's logits from one day to the next.
PINNED_DATE = date(2024, 7, 26)
DATE_TEXT = PINNED_DATE.strftime("%d %b %Y")
_CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.+?)\1\s*\)""")
# Markers that open a thought, and those that close it.
_THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "[THINK]": "[/THINK]",
    "<|channel|>analysis": "<|end|>",
    "<|channel>thought": "<channel|>",
}
THINKING = "set chat_template_kwargs: {enable_thinking: false} if its template has that, or use another model"
_QUESTION, _ANSWER = "Which one?", "Seven"


def open_thought(text: str) -> str | None:
    """Return the marker of a thought that a text opens and does not close, None without one."""
    return next((marker for marker, end in _THOUGHTS.items() if text.rfind(marker) > text.rfind(end)), None)


def without_thoughts(text: str) -> str:
    """Return a text without the thoughts before its answer; nothing of one that is still open.

    >>> without_thoughts("<think>Well.</think> Seven")
    ' Seven'
    """
    if open_thought(text) is not None:
        return ""
    return text[max((text.rfind(end) + len(end) for end in _THOUGHTS.values() if end in text), default=0) :]


def special_tokens(tokenizer: Any, template: str = "") -> re.Pattern[str]:
    """Return the pattern of a tokenizer's special tokens, and of the added tokens that a template writes."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {
        token.content for token in added if token.special or (token.content in template and len(token.content) > 2)
    }
    # A template also has line ends, and words such as "user", which a few vocabularies have as added tokens.
    marks = sorted((text for text in texts if re.search(r"[^\w\s]", text)), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks)) or r"(?!)")


class ChatTemplate:
    """A tokenizer's chat template.

    Attributes:
        source: How prompts reach the model, for the description of its logits.
        before: White space that the template puts before an answer.
        end: Text with which the template ends an answer: up to its first special token, else the tokenizer's EOS.
        special: Pattern of the tokens that control the chat.
    """

    def __init__(self, model: str, tokenizer: Any, settings: Mapping[str, Any], *, with_images: bool = False) -> None:
        """Render a question and an answer to it.

        Args:
            model: Name for messages.
            tokenizer: Of the transformers library, with a chat template.
            settings: Variables of the template.
            with_images: Whether an image comes before the text of each question.

        Raises:
            ConfigError: The prompt ends inside a thought.
        """
        template = tokenizer.get_chat_template()
        self._tokenizer, self._with_images = tokenizer, with_images
        self._settings = {**settings, "tokenize": False}
        self.source = "through its chat template"
        if "date_string" not in settings and _CLOCK.search(template):
            self._settings["chat_template"] = _CLOCK.sub(lambda call: repr(PINNED_DATE.strftime(call[2])), template)
            self.source += f" dated {DATE_TEXT}"
        self.special = special_tokens(tokenizer, template)
        self._lead = ""
        prompt = self.prompts([_QUESTION])[0]
        closing = ""
        answered = [self._turn("user", _QUESTION), self._turn("assistant", _ANSWER)]
        try:
            before, _, closing = tokenizer.apply_chat_template(answered, **self._settings).rpartition(_ANSWER)
        except TemplateError:  # it renders no answers
            before = ""
        lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
        self.before = "" if lead.strip() else lead
        self._lead = lead if lead.strip() else ""  # such as an empty thought, or the channel of final answers
        mark = self.special.search(closing)
        self.end: str = closing[: mark.end()] if mark else tokenizer.eos_token or "\n"
        thought = open_thought(f"{prompt}{self._lead}".rpartition(_QUESTION)[2])
        if thought:
            raise ConfigError(f"{model}: its chat template opens a thought ({thought}) before the answer; {THINKING}")

    def prompts(self, texts: Sequence[str]) -> list[str]:
        """Return questions as the model gets them, up to where its answer begins."""
        if not texts:
            return []
        turns = [[self._turn("user", text)] for text in texts]
        rendered = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, **self._settings)
        return [text + self._lead for text in rendered]

    def _turn(self, role: str, text: str) -> dict[str, Any]:
        if not self._with_images:
            return {"role": role, "content": text}
        image = [{"type": "image"}] if role == "user" else []
        return {"role": role, "content": [*image, {"type": "text", "text": text}]}
