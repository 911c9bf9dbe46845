"""Tasks and their outcomes, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """Something to measure.

    Attributes:
        part: What the value belongs to, such as a table.
        name: The name of its entry there.
        measure: Returns the value.
        identity: All that its value depends on, in one text, by which a stored value is that of the same task.
    """

    part: str
    name: str
    measure: Callable[[], Any]
    identity: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a task: its value, or the error in one line; and its warnings.

    Attributes:
        task: The task.
        value: Its value.
        error: Its error, None where it has a value.
        warnings: Its warnings.
        seconds: How long the last attempt took.
        attempts: How often it was begun.
        may_pass: Whether another attempt may succeed.
    """

    task: Task
    value: Any = None
    error: str | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    attempts: int = 1
    may_pass: bool = False
