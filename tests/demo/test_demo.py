"""The demo, as a newcomer runs it: its table is true, its run is its replay, its folder can be moved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("sklearn", reason="the demo's images come with scikit-learn")

FILES = "accuracy-cost.png comparison digit_networks.py inputs logits policies pool.yaml request.json run weights"
MODELS = ("small", "medium", "large")
CAUC = Path(sys.executable).with_name("cauc")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run `cauc demo --json` in a process and a folder of its own, where torch cannot be imported, and move its folder.

    Returns its new path, and what it printed.
    """
    folder, broken = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("broken")
    (broken / "torch.py").write_text("raise AssertionError('torch was imported')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(broken), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([CAUC, "demo", "--json"], cwd=folder, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    moved = (folder / "cauc-demo").rename(tmp_path_factory.mktemp("elsewhere") / "moved")
    return moved, json.loads(done.stdout)


@pytest.mark.slow
def test_its_table_has_every_row_and_is_true(demo):
    folder, result = demo
    rows = {row["name"]: row for row in result["rows"]}
    budgets = {f"CAUC-RF, budget {share}%": share for share in (5, 10, 20)}
    assert list(rows) == [*(f"{name} alone" for name in MODELS), "CAUC Base", *budgets]
    singles = [rows[f"{name} alone"] for name in MODELS]
    assert singles[0]["accuracy"] < singles[1]["accuracy"] < singles[2]["accuracy"]
    assert [row["avoided"] for row in singles] == [1, 1, 0]
    assert [row["cost"] for row in singles] == pytest.approx([0.296, 1.776, 18.944])  # of 4, 24 and 256 hidden units
    for row in rows.values():
        assert row["low"] < row["accuracy"] < row["high"]
        assert row["relative_cost"] == pytest.approx(row["cost"] / singles[2]["cost"])
    for name, share in budgets.items():  # met on validation; on test met within its noise
        assert rows[name]["relative_cost"] < 1.5 * share / 100
    everything = f"{result['n']} of {result['n']}"
    assert result["agreement"].startswith(f"live run and offline replay agree row for row: {everything}")
    names = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")  # which Python may leave
    assert names == FILES.split() == result["files"]
    home = str(Path(result["folder"]).parent).encode()
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    assert [path for path in files if home in path.read_bytes()] == []
    assert (folder / "accuracy-cost.png").read_bytes().startswith(b"\x89PNG")
    assert set(pq.read_table(folder / "comparison" / "curves.parquet")["method"].to_pylist()) > {"base", "rf", "margin"}
    parts = [pq.read_table(file)["example_id"].to_pylist() for file in (folder / "inputs").iterdir()]
    assert len({example for part in parts for example in part}) == sum(map(len, parts)) == 1078
