"""Rules by which answers in words are the same, and right: each turns an answer into its normal form."""

from __future__ import annotations

import json
import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from functools import lru_cache
from importlib.metadata import EntryPoint
from typing import TypeAlias

from cauc_ray.errors import ConfigError, DataError, first_line

Normaliser: TypeAlias = Callable[[str], str | None]
DEFAULT_RULE = "exact"
RULES = "exact, number, json:FIELD, regex:PATTERN or a function as module:function"
# What NFKC would turn into digits or spaces of their own: groups' separators, fractions, and raised or lowered digits.
_MARK = re.compile(
    "(?<=\\d)[\u00a0\u2009\u202f'\u2019](?=\\d{3}(?!\\d))|[\u00b2\u00b3\u00b9\u2070-\u209c]"
    "|\\s?([\u00bc-\u00be\u2150-\u215e])"
)
# A number with a decimal comma, or with its groups by points. Three digits after one comma are a group (1,234); more
# commas are a list.
_COMMA = re.compile(
    r"(?<![\d.,])(?!(?:[1-9]\d{0,2},\d{3})(?!\d))"
    r"(?:(\d+|[1-9]\d{0,2}(?:\.\d{3}){1,20}),(\d+)|([1-9]\d{0,2}(?:\.\d{3}){2,20}))(?![\d_]|[.,]\d)"
)
# Its sign, which no hyphen after a word or number is, its digits, and a percent sign. Groups are counted: to look for
# their end from every digit would take minutes for a long list of numbers.
_NUMBER = re.compile(
    "(?:(?<!\\w)([-+\u2212])[$\u20ac\u00a3\u00a5]?)?"
    r"((?:(?:\d{1,3}(?:,\d{2,3}){0,20},\d{3}(?!\d)|\d[\d_]*)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)"
)
# Quotation marks and the ends of sentences of other scripts are punctuation, too.
_OUTER = string.whitespace + string.punctuation.translate(str.maketrans("", "", "%-+#"))
_OUTER += "\u00ab\u00bb\u00bf\u00a1\u2018\u2019\u201a\u201c\u201d\u201e\u2039\u203a\u3001\u3002\u300c\u300d\u300e\u300f"


class AnswerRule:
    """A rule by its text.

    | text | normal form of an answer |
    | --- | --- |
    | `exact` | without case, repeated white space and outer punctuation |
    | `number` | its last number, as 1,234.5 or 1.234,5 |
    | `json:FIELD` | that field of the JSON object in it |
    | `regex:PATTERN` | the first group of the pattern's last match, else the match |
    | `module:name` | what that function returns for it: a text, or None |

    An answer without a normal form counts as none. A right one has the normal form of the reference.
    """

    def __init__(self, text: str) -> None:
        """Read a rule. Raises ConfigError for a text that is none."""
        self.text = text
        kind, _, rest = text.partition(":")
        if text == "exact":
            self._normal: Normaliser = exact_form
        elif text == "number":
            self._normal = number_form
        elif kind == "json" and rest:
            self._normal = lambda answer: _field(answer, rest)
        elif kind == "regex" and rest:
            self._normal = _by_pattern(rest)
        elif kind and rest:
            self._normal = _function(text)
        else:
            raise ConfigError(f"unknown rule {text!r} for answers; expected {RULES}")

    def form(self, answer: str | None) -> str | None:
        """Return the normal form of an answer, None where it has none."""
        return None if answer is None else self._normal(answer)

    def forms(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the normal forms of answers."""
        return [self.form(answer) for answer in answers]

    def references(self, texts: Sequence[str | None]) -> list[str | None]:
        """Return the normal forms of right answers, which may be the bare ones; None where one is missing."""
        return [None if not text else self.form(text) or exact_form(text) for text in texts]


@lru_cache(maxsize=64)
def rule_of(text: str) -> AnswerRule:
    """Return a rule by its text. Raises ConfigError as AnswerRule does."""
    return AnswerRule(text)


def exact_form(answer: str) -> str | None:
    """Return an answer without case, repeated white space and outer punctuation, None where nothing is left.

    >>> exact_form("  The  Answer. "), exact_form("# C#.")
    ('the answer', 'c#')
    """
    text = " ".join(unicodedata.normalize("NFKC", answer).casefold().split())
    return text.lstrip(f"{_OUTER}#").rstrip(_OUTER) or text or None


def number_form(answer: str) -> str | None:
    """Return the last number of an answer, without grouping and trailing zeros; None where it has none.

    >>> number_form("It is 1,234.50 EUR."), number_form("17,5 %"), number_form("none")
    ('1234.5', '0.175', None)
    """
    text = _COMMA.sub(_with_point, _MARK.sub(_without_mark, answer))
    numbers = _NUMBER.findall(unicodedata.normalize("NFKC", text))
    if not numbers:
        return None
    sign, digits, percent = numbers[-1]
    exact = Context(prec=len(digits) + 2)
    try:
        number = Decimal(digits.replace(",", "")).scaleb(-2 if percent else 0, exact).normalize(exact)
    except ArithmeticError:  # an exponent without end
        return None
    text = format(number, "f") if abs(number.adjusted()) < 40 else str(number)
    return f"-{text}" if number and sign in ("-", "\u2212") else text


def _without_mark(mark: re.Match[str]) -> str:
    return "" if mark[1] is None else f"{unicodedata.numeric(mark[1]):.12f}"[1:]


def _with_point(number: re.Match[str]) -> str:
    whole, decimals, grouped = number.groups()
    return grouped.replace(".", "") if grouped else f"{whole.replace('.', '')}.{decimals}"


def _field(answer: str, field: str) -> str | None:
    start, end = answer.find("{"), answer.rfind("}")
    try:
        value = json.loads(answer[start : end + 1])[field]
    except (ValueError, KeyError, TypeError, RecursionError):
        plain = answer.strip()
        return exact_form(plain) if plain and "{" not in plain else None  # a reference that is the field's value
    return exact_form(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True))


def _by_pattern(pattern: str) -> Normaliser:
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"the rule regex:{pattern} is not a regular expression: {error}") from error

    def form(answer: str) -> str | None:
        matches = list(compiled.finditer(answer))
        if not matches:
            return None
        match = matches[-1][1] if compiled.groups else matches[-1][0]
        return None if match is None else exact_form(match)

    return form


def _function(text: str) -> Normaliser:
    try:
        function = EntryPoint("", text, "").load()
    except Exception as error:  # whatever its module raises
        raise ConfigError(f"unknown rule {text!r} for answers; expected {RULES}: {error}") from error
    if not callable(function):
        raise ConfigError(f"the rule {text!r} for answers does not name a function")

    def form(answer: str) -> str | None:
        try:
            returned = function(answer)
        except Exception as error:
            raise DataError(f"the rule {text} fails for {answer!r:.80}: {first_line(error)}") from error
        if returned is not None and not isinstance(returned, str):
            raise DataError(f"the rule {text} must return a text or None, got {returned!r:.80}")
        return returned

    return form
