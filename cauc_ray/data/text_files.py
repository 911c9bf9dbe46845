"""Tables in text files, CSV and JSONL, read whole."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.csv

from cauc_ray.errors import DataError, first_line
from cauc_ray.files.paths import AnyPath


def read_csv(file: AnyPath) -> pa.Table:
    """Read a CSV file with a header: every cell as text, null where it is empty. Raises DataError."""
    try:
        content = file.read_bytes()
        # One block: a row may not straddle two of them. Types are not guessed: "007" is not a number.
        options = pyarrow.csv.ReadOptions(block_size=min(max(len(content), 1) + 1, 2**31 - 1))
        parsing = pyarrow.csv.ParseOptions(newlines_in_values=True)
        with pyarrow.csv.open_csv(pa.BufferReader(content), read_options=options, parse_options=parsing) as opened:
            names = opened.schema.names
        texts = pyarrow.csv.ConvertOptions(
            column_types={name: pa.string() for name in names},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        )
        table = pyarrow.csv.read_csv(
            pa.BufferReader(content), read_options=options, parse_options=parsing, convert_options=texts
        )
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable CSV file: {first_line(error)}") from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{file} has two columns named {twice!r}")
    return table


def read_jsonl(file: AnyPath) -> pa.Table:
    """Read a file of one JSON object a line. Raises DataError naming a line that is not."""
    rows: list[dict[str, Any]] = []
    try:
        with io.TextIOWrapper(io.BytesIO(file.read_bytes()), encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{file}, line {number}: not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise DataError(
                        f"{file}, line {number}: one JSON object a line is expected, got a {type(row).__name__}"
                    )
                rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a readable JSONL file: {error}") from error
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.table({name: _array([row.get(name) for row in rows]) for name in names})
    except UnicodeEncodeError as error:
        raise DataError(f"{file} holds half a surrogate pair (such as \\ud800), which is no text") from error


def _array(values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        # Values of several kinds: a label column may hold "A" and 1, and columns that are not read may hold anything.
        return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())
