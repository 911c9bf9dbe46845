import json
import subprocess
import sys
from pathlib import Path


def test_bench_prints_ratios_and_ends_with_one_json_object():
    job = [sys.executable, "-m", "jobs.bench", "--rows", "300", "--options", "20", "--repeats", "1"]
    root = Path(__file__).parents[2]
    done = subprocess.run(job, cwd=root, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    results = json.loads(last)
    ratios = {"temperature_over_sklearn", "temperature_copies_warm", "pair_over_lbfgsb", "sweep_over_grid"}
    assert ratios <= set(results)
    assert all(results[name] > 0 for name in ratios)
    assert abs(results["pair_nll_above_lbfgsb"]) < 1e-5
    assert len(said) >= 8
