"""How a dataset's own columns become those that models read: an image, or a question with its choices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.blocks import InputBlock, column_to_numpy, objects
from cauc_ray.data.image_input import read_image
from cauc_ray.data.partitions import Partition
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Ints

CANONICAL = ("example_id", "image", "question", "choices", "context", "subject", "label")


@dataclass(frozen=True, slots=True)
class Published:
    """How a benchmark's files were published.

    columns: canonical name -> the file's own (several for choices, joined with "+").   first_label: the number
    that its labels give the first option.   split_choices: the options in a text of all of them, None if unreadable.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    first_label: int = 0
    split_choices: Callable[[str], list[str] | None] | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """Which columns of a partition are read as what.

    own: canonical name -> the partition's columns (several for choices only).   benchmark: the name of one of
    the paper's, whose prompt the questions get, or "".
    """

    task: str
    own: Mapping[str, tuple[str, ...]]
    published: Published
    benchmark: str = ""

    @property
    def columns(self) -> list[str]:
        """The partition's columns that are needed, each once."""
        return list(dict.fromkeys(name for names in self.own.values() for name in names))


def find_columns(
    partition: Partition, given: Mapping[str, str], published: Published | None = None, benchmark: str = ""
) -> Reading:
    """Find the canonical columns: as given, else as the benchmark was published, else by their own names.

    Raises ConfigError when a canonical name is unknown, DataError when a column is not there.
    """
    for name in given:
        if name not in CANONICAL:
            raise ConfigError(unknown_name("column to read", name, CANONICAL))
    there = partition.columns
    as_published = published if published and _holds(there, {**published.columns, **given}) else Published()
    named = {**as_published.columns, **given}
    own: dict[str, tuple[str, ...]] = {}
    for name in CANONICAL:
        if name in named:
            own[name] = _names(named[name], there) if name == "choices" else (named[name],)
        elif name in there:
            own[name] = (name,)
    if "example_id" not in own and "id" in there:
        own["example_id"] = ("id",)
    task = "multiple-choice" if "question" in own else "image-classification"
    needed = ("question", "choices") if "question" in own else ("image",) if "image" in own else ("question or image",)
    absent = next((f"{each!r} for {name}" for name in own for each in own[name] if each not in there), None)
    absent = absent or next((name for name in needed if name not in own), None)
    if absent is not None:
        raise DataError(
            f"{partition.source} has no column {absent}; it has {', '.join(there)}. "
            "Name its own with --columns, such as question=stem,choices=opa+opb or image=jpeg"
        )
    unread = ("image",) if task == "multiple-choice" else ("question", "choices", "context", "subject")
    return Reading(task, {k: v for k, v in own.items() if k not in unread}, as_published, benchmark)


def _holds(there: Sequence[str], named: Mapping[str, str]) -> bool:
    return all(each in there for name in named.values() for each in _names(name, there))


def _names(name: str, there: Sequence[str]) -> tuple[str, ...]:
    return (name,) if name in there else tuple(name.split("+"))


def read_block(reading: Reading, table: pa.Table, rows: Ints, partition: Partition, name: str) -> InputBlock:
    """Make rows of a partition, whose numbers are given, the block that models read.

    name: of the partition, for the ids of rows that have none of their own.
    Raises DataError naming file and row for a label, a choice or an id that cannot be read.
    """
    ids = [f"{name}-{row}" for row in rows.tolist()]
    if "example_id" in reading.own:
        ids = read_ids(table.column(reading.own["example_id"][0]), partition).to_pylist()
    columns: dict[str, npt.NDArray[Any]] = {"example_id": np.array(ids, dtype=object)}
    if reading.task == "image-classification":
        columns["image"] = _images(table.column(reading.own["image"][0]), partition)
    else:
        for text in ("question", "context", "subject"):
            if text in reading.own:
                columns[text] = _texts(table.column(reading.own[text][0]), text, partition)
        columns["choices"] = _choices(reading, table, rows, partition)
        if reading.benchmark:
            columns["task"] = np.full(len(rows), reading.benchmark, dtype=object)
    labels = None
    if "label" in reading.own:
        labels = _labels(table.column(reading.own["label"][0]), reading.published.first_label, rows, partition)
        _require_option(labels, columns.get("choices"), rows, partition)
    return InputBlock(ids, labels, columns, table.nbytes)


def read_ids(column: pa.ChunkedArray, partition: Partition, start: int = 0) -> pa.ChunkedArray:
    """Return ids as text. Raises DataError where one is null (naming its row, counted from start) or no id."""
    column = _decoded(column)
    if column.null_count:
        row = pc.index(column.is_null(), True).as_py() + start
        raise DataError(f"{partition.place(row)}: the row has no example_id")
    if not (_is_text(column.type) or pa.types.is_integer(column.type) or len(column) == 0):
        raise DataError(f"{partition.source}: the column of example ids holds {column.type}, not text or whole numbers")
    return column.cast(pa.string())


def _images(column: pa.ChunkedArray, partition: Partition) -> npt.NDArray[Any]:
    """Return images as stored, None for null; of a struct {bytes, path}, as image datasets have, the bytes."""
    kind = column.type
    if pa.types.is_struct(kind) and "bytes" in kind.names:
        return objects([_image_bytes(value) for value in column.to_pylist()])
    if _is_text(kind) or pa.types.is_struct(kind):
        raise DataError(f"{partition.source}: column 'image' holds {kind}; images are bytes or arrays")
    try:
        if column.null_count == 0:
            return column_to_numpy(column)
        images = [None] * len(column)
        known = np.flatnonzero(column.is_valid().to_numpy())
        for row, image in zip(known, column_to_numpy(column.drop_null()), strict=True):
            images[row] = image
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{partition.source}: column 'image' ({kind}) cannot be given to a model: {error}") from error
    return objects(images)


def _image_bytes(value: Mapping[str, Any] | None) -> bytes | None:
    """Return the bytes, else those of the file at `path`; None where there are neither."""
    if value is None:
        return None
    stored: bytes | None = value["bytes"]
    return read_image(Path(value.get("path") or "")) if stored is None else stored


def _texts(column: pa.ChunkedArray, name: str, partition: Partition) -> npt.NDArray[Any]:
    """Return text, None for null; numbers as they are written."""
    column = _plain_values(column, f"column {name!r}", "text", partition)
    return objects(column.cast(pa.large_string()).to_pylist())


def _choices(reading: Reading, table: pa.Table, rows: Ints, partition: Partition) -> npt.NDArray[Any]:
    """Return each row's list of texts, None where it has none."""
    own = reading.own["choices"]
    if len(own) > 1:
        options = zip(*(_texts(table.column(name), name, partition) for name in own), strict=True)
        return objects([_until_last(row) for row in options])
    column = _decoded(table.column(own[0]))
    if pa.types.is_null(column.type):
        return objects([None] * len(column))
    if _is_text(column.type):
        parse = reading.published.split_choices or _json_list
        found = []
        for row, text in zip(rows.tolist(), column.to_pylist(), strict=True):
            try:
                found.append(None if text is None else parse(text))
            except ValueError as error:
                raise DataError(
                    f"{partition.place(row)}: choices are not a JSON list of texts: {text!r:.60}"
                ) from error
        return objects(found)
    inner = getattr(column.type, "value_type", None)
    if inner is not None and pa.types.is_dictionary(inner):
        inner = inner.value_type
    if inner is None or not (_is_text(inner) or pa.types.is_integer(inner) or pa.types.is_null(inner)):
        raise DataError(f"{partition.source}: column {own[0]!r} holds {column.type}; choices are lists of texts")
    # Not by a cast: Arrow's, of a list_view, may lose the last row.
    return objects([row and [v if v is None else str(v) for v in row] for row in column.to_pylist()])


def _until_last(options: tuple[str | None, ...]) -> list[str | None] | None:
    # Only the null cells at the end are no options: without one in between, the label would name another option.
    n = max((place for place, option in enumerate(options, 1) if option is not None), default=0)
    return list(options[:n]) or None


def _json_list(text: str) -> list[str]:
    value = json.loads(text)
    if not isinstance(value, list) or not all(isinstance(option, str) for option in value):
        raise ValueError("no list of texts")
    return value


def _labels(column: pa.ChunkedArray, first: int, rows: Ints, partition: Partition) -> Ints:
    """Return labels, int32, UNKNOWN_LABEL for null and -1, which published test sets have for it."""
    column = _plain_values(column, "the column of labels", "numbers or letters of options", partition)
    labels = np.full(len(rows), UNKNOWN_LABEL, dtype=np.int32)
    for index, value in enumerate(column.to_pylist()):
        label = _label(value, first)
        if label is None:
            raise DataError(
                f"{partition.place(int(rows[index]))}: label {value!r} is neither the number of an option, "
                f"counted from {first}, nor its letter"
            )
        labels[index] = label
    return labels


def _label(value: int | float | str | None, first: int) -> int | None:
    """Return a label counted from 0, None if it is not one.

    >>> [_label(value, 0) for value in (2, 2.0, "2", " c", None, "cat", -2)]
    [2, 2, 2, 2, -1, None, None]
    """
    if isinstance(value, str):
        value = value.strip()
        if re.fullmatch("[A-Za-z]", value):
            return ord(value.upper()) - ord("A")
        if value and not re.fullmatch(r"-?\d{1,9}(\.0*)?", value):
            return None
        value = float(value) if value else None
    if value is None or value == -1:
        return UNKNOWN_LABEL
    return int(value) - first if value == value // 1 and first <= value < 2**31 else None


def _require_option(labels: Ints, choices: npt.NDArray[Any] | None, rows: Ints, partition: Partition) -> None:
    for place, options in enumerate(choices if choices is not None else []):
        if options is not None and labels[place] >= len(options):
            raise DataError(
                f"{partition.place(int(rows[place]))}: label {labels[place]}, counted from 0, is outside its "
                f"{len(options)} choices"
            )


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _plain_values(column: pa.ChunkedArray, what: str, wanted: str, partition: Partition) -> pa.ChunkedArray:
    """Return a column of texts, numbers or nulls. Raises DataError, which names what was wanted, for another."""
    column = _decoded(column)
    kind = column.type
    if not (_is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise DataError(f"{partition.source}: {what} holds {kind}, not {wanted}")
    return column
