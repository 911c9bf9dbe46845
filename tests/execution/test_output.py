"""What models print on their replicas."""

import json
import logging

import pytest
from runs import cauc, numbered_input, python_pool, two_model_policy

from cauc_ray.execution.session import log_output


def batch(*lines, name="stage 'small'"):
    return {"ip": "127.0.0.1", "pid": 11, "actor_name": name, "task_name": None, "lines": list(lines)}


# Lines of replicas, and what is logged of them.
OUTPUT = {
    "of a run": (batch("loaded in 0.5 s", "step 1"), ["small: loaded in 0.5 s", "small: step 1"]),
    "of a service": (
        batch("INFO 2026-01-01 of Serve", "step 1", name="ServeReplica:test:stage:small"), ["small: step 1"]
    ),
    "progress bars and blank lines": (batch("\r 10 %", "\r 10 %\r 20 %", "", "  "), []),
    "of a controller": (batch("a fault of Ray's", name="RunController"), []),
    "of a task": (batch("more", name=None), []),
    "control sequences": (batch("\x1b[1;31mred\x1b[0m\tand \x1b]loud\x07"), ["small: red\tand ]loud"]),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTPUT)
def test_what_models_print_is_logged_by_stage(caplog, case):
    lines, expected = OUTPUT[case]
    with caplog.at_level(logging.INFO, logger="cauc_ray.output"):
        log_output(lines)
    assert [line.replace("stage '", "").replace("'", "", 1) for line in caplog.messages] == expected


@pytest.mark.soak("full")
def test_a_run_shows_it_next_to_its_results(tmp_path):
    pool = python_pool(tmp_path, [("talkative", {"seconds": 0.2})] * 2, replicas={"min": 2, "max": 2})
    (tmp_path / "policy.json").write_text(two_model_policy().to_json())
    words = ["--policy", tmp_path / "policy.json", "--input", numbered_input(tmp_path, 80), "-o", tmp_path / "out"]
    process = cauc("run", pool, *words, "--address", "local", "--json")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["n"] == 80
    lines = process.stderr.splitlines()
    for name in ("small", "large"):
        of_stage = [line for line in lines if line.startswith(f"stage '{name}': ")]
        assert any("loaded in process" in line for line in of_stage)
        assert any(line.endswith(": a batch of 8 rows") for line in of_stage)
    assert not any("of 3" in line or "pid=" in line or "SystemExit" in line for line in lines)
