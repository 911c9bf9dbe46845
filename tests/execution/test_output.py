"""What models print on their replicas."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from runs import numbered_input, python_pool, two_model_policy

from cauc_ray.execution import session
from cauc_ray.execution.session import ModelOutput


def batch(pid, *lines, name="stage 'small'"):
    return {"ip": "127.0.0.1", "pid": pid, "actor_name": name, "task_name": None, "lines": list(lines)}


OF_ALL = [
    batch(11, "loaded in 0.5 s", "step 1"),
    batch(12, "loaded in 0.7 s", "step 1", "step 2"),
    batch(11, "step 2", "step 3"),
    batch(13, "loaded in 0.6 s", name="stage 'large'"),
]
SHOWN = ["small: loaded in 0.5 s", "small: step 1", "small: step 2", "small: step 3", "large: loaded in 0.6 s"]
# Lines of replicas, and what is logged of them.
OUTPUT = {
    "of all replicas once": (OF_ALL, SHOWN),
    "two nodes of one machine": ([batch(11, "step 1"), batch(11, "step 1")], ["small: step 1"]),
    "progress bars and blank lines": ([batch(11, "\r 10 %", "\r 10 %\r 20 %", "", "  ")], []),
    "of no model": ([batch(12, "a fault of Ray's", name="RunController"), batch(13, "more", name=None)], []),
    "control sequences": (
        [batch(11, "\x1b[1;31mred\x1b[0m\tand \x1b]loud\x07")], ["small: red\tand ]loud"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTPUT)
def test_what_models_print_is_logged_by_stage(caplog, monkeypatch, case):
    monkeypatch.setattr(session, "REPEATED_S", 600.0)  # else a busy machine decides what is a repetition
    batches, expected = OUTPUT[case]
    output = ModelOutput()
    with caplog.at_level(logging.INFO, logger="cauc_ray.output"):
        for lines in batches:
            output.take(lines)
    assert [line.replace("stage '", "").replace("'", "", 1) for line in caplog.messages] == expected


@pytest.mark.slow
def test_a_run_shows_it_next_to_its_results(tmp_path):
    pool = python_pool(tmp_path, [("talkative", {"seconds": 0.2})] * 2, replicas={"min": 2, "max": 2})
    (tmp_path / "policy.json").write_text(two_model_policy().to_json())
    process = subprocess.run(
        [Path(sys.executable).with_name("cauc"), "run", pool, "--policy", tmp_path / "policy.json", "--input",
         numbered_input(tmp_path, 80), "-o", tmp_path / "out", "--address", "local", "--json"],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["n"] == 80
    lines = process.stderr.splitlines()
    for name in ("small", "large"):
        of_stage = [line for line in lines if line.startswith(f"stage '{name}': ")]
        assert sum("loaded in process" in line for line in of_stage) == 1
        assert any(line.endswith(": a batch of 8 rows") for line in of_stage)
    assert not any("of 3" in line or "pid=" in line or "SystemExit" in line for line in lines)
