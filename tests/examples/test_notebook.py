"""The notebook in examples/, from arrays to a run."""

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import cauc_ray

ROOT = Path(__file__).parents[2]


@pytest.mark.soak("pages")
@pytest.mark.usefixtures("ray_session")
def test_the_notebook_ends_in_a_run_that_reproduces_its_evaluation(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "examples.notebook", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    summary = cauc_ray.run(
        tmp_path / "pool.yaml", tmp_path / "policy.json", tmp_path / "input.parquet", tmp_path / "out"
    )
    replayed = cauc_ray.evaluate(tmp_path / "LOGITS", tmp_path / "policy.json").to_arrow()
    assert summary["n_failed"] == 0
    live = pq.read_table(tmp_path / "out" / "predictions").sort_by("example_id")
    for column in ("example_id", "prediction", "stage", "confidence"):
        assert live.column(column).to_pylist() == replayed.column(column).to_pylist()
