"""The demo, as a newcomer runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from runs import by_example, read_all

import cauc_ray

pytest.importorskip("torch", reason="the demo trains torch models")
pytest.importorskip("sklearn", reason="the demo's images come with scikit-learn")

FILES = ["accuracy-cost.png", "inputs", "logits", "policies", "pool.yaml", "run", "sweep.parquet", "weights"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run `cauc demo --json` in a process and a folder of its own."""
    folder = tmp_path_factory.mktemp("demo")
    cauc = Path(sys.executable).with_name("cauc")
    done = subprocess.run([cauc, "demo", "--json"], cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder / "cauc-demo", json.loads(done.stdout)


def test_its_table_has_every_row_and_tells_a_true_story(demo):
    _, result = demo
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [
        "perceptron alone", "small-cnn alone", "large-cnn alone", "CAUC Base", "CAUC-RF, budget 10%",
        "CAUC-RF, budget 20%", "CAUC-RF, budget 40%",
    ]  # fmt: skip
    alone = [rows[f"{name} alone"] for name in ("perceptron", "small-cnn", "large-cnn")]
    assert alone[0]["accuracy"] < alone[1]["accuracy"] < alone[2]["accuracy"]
    assert alone[0]["cost"] * 10 < alone[1]["cost"] < alone[2]["cost"] / 3
    for row in rows.values():
        assert row["low"] < row["accuracy"] < row["high"]
        assert row["relative_cost"] == pytest.approx(row["cost"] / alone[2]["cost"])
    for share in (10, 20, 40):
        # The budget is met on validation; on test it is met within its noise.
        assert rows[f"CAUC-RF, budget {share}%"]["relative_cost"] < 1.5 * share / 100
    assert rows["CAUC-RF, budget 40%"]["accuracy"] > alone[0]["accuracy"]


def test_its_live_run_is_its_replay(demo):
    folder, result = demo
    everything = f"{result['n']} of {result['n']}"
    assert result["agreement"].startswith(f"live run and offline replay agree row for row: {everything}")
    policy = cauc_ray.Policy.load(folder / "policies" / "rf-20.json")
    live = by_example(read_all(folder / "run" / "predictions"))
    replayed = by_example(cauc_ray.evaluate(folder / "logits", policy).predictions())
    assert live.keys() == replayed.keys()
    for example, row in replayed.items():
        assert {**live[example], "confidence": None} == {**row, "confidence": None}
        assert live[example]["confidence"] == pytest.approx(row["confidence"], abs=1e-5)


def test_its_folder_holds_all_that_it_names(demo):
    folder, result = demo
    assert result["folder"] == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert all((folder / name).exists() for name in result["files"])
    assert (folder / "accuracy-cost.png").read_bytes().startswith(b"\x89PNG")
    assert {row["method"] for row in pq.ParquetFile(folder / "sweep.parquet").read().to_pylist()} == {
        "base", "rf", "margin",
    }  # fmt: skip
    ids = {
        split: {row["example_id"] for row in pq.ParquetFile(folder / "inputs" / f"{split}.parquet").read().to_pylist()}
        for split in ("calibration", "validation", "test")
    }
    assert len(set.union(*ids.values())) == sum(map(len, ids.values())) == 1078


def test_its_parts_run_again_by_hand(demo, tmp_path):
    folder, _ = demo
    cauc = Path(sys.executable).with_name("cauc")
    policy, inputs = folder / "policies" / "base.json", folder / "inputs" / "test.parquet"
    run = [cauc, "run", folder / "pool.yaml", "--policy", policy, "--input", inputs, "-o", tmp_path / "out", "--json"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n"] == 539


def test_a_folder_that_exists_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").write_text("")
    cauc = Path(sys.executable).with_name("cauc")
    done = subprocess.run([cauc, "demo", "-o", "mine"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "not an empty folder" in done.stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["x"]
