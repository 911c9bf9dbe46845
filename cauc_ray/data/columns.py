"""From the columns of a file to what models read: one conversion for collections, runs and Ray Datasets."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.benchmarks import Benchmark
from cauc_ray.data.blocks import InputBlock
from cauc_ray.data.sources import ID
from cauc_ray.data.values import as_column, objects
from cauc_ray.errors import ConfigError, DataError, first_line, unknown_name
from cauc_ray.files.parquet import cast_table, plain_schema
from cauc_ray.files.paths import AnyPath, RemotePath, path_from, side_by_side
from cauc_ray.numbers.answer_keys import NO_ANSWER, answer_keys
from cauc_ray.numbers.answer_rules import rule_of
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Ints

Task: TypeAlias = Literal["image-classification", "multiple-choice", "classification", "generation"]
LABEL, IMAGE, CHOICES = "label", "image", "choices"
# The number of a label that is none of the options; -1 is that of a row without a label.
NOT_AN_OPTION = -2
# Columns of questions, whose numbers are read as text.
TEXTS = ("question", "context", "subject")
CANONICAL = (ID, IMAGE, *TEXTS, CHOICES, LABEL)
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "image-classification": (IMAGE,),
    "multiple-choice": ("question", CHOICES),
    "classification": (),
    "generation": (),
}
# Tasks whose rows are columns that models read by their names.
_BY_NAMES = ("classification", "generation")
_WHOLE = re.compile(r"(-?\d{1,9})(\.0*)?")
# Enough to tell two versions of a row with one id apart.
DIGEST_BYTES = 8


class RowPlaces(Protocol):
    """Where rows are, by their numbers."""

    def place_of(self, row: int) -> str:
        """Return where a row is, for messages."""

    def folder_of(self, row: int) -> AnyPath:
        """Return the folder that paths in a row are relative to."""


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """Which columns of a file models read, under which names, and how.

    Attributes:
        task: What the rows are.
        columns: The name that models use to the file's columns (several for choices only).
        labels: The names of the options, by which the column of labels may call them.
        first_label: The label of the first option, where labels are numbers.
        choices_pattern: A regular expression whose groups are the options of a text of choices; None for JSON lists.
        rule: By which labels in words are the same as answers; None where labels are options.
        id_prefix: What makes ids unique where several partitions have the same.
    """

    task: Task
    columns: Mapping[str, tuple[str, ...]]
    labels: tuple[str, ...] | None = None
    first_label: int = 0
    choices_pattern: str | None = None
    id_prefix: str = ""
    rule: str | None = None

    @property
    def file_columns(self) -> list[str]:
        """The file's columns that are read, without duplicates."""
        return list(dict.fromkeys(name for names in self.columns.values() for name in names))

    @property
    def texts(self) -> frozenset[str]:
        """The file's columns whose cells are read as they are written: 007 is an id, not a number."""
        names = (ID, LABEL, *((IMAGE, CHOICES, *TEXTS) if self.task not in _BY_NAMES else ()))
        return frozenset(stored for name in names for stored in self.columns.get(name, ()))

    @property
    def ids(self) -> tuple[str, ...]:
        """The file's column of ids, none where rows are named by their numbers."""
        return self.columns.get(ID, ())

    def unique(self, ids: list[str]) -> list[str]:
        """Return ids with the prefix that makes them unique."""
        return [self.id_prefix + example for example in ids] if self.id_prefix else ids

    def restricted(self, columns: Collection[str] | None) -> ColumnPlan:
        """Return the plan of some columns, and of ids and labels; None for all."""
        if columns is None:
            return self
        chosen = {name: stored for name, stored in self.columns.items() if name in columns or name in (ID, LABEL)}
        return replace(self, columns=chosen)


def plan_columns(
    available: Sequence[str],
    location: str,
    task: Task,
    renamed: Mapping[str, str],
    labels: tuple[str, ...] | None = None,
    benchmark: Benchmark | None = None,
    *,
    rule: str | None = None,
    model_columns: frozenset[str] | None = None,
    complete: bool = False,
) -> ColumnPlan:
    """Find the columns that models read: as the user names them, else as published, else by their own names.

    Args:
        available: The file's columns.
        location: The file, for messages.
        task: What the rows are.
        renamed: Canonical name to the file's own name, for choices several joined with "+".
        labels: The names of the options.
        rule: As of ColumnPlan.
        benchmark: How published files are written, which counts where the files have all of its columns.
        model_columns: The columns that models read, None for all.
        complete: Require the columns of the task.

    Raises:
        ConfigError: A name to read is unknown.
        DataError: A column is missing.
    """
    names = (*((ID, LABEL, IMAGE) if task == "classification" else CANONICAL), *sorted(model_columns or ()))
    unknown = next((name for name in renamed if name not in names), None)
    if unknown is not None:
        hint = "; models of a classification task read all other columns by their own names"
        raise ConfigError(unknown_name("column to read", unknown, names) + (hint if task == "classification" else ""))

    def columns_of(aliases: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(stored.split("+")) if name == CHOICES and stored not in available else (stored,)
            for name, stored in aliases.items()
        }

    ids = {ID: "id"} if "id" in available and ID not in available else {}
    published = benchmark is not None and {
        stored for stored_names in columns_of({**benchmark.columns, **renamed}).values() for stored in stored_names
    } <= {*available}
    layout = benchmark if benchmark is not None and published else Benchmark()
    aliases = columns_of({**ids, **layout.columns, **renamed})
    used = {stored for stored_names in aliases.values() for stored in stored_names}
    # Ids may be read as something else, too.
    columns = {name: (name,) for name in available if name not in used or name == ID} | aliases
    missing = [
        f"{stored!r} for {name}"
        for name, stored_names in columns.items()
        for stored in stored_names
        if stored not in available
    ]
    missing += [repr(name) for name in _REQUIRED[task] if complete and name not in columns]
    if missing:
        example = "label=churned" if task == "classification" else "question=stem,choices=opa+opb or image=jpeg"
        raise DataError(
            f"{location} has no column {missing[0]}; it has {', '.join(available)}. Models of {task} need it: give the "
            f"names that the file uses with --columns, such as {example}"
        )
    return ColumnPlan(task, columns, labels, layout.first_label, layout.choices_pattern, rule=rule)


def read_block(plan: ColumnPlan, table: pa.Table, rows: Ints, places: RowPlaces) -> InputBlock:
    """Convert rows to what models read.

    Args:
        plan: The columns.
        table: The rows, with the plan's columns of the file.
        rows: Their numbers, int64 (n,).
        places: Where they are.

    Raises:
        DataError: A label, a choice or an id cannot be read, or a column that no model can read; names the row.
    """
    table = cast_table(table, plain_schema(table.schema))

    def place(position: int) -> str:
        return places.place_of(int(rows[position])) if len(rows) else "the input"

    is_text, n_bytes = plan.task != "classification", table.nbytes
    ids = plan.unique(read_ids(table.column(plan.ids[0]), place))
    columns: dict[str, npt.NDArray[Any]] = {ID: objects(ids)}
    for name, stored in plan.columns.items():
        if name in (ID, LABEL):
            continue
        column = table.column(stored[0])
        if is_text and name == CHOICES:
            columns[name] = _choices(plan, [table.column(part) for part in stored], place)
        elif is_text and name in TEXTS:
            columns[name] = objects(_texts(column, f"{place(0)}: column {name!r}"))
        elif name == IMAGE and (_holds_files(column.type) or (is_text and _is_text(column.type))):
            columns[name] = _images(column, rows, places)
            n_bytes += sum(map(len, filter(None, columns[name])))
        else:
            columns[name] = model_column(column, name, place(0))
    labels = None
    if LABEL in plan.columns:
        labels = read_labels(plan, table.column(plan.columns[LABEL][0]), place)
        for position, options in enumerate(columns[CHOICES] if plan.labels is None and CHOICES in columns else ()):
            if isinstance(options, list) and labels[position] >= len(options):
                counted = f"label {labels[position]}, counted from 0, is outside its {len(options)} choices"
                raise DataError(f"{place(position)}: {counted}")
    return InputBlock(ids, labels, columns, n_bytes)


def read_ids(column: pa.ChunkedArray, place: Callable[[int], str]) -> list[str]:
    """Return ids as text. Raises DataError if one is missing, or the column cannot hold ids."""
    kind = column.type
    if column.null_count:
        raise DataError(f"{place(pc.index(column.is_null(), True).as_py())}: the row has no example_id")
    if pa.types.is_nested(kind) or pa.types.is_floating(kind):
        raise DataError(f"{place(0)}: the column of example ids has type {kind}, expected text or integers")
    try:
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
            column = column.cast(pa.binary()).cast(pa.string())  # an ArrowException if they are not UTF-8
        ids: list[Any] = column.to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{place(0)}: the column of example ids ({kind}) is not text: {first_line(error)}") from error
    return ids if not ids or isinstance(ids[0], str) else [str(example) for example in ids]


def read_labels(plan: ColumnPlan, column: pa.ChunkedArray, place: Callable[[int], str]) -> Ints:
    """Return labels counted from 0, int32 (n,), UNKNOWN_LABEL where a row has none.

    Raises:
        DataError: A label is none of the options; names the row.
    """
    labels = label_numbers(plan, column, place(0))
    if (labels == NOT_AN_OPTION).any():
        row = int((labels == NOT_AN_OPTION).argmax())
        raise DataError(f"{place(row)}: label {column[row].as_py()!r} is {describe_options(plan)}")
    return labels


def label_numbers(plan: ColumnPlan, column: pa.ChunkedArray, location: str) -> Ints:
    """Return labels counted from 0, int32 (n,): UNKNOWN_LABEL for none, NOT_AN_OPTION if it is none of the options.

    Raises:
        DataError: The column's type is not one of labels.
    """
    kind = column.type
    if plan.rule is not None:
        keys = answer_keys(rule_of(plan.rule).references(_texts(column, f"{location}: the column of labels")))
        return np.where(keys == NO_ANSWER, UNKNOWN_LABEL, keys).astype(np.int32)
    if not _is_plain(kind) and not (pa.types.is_boolean(kind) and plan.labels is not None):
        raise DataError(
            f"{location}: the column of labels has type {kind}, expected numbers, letters or names of options"
        )
    values = pc.unique(column)
    numbers = np.array([_label_number(plan, value) for value in values.to_pylist()], dtype=np.int32)
    positions: Ints = pc.index_in(column, value_set=values).to_numpy()
    return numbers[positions]


def describe_options(plan: ColumnPlan) -> str:
    """Return what a label is that is none of the options."""
    if plan.labels is None:
        return f"neither an option's number, counted from {plan.first_label}, nor its letter"
    names = ", ".join(plan.labels[:20]) + (", …" if len(plan.labels) > 20 else "")
    if _numeric(plan.labels):
        return f"none of the pool's labels: {names}; since these are numbers, labels are names here, not positions"
    return f"neither an option's number, counted from {plan.first_label}, nor one of the pool's labels: {names}"


def _label_number(plan: ColumnPlan, value: str | int | float | bool | None) -> int:
    """Return a label counted from 0: names come before numbers, numbers before letters.

    Returns:
        UNKNOWN_LABEL for null and for -1, which published test sets use; NOT_AN_OPTION if it is none of the options.
    """
    names = plan.labels or ()
    text = "" if value is None or value != value else value.strip() if isinstance(value, str) else str(value)
    whole = _WHOLE.fullmatch(text)
    for spelling in (value, text, text.lower() if isinstance(value, bool) else text, whole[1] if whole else text):
        if spelling in names:
            return names.index(str(spelling))
    if not text or (whole and int(whole[1]) == -1):
        return UNKNOWN_LABEL
    if whole and not _numeric(names):
        number = int(whole[1]) - plan.first_label
    elif re.fullmatch("[A-Za-z]", text) and not any(len(name) == 1 for name in names):
        number = ord(text.upper()) - ord("A")
    else:
        return NOT_AN_OPTION
    return number if 0 <= number < (len(names) or 2**31) else NOT_AN_OPTION


def _numeric(names: Iterable[str]) -> bool:
    """Return whether some of the names are numbers, so that a number is not read as a position."""
    return any(map(_WHOLE.fullmatch, names))


def _images(column: pa.ChunkedArray, rows: Ints, places: RowPlaces) -> npt.NDArray[Any]:
    """Return encoded images, None for null; those stored as paths are read from the files."""
    images: list[bytes | None] = []
    paths: dict[int, AnyPath] = {}
    for position, value in enumerate(column.to_pylist()):
        content, path = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (None, value)
        images.append(content)
        if content is None and path:
            paths[position] = path_from(places.folder_of(int(rows[position])), str(path))
    remote = any(isinstance(path, RemotePath) for path in paths.values())
    for position, content in zip(paths, side_by_side(_content, [*paths.values()], remote=remote), strict=True):
        images[position] = content
    return objects(images)


def _content(path: AnyPath) -> bytes | None:
    """Return a file's content, None if it cannot be read."""
    try:
        if isinstance(path, RemotePath):
            return path.read_bytes()
        return path.read_bytes() if path.is_file() else None  # reading a pipe would block
    except (OSError, ValueError, DataError):
        return None


def _holds_files(kind: pa.DataType) -> bool:
    """Return whether a column is as image datasets have it: structs of bytes and paths."""
    return bool(pa.types.is_struct(kind)) and {"bytes", "path"} & set(kind.names) == {"bytes", "path"}


def _texts(column: pa.ChunkedArray, what: str) -> list[str | None]:
    """Return text, None for null; numbers as text."""
    kind = column.type
    if not _is_plain(kind):
        raise DataError(f"{what} has type {kind}, expected text")
    texts: list[str | None] = column.cast(pa.large_string()).to_pylist()
    return texts


def _choices(plan: ColumnPlan, columns: Sequence[pa.ChunkedArray], place: Callable[[int], str]) -> npt.NDArray[Any]:
    """Return each row's list of texts, None for null: from several columns, lists, or texts that are split."""
    if len(columns) > 1:
        parts = [_texts(column, f"{place(0)}: a column of choices") for column in columns]
        return objects([_until_last(row) for row in zip(*parts, strict=True)])
    (column,) = columns
    inner = getattr(column.type, "value_type", None)
    if _is_text(column.type) or pa.types.is_null(column.type):
        return objects([_split(plan, text, position, place) for position, text in enumerate(column.to_pylist())])
    if inner is None or not (_is_text(inner) or pa.types.is_integer(inner) or pa.types.is_null(inner)):
        raise DataError(f"{place(0)}: column 'choices' has type {column.type}, expected lists of texts")
    # No cast: Arrow's cast of a list_view may lose the last row.
    return objects([row and [v if v is None else str(v) for v in row] for row in column.to_pylist()])


def _until_last(options: tuple[str | None, ...]) -> list[str | None] | None:
    # Only null cells at the end are dropped: dropping one in between would change the option that the label names.
    n = max((n for n, option in enumerate(options, 1) if option is not None), default=0)
    return list(options[:n]) or None


def _split(plan: ColumnPlan, text: str | None, position: int, place: Callable[[int], str]) -> list[str] | None:
    """Return the options in a text; None if a benchmark's text has another form."""
    if text is None:
        return None
    if plan.choices_pattern is not None:
        match = re.fullmatch(plan.choices_pattern, text, re.DOTALL)
        return [option.strip() for option in match.groups()] if match else None
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise DataError(f"{place(position)}: choices must be a JSON list of texts, got {text!r:.60}")
    return options


def model_column(column: pa.ChunkedArray, name: str, location: str) -> npt.NDArray[Any]:
    """Return a column as models read it. Raises DataError, prefixed with the location, if that fails."""
    try:
        return column_to_numpy(column)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(
            f"{location}: column {name!r} ({column.type}) cannot be converted for a model: {error}"
        ) from error


def column_to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column as models read it: (n,), (n, d) for lists of numbers of one length, else an array of objects.

    A null becomes NaN or NaT if its type has one, NaN among integers, whose values keep their type, and else None.
    Nested values are Python's lists and dicts, so that a row does not depend on the nulls of another.

    >>> column_to_numpy(pa.chunked_array([[[1, 2], [3, 4]]])).shape
    (2, 2)
    """
    array = column.combine_chunks()
    kind = array.type
    values: npt.NDArray[Any]
    if isinstance(kind, pa.FixedShapeTensorType):
        values = array.to_numpy_ndarray()
        return values
    if array.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        # Arrow would change the type of all rows, including those that reach a model without the null.
        numbers = iter(column_to_numpy(column.drop_null()))
        null = np.float64(np.nan) if pa.types.is_integer(kind) else None
        return objects([next(numbers) if valid else null for valid in array.is_valid().to_pylist()])
    if not pa.types.is_nested(kind):
        values = array.to_numpy(zero_copy_only=False)
        return values
    inner = getattr(kind, "value_type", pa.null())
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner)) or pa.types.is_map(kind):
        return objects(array.to_pylist())
    fixed = pa.types.is_fixed_size_list(kind)
    if (fixed or len(array)) and not array.null_count:
        whole = array.flatten()
        width = kind.list_size if fixed else len(whole) // len(array)
        even = fixed or pc.all(pc.equal(pc.list_value_length(array), width)).as_py()
        if even and (not whole.null_count or pa.types.is_floating(inner)):
            # At once: row by row takes several times as long.
            values = whole.to_numpy(zero_copy_only=False)
            return values.reshape(len(array), width)
    dtype = inner.to_pandas_dtype()
    rows = [
        row if row is None or (None in row and pa.types.is_integer(inner)) else np.array(row, dtype)
        for row in array.to_pylist()
    ]
    return as_column(rows)


def row_digests(columns: Mapping[str, npt.NDArray[Any]], n: int) -> pa.Array:
    """Return a digest of each row's values but its id, binary (n,), the same whatever its neighbours are."""
    digests = [hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(n)]
    for name in sorted(columns.keys() - {ID}):
        column, key = columns[name], f"\0{name}\0".encode()
        values = column.tolist() if column.ndim == 1 and column.dtype != object else column
        for digest, value in zip(digests, values, strict=True):
            digest.update(key)
            digest.update(value if isinstance(value, bytes) else _spelled(value))
    return pa.array([digest.digest() for digest in digests], pa.binary())


def _spelled(value: Any) -> bytes:
    """Return bytes that differ for values that a model may tell apart."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"{value.dtype.str}{value.shape}".encode() + value.tobytes()
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    return f"{type(value).__name__}{value!r}".encode(errors="surrogatepass")


def _is_plain(kind: pa.DataType) -> bool:
    """Return whether values are texts or numbers, or all are null."""
    return bool(_is_text(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
