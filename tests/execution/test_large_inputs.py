"""Inputs that are larger than a driver's memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_drivers_memory_does_not_grow_with_the_input(tmp_path):
    path = os.pathsep.join([str(TESTS), str(TESTS / "execution"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "execution" / "large_inputs.py"), str(tmp_path)],
        cwd=TESTS.parent, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.splitlines()[-2:])
    assert large < 3 * small
