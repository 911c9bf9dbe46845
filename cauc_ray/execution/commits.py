"""What is committed of a table: parts of several blocks, each with an entry in the manifest, and totals of them all.

A part's entry is written last, and with it the part is committed: files that no entry names are of an attempt that was
ended before. This holds for run folders and for logit tables, on object stores as on disks.
"""

from __future__ import annotations

import json
import queue
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict
from tenacity import Retrying, retry, retry_if_exception_type, stop_after_attempt, wait_exponential

from cauc_ray.cascade.rows import Call, CallResult, Owner
from cauc_ray.cascade.worker import Collected
from cauc_ray.errors import CaucError, DataError
from cauc_ray.files.documents import make_folder, read_model, write_json, write_text
from cauc_ray.files.parquet import read_footer, read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath, visible
from cauc_ray.models.answers import ModelFacts
from cauc_ray.numbers.types import Ints

# A part is closed once its rows take so many bytes, or the first of them is done for so long.
COMMIT_BYTES = 100_000_000
COMMIT_S = 60.0

FAILED_SCHEMA = pa.schema([("example_id", pa.string()), ("stage", pa.string()), ("reason", pa.string())])
# The folder of the claims of a table's attempts.
CLAIMS = "_attempts"
# In the metadata of a file of failed rows: their positions in each block, in their order.
_FAILED_BLOCKS = b"cauc.failed"
# Of a part: the first block in it, after the number of the attempt if that does failed rows again; and the attempt's
# token.
_NAME = re.compile(r"(part-|retry-\d{3,}-)\d{6,}-[0-9a-f]{8}")
_READ_AT_ONCE = 16

# What is counted, and of what: {"failed": {"small": 3}}. Those of several parts add up.
Totals: TypeAlias = dict[str, Counter[str]]
# So many results, and bytes of answers, may wait to be written before the controller waits, too.
MOST_WAITING = 512
MOST_BYTES = 64_000_000
# How a commit is tried again: a disk may be full, or a store out of reach, for a moment.
_TRIES = Retrying(
    retry=retry_if_exception_type(CaucError), wait=wait_exponential(0.5), stop=stop_after_attempt(6), reraise=True
)


def add_totals(totals: Totals, more: Mapping[str, Mapping[str, float]]) -> None:
    """Add counts to totals."""
    for what, counts in more.items():
        sums = totals.setdefault(what, Counter())
        for key, n in counts.items():
            sums[key] += n  # type: ignore[assignment]  # seconds and costs add up as rows do


class Entry(BaseModel):
    """A part's entry in the manifest.

    blocks: number, rows and the digest of all its ids of each block; "" where it could not be read, and no digest where
    failed rows of a block that another part has were done again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    blocks: tuple[tuple[int, int, str | None], ...]
    totals: dict[str, dict[str, int | float]]


@dataclass(frozen=True, slots=True)
class Committed:
    """What is committed.   rows, ids: rows of each block, failed ones too, and the digest of their ids."""

    rows: Mapping[int, int]
    ids: Mapping[int, str]
    totals: Totals


@dataclass(frozen=True, slots=True)
class FailedBlock:
    """A block's failed rows.

    Attributes:
        by_stage: How many failed at each stage; at "" those that could not be read.
        rows: Their positions in the block, ascending.
    """

    by_stage: Counter[str]
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A table in parts.

    Attributes:
        rows: The folder of the Parquet files of answered rows.
        failed: That of failed rows.
        manifest: The folder of the parts' entries.
        inputs: That of digests of what models read, a file for each part; None where these are not kept.
    """

    rows: AnyPath
    failed: AnyPath
    manifest: AnyPath
    inputs: AnyPath | None = None

    def committed(self) -> Committed:
        """Return what is committed. Raises DataError for a damaged entry and where a part is missing."""
        rows: dict[int, int] = {}
        ids: dict[int, str] = {}
        totals: Totals = {}
        for name, entry in self._entries().items():
            add_totals(totals, entry.totals)
            for number, n, digest in entry.blocks:
                if digest is None:
                    continue
                if number in rows and self.inputs is None:  # a collection numbers its blocks anew in each attempt
                    entry_file = self.manifest / f"{name}.json"
                    raise DataError(f"block {number} is committed twice; remove {entry_file}, then resume")
                rows[number], ids[number] = n, digest
        return Committed(rows, ids, totals)

    def failed_blocks(self) -> dict[int, FailedBlock]:
        """Return the failed rows of each block that has some."""
        failed = {}
        for file in _files(self.failed):
            table, start = read_parquet(file, ("stage",)), 0
            for block, rows in _failed_blocks(file).items():
                stages = table.column("stage").slice(start, len(rows)).to_pylist()
                failed[block] = FailedBlock(Counter(stage or "" for stage in stages), tuple(rows))
                start += len(rows)
        return failed

    def clean(self) -> None:
        """Remove what is not committed, and failed rows that were done again.

        Raises DataError for a file that no run has written.
        """
        entries = self._entries()
        for file in self._data_files():
            if not _NAME.fullmatch(file.stem):
                raise DataError(f"{file} was not written by a run; remove it")
            if file.stem not in entries:
                file.unlink()
        retries = {name: entry for name, entry in entries.items() if name.startswith("retry")}
        latest = {number: name for name, entry in retries.items() for number, _, _ in entry.blocks}
        for file in _files(self.failed) if latest else ():
            blocks = _failed_blocks(file)
            again = {block for block in blocks if latest.get(block, file.stem) != file.stem}
            if again:
                _write_failed(file, *_without(read_parquet(file), blocks, again))

    def example_ids(self) -> pa.ChunkedArray:
        """Return the ids of all committed rows, failed ones too."""
        files = [*self._committed(self.rows), *self._committed(self.failed)]
        ids = [read_parquet(file, ("example_id",)).column("example_id") for file in files]
        return pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.string())

    def read(self) -> Iterator[tuple[pa.Table, pa.Array]]:
        """Yield the committed answered rows of each part, with the digests of what models read of them."""
        assert self.inputs is not None
        for file in self._committed(self.rows):
            yield read_parquet(file), read_parquet(self.inputs / file.name).column("input").combine_chunks()

    def remove(self) -> None:
        """Remove everything, what commits it first."""
        for file in (*(self.manifest / f"{name}.json" for name in self._names()), *self._data_files()):
            file.unlink()

    def _data_files(self) -> list[AnyPath]:
        folders = [self.rows, self.failed, *([] if self.inputs is None else [self.inputs])]
        return [file for folder in folders for file in _files(folder)]

    def _committed(self, folder: AnyPath) -> list[AnyPath]:
        """Return those files of a folder that the manifest names."""
        names = {*self._names()}
        return [file for file in _files(folder) if file.stem in names]

    def _names(self) -> list[str]:
        """Return the names of what is committed, retries last and in their order."""
        files = visible(self.manifest) if self.manifest.is_dir() else []
        return [file.stem for file in files if file.suffix == ".json"]

    @retry(
        retry=retry_if_exception_type(DataError),
        wait=wait_exponential(0.1, exp_base=4),
        stop=stop_after_attempt(4),
        reraise=True,
    )
    def _entries(self) -> dict[str, Entry]:
        """Return the parts' entries; where one is damaged or its part is missing, as they are a moment later.

        An attempt withdraws the entry that it has just written when it finds that a newer one, which has removed the
        part, has claimed the table.
        """
        names = self._names()
        with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
            files = (self.manifest / f"{name}.json" for name in names)
            entries = dict(zip(names, pool.map(partial(read_model, kind=Entry), files), strict=True))
        if missing := entries.keys() - {file.stem for file in _files(self.rows)}:
            raise DataError(
                f"{self.rows / min(missing)}.parquet is committed but missing; restore it, or remove "
                f"{self.manifest / min(missing)}.json to process its rows again"
            )
        return entries


class Claim:
    """An attempt's claim to a folder: the newest one holds, so that two drivers do not write into it side by side.

    Attributes:
        number: Of the attempt.
        token: Its own, in hexadecimal, also where two attempts begin at once.
    """

    def __init__(self, table: AnyPath, least: int = 0) -> None:
        """Claim nothing yet.

        Args:
            table: The folder.
            least: The least number of the attempt, which is above those of all earlier claims.
        """
        self._folder = table / CLAIMS
        earlier = self._folder.iterdir() if self._folder.is_dir() else ()
        self.number = max(least, *(1 + int(file.name.split("-")[1]) for file in earlier), 0)
        self.token = uuid.uuid4().hex[:8]
        self._name = f"attempt-{self.number:06d}-{self.token}"
        self._made = False

    def make(self) -> None:
        """Claim the folder; an earlier attempt that is still at work ends at its next commit."""
        if not self._made:
            make_folder(self._folder)
            write_text(self._folder / self._name, "")
            self._made = True

    def require(self) -> None:
        """Raise ExecutionError if a newer attempt has claimed the folder."""
        self.make()
        if max(file.name for file in self._folder.iterdir()) > self._name:
            raise DataError(
                f"another process continues in {self._folder.parent}; this one ends, and what it has committed stays"
            )


@dataclass(frozen=True, slots=True)
class FinishedBlock:
    """A block that is done.

    Attributes:
        number: Its number.
        rows: The answered rows.
        failed: The failed rows, of FAILED_SCHEMA.
        failed_at: The positions of the failed rows in the block, in their order.
        digest: As Entry has it.
        totals: What is counted of the block.
        inputs: A digest of what models read of each answered row, where these are kept.
    """

    number: int
    rows: pa.Table
    failed: pa.Table
    failed_at: Sequence[int]
    digest: str | None
    totals: Mapping[str, Mapping[str, float]]
    inputs: pa.Array | None = None


class PartWriter:
    """Gathers blocks that are done, and commits them as one part: whole or not at all."""

    def __init__(self, parts: Parts, claim: Claim, *, retries: bool = False) -> None:
        """Take the table, the attempt's claim to it, and whether it does failed rows of committed blocks again."""
        self._parts, self._claim = parts, claim
        self._prefix = f"retry-{claim.number:03d}" if retries else "part"
        self._blocks: dict[int, FinishedBlock] = {}
        self.n_bytes = 0

    def add(self, block: FinishedBlock) -> None:
        """Take a block that is done."""
        self._blocks[block.number] = block
        self.n_bytes += block.rows.nbytes + block.failed.nbytes

    def commit(self) -> None:
        """Write what was gathered. Raises ExecutionError if a newer attempt has claimed the table."""
        if not self._blocks:
            return
        self._claim.require()
        blocks, parts = [self._blocks[number] for number in sorted(self._blocks)], self._parts
        name = f"{self._prefix}-{blocks[0].number:06d}-{self._claim.token}"
        make_folder(parts.rows)
        rows = pa.concat_tables([block.rows for block in blocks], promote_options="default")
        write_parquet(parts.rows / f"{name}.parquet", rows)
        failed_at = {block.number: block.failed_at for block in blocks if block.failed_at}
        _write_failed(parts.failed / f"{name}.parquet", pa.concat_tables([block.failed for block in blocks]), failed_at)
        if parts.inputs is not None:
            make_folder(parts.inputs)
            digests = pa.chunked_array([block.inputs for block in blocks], pa.binary())
            write_parquet(parts.inputs / f"{name}.parquet", pa.table({"input": digests}))
        totals: Totals = {}
        for block in blocks:
            add_totals(totals, block.totals)
        entry = Entry(
            blocks=tuple((block.number, len(block.rows) + len(block.failed), block.digest) for block in blocks),
            totals={what: dict(counts) for what, counts in totals.items()},
        )
        make_folder(parts.manifest)
        write_json(parts.manifest / f"{name}.json", entry.model_dump())
        try:
            self._claim.require()
        except DataError:  # the other one may have looked at the manifest before this entry was there
            (parts.manifest / f"{name}.json").unlink()
            raise
        self._blocks, self.n_bytes = {}, 0


def failed_rows(
    example_ids: Sequence[str], reasons: Iterable[tuple[int, str | None, str]]
) -> tuple[pa.Table, Counter[str]]:
    """Return a block's failed rows as a table, and how many there are of each stage.

    reasons: index, stage and reason of each; stage None where the row could not be read.
    """
    rows = [{"example_id": example_ids[row], "stage": stage, "reason": why} for row, stage, why in sorted(reasons)]
    return pa.Table.from_pylist(rows, schema=FAILED_SCHEMA), Counter(row["stage"] or "" for row in rows)


def common_reason(parts: Parts) -> str:
    """Return the most common reason of rows that models failed on."""
    reasons = Counter[str]()
    for file in _files(parts.failed):
        table = read_parquet(file)
        reasons.update(table.filter(pc.is_valid(table.column("stage"))).column("reason").to_pylist())
    return reasons.most_common(1)[0][0] if reasons else ""


def _files(folder: AnyPath) -> list[AnyPath]:
    files = visible(folder) if folder.is_dir() else []
    return [file for file in files if file.suffix == ".parquet"]


def _failed_blocks(file: AnyPath) -> dict[int, list[int]]:
    """Return the positions of each block's failed rows in a file, in their order."""
    positions = json.loads((read_footer(file).metadata.metadata or {}).get(_FAILED_BLOCKS, b"{}"))
    return {int(block): rows for block, rows in positions.items()}


def _without(
    table: pa.Table, blocks: Mapping[int, list[int]], again: set[int]
) -> tuple[pa.Table, dict[int, list[int]]]:
    """Return failed rows without those of some blocks."""
    mask = [block not in again for block, rows in blocks.items() for _ in rows]
    return table.filter(pa.array(mask)), {block: rows for block, rows in blocks.items() if block not in again}


def _write_failed(path: AnyPath, table: pa.Table, positions: Mapping[int, Sequence[int]]) -> None:
    """Write failed rows with their positions in each block; without any, remove the file."""
    if positions:
        make_folder(path.parent)
        write_parquet(path, table.replace_schema_metadata({_FAILED_BLOCKS: json.dumps(positions)}))
        return
    path.unlink(missing_ok=True)
    if isinstance(path, Path):
        with suppress(OSError):  # the folder is there only if a row failed
            path.parent.rmdir()


class Sink(Protocol):
    """Where a run's results go; plain, used in the controller's process.

    Attributes:
        commit_s: For how many seconds what it has taken may wait to be written.
    """

    commit_s: float

    @property
    def n_bytes(self) -> int:
        """Return the bytes that wait to be written."""

    def start(self, facts: ModelFacts) -> None:
        """Take the facts of the first stage's model, from each replica that has loaded it."""
        return  # few need them

    def add_call(self, call: Call, result: CallResult, collected: Collected | None) -> None:
        """Take a call's result, and the model's answers where these are collected."""

    def add_block(self, block: Owner, example_ids: pa.Array, labels: Ints | None) -> None:
        """Take a block that is done."""

    def commit(self) -> None:
        """Write what has been taken."""

    def close(self) -> None:
        """Write what is left after the last block."""
        self.commit()


class Committer:
    """Gives a sink what happened, in its order, on a thread of its own, so that a slow disk holds up no replica.

    n_rows: rows of the blocks that are done.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._todo: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._taken_bytes = self._given_bytes = 0  # of answers; each is counted by one thread
        self._error: BaseException | None = None
        self.n_rows = 0
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def start(self, facts: ModelFacts) -> None:
        """Pass the facts of the model to the sink."""
        self._put(lambda: self._sink.start(facts))

    def add_call(self, call: Call, result: CallResult, collected: Collected | None = None) -> None:
        """Give the sink a call's result, without what holds the call's rows: its bytes would wait there uncounted."""
        record, n_bytes = call.without_sources(), 0 if collected is None else collected.answers.logits.nbytes
        while self._taken_bytes - self._given_bytes > MOST_BYTES:
            self.check()
            time.sleep(0.01)
        self._taken_bytes += n_bytes

        def add() -> None:
            self._sink.add_call(record, result, collected)
            self._given_bytes += n_bytes

        self._put(add)

    def add_block(self, block: Owner, example_ids: pa.Array, labels: Ints | None) -> None:
        """Give the sink a block that is done."""

        def add() -> None:
            self._sink.add_block(block, example_ids, labels)
            self.n_rows += block.n

        self._put(add)

    def close(self) -> None:
        """Wait until all is written. Raises what the sink has raised."""
        self._put(self._commit)
        self._put(self._sink.close)
        self._put(None)
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise what the sink has raised, if it has."""
        if self._error is not None:
            raise self._error

    def _put(self, what: Callable[[], None] | None) -> None:
        while True:
            self.check()
            try:
                self._todo.put(what, timeout=1.0)
                return
            except queue.Full:
                continue  # unless what fills it is an error

    def _commit(self) -> None:
        _TRIES(self._sink.commit)

    def _work(self) -> None:
        pa.array([""])  # Arrow's first array imports pandas, where that is installed: now, while replicas load
        try:
            due: float | None = None
            while True:
                with suppress(queue.Empty):
                    what = self._todo.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
                    if what is None:
                        return
                    what()
                    due = due or time.monotonic() + self._sink.commit_s
                if due is not None and (time.monotonic() >= due or self._sink.n_bytes >= COMMIT_BYTES):
                    self._commit()
                    due = None
        except BaseException as error:
            self._error = error
