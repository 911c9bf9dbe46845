"""Seconds of batches from calls: exact on a line, the best line that is nowhere below 0, deaf to first calls."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from cauc_ray.errors import CaucError
from cauc_ray.execution.ledger import LEDGER_SCHEMA, new_record
from cauc_ray.files.documents import write_json, write_text
from cauc_ray.planning.timings import fit_seconds, read_earlier_run

START = datetime(2026, 1, 1, tzinfo=UTC)
calls = st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10.0)), min_size=1, max_size=30)


@given(calls=calls)
def test_the_fit_is_the_best_line_without_a_negative_share(calls):
    rows, seconds = np.array([n for n, _ in calls]), np.array([s for _, s in calls])
    timing = fit_seconds(rows, seconds, "ledger")
    assert timing.seconds.per_call >= 0
    assert timing.seconds.per_row >= 0
    assert (timing.n_calls, timing.least_rows, timing.most_rows) == (len(rows), rows.min(), rows.max())
    residuals = seconds - timing.seconds.per_call - timing.seconds.per_row * rows
    _, best = nnls(np.stack([np.ones(len(rows)), rows], axis=1), seconds)
    assert np.sqrt((residuals**2).sum()) == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert timing.error == pytest.approx(np.sqrt((residuals**2).mean()) / seconds.mean())


@given(
    per_call=st.floats(0, 10),
    per_row=st.floats(1e-6, 1),
    rows=st.lists(st.integers(1, 500), min_size=2, max_size=20, unique=True),
)
def test_a_line_is_found_again(per_call, per_row, rows):
    rows = np.array(rows)
    timing = fit_seconds(rows, per_call + per_row * rows, "measured")
    assert timing.seconds.per_call == pytest.approx(per_call, rel=1e-6, abs=1e-8)
    assert timing.seconds.per_row == pytest.approx(per_row, rel=1e-6, abs=1e-8)
    assert timing.error == pytest.approx(0.0, abs=1e-6)


def call(stage, replica, at_s, rows, compute_s, accepted=None):
    return {
        "run_id": "r",
        "stage": stage,
        "replica": replica,
        "node": "n",
        "started_at": START + timedelta(seconds=at_s),
        "batch": rows,
        "accepted": rows if accepted is None else accepted,
        "deferred": 0 if accepted is None else rows - accepted,
        "queue_s": 0.0,
        "compute_s": compute_s,
        "device_s": None,
        "cost": 1.0,
        "attempt": 1,
    }


def write_run(folder, calls, policy_id="p"):
    (folder / "ledger").mkdir(parents=True)
    half = len(calls) // 2
    for part, own in enumerate((calls[:half], calls[half:])):
        pq.write_table(pa.Table.from_pylist(own, schema=LEDGER_SCHEMA), folder / "ledger" / f"part-{part}.parquet")
    write_json(folder / "run.json", new_record(policy_id, 8, {"a": 1}).model_dump())
    return folder


def test_each_replicas_first_call_and_calls_that_were_lost_count_for_nothing(tmp_path):
    def seconds(n):
        return 0.5 + 0.1 * n

    rows = [call("small", replica, 100.0 * replica, 8, 99.0, accepted=0) for replica in range(3)]
    rows += [call("small", n % 3, 500.0 + n, n, seconds(n), accepted=n // 2) for n in (8, 4, 8, 2, 6)]
    rows += [call("small", 0, 900.0, 8, None, accepted=0) | {"deferred": 0}]
    rows += [call("large", 7, 0.0, 4, 2.0)]  # its replica's first and only one
    found = read_earlier_run(write_run(tmp_path / "run", rows), ["small", "large"])
    small = found.timings["small"]
    assert (small.seconds.per_call, small.seconds.per_row) == pytest.approx((0.5, 0.1))
    assert (small.n_calls, small.least_rows, small.most_rows) == (5, 2, 8)
    assert found.timings["large"].seconds.of(4) == pytest.approx(2.0)
    n_deferred, n = 3 * 8 + 4 + 2 + 4 + 1 + 3, 3 * 8 + 28
    assert found.deferral == {"small": pytest.approx(n_deferred / n), "large": 0.0}
    assert found.policy_id == "p"


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: folder / "absent", "is not the folder of an earlier `cauc run`"),
        (lambda folder: folder / "ledger", "is not the folder of an earlier `cauc run`"),
        (
            lambda folder: write_json(folder / "run.json", {"format": "cauc-run/9"}),
            "run.json has format cauc-run/9",
        ),
        (lambda folder: write_json(folder / "run.json", []), "run.json"),
        (lambda folder: pq.write_table(pa.table({"a": [1]}), folder / "ledger" / "x.parquet"), "no column"),
        (lambda folder: write_text(folder / "ledger" / "x.parquet", "no"), "x.parquet"),
    ],
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, spoil, says):
    folder = write_run(tmp_path / "run", [call("small", 0, 0.0, 4, 1.0)] * 2)
    other = spoil(folder)
    with pytest.raises(CaucError, match=says) as told:
        read_earlier_run(other or folder, ["small"])
    assert "\n" not in str(told.value)


def test_a_stage_that_was_never_called_is_named(tmp_path):
    folder = write_run(tmp_path / "run", [call("small", 0, 0.0, 4, 1.0)] * 2)
    with pytest.raises(CaucError, match=r"no answered call of stage 'large'; it has small"):
        read_earlier_run(folder, ["small", "large"])
