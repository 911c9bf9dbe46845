import json
import subprocess
import sys
from pathlib import Path

import pytest


def test_bench_collect_prints_its_ratio_and_ends_with_one_json_object():
    pytest.importorskip("torchvision")
    job = [sys.executable, "-m", "jobs.bench_collect", "--arch", "mnasnet0_5", "--images", "48", "--batch", "16"]
    root = Path(__file__).parents[2]
    done = subprocess.run([*job, "--repeats", "1"], cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    results = json.loads(last)
    assert results["collect_to_bare"] == pytest.approx(results["collect_rows_per_s"] / results["bare_rows_per_s"])
    assert results["largest_difference"] < 1e-4  # both sides have answered the same images with the same network
    assert any("of the bare loop's throughput" in line for line in said)
