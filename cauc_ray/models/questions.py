"""Multiple-choice questions as they come in a batch."""

from __future__ import annotations

from typing import Any

from cauc_ray.data.prompts import Question
from cauc_ray.models.answers import Batch, batch_size, require_columns

# The required columns of questions, and all columns that are read.
NEEDED = frozenset({"question", "choices"})
READ = NEEDED | {"context", "subject", "task"}


def read_questions(batch: Batch) -> tuple[dict[int, Question], dict[int, str]]:
    """Return a batch's questions by row, and why the other rows hold none.

    batch: `question` (text) and `choices` (a list of texts), and where there are such columns `context`,
    `subject` and `task` (text, "" or null where a row has none).
    Raises DataError when a column is missing that every question needs.
    """
    require_columns(batch, "question", "choices")
    questions: dict[int, Question] = {}
    faults: dict[int, str] = {}
    for row in range(batch_size(batch)):
        text, choices = batch["question"][row], batch["choices"][row]
        if not isinstance(text, str):
            faults[row] = "it has no question"
        elif choices is None or len(choices) < 2 or not all(isinstance(choice, str) for choice in choices):
            faults[row] = "it has no list of at least two choices"
        else:
            own = {name: _text(batch[name][row]) for name in ("context", "subject", "task") if name in batch}
            questions[row] = Question(text, tuple(choices), **own)
    return questions, faults


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
