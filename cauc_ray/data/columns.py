"""From a dataset's own columns to those that models read: an image, or a question with its choices."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.blocks import InputBlock, model_column, nulls_between
from cauc_ray.data.rows import Rows, read_image
from cauc_ray.data.values import objects
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Ints

# Of a task whose models read columns by the file's own names.
TABULAR = "classification"
CANONICAL_OF_ALL = ("example_id", "label")
CANONICAL = ("example_id", "image", "question", "choices", "context", "subject", "label")


@dataclass(frozen=True, slots=True)
class Published:
    """The layout of a benchmark's published files.

    columns: canonical name -> the file's own name (for choices several, joined with "+").   first_label: the label
    of the first option.   split_choices: splits a text into options; None if it cannot be read.   kept: a column and
    the value of the rows that count, where the files have that column.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    first_label: int = 0
    split_choices: Callable[[str], list[str] | None] | None = None
    kept: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How a partition's columns are read.

    own: canonical name -> the partition's columns (several for choices only).   benchmark: the name of the paper's
    dataset whose prompt the questions get, or "".   names: of the options, which labels may use.
    """

    task: str
    own: Mapping[str, tuple[str, ...]]
    published: Published
    benchmark: str = ""
    names: tuple[str, ...] | None = None

    @property
    def columns(self) -> list[str]:
        """The partition's columns that are needed, without duplicates."""
        return list(dict.fromkeys(name for names in self.own.values() for name in names))


def find_columns(
    part: Rows,
    given: Mapping[str, str],
    published: Published,
    benchmark: str = "",
    names: tuple[str, ...] | None = None,
    *,
    tabular: bool = False,
) -> Reading:
    """Find the canonical columns: as given, else as the benchmark was published, else by their own names.

    tabular: only ids and labels have canonical names, and all other columns are read by their own.
    Raises ConfigError if a canonical name is unknown, DataError if a column is missing or there is none for models.
    """
    known = CANONICAL_OF_ALL if tabular else CANONICAL
    for name in given:
        if name not in known:
            others = "; models of a classification task read all other columns by their own names" if tabular else ""
            raise ConfigError(f"{unknown_name('column to read', name, known)}{others}")
    there = part.columns

    def own_columns(named: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        several = {"choices"} - {name for name in named if named[name] in there}
        return {name: tuple(own.split("+")) if name in several else (own,) for name, own in named.items()}

    if tabular or any(
        each not in there for own in own_columns({**published.columns, **given}).values() for each in own
    ):
        published = Published()
    same = {"example_id": "id"} if "id" in there else {}
    same |= {name: name for name in known if name in there}
    own = own_columns({**same, **published.columns, **given})
    needed: tuple[str, ...] = ("image",) if "image" in own else ("question or image",)
    unread: tuple[str, ...] = ("question", "choices", "context", "subject")
    task = "image-classification"
    if tabular:
        own = {**{name: (name,) for name in there if (name,) not in own.values()}, **own}
        task, needed, unread = TABULAR, () if len(own.keys() - known) else ("of features for models",), ()
    elif "question" in own:
        task, needed, unread = "multiple-choice", ("question", "choices"), ("image",)
    absent = [f"{each!r} for {name}" for name in own for each in own[name] if each not in there]
    absent += [name for name in needed if name not in own]
    if absent:
        example = "label=churned" if tabular else "question=stem,choices=opa+opb or image=jpeg"
        raise DataError(
            f"{part.source} has no column {absent[0]}; it has {', '.join(there)}. "
            f"Give the names that it uses with --columns, such as {example}"
        )
    return Reading(task, {name: own[name] for name in own if name not in unread}, published, benchmark, names)


def read_block(reading: Reading, table: pa.Table, rows: Ints, part: Rows, name: str) -> InputBlock:
    """Convert rows of a partition, given by their numbers, to the block that models read.

    name: of the partition, to make ids for rows without ids.
    Raises DataError naming file and row for a label, a choice or an id that cannot be read.
    """
    own = {each: [table.column(column) for column in columns] for each, columns in reading.own.items()}

    def read_rows(read: Callable[..., Any], *values: Iterable[Any]) -> list[Any]:
        found: list[Any] = []
        for row in zip(*values, strict=True):
            try:
                found.append(read(*row))
            except ValueError as error:
                raise DataError(f"{part.name_of(int(rows[len(found)]))}: {error}") from error
        return found

    ids = read_ids(own["example_id"][0], part).to_pylist() if "example_id" in own else [f"{name}-{row}" for row in rows]
    columns: dict[str, npt.NDArray[Any]] = {"example_id": objects(ids)}
    if reading.task == TABULAR:
        columns |= {each: model_column(own[each][0], each, part.source) for each in own if each not in CANONICAL_OF_ALL}
    elif "image" in own:
        columns["image"] = _images(own["image"][0], part.source)
    for text in ("question", "context", "subject") if reading.task != TABULAR else ():
        if text in own:
            columns[text] = objects(_texts(own[text][0], f"column {text!r}", part.source))
    if "choices" in own and reading.task != TABULAR:
        choices = _choices(dict(zip(reading.own["choices"], own["choices"], strict=True)), part.source)
        parse = reading.published.split_choices or _json_list
        columns["choices"] = objects(read_rows(lambda v: parse(v) if isinstance(v, str) else v, choices))
        if reading.benchmark:
            columns["task"] = np.full(len(rows), reading.benchmark, dtype=object)
    labels = None
    if "label" in own:
        options = columns.get("choices", [None] * len(rows))
        read_label = _reader_of_labels(reading, own["label"][0], part)
        labels = np.array(read_rows(read_label, own["label"][0].to_pylist(), options), dtype=np.int32)
    return InputBlock(ids, labels, columns, table.nbytes)


def require_known_labels(reading: Reading, part: Rows) -> None:
    """Raise DataError naming the first row whose label is none of those that the pool names."""
    if reading.names is None or "label" not in reading.own:
        return
    (name,) = reading.own["label"]
    (table,) = part.tables([name], np.arange(part.n_rows), part.n_rows)
    read_label = _reader_of_labels(reading, table.column(name), part)
    for value in pc.unique(table.column(name)):
        try:
            read_label(value.as_py())
        except ValueError as error:
            row = pc.index(table.column(name), value).as_py()
            raise DataError(f"{part.name_of(row)}: {error}") from error


def _reader_of_labels(reading: Reading, column: pa.ChunkedArray, part: Rows) -> Callable[..., int]:
    """Return what reads a column's labels. Raises DataError for one that has none."""
    _require_plain(column, "the column of labels", "numbers or letters of options", part.source)
    return partial(_label, first=reading.published.first_label, names=reading.names)


def read_ids(column: pa.ChunkedArray, part: Rows) -> pa.ChunkedArray:
    """Return all rows' ids as str. Raises DataError if one is null or the column cannot hold ids."""
    if column.null_count:
        raise DataError(f"{part.name_of(pc.index(column.is_null(), True).as_py())}: the row has no example_id")
    if not (_is_text(column.type) or pa.types.is_integer(column.type) or len(column) == 0):
        raise DataError(f"{part.source}: the column of example ids has type {column.type}, expected text or integers")
    return column.cast(pa.string())


def _images(column: pa.ChunkedArray, source: str) -> npt.NDArray[Any]:
    """Return images as stored, None for null; from a struct {bytes, path}, as image datasets use, the bytes."""
    kind = column.type
    if pa.types.is_struct(kind) and "bytes" in kind.names:
        return objects([_image_bytes(value) for value in column.to_pylist()])
    if _is_text(kind) or pa.types.is_struct(kind):
        raise DataError(f"{source}: column 'image' has type {kind}, expected bytes or arrays")
    known = model_column(column.drop_null(), "image", source)
    return nulls_between(column, known) if column.null_count else known


def _image_bytes(value: Mapping[str, Any] | None) -> bytes | None:
    """Return the bytes, else those of the file at `path`; None if both are missing."""
    if value is None:
        return None
    stored: bytes | None = value["bytes"]
    return read_image(Path(value.get("path") or "")) if stored is None else stored


def _texts(column: pa.ChunkedArray, what: str, source: str) -> list[str | None]:
    """Return text, None for null; numbers as text."""
    _require_plain(column, what, "text", source)
    texts: list[str | None] = column.cast(pa.large_string()).to_pylist()
    return texts


def _choices(own: Mapping[str, pa.ChunkedArray], source: str) -> list[Any]:
    """Return each row's list of texts, or one text to be split later; None for null."""
    if len(own) > 1:
        columns = [_texts(column, f"column {name!r}", source) for name, column in own.items()]
        return [_until_last(row) for row in zip(*columns, strict=True)]
    ((name, column),) = own.items()
    inner = getattr(column.type, "value_type", None)
    if _is_text(column.type) or pa.types.is_null(column.type):
        options: list[Any] = column.to_pylist()
        return options
    if inner is None or not (_is_text(inner) or pa.types.is_integer(inner) or pa.types.is_null(inner)):
        raise DataError(f"{source}: column {name!r} has type {column.type}, expected lists of texts")
    # No cast: Arrow's cast of a list_view may lose the last row.
    return [row and [v if v is None else str(v) for v in row] for row in column.to_pylist()]


def _until_last(options: tuple[str | None, ...]) -> list[str | None] | None:
    # Only null cells at the end are dropped: dropping one in between would change the option that the label names.
    n = max((n for n, option in enumerate(options, 1) if option is not None), default=0)
    return list(options[:n]) or None


def _json_list(text: str) -> list[str]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(option, str) for option in value):
        raise ValueError(f"choices must be a JSON list of texts, got {text!r:.60}")
    return value


def _label(
    value: int | float | str | None,
    options: Sequence[str] | None = None,
    *,
    first: int = 0,
    names: Sequence[str] | None = None,
) -> int:
    """Return a label counted from 0, UNKNOWN_LABEL for null and for -1, which published test sets use.

    names: of the options, None if they have none.

    >>> [_label(value) for value in (2, 2.0, "2", " c", None)]
    [2, 2, 2, 2, -1]
    """
    if names is not None and isinstance(value, str) and value in names:
        return names.index(value)
    number = _number(value.strip(), first) if isinstance(value, str) else value
    if number is None or number == -1:
        return UNKNOWN_LABEL
    if number != number // 1 or not first <= number < 2**31:
        known = "nor its letter" if names is None else f"nor one of the pool's labels: {', '.join(names[:20])}"
        raise ValueError(f"label {value!r} is neither an option's number, counted from {first}, {known}")
    label = int(number) - first
    if options is not None and label >= len(options):
        raise ValueError(f"label {label}, counted from 0, is outside its {len(options)} choices")
    return label


def _number(text: str, first: int) -> float | None:
    """Return the number that a text or a letter denotes: None for an empty text, NaN if it denotes none."""
    if re.fullmatch("[A-Za-z]", text):
        return first + ord(text.upper()) - ord("A")
    return (float(text) if re.fullmatch(r"-?\d{1,9}(\.0*)?", text) else np.nan) if text else None


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _require_plain(column: pa.ChunkedArray, what: str, wanted: str, source: str) -> None:
    kind = column.type
    if not (_is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)):
        raise DataError(f"{source}: {what} has type {kind}, expected {wanted}")
