"""Inputs that are larger or slower than a driver's memory or a reader's deadline."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TESTS = Path(__file__).parents[1]


def part(name, folder):
    """Run a part of large_inputs in a process of its own. Returns the last lines that it printed."""
    path = os.pathsep.join([str(TESTS), str(TESTS / "execution"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "execution" / "large_inputs.py"), name, str(folder)],
        cwd=TESTS.parent, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()


def test_the_drivers_memory_does_not_grow_with_the_input(tmp_path):
    small, large = map(int, part("memory", tmp_path)[-2:])
    assert large < 3 * small


def test_a_dataset_whose_done_blocks_take_longer_than_the_deadline_is_resumed(tmp_path):
    assert "is down" in part("first", tmp_path)[-1]
    assert part("resumed", tmp_path)[-1] == "640"
