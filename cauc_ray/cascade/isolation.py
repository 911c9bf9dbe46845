"""Which rows of a call a model cannot answer, and whether the rows or the replica is at fault.

A call that fails is divided on the replica itself, until the rows that fail are isolated. Rows and replica
are distinguished by answers: a replica that answers other rows, or a row known to be good, works, so the rows that fail
on it are at fault. A replica that fails on a row known to be good is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from cauc_ray.cascade.rows import Fault
from cauc_ray.errors import CaucError, ConfigError, ExecutionError, printable
from cauc_ray.models.answers import Answers, Batch, batch_size, ragged, wires
from cauc_ray.numbers.types import Floats, Ints

Ask: TypeAlias = Callable[[Batch], Answers]

# Where no row is known to be good, so many rows are tried one by one before a call is given up: each may take long.
MOST_IN_VAIN = 16


@dataclass(frozen=True, slots=True)
class Isolated:
    """What a model answered.

    answers: None where it answered no row.   error, fault: why there are none, and who is at fault.   raised: rows on
    which the model raised, or gave no finite number, while it answered others or a good row; they are among the
    failures of answers.
    """

    answers: Answers | None
    error: str = ""
    fault: Fault = "unknown"
    raised: frozenset[int] = frozenset()


def answer_isolated(
    first: Callable[[], Answers],
    ask: Ask,
    batch: Callable[[], Batch],
    good_row: Batch | None,
    stopped: Callable[[], bool],
) -> Isolated:
    """Have a model answer a batch; where it raises, find the rows that it raises on.

    Args:
        first: Asks for the whole batch.
        ask: Asks for rows.
        batch: Makes the call's columns, each (n, ...), anew: the model may do with them what it likes.
        good_row: A row that this stage has answered before, each column (1, ...).
        stopped: Whether the answer is no longer wanted.

    Returns:
        What the model answered.

    Raises:
        ConfigError: Of the model: a wrong key is not the rows' fault.
        ExecutionError: The same, as where a server is down.
    """
    try:
        answers = first()
    except (ConfigError, ExecutionError):
        raise
    except BaseException as error:  # a model may raise what it likes
        reason = reason_of(error)
    else:
        if answers.not_finite:
            answers = _asked_again(answers, ask, batch())
        if len(answers.failures) < len(answers.logits) or good_row is None or _answers(ask, good_row):
            return Isolated(answers, raised=answers.not_finite)
        return Isolated(None, next(iter(answers.failures.values())), "replica")
    if good_row is not None and not _answers(ask, good_row):
        return Isolated(None, reason, "replica")
    rows = batch()
    answered, raised = _divided(ask, rows, stopped, batch_size(rows) if good_row is not None else MOST_IN_VAIN)
    if stopped() or not (answered or good_row is not None):
        return Isolated(None, reason)
    joined = _joined(batch_size(rows), answered, raised)
    return Isolated(joined, raised=joined.not_finite.union(raised))


def reason_of(error: BaseException) -> str:
    """Return an error as one printable line."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "its message cannot be shown"
    return printable(text if isinstance(error, CaucError) else f"{type(error).__name__}: {text}")


def row_of(batch: Batch, row: int) -> Batch:
    """Copy a row of a batch, each column (1, ...)."""
    return {name: column[row : row + 1].copy() for name, column in batch.items()}


def _answers(ask: Ask, good_row: Batch) -> bool:
    try:
        return not ask(row_of(good_row, 0)).failures
    except (ConfigError, ExecutionError):
        raise
    except BaseException:
        return False


def _asked_again(answers: Answers, ask: Ask, batch: Batch) -> Answers:
    """Ask a second time for rows without finite numbers: a model may have failed by chance."""
    rows = np.array(sorted(answers.not_finite))
    try:
        again = ask({name: column[rows] for name, column in batch.items()})
    except (ConfigError, ExecutionError):
        raise
    except BaseException:
        return answers
    failures = {row: why for row, why in answers.failures.items() if row not in answers.not_finite}
    whole = replace(answers, failures=failures, not_finite=frozenset())
    return _joined(len(answers.logits), [(np.arange(len(answers.logits)), whole), (rows, again)], {})


def _divided(
    ask: Ask, batch: Batch, stopped: Callable[[], bool], most_in_vain: int
) -> tuple[list[tuple[Ints, Answers]], dict[int, str]]:
    """Return the answers to parts of a batch that has failed as a whole, and why its other rows have none.

    most_in_vain: it ends where so many single rows have failed and no part was answered.
    """
    answered: list[tuple[Ints, Answers]] = []
    raised: dict[int, str] = {}
    todo = _halves(np.arange(batch_size(batch)))
    while todo and not stopped() and (answered or len(raised) < most_in_vain):
        rows = todo.pop()
        try:
            answered.append((rows, ask({name: column[rows] for name, column in batch.items()})))
        except (ConfigError, ExecutionError):
            raise
        except BaseException as error:
            if len(rows) > 1:
                todo += _halves(rows)
            else:
                raised[int(rows[0])] = reason_of(error)
    return answered, raised


def _halves(rows: Ints) -> list[Ints]:
    """Return halves of some rows; one row is asked a second time, since a model may have failed by chance."""
    middle = len(rows) // 2
    return [rows[middle:], rows[:middle]] if middle else [rows]


def _joined(n: int, answered: Sequence[tuple[Ints, Answers]], raised: Mapping[int, str]) -> Answers:
    """Return the answers to parts of n rows as one, with those that raised as failures."""
    logits, as_returned = dict[int, Floats](), dict[int, Floats]()
    costs = tokens = None
    texts: list[str | None] | None = None
    failures, counts = dict(raised), Counter[str]()
    for rows, answers in answered:
        counts.update(answers.counts)
        for position, row in enumerate(rows.tolist()):
            n_options = None if answers.n_options is None else answers.n_options[position]
            logits[row] = answers.logits[position, :n_options]
            as_returned[row] = answers.as_returned[position, :n_options]
        if answers.texts is not None:
            texts = [None] * n if texts is None else texts
            for row, text in zip(rows.tolist(), answers.texts, strict=True):
                texts[row] = text
        if answers.costs is not None:
            costs = np.zeros(n) if costs is None else costs
            costs[rows] = answers.costs
        if answers.tokens is not None:
            tokens = np.zeros((n, 2), dtype=np.int64) if tokens is None else tokens
            tokens[rows] = answers.tokens
        failures |= {int(rows[row]): reason for row, reason in answers.failures.items()}
    seconds = [answers.device_s for _, answers in answered if answers.device_s is not None]
    return Answers(
        *ragged(n, logits),
        costs,
        failures,
        dict(counts),
        sum(seconds) if seconds else None,
        next((answers.cost_unit for _, answers in answered if answers.cost_unit), None),
        wires(answers.wire for _, answers in answered),
        ragged(n, as_returned)[0],
        texts=texts,
        tokens=tokens,
        waiting=frozenset(int(rows[place]) for rows, answers in answered for place in answers.waiting),
        not_finite=frozenset(int(rows[place]) for rows, answers in answered for place in answers.not_finite),
    )
