"""What can go wrong with a request: of its own making, or a stage's."""

from __future__ import annotations

import reprlib
from typing import Literal

_MOST_LETTERS = 120
# Looks at so much of a value and no more: it may be as large as a body.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _MOST_LETTERS
_SHORT.maxlist = 16


class RequestError(Exception):
    """A request that cannot be answered; the message is for its client.

    status: of HTTP.   retry_after_s: when it may be worth trying again, None where it is not.
    """

    def __init__(self, message: str, status: int = 400, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s


class StageError(Exception):
    """A call of a stage that came to nothing.

    kind: "died" (its replica ended, so another may do it), "gone" (its replica was there no more), "down" (no replica
    takes calls), "overloaded", or "failed" (the model or the code around it raised).
    """

    def __init__(self, kind: Literal["died", "gone", "down", "overloaded", "failed"], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


def shown(value: object) -> str:
    r"""Return what a client sent as a message can hold it: short, and on one line.

    >>> shown("a\nb")
    "'a\\nb'"
    """
    text = _SHORT.repr(value)
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
