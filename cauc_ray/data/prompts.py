"""The prompts of multiple-choice questions, for all tasks and models.

There are two formats: with lettered options, for models that answer with a letter; and without options, for models
that are compared by their likelihood of each option's text.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass

# The names of options; each is a single token in the vocabularies of common models.
LETTERS = string.ascii_uppercase + string.ascii_lowercase


@dataclass(frozen=True, slots=True)
class Question:
    """A multiple-choice question.   task: selects the prompt, "" for the general one."""

    question: str
    choices: tuple[str, ...]
    context: str = ""
    subject: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The templates of a task's prompt before its options."""

    intro: str = ""
    context: str = "{context}\n"
    question: str = "Question: {question}\n"


GENERAL = Prompt()
PROMPTS: Mapping[str, Prompt] = {
    "mmlu": Prompt(intro="The following is a multiple choice question about {subject}.\n\n"),
    "logiqa": Prompt(context="Passage: {context}\n"),
    "mathqa": GENERAL,
    "medmcqa": Prompt(intro="The following is a multiple choice question from a medical entrance exam.\n\n"),
    "piqa": GENERAL,
    "socialiqa": Prompt(context="Situation: {context}\n"),
}


def letter_prompt(question: Question) -> str:
    r"""Return the prompt that lists the options by letter and ends where a letter must follow.

    >>> letter_prompt(Question("2 + 2?", ("3", "4")))
    'Question: 2 + 2?\nA. 3\nB. 4\nAnswer:'
    """
    return f"{_stem(question)}{_options(question)}Answer:"


def letter_request(question: Question) -> str:
    r"""Return the message to a chat model that asks for a letter.

    >>> letter_request(Question("2 + 2?", ("3", "4")))
    'Question: 2 + 2?\nA. 3\nB. 4\nAnswer with the letter of the right option only.'
    """
    return f"{_stem(question)}{_options(question)}Answer with the letter of the right option only."


def text_prompt(question: Question) -> str:
    r"""Return the prompt that does not show the options and ends where the text of one may follow.

    >>> text_prompt(Question("2 + 2?", ("3", "4")))
    'Question: 2 + 2?\nAnswer:'
    """
    return f"{_stem(question)}Answer:"


def text_request(question: Question) -> str:
    """Return the message to a chat model whose answer is the text of an option.

    >>> text_request(Question("2 + 2?", ("3", "4")))
    'Question: 2 + 2?'
    """
    return _stem(question).rstrip()


def _stem(question: Question) -> str:
    prompt = PROMPTS.get(question.task, GENERAL)
    shown = question.subject or "{subject}" not in prompt.intro
    parts = [prompt.intro.format(subject=question.subject.replace("_", " "))] if shown else []
    if question.context:
        parts.append(prompt.context.format(context=question.context.strip()))
    return "".join([*parts, prompt.question.format(question=question.question.strip())])


def _options(question: Question) -> str:
    return "".join(f"{letter}. {choice.strip()}\n" for letter, choice in zip(LETTERS, question.choices, strict=False))
