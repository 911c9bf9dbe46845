"""Tables in text files, CSV and JSONL, read in small pieces."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv

from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import UnopenedError
from cauc_ray.files.paths import AnyPath, open_bytes

# Bytes of a file that are read at once; the limit of a CSV row.
BLOCK_BYTES = 16 << 20
# A JSON line needs several times its length in memory while it is parsed.
JSON_LETTERS = 4 << 20


def is_csv(file: AnyPath) -> bool:
    """Return whether a text file's name is that of a CSV file; else it is JSONL."""
    return file.suffix.lower() == ".csv"


def text_tables(file: AnyPath, schema: pa.Schema | None = None) -> Iterator[pa.Table]:
    """Yield a CSV or JSONL file's rows in tables of a few megabytes, at least one.

    schema: the wanted columns, with types to which all of the file's values can be converted; None for all columns,
    with CSV cells as text and JSON types inferred for each table.
    Raises DataError naming file and row, or line, if one is malformed; UnopenedError if the file cannot be reached.
    """
    return (_csv_tables if is_csv(file) else _jsonl_tables)(file, schema)


@contextmanager
def _opened(file: AnyPath, kind: str) -> Iterator[BinaryIO]:
    try:
        if not file.is_file():
            raise UnopenedError(f"there is no file {file}")
        opened = open_bytes(file)
    except (OSError, DataError) as error:
        raise UnopenedError(f"{file} cannot be read: {error}" if isinstance(error, OSError) else str(error)) from error
    try:
        with opened:
            yield opened
    except (pa.ArrowException, UnicodeError) as error:
        reason = first_line(error)
        if "straddl" in reason:
            reason = f"a row is longer than {BLOCK_BYTES >> 20} MiB, or a quote is not closed"
        raise DataError(f"{file} is not a readable {kind} file: {reason}") from error
    except OSError as error:
        raise UnopenedError(f"{file} cannot be read: {first_line(error)}") from error


def _csv_tables(file: AnyPath, schema: pa.Schema | None) -> Iterator[pa.Table]:
    # One thread: Arrow then names the malformed row and does not read ahead.
    options = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)
    parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
    with _opened(file, "CSV") as content, pyarrow.csv.open_csv(content, options, parsing) as opened:
        names = opened.schema.names
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{file} has two columns named {twice!r}")
    # Arrow would guess types from the first block: "007" is not a number if a later row has "A1".
    kinds = pa.schema([(name, pa.string()) for name in names]) if schema is None else schema
    converting = pyarrow.csv.ConvertOptions(
        column_types=kinds,
        include_columns=kinds.names,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
    )
    with _opened(file, "CSV") as content, pyarrow.csv.open_csv(content, options, parsing, converting) as opened:
        yield kinds.empty_table()
        for batch in opened:
            yield pa.Table.from_batches([batch])


def _jsonl_tables(file: AnyPath, schema: pa.Schema | None) -> Iterator[pa.Table]:
    rows: list[dict[str, Any]] = []
    n_letters = 0
    with _opened(file, "JSONL") as content, io.TextIOWrapper(content, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{file}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise DataError(f"{file}, line {number}: expected a JSON object, got a {kind}")
            rows.append(row)
            n_letters += len(line)
            if n_letters >= JSON_LETTERS:
                yield _table(file, rows, schema)
                rows, n_letters = [], 0
    yield _table(file, rows, schema)


def _table(file: AnyPath, rows: list[dict[str, Any]], schema: pa.Schema | None) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else schema.names
    kinds = {} if schema is None else dict(zip(schema.names, schema.types, strict=True))
    try:
        return pa.table({name: _array([row.get(name) for row in rows], kinds.get(name)) for name in names})
    except UnicodeEncodeError as error:
        raise DataError(f"{file} has half a surrogate pair (such as \\ud800), which is not valid text") from error
    except pa.ArrowException as error:
        raise DataError(f"{file} has values that do not fit their column's type: {first_line(error)}") from error


def _array(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError):
        if kind not in (None, pa.string()):
            raise
        # Values of several types: a label column may have "A" and 1, and unused columns may have anything.
        return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())
