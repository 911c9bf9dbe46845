"""What a run commits, on disks and on object stores: parts, their manifest, and what a later attempt makes of it."""

import os
import threading
import weakref

import numpy as np
import pyarrow as pa
import pytest
from runs import by_example, two_model_policy

from cauc_ray.api.online import summarise
from cauc_ray.cascade.rows import Call, CallResult, Owner, Rows
from cauc_ray.errors import DataError
from cauc_ray.execution.commits import Committer
from cauc_ray.execution.ledger import RunTables, new_record, parts_of
from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import parquet_below, read_parquet
from cauc_ray.files.paths import visible

EVERYWHERE = pytest.mark.parametrize("folder", ["local", "s3"], indirect=True)
RECORD = new_record("policy", 4, {"input": 12})


def tables(out, **options):
    return RunTables(out, RECORD, ("small", "large"), degrade=False, **options)


def block(number, n=4, failed=None):
    """Return a block of rows that the stages answered in turns, but for failed ones: stage and reason by position."""
    owner = Owner(number, n)
    owner.stages[:] = np.arange(n) % 2
    owner.predictions[:], owner.confidences[:], owner.costs[:] = 1, 0.75, 1 + 3 * owner.stages
    owner.failures = dict(failed or {})
    owner.stages[list(owner.failures)] = -1
    return owner


def ids(number, rows=range(4)):
    return pa.array([f"{number}-{row}" for row in rows])


def add(sink, number, rows=range(4), **more):
    """Have a sink take a block; the label of every row is 1, that of its first is unknown."""
    labels = np.where(np.arange(len(rows)) == 0, -1, 1)
    sink.add_block(block(number, len(rows), **more), ids(number, rows), labels)


def rows_of(folder):
    files = parquet_below(folder) if folder.is_dir() else []
    return (
        by_example(pa.concat_tables([read_parquet(file) for file in files], promote_options="default")) if files else {}
    )


@EVERYWHERE
def test_blocks_are_committed_together_and_named_by_the_first(folder):
    sink = tables(folder)
    for number in (2, 0):
        add(sink, number, failed={3: (1, "cannot")} if number else None)
    assert not (folder / "predictions").is_dir()  # nothing yet
    assert sink.n_bytes > 0
    sink.commit()
    assert sink.n_bytes == 0
    (file,) = parquet_below(folder / "predictions")
    assert file.name.startswith("part-000000-")
    committed = parts_of(folder).committed()
    assert committed.rows == {0: 4, 2: 4}
    assert committed.ids[0] != committed.ids[2]
    assert set(rows_of(folder / "predictions")) == {f"{n}-{row}" for n in (0, 2) for row in range(4)} - {"2-3"}
    assert rows_of(folder / "failed") == {"2-3": {"example_id": "2-3", "stage": "large", "reason": "cannot"}}
    summary = summarise(folder, two_model_policy(), {"small": 8, "large": 8})
    assert (summary["n"], summary["n_failed"], summary["accuracy"]["value"]) == (8, 1, 1.0)
    assert [(stage["answered"], stage["failed"]) for stage in summary["stages"]] == [(4, 0), (3, 1)]
    sink.close()
    assert parts_of(folder).committed() == committed


@EVERYWHERE
def test_what_was_not_committed_is_removed_and_done_again_in_other_parts(folder):
    first = tables(folder)
    add(first, 0)
    first.commit()
    make_folder(folder / "failed")
    (committed,) = parquet_below(folder / "predictions")
    for name in ("predictions", "failed"):  # written, and killed before the manifest had it
        (folder / name / "part-000001-0123abcd.parquet").write_bytes(committed.read_bytes())
    parts_of(folder).clean()
    assert parts_of(folder).committed().rows == {0: 4}
    second = tables(folder)
    for number in (2, 1):
        add(second, number)
    second.close()
    assert set(rows_of(folder / "predictions")) == {f"{n}-{row}" for n in range(3) for row in range(4)}
    assert parts_of(folder).committed().totals["answered"] == {"small": 6, "large": 6}
    assert not rows_of(folder / "failed")


@EVERYWHERE
def test_failed_rows_that_are_done_again_are_counted_once_wherever_the_attempt_ends(folder):
    sink, parts = tables(folder), parts_of(folder)
    add(sink, 0, failed={1: (0, "cannot"), 2: (1, "cannot")})
    add(sink, 1, failed=dict.fromkeys(range(4), (-1, "unreadable")))
    add(sink, 2, failed={0: (0, "cannot")})
    sink.commit()
    failed = parts.failed_blocks()
    assert [failed[number].rows for number in range(3)] == [(1, 2), (0, 1, 2, 3), (0,)]
    again = tables(folder, retried=failed)
    add(again, 0, rows=[1, 2], failed={1: (1, "still not")})
    add(again, 1)
    again.commit()  # and killed before the old failures were taken away
    for _ in range(2):
        committed = parts.committed()
        assert committed.rows == {0: 4, 1: 4, 2: 4}
        assert +committed.totals["failed"] == {"large": 1, "small": 1}
        assert sum(committed.totals["answered"].values()) == 10
        parts.clean()
    assert {name: row["reason"] for name, row in rows_of(folder / "failed").items()} == {
        "0-2": "still not",
        "2-0": "cannot",
    }
    assert len(rows_of(folder / "predictions")) == 10
    assert {number: block.rows for number, block in parts.failed_blocks().items()} == {0: (2,), 2: (0,)}
    last = tables(folder, retried=parts.failed_blocks())
    for number, rows in ((0, [2]), (2, [0])):
        add(last, number, rows=rows)
    last.close()
    parts.clean()
    assert not rows_of(folder / "failed")
    assert len(rows_of(folder / "predictions")) == 12
    assert not +parts.committed().totals["failed"]


def test_what_somebody_else_did_to_a_folder_is_named(tmp_path):
    sink, parts = tables(tmp_path), parts_of(tmp_path)
    add(sink, 0)
    sink.commit()
    (entry,), (file,) = (tmp_path / "manifest").iterdir(), (tmp_path / "predictions").iterdir()
    copy = file.with_name(f"{file.stem} (1).parquet")
    copy.write_bytes(file.read_bytes())
    with pytest.raises(DataError, match=r"part-000000-\w+ \(1\)\.parquet was not written by a run; remove it"):
        parts.clean()
    copy.unlink()
    whole = entry.read_text()
    entry.write_text(whole.replace('"blocks"', '"blokcs"'))
    with pytest.raises(DataError, match=r"part-000000-\w+\.json: unknown key 'blokcs'"):
        parts.committed()
    entry.write_text(whole)
    os.unlink(file)
    with pytest.raises(DataError, match=r"part-000000-\w+\.parquet is committed but missing; restore it, or remove"):
        parts.committed()


@EVERYWHERE
def test_of_two_drivers_in_one_folder_the_first_ends_and_no_row_is_there_twice(folder):
    first = tables(folder)
    add(first, 0)
    first.commit()
    add(first, 1)
    second = tables(folder)
    add(second, 1)
    second.commit()
    with pytest.raises(DataError, match="another process continues in"):
        first.commit()
    add(second, 2)
    second.close()
    # The first has written an entry whose part the second has removed, and is about to find that out.
    entry, *_ = visible(folder / "manifest")
    stray = folder / "manifest" / "part-000009-0123abcd.json"
    for delay_s in (0.001, 0.003, 0.01, 0.3):
        stray.write_bytes(entry.read_bytes())
        threading.Timer(delay_s, stray.unlink).start()
        parts_of(folder).committed()
    parts_of(folder).clean()
    assert parts_of(folder).committed().rows == {0: 4, 1: 4, 2: 4}
    assert len(rows_of(folder / "predictions")) == 12


def test_what_waits_for_a_slow_store_holds_no_input(tmp_path, monkeypatch):
    sink, may_go_on = tables(tmp_path), threading.Event()
    add_call = sink.add_call
    monkeypatch.setattr(sink, "add_call", lambda *call: may_go_on.wait(60) and add_call(*call))
    committer, source = Committer(sink), np.ones(4)
    held = weakref.ref(source)
    rows = Rows(block(0), np.arange(4), source, np.arange(4), 0.0, 0.0)
    for _ in range(3):
        committer.add_call(
            Call(0, [rows], 0.0, good_row=rows, handle=source), CallResult.broken(1.0, "node", "lost"), None
        )
    del rows, source
    assert held() is None
    may_go_on.set()
    committer.close()


def test_a_store_that_is_away_for_a_moment_is_waited_for(tmp_path):
    (tmp_path / "ledger").write_text("in the way of the folder")
    threading.Timer(0.7, os.unlink, [tmp_path / "ledger"]).start()
    committer, owner = Committer(tables(tmp_path)), block(0)
    rows = Rows(owner, np.arange(4), None, np.arange(4), 0.0, 0.0)
    committer.add_call(Call(0, [rows], 0.0, replica=0), CallResult.broken(1.0, "node", "lost"), None)
    committer.close()
    (file,) = parquet_below(tmp_path / "ledger")
    assert read_parquet(file).num_rows == 1
