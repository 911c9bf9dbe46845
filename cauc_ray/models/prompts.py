"""What language models are asked: the prompt of a row, its options, and the answers that a model chooses among.

A prompt is a Jinja template over the columns of a row. The options are listed for the model by letter or by name, or
not at all where their texts are compared.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from jinja2 import TemplateError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from cauc_ray.errors import CaucError, first_line
from cauc_ray.files.paths import AnyPath, path_from
from cauc_ray.models.answers import Batch, Unusable, batch_size, parted, require_columns
from cauc_ray.models.kind import InputColumns, KindSpec, Section, folder_of
from cauc_ray.numbers.logits import LogitKind

# The names of options; each is a single token in the vocabularies of common models.
LETTERS = string.ascii_uppercase + string.ascii_lowercase
# Up to so many labels have letters unless options are set: models know the alphabet better than its second half in
# lower case.
LETTERED = 26

# Tokens by their numbers that vLLM scores in one request.
IDS_AT_ONCE = 128

OptionsAs: TypeAlias = Literal["letter", "name", "text"]

# The columns that a question has.
QUESTION_COLUMNS = frozenset({"question", "choices"})
# The prompt of multiple-choice questions.
QUESTION = """\
{% if context %}{{ context | trim }}
{% endif -%}
Question: {{ question | trim }}"""

_ENVIRONMENT = ImmutableSandboxedEnvironment(
    autoescape=False,
    finalize=lambda value: "" if value is None else value,
)


def _variables(template: str) -> frozenset[str]:
    """Return the names that a template reads. Raises TemplateError for one that cannot be parsed."""
    return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(template)))


def _optional(template: str) -> frozenset[str]:
    """Return the names that a template tests by {% if name %}: a row may be without them."""
    tests = (node.test for node in _ENVIRONMENT.parse(template).find_all(nodes.If))
    return frozenset(test.name for test in tests if isinstance(test, nodes.Name))


def _benchmark_prompt(prompt: Any) -> Any:
    """Return the template of the benchmark that a prompt names, any other prompt as it is."""
    if not isinstance(prompt, str) or not prompt.isidentifier():
        return prompt
    from cauc_ray.data.benchmarks import BENCHMARKS

    benchmark = BENCHMARKS.get(prompt)
    return prompt if benchmark is None or benchmark.prompt is None else benchmark.prompt.rstrip()


def rendered(template: str, **values: str) -> str:
    """Return a template's text. Raises TemplateError if it reads another name."""
    unknown = sorted(_variables(template) - values.keys())
    if unknown:
        raise TemplateError(f"there is no {unknown[0]!r}, only {', '.join(values)}")
    return _ENVIRONMENT.from_string(template).render(values)


def _named(labels: Any, info: ValidationInfo) -> Any:
    """Check names of classes, in a list or with their descriptions. Two classes may have one name, as in ImageNet.

    A text is the path of a file with a name on each line. Empty lines are kept, so that later names keep their numbers.
    """
    if isinstance(labels, str):
        with _file(labels, info) as path:
            text = path.read_text(encoding="utf-8-sig").rstrip()
        labels = [line.strip() for line in text.split("\n")]
    if not isinstance(labels, list | tuple | dict):
        return labels
    if not labels:
        raise ValueError("the list of labels is empty")
    for index, label in enumerate(labels):
        if not isinstance(label, str) or not label.strip():
            raise ValueError(f"class {index}: a name must be a text that is not empty, got {label!r}; put it in quotes")
    if isinstance(labels, dict):
        return {name: "" if about is None else str(about) for name, about in labels.items()}
    return tuple(labels)


def _rows(examples: Any, info: ValidationInfo) -> Any:
    """Return rows; a text is the path of a file of them."""
    if not isinstance(examples, str):
        return examples
    from cauc_ray.data.sources import open_rows  # Arrow, which a pool without examples does not need

    with _file(examples, info) as path:
        return open_rows(path)


@contextmanager
def _file(name: str, info: ValidationInfo) -> Iterator[AnyPath]:
    """Read a file in the block; what fails there is a fault of the settings that name it."""
    path = path_from(folder_of(info) or Path(), name)
    try:
        yield path
    except (OSError, UnicodeDecodeError, CaucError) as error:
        raise ValueError(f"the file {path} cannot be read: {first_line(error)}") from error


# In a file, names, or the path of a file of them.
_Some: TypeAlias = Annotated[list[str], Field(min_length=1)] | Annotated[dict[str, str], Field(min_length=1)]
_Path: TypeAlias = Annotated[str, Field(min_length=1)]
Labels: TypeAlias = Annotated[
    dict[str, str] | tuple[str, ...] | None, BeforeValidator(_named, json_schema_input_type=_Some | _Path | None)
]
Examples: TypeAlias = Annotated[
    tuple[dict[str, Any], ...], BeforeValidator(_rows, json_schema_input_type=list[dict[str, Any]] | _Path)
]


class Labelled(Section):
    """Something with classes.

    Attributes:
        labels: Their names, or names with their descriptions.
    """

    labels: Labels = None

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of the classes in their order, None where they are not known."""
        return None if self.labels is None else tuple(self.labels)

    @property
    def descriptions(self) -> dict[str, str]:
        """Return the descriptions of the classes that have some."""
        labels = self.labels if isinstance(self.labels, dict) else {}
        return {name: about for name, about in labels.items() if about}


class PromptSettings(Labelled):
    """How language models are asked, for a pool or for one of its stages.

    Attributes:
        prompt: A Jinja template over the columns of a row, or the name of a benchmark for its template; by default that
            of a multiple-choice question. Columns that it tests by {% if column %} may be missing. Without
            {{ options }}, the options are listed with it and the model is asked to answer; with it, the template is the
            whole prompt.
        labels: The names of the classes, or names with their descriptions, or in the file the path of a text that has a
            name on each line; in multiple-choice, the choices of a row are its options.
        examples: Rows with their `label`, which precede each question, or in the file the path of a table of them.
        options: What the model answers with: "letter", the letter of an option; "name", its name; "text", the
            likelihood of its text without a list of the options, per byte. By default letter, name for more than 26
            labels.
    """

    prompt: Annotated[str, BeforeValidator(_benchmark_prompt), Field(min_length=1)] | None = None
    examples: Examples = ()
    options: OptionsAs | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A row as a question.

    Attributes:
        text: The prompt.
        options: What the model may answer with, in order.
        image: The image that goes with the prompt, as a data URI.
    """

    text: str
    options: tuple[str, ...]
    image: str | None = None


# Descriptions of a model's logits.
LOGITS_ARE: Mapping[OptionsAs, str] = {
    "letter": "raw next-token logits of the options' letters",
    "name": "log-probabilities of the options' names",
    "text": "log-likelihoods of the options' texts per byte",
}


class LanguageSpec(PromptSettings, KindSpec):
    """A language model that chooses among options."""

    REVISION: ClassVar[int] = 1  # prompts and options are encoded jointly
    LOGITS: ClassVar[LogitKind] = "log-probabilities"

    @model_validator(mode="after")
    def _prompt_is_complete(self) -> LanguageSpec:
        try:
            read = _variables(self.template)
        except TemplateError as error:
            raise ValueError(
                f"prompt: {first_line(error)} (line {getattr(error, 'lineno', 1)} of the template)"
            ) from error
        if self.labels is not None and self.prompt is None:
            raise ValueError("labels need a prompt: a template over the input's columns such as 'Text: {{ text }}'")
        if self.prompt is not None and not (read | self.columns_read.required) - {"options", "choices"}:
            raise ValueError("prompt reads no column: name those of the input, such as {{ text }}")
        if self.labels is not None and len(self.labels) < 2:
            raise ValueError("a model needs at least two labels to choose from")
        if self.labels is not None and len(set(self.labels)) < len(self.labels):
            raise ValueError("two labels have one name, so a model cannot tell them apart")
        if self.labels is not None and self.answers_with == "letter" and len(self.labels) > len(LETTERS):
            raise ValueError(f"options: letter takes up to {len(LETTERS)} labels, not {len(self.labels)}; use name")
        for index, example in enumerate(self.examples):
            missing = sorted((self.columns_read.required - self.image_columns | {"label"}) - example.keys())
            if missing:
                raise ValueError(f"example {index} has no {missing[0]!r}; it has {', '.join(sorted(example))}")
            if self.answer_format is None:
                self.label_of(index, example)
        return self

    @property
    def template(self) -> str:
        """Return the template of a row."""
        return QUESTION if self.prompt is None else self.prompt

    @property
    def answers_with(self) -> OptionsAs:
        """Return what the model answers with."""
        return self.options or ("name" if self.labels is not None and len(self.labels) > LETTERED else "letter")

    @property
    def columns_read(self) -> InputColumns:
        """Return the columns of the prompt, those that it tests for being optional, and that of images."""
        names = _variables(self.template) - {"options"} | ({"choices"} if self.offers_choices else frozenset())
        names |= self.image_columns
        required = names - (_optional(self.template) - self.image_columns)
        return InputColumns(required, names - required, texts=required - self.image_columns - {"choices"})

    @property
    def offers_choices(self) -> bool:
        """Return whether a row's own choices are the options."""
        return self.labels is None and self.answer_format is None

    @property
    def image_columns(self) -> frozenset[str]:
        """Return the column of images, if it is read."""
        return frozenset()

    @property
    def shown(self) -> str:
        """Return the prompt as one text, with columns by their names: what tables and policies keep of it."""
        return Prompts(self, chat=False).shown

    def label_of(self, index: int, example: Mapping[str, Any]) -> int:
        """Return the right option of an example, given by its name or its number. Raises ValueError."""
        names = list(self.label_names or example["choices"])
        label = example["label"]
        if label in names:
            return names.index(label)
        number = int(label) if str(label).isascii() and str(label).isdigit() else -1
        if not 0 <= number < len(names):
            raise ValueError(f"example {index}: unknown label {label!r}; the labels are {', '.join(map(str, names))}")
        return number


class ImagePromptSpec(LanguageSpec):
    """A language model that may look at an image.

    Attributes:
        image: Whether the column `image` goes with each prompt.
    """

    image: bool = False

    @property
    def image_columns(self) -> frozenset[str]:
        """Return the column of images, if it is read."""
        return frozenset({"image"} if self.image else ())


class Prompts:
    """The prompts of rows, for a model that continues a text or for one that answers in a chat."""

    def __init__(self, spec: LanguageSpec, chat: bool, n_letters: int = len(LETTERS)) -> None:
        """Prepare what the prompts of all rows share.

        Args:
            spec: How rows are asked.
            chat: Whether a prompt is a message of a conversation.
            n_letters: Number of options that can be letters.
        """
        self._n_letters = n_letters
        self._spec = spec
        self._chat = chat
        self._with = spec.answers_with
        self._whole = "options" in _variables(spec.template)
        self._template = _ENVIRONMENT.from_string(spec.template)
        self._reads = sorted((spec.columns_read.names or frozenset()) - {"choices", *spec.image_columns})
        self.head = self._head()

    def __call__(self, batch: Batch) -> tuple[dict[int, Asked], dict[int, str]]:
        """Return a batch's questions by row, and why the other rows have none.

        Args:
            batch: The columns of the prompt, (n,) each; by default `question` (text) and `choices` (a list of texts).

        Raises:
            DataError: A required column is missing.
        """
        require_columns(batch, *sorted(self._spec.columns_read.required))
        columns = [name for name in [*self._reads, "choices"] if name in batch]
        rows = range(batch_size(batch))
        return parted({row: self._asked({name: _plain(batch[name][row]) for name in columns}) for row in rows})

    @property
    def shown(self) -> str:
        """Return what is asked as one text, with columns by their names, and with all that tells labels apart."""
        names, text = self._spec.label_names or (), self._with == "text"
        asked = f"{self.head}{self._spec.template.rstrip()}"
        if self._spec.answer_format is not None:
            return asked
        answer = f"<{' | '.join(names) if text and names else self._with}>"
        rows = "" if names or text else "\n{{ choices }}"
        if self._whole:
            listed = self._listing(names).rstrip()
            return f"{asked} {answer}" + (f"\n\n{{{{ options }}}}:\n{listed}" if listed else "")
        return f"{asked}{rows}\nAnswer: {answer}"

    def _asked(self, values: Mapping[str, Any]) -> Asked | Unusable:
        """Return a row as a question, or why it cannot be asked."""
        options = self._spec.label_names or ()
        if self._spec.offers_choices:
            choices = values["choices"]
            if choices is None or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
                return Unusable("it has no list of at least two choices")
            options = tuple(choice.strip() for choice in choices)
            if self._with != "letter" and not all(options):
                return Unusable("one of its choices is empty")
        if self._spec.labels is None and "question" in self._reads and not isinstance(values.get("question"), str):
            return Unusable("it has no question")
        columns = [values[name] for name in self._reads if name in values]
        if columns and all(value is None or not str(value).strip() for value in columns):
            return Unusable(f"it has nothing in {', '.join(self._reads)}")
        if self._with == "letter" and len(options) > self._n_letters:
            return Unusable(
                f"it has {len(options)} options; letters support up to {self._n_letters}, options: text any number"
            )
        try:
            text = self._text(values, options)
            "".join([text, *options]).encode()
        except UnicodeEncodeError:
            return Unusable("its text is not valid Unicode")
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:  # of the template with these values
            return Unusable(f"its prompt cannot be written: {first_line(error)}")
        return Asked(self.head + text, tuple(LETTERS[: len(options)]) if self._with == "letter" else options)

    def _text(self, values: Mapping[str, Any], options: Sequence[str], answer: str | None = None) -> str:
        """Return a row's own part of the prompt; that of an example ends with its answer."""
        if self._whole:
            text = self._template.render({**values, "options": self._listing(options).rstrip()}).rstrip()
            return text if answer is None else f"{text} {answer}\n\n"
        text = f"{self._template.render(values).rstrip()}\n"
        if self._spec.answer_format is not None and answer is None:
            return text.rstrip()
        if self._spec.offers_choices:
            text += self._listing(options)
        if answer is not None:
            return f"{text}Answer: {answer}\n\n"
        return (text + _REQUESTS[self._with]).rstrip() if self._chat else f"{text}Answer:"

    def _listing(self, options: Sequence[str]) -> str:
        if self._with == "text":
            return ""
        about = {name: f": {text}" for name, text in self._spec.descriptions.items()}
        marks = [f"{letter}. " for letter in LETTERS] if self._with == "letter" else ["- "] * len(options)
        return "".join(f"{mark}{name}{about.get(name, '')}\n" for mark, name in zip(marks, options, strict=False))

    def _head(self) -> str:
        """Return what precedes every row: the list of labels, and the examples."""
        spec = self._spec
        names = spec.label_names
        head = ""
        if names is not None and self._with != "text" and not self._whole:
            head = f"Options:\n{self._listing(names)}\n"
        for index, example in enumerate(spec.examples):
            options, answer = list[str](), str(example["label"])
            if spec.answer_format is None:
                options = [option.strip() for option in names or example["choices"]]
                right = spec.label_of(index, example)
                answer = LETTERS[right] if self._with == "letter" else options[right]
            head += self._text({name: _plain(value) for name, value in example.items()}, options, answer)
        return head


# The end of a message to a chat model.
_REQUESTS: Mapping[OptionsAs, str] = {
    "letter": "Answer with the letter of the right option only.",
    "name": "Answer with the right option only, word for word.",
    "text": "",
}


def _plain(value: Any) -> Any:
    """Return a value of a batch as a template takes it, None where there is none."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and value != value else value
