"""A run's metrics as Prometheus reads them from a node."""

import re
import time
import urllib.request

import pytest
import ray

from cauc_ray.execution.progress import RunProgress, StageProgress

RUN = 'run-"1"'


class Reporter:
    def __init__(self):
        from cauc_ray.execution.metrics import RunMetrics

        self._metrics = RunMetrics(RUN, ["small", "large"])

    def report(self, *seen):
        for progress in seen:
            self._metrics.report(progress)

    def close(self):
        self._metrics.close()


def scrape():
    """Return a node's metrics of runs: name, run, stage and outcome to value; "" for a tag that one lacks."""
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(url, timeout=10) as page:
        lines = page.read().decode().splitlines()
    found = {}
    for line in lines:
        if match := re.fullmatch(r"ray_cauc_run_(\w+)\{(.*)\} (\S+)", line):
            tags = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2]))
            if tags["run"] == RUN.replace('"', r"\""):
                found[match[1], tags.get("stage", ""), tags.get("outcome", "")] = float(match[3])
    return found


def wait_for(key, value):
    deadline = time.monotonic() + 60
    while (found := scrape()).get(key) != value:
        assert time.monotonic() < deadline, found
        time.sleep(0.3)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_what_is_reported_can_be_scraped_and_ends_at_zero():
    small = StageProgress("small", queued=7, in_flight=5, replicas=2, starting=1)
    large = StageProgress("large", replicas=1)
    one = RunProgress(100.0, 1000, 0, (small, large))
    done = {"accepted": 30, "deferred": 10, "failed": 2, "busy_s": 1.5, "cost": 44.0}
    two = RunProgress(102.0, 1000, 20, (StageProgress("small", 7, 5, replicas=2, starting=1, **done), large))
    done = {"accepted": 60, "deferred": 20, "failed": 2, "busy_s": 2.5, "cost": 90.5}
    small, large = StageProgress("small", 3, 4, replicas=3, **done), StageProgress("large", degraded=8, replicas=1)
    three = RunProgress(104.0, 1000, 60, (small, large))
    reporter = ray.remote(num_cpus=0)(Reporter).remote()
    try:
        ray.get(reporter.report.remote(one, two, three))
        found = wait_for(("finished_rows", "", ""), 60)
        gauges = {"queued_rows": 3, "in_flight_rows": 4, "replicas": 3, "starting_replicas": 0}
        gauges |= {"rows_per_second": 82 / 4, "accepted_share": 0.75}
        counters = {"cost_total": 90.5, "busy_seconds_total": 2.5}
        expected = {(name, "small", ""): value for name, value in (gauges | counters).items()}
        expected |= {
            ("rows_total", "small", what): n for what, n in (("accepted", 60), ("deferred", 20), ("failed", 2))
        }
        expected |= {("rows_total", "large", "degraded"): 8, ("replicas", "large", ""): 1}
        expected |= {("eta_seconds", "", ""): (1000 - 70) / (70 / 4)}
        assert {key: found.get(key) for key in expected} == pytest.approx(expected)
        assert ("rows_total", "large", "accepted") not in found
        ray.get(reporter.report.remote(RunProgress(500.0, None, 60, (small, large))))
        found = wait_for(("rows_per_second", "small", ""), 0)
        assert ("eta_seconds", "", "") not in found  # where the end is not known
        ray.get(reporter.close.remote())
        found = wait_for(("finished_rows", "", ""), 0)
        assert {value for (name, *_), value in found.items() if not name.endswith("_total")} == {0}
        assert found["rows_total", "small", "accepted"] == 60
    finally:
        ray.kill(reporter)
