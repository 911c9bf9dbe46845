"""Tables that are read from their start: CSV, TSV, JSON Lines, JSON arrays, Arrow IPC and ORC, each also compressed."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePath
from typing import Any

import pyarrow as pa
import pyarrow.csv

from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import UnopenedError, cast_table, open_file, plain_schema, require_distinct
from cauc_ray.files.paths import AnyPath, FileEntry

# Bytes of a file that are read at once; the limit of a CSV row.
BLOCK_BYTES = 16 << 20
# Characters of JSON Lines that are parsed at once; a line needs several times its length in memory.
JSON_CHARS = 4 << 20
_ITEM_CHARS = 512  # of an array, roughly

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}
FORMATS = {
    ".parquet": "Parquet",
    **dict.fromkeys((".arrow", ".arrows", ".feather", ".ipc"), "Arrow"),
    ".orc": "ORC",
    **dict.fromkeys((".csv", ".tsv"), "CSV"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "JSON"),
}


def suffixes_of(path: AnyPath | PurePath) -> tuple[str, str]:
    """Return the suffix of a table's format and that of its compression, "" where it has none, in lower case.

    >>> suffixes_of(PurePath("rows.CSV.gz")), suffixes_of(PurePath("rows.parquet"))
    (('.csv', '.gz'), ('.parquet', ''))
    """
    name = PurePath(path.name)
    last = name.suffix.lower()
    return (PurePath(name.stem).suffix.lower(), last) if last in COMPRESSIONS else (last, "")


def format_of(path: AnyPath) -> str | None:
    """Return the format that a file's name says, None if it is not that of a table."""
    return FORMATS.get(suffixes_of(path)[0])


def stem_of(path: AnyPath | PurePath) -> str:
    """Return a file's name without the suffixes of its format and compression; a folder's name as it is."""
    kind, compression = suffixes_of(path)
    return path.name[: -len(kind + compression)] if kind in FORMATS else path.name


def stream_tables(entry: FileEntry, schema: pa.Schema | None = None) -> Iterator[pa.Table]:
    """Read a file from its start.

    Args:
        entry: The file.
        schema: The columns to read, with types to which all values can be converted; None for all columns, with CSV
            cells as text and JSON types inferred for each table.

    Yields:
        Tables of a few megabytes, at least one, with plain types.

    Raises:
        DataError: A row or a line is malformed; names the file and the place.
        UnopenedError: The file cannot be reached.
    """
    kind = str(format_of(entry.path))
    with _opened(entry.path, kind) as content:
        for table in _READERS[kind](entry.path, content, schema):
            plain = plain_schema(table.schema) if schema is None else schema
            yield cast_table(table.select(plain.names), plain)


@contextmanager
def _opened(path: AnyPath, kind: str) -> Iterator[Any]:
    """Open a file, decompressed; what fails while it is read is named by it."""
    source = open_file(path)
    compression = COMPRESSIONS.get(suffixes_of(path)[1])
    try:
        with source, source if compression is None else pa.CompressedInputStream(source, compression) as content:
            yield content
    except (pa.ArrowException, UnicodeError, csv.Error) as error:
        reason = first_line(error)
        if "straddl" in reason:
            reason = f"a row is longer than {BLOCK_BYTES >> 20} MiB, or a quote is not closed"
        if isinstance(error, UnicodeError) or "UTF8" in reason:
            reason += "; text must be UTF-8 (or UTF-16 with a byte order mark): iconv -f LATIN1 -t UTF-8 converts it"
        raise DataError(f"{path} is not a readable {kind} file: {reason}") from error
    except OSError as error:
        if compression is not None:
            raise DataError(f"{path} cannot be decompressed: {first_line(error)}") from error
        raise UnopenedError(f"{path} cannot be read: {first_line(error)}") from error


def _text(content: Any) -> io.BufferedReader:
    """Return a stream of UTF-8 text, from UTF-16 where it begins with that byte order mark."""
    buffered = io.BufferedReader(content, BLOCK_BYTES)
    if not buffered.peek(2).startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return buffered
    return io.BufferedReader(pa.transcoding_input_stream(pa.PythonFile(buffered, "r"), "utf-16", "utf-8"), BLOCK_BYTES)


def _csv_tables(path: AnyPath, content: Any, schema: pa.Schema | None) -> Iterator[pa.Table]:
    text = _text(content)
    head = text.peek().decode("utf-8-sig", errors="ignore")
    first = head.split("\n", 1)[0]
    delimiter = "\t" if suffixes_of(path)[0] == ".tsv" else next((mark for mark in ",;\t" if mark in first), ",")
    names = next(csv.reader(io.StringIO(head), delimiter=delimiter), [])
    require_distinct(path, names)
    # Arrow would guess types from the first block: "007" is not a number if a later row has "A1".
    kinds = pa.schema([(name, pa.string()) for name in names]) if schema is None else schema
    # One thread: Arrow then names the malformed row and does not read ahead.
    options = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)
    parsing = pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    converting = pyarrow.csv.ConvertOptions(
        column_types=kinds,
        include_columns=kinds.names,
        null_values=[""],
        strings_can_be_null=True,
        quoted_strings_can_be_null=True,
    )
    with pyarrow.csv.open_csv(text, options, parsing, converting) as opened:
        yield from _tables(kinds, opened)


def _tables(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Yield a table without rows, which also has the columns of a file without any, and one for each batch."""
    yield schema.empty_table()
    for batch in batches:
        yield pa.Table.from_batches([batch])


def _json_tables(path: AnyPath, content: Any, schema: pa.Schema | None) -> Iterator[pa.Table]:
    rows: list[dict[str, Any]] = []
    n_chars = 0
    for place, row, n in _json_rows(path, _text(content)):
        if not isinstance(row, dict):
            raise DataError(f"{path}, {place}: expected a JSON object, got a {type(row).__name__}")
        rows.append(row)
        n_chars += n
        if n_chars >= JSON_CHARS:
            yield _json_table(path, rows, schema)
            rows, n_chars = [], 0
    yield _json_table(path, rows, schema)


def _json_rows(path: AnyPath, text: io.BufferedReader) -> Iterator[tuple[str, Any, int]]:
    """Yield the place, value and length of each line, or of each item of an array, which must fit into memory."""
    if text.peek(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        try:
            items = json.loads(text.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}") from error
        yield from ((f"item {number}", item, _ITEM_CHARS) for number, item in enumerate(items))
        return
    with io.TextIOWrapper(text, encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    yield f"line {number}", json.loads(line), len(line)
            except (ValueError, RecursionError) as error:
                hint = "; expected an object on each line, or an array of objects"
                raise DataError(f"{path}, line {number}: not JSON: {error}{hint}") from error


def _json_table(path: AnyPath, rows: Sequence[dict[str, Any]], schema: pa.Schema | None) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row) if schema is None else schema.names
    try:
        return pa.table(
            {name: _json_column([row.get(name) for row in rows], schema and schema.field(name).type) for name in names}
        )
    except UnicodeEncodeError as error:
        raise DataError(f"{path} has half a surrogate pair (such as \\ud800), which is not valid text") from error
    except pa.ArrowException as error:
        raise DataError(f"{path} has values that do not fit their column's type: {first_line(error)}") from error


def _json_column(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError):
        if kind not in (None, pa.string()):
            raise
        # Values of several types: a label column may have "A" and 1, and unused columns may have anything.
        return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())


def _arrow_tables(path: AnyPath, content: Any, schema: pa.Schema | None) -> Iterator[pa.Table]:
    buffered = io.BufferedReader(content, BLOCK_BYTES)
    if buffered.peek(6)[:6] == b"ARROW1" and content.seekable():
        content.seek(0)
        opened = pa.ipc.open_file(content)
        yield from _tables(opened.schema, map(opened.get_batch, range(opened.num_record_batches)))
    else:
        stream = pa.ipc.open_stream(buffered)
        yield from _tables(stream.schema, stream)


def _orc_tables(path: AnyPath, content: Any, schema: pa.Schema | None) -> Iterator[pa.Table]:
    from pyarrow.orc import ORCFile

    opened = ORCFile(content)
    names = opened.schema.names if schema is None else schema.names
    columns = pa.schema([opened.schema.field(name) for name in names])
    yield from _tables(columns, (opened.read_stripe(number, names) for number in range(opened.nstripes)))


_READERS: dict[str, Callable[[AnyPath, Any, pa.Schema | None], Iterator[pa.Table]]] = {
    "CSV": _csv_tables,
    "JSON": _json_tables,
    "Arrow": _arrow_tables,
    "ORC": _orc_tables,
}


_BOOLEAN = re.compile("true|false", re.IGNORECASE)


def narrowest(texts: pa.ChunkedArray) -> pa.DataType:
    """Return the narrowest type of all texts, one of null, bool, int64, double, string.

    >>> [str(narrowest(pa.chunked_array([texts]))) for texts in (["1", None], ["1", "2.5"], ["true"], ["1", "A"])]
    ['int64', 'double', 'bool', 'string']
    """
    values = texts.drop_null()
    if not len(values):
        return pa.null()
    for kind in (pa.int64(), pa.float64()):
        with suppress(pa.ArrowException):
            return values.cast(kind).type
    return pa.bool_() if all(map(_BOOLEAN.fullmatch, values.unique().to_pylist())) else pa.string()


def wider(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """Return a type that fits values of both types; string where Arrow has none.

    >>> [str(wider(pa.int64(), second)) for second in (pa.null(), pa.float64(), pa.bool_())]
    ['int64', 'double', 'string']
    """
    if pa.null() in (first, second) or pa.types.is_boolean(first) == pa.types.is_boolean(second):
        with suppress(pa.ArrowException):
            schemas = [pa.schema([("", kind)]) for kind in (first, second)]
            return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    return pa.string()
