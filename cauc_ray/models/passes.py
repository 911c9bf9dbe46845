"""Models that compute here: rows are read into the inputs of passes, and each pass gives the logits of its rows."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import (
    PASS_TOKENS,
    Answers,
    Batch,
    PreparingModel,
    Unusable,
    answered,
    batch_size,
    bucketed,
    parted,
    require_columns,
)
from cauc_ray.numbers.types import Floats

# The rows of a pass with its inputs.
Passes: TypeAlias = Sequence[tuple[Sequence[int], Any]]
# A batch as a model computes it: its number of rows, its passes, and why rows that are in none have no logits.
Inputs: TypeAlias = tuple[int, Passes, Mapping[int, str]]


class LocalModel(PreparingModel):
    """A model that reads rows on the host, then computes their logits in passes, all launched before any is taken."""

    @abstractmethod
    def read(self, batch: Batch) -> tuple[Passes, Mapping[int, str]]:
        """Return a batch's passes, and why the other rows are in none. Raises DataError when a column is missing."""

    @abstractmethod
    def launch(self, inputs: Any) -> Any:
        """Start a pass, and return what take takes; a GPU computes on meanwhile."""

    def take(self, inputs: Any, launched: Any, counts: Counter[str]) -> Iterable[Floats]:
        """Return the logits of each row of a pass; counts is updated in place, as Answers has it."""
        logits: Iterable[Floats] = launched
        return logits

    def device_s(self) -> float | None:
        """Return the seconds that a GPU has computed since the last time this was called, None without one."""
        return None

    def prepare(self, batch: Batch) -> Inputs:
        """Read a batch. Raises DataError when a column is missing."""
        return batch_size(batch), *self.read(batch)

    def answer(self, prepared: Inputs) -> Answers:
        """Compute a batch; rows that cannot be read, or whose logits are not finite, are failures."""
        n, passes, faults = prepared
        logits: dict[int, Floats] = {}
        counts: Counter[str] = Counter()
        launched = [self.launch(inputs) for _, inputs in passes]
        for (rows, inputs), one in zip(passes, launched, strict=True):
            logits |= zip(rows, self.take(inputs, one, counts), strict=True)
        return answered(n, logits, faults, counts, self.facts.dtype, device_s=self.device_s())


def row_texts(batch: Batch, columns: Sequence[str]) -> dict[int, list[str] | Unusable]:
    """Return each row's texts, or why it lacks one. Raises DataError when a column is missing."""
    require_columns(batch, *columns)

    def texts(row: int) -> list[str] | Unusable:
        values = {name: batch[name][row] for name in columns}
        missing = [name for name, text in values.items() if not isinstance(text, str)]
        return Unusable(f"it has no text in {missing[0]!r}") if missing else list(values.values())

    return {row: texts(row) for row in range(batch_size(batch))}


def text_passes(
    texts: Mapping[int, Any],
    encode: Callable[[list[Any]], Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    batch_tokens: int,
    pass_tokens: int = PASS_TOKENS,
    n_tokens: Callable[[Any], int] = lambda encoding: len(encoding["input_ids"]),
) -> tuple[Passes, dict[int, str]]:
    """Return texts of like lengths as passes of at most so many tokens, and why the other rows are in none.

    Args:
        texts: What each row is encoded from, or why it cannot be.
        encode: Returns the encodings of rows.
        collate: Returns the inputs of a pass of encodings.
        batch_tokens: Tokens of a pass, padding included.
        pass_tokens: Tokens that cost as much as a pass does in itself.
        n_tokens: Returns the number of tokens of an encoding.
    """
    usable, faults = parted(texts)
    encoded = dict(zip(usable, encode(list(usable.values())) if usable else [], strict=True))
    passes = bucketed({row: n_tokens(encoding) for row, encoding in encoded.items()}, batch_tokens, pass_tokens)
    return [(rows, collate([encoded[row] for row in rows])) for rows in passes], faults


def option_order(source: str, classes: Sequence[str], names: Sequence[str]) -> list[int]:
    """Return the class of each of the pool's labels, where a model names its classes.

    Args:
        source: The model, for the message.
        classes: The model's classes: names of labels, or options by their numbers.
        names: The labels in the pool's order.

    Raises:
        ConfigError: The classes are not the labels.
    """
    numbers = [str(number) for number in range(len(names))]
    if sorted(classes) != sorted(names) and sorted(classes) == sorted(numbers):
        names = numbers
    if sorted(classes) != sorted(names):
        raise ConfigError(f"{source} has the labels {', '.join(classes)}, the pool has {', '.join(names)}")
    return [classes.index(name) for name in names]


def texts_in(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts of a row's values and lists that are not empty."""
    for value in values:
        if isinstance(value, str):
            yield from filter(None, [value])
        elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype.kind in "OU"):
            yield from texts_in(value)
