"""Rates and the time left, from successive progress; and a run's metrics as Prometheus reads them from a node."""

import re
import time
import urllib.request

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.execution.metrics import RunMetrics
from cauc_ray.execution.progress import ETA_WINDOW_S, RATE_WINDOW_S, RateMeter, RunProgress, StageProgress


def look(at, accepted=0, n_finished=0, n_rows=None, **stage):
    return RunProgress(at, n_rows, n_finished, (StageProgress("m", accepted=accepted, **{"replicas": 1, **stage}),))


def slow_rate(seen, counts, window_s):
    """Return a count's growth since the last look that is a window old, or the first; None where no time has passed."""
    old = [place for place, look in enumerate(seen) if look.at <= seen[-1].at - window_s] or [0]
    took_s = seen[-1].at - seen[old[-1]].at
    return (counts[-1] - counts[old[-1]]) / took_s if took_s else None


# Seconds to the next look, whether what has ended is committed by then, and what happened meanwhile: rows accepted,
# deferred and failed at the first stage, accepted and degraded at the second.
@given(
    st.integers(0, 10**5),
    st.lists(st.tuples(st.floats(0.01, 30), st.booleans(), *[st.integers(0, 500)] * 5), min_size=1, max_size=40),
)
def test_rates_are_what_a_slow_loop_over_all_looks_says_and_rows_done_those_of_earlier_attempts_too(earlier, steps):
    at, counts, seen, ended, handled, meter = 1e9, [0] * 5, [], [], [], RateMeter()
    n_committed = 0
    for dt, is_committed, *more in [(0.0, True, 0, 0, 0, 0, 0), *steps]:
        at, counts = at + dt, [count + n for count, n in zip(counts, more, strict=True)]
        small, deferred, failed, large, degraded = counts
        stages = (
            StageProgress("a", accepted=small, deferred=deferred, failed=failed, replicas=1),
            StageProgress("b", accepted=large, degraded=degraded, replicas=1),
        )
        ended.append(small + failed + large + degraded)
        handled.append((small + deferred + failed, large))
        n_committed = ended[-1] if is_committed else n_committed
        seen.append(RunProgress(at, 10**6, earlier + n_committed, stages))
        rates = meter.add(seen[-1])
        assert rates.n_done == earlier + ended[-1]
    assert rates.rows_per_s == pytest.approx(slow_rate(seen, ended, RATE_WINDOW_S))
    for rate, counts_of_stage in zip(rates.stage_rows_per_s, zip(*handled, strict=True), strict=True):
        assert rate == pytest.approx(slow_rate(seen, counts_of_stage, RATE_WINDOW_S))
    per_s = slow_rate(seen, ended, ETA_WINDOW_S)
    assert rates.eta_s == (pytest.approx((10**6 - rates.n_done) / per_s) if per_s else None)


def test_the_time_that_models_take_to_load_is_not_part_of_the_meter_and_a_run_that_is_done_ends_at_once():
    meter = RateMeter()
    for at in range(50):
        assert meter.add(look(float(at), n_rows=100, replicas=0, starting=1)).rows_per_s is None
    rates = meter.add(look(50.0, accepted=25, n_rows=100))  # they have begun since the last look
    assert (rates.rows_per_s, rates.eta_s) == (25, 3)
    assert meter.add(look(51.0, accepted=26, n_rows=None)).eta_s is None
    assert RateMeter().add(look(0.0, n_finished=100, n_rows=100)).eta_s == 0


def test_a_clock_that_is_set_back_makes_no_rate_below_zero():
    meter = RateMeter()
    for at, accepted in ((100.0, 10), (101.0, 20), (50.0, 25), (51.0, 31)):
        rates = meter.add(look(at, accepted=accepted))
        assert rates.rows_per_s is None or rates.rows_per_s >= 0
    assert rates.rows_per_s == 6


RUN = 'run-"1"'


def scrape():
    """Return a node's metrics of runs: name, run, stage and outcome to value; "" for a tag that one lacks."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    values = {}
    for line in lines:
        if match := re.fullmatch(r"ray_cauc_run_(\w+)\{(.*)\} (\S+)", line):
            tags = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2]))
            if tags["run"] == RUN.replace('"', r"\""):
                values[match[1], tags.get("stage", ""), tags.get("outcome", "")] = float(match[3])
    return values


def scrape_until(is_complete):
    """Scrape until all that was reported is there: Ray exports each metric by itself."""
    deadline = time.monotonic() + 240
    while not is_complete(metrics := scrape()):
        assert time.monotonic() < deadline, metrics
        time.sleep(0.3)
    return metrics


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_what_is_reported_can_be_scraped_and_ends_at_zero():
    done = {"accepted": 60, "deferred": 20, "failed": 2, "busy_s": 2.5, "cost": 90.5}
    stages = (StageProgress("small", 3, 4, replicas=3, **done), StageProgress("large", degraded=8, replicas=1))
    begun = (StageProgress("small", replicas=2), StageProgress("large", replicas=1))
    reporter = ray.remote(num_cpus=0)(RunMetrics).remote(RUN, ["small", "large"])
    try:
        for progress in (RunProgress(100.0, 1000, 0, begun), RunProgress(104.0, 1000, 60, stages)):
            ray.get(reporter.report.remote(progress))
        of_small = {"queued_rows": 3, "in_flight_rows": 4, "replicas": 3, "starting_replicas": 0}
        of_small |= {"rows_per_second": 82 / 4, "accepted_share": 0.75, "cost_total": 90.5, "busy_seconds_total": 2.5}
        expected = {(name, "small", ""): value for name, value in of_small.items()}
        expected |= {("rows_total", "small", what): done[what] for what in ("accepted", "deferred", "failed")}
        expected |= {("rows_total", "large", "degraded"): 8, ("replicas", "large", ""): 1}
        expected |= {("eta_seconds", "", ""): (1000 - 70) / (70 / 4)}
        expected |= {("finished_rows", "", ""): 60}
        metrics = scrape_until(lambda page: {key: page.get(key) for key in expected} == pytest.approx(expected))
        assert ("rows_total", "large", "accepted") not in metrics
        ray.get(reporter.report.remote(RunProgress(500.0, None, 60, stages)))
        unknown_end = ("eta_seconds", "", "")
        scrape_until(lambda page: page.get(("rows_per_second", "small", "")) == 0 and unknown_end not in page)
        ray.get(reporter.close.remote())
        metrics = scrape_until(
            lambda page: {value for (name, *_), value in page.items() if not name.endswith("_total")} == {0}
        )
        assert metrics["rows_total", "small", "accepted"] == 60
    finally:
        ray.kill(reporter)
