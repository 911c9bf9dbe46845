"""Seconds of batches from calls: exact on a line, the best line that is nowhere below 0, deaf to first calls."""

import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from earlier_runs import call, write_run
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from cauc_ray.errors import CaucError, CaucWarning
from cauc_ray.files.documents import write_json
from cauc_ray.planning.timings import Timing, fit_seconds, read_earlier_run

calls = st.lists(st.tuples(st.integers(1, 300), st.floats(1e-4, 10.0)), min_size=1, max_size=30)


@given(calls=calls)
def test_the_fit_is_the_best_line_without_a_negative_share(calls):
    rows, seconds = np.array([n for n, _ in calls]), np.array([s for _, s in calls])
    timing = fit_seconds(rows, seconds)
    assert timing.per_call >= 0
    assert timing.per_row >= 0
    assert (timing.n_calls, timing.least_rows, timing.most_rows) == (len(rows), rows.min(), rows.max())
    residuals = seconds - timing.per_call - timing.per_row * rows
    _, best = nnls(np.stack([np.ones(len(rows)), rows], axis=1), seconds)
    assert np.sqrt((residuals**2).sum()) == pytest.approx(best, rel=1e-6, abs=1e-9)
    assert timing.error == pytest.approx(np.median(np.abs(residuals)) / seconds.mean())


def test_each_replicas_first_call_and_calls_that_were_lost_count_for_nothing(tmp_path):
    def seconds(n):
        return 0.5 + 0.1 * n

    rows = [call("small", replica, 100.0 * replica, 8, 99.0, accepted=0) for replica in range(3)]
    rows += [call("small", n % 3, 500.0 + n, n, seconds(n), accepted=n // 2) for n in (8, 4, 8, 2, 6)]
    rows += [call("small", 0, 900.0, 8, None, accepted=0) | {"deferred": 0}]
    rows += [call("large", 7, 0.0, 4, 2.0)]  # its replica's first and only one
    run = read_earlier_run(write_run(tmp_path / "run", rows), ["small", "large"])
    small = run.timings["small"]
    assert (small.per_call, small.per_row) == pytest.approx((0.5, 0.1))
    assert (small.n_calls, small.least_rows, small.most_rows) == (5, 2, 8)
    assert run.timings["large"].of(4) == pytest.approx(2.0)
    n_deferred, n = 3 * 8 + 4 + 2 + 4 + 1 + 3, 3 * 8 + 28
    assert run.deferral == {"small": pytest.approx(n_deferred / n), "large": 0.0}
    assert run.policy_id == "p"


def warnings_of(timing, batch_size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        timing.check("large", batch_size)
    assert all(one.category is CaucWarning for one in caught)
    return [str(one.message) for one in caught]


def test_a_plan_says_where_its_fit_is_off_or_does_not_reach():
    rng, rows = np.random.default_rng(0), np.resize([1, 2, 4, 8], 400)
    steady = fit_seconds(rows, 0.2 + 0.05 * rows + rng.normal(0, 0.01, 400))
    assert not warnings_of(steady, 12)
    assert ["batches of 13" in text for text in warnings_of(steady, 13)] == [True]
    # A few outliers leave the fit as it is; calls that wait at a provider do not depend on their rows.
    outliers = fit_seconds(rows, 0.2 + 0.05 * rows + np.where(np.arange(400) % 50 == 0, 2.0, 0.0))
    assert not warnings_of(outliers, 8)
    of_one_size = Timing(0.0, 0.1, "ledger", 0.0, 9, 8, 8)
    assert ["smaller" in text for text in warnings_of(of_one_size, 8)] == [True]


# What is done to the folder of a run, or another folder, and words of the line.
BROKEN = {
    "absent": (lambda run: run / "absent", "is not the folder of an earlier `cauc run`"),
    "a later version": (lambda run: write_json(run / "run.json", {"format": "cauc-run/9"}), "has format cauc-run/9"),
    "no column": (lambda run: pq.write_table(pa.table({"a": [1]}), run / "ledger" / "x.parquet"), "no column"),
    "no call": (lambda run: None, "no answered call of stage 'large'; it has small"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, case):
    break_it, words = BROKEN[case]
    folder = write_run(tmp_path / "run", [call("small", 0, 0.0, 4, 1.0)] * 2)
    broken = break_it(folder)
    with pytest.raises(CaucError, match=words) as error:
        read_earlier_run(broken or folder, ["small", "large"])
    assert "\n" not in str(error.value)
