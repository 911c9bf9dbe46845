"""Run the tests that failed in the last run once more, with nothing next to them: again.py FLAKY.

A file's failed tests share a process, as they share what their file sets up. Tests that pass now are flaky: each gets
a line in the file FLAKY. Exits with 1 if one fails again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

FAILED_TESTS = Path(".pytest_cache/v/cache/lastfailed")
N_FILES = 5  # failures in more files than these are not by chance
TIMEOUT_S = 600.0


def main() -> int:
    """Return the exit code."""
    tests = list(json.loads(FAILED_TESTS.read_text())) if FAILED_TESTS.exists() else []
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.partition("::")[0]].append(test)
    if not tests or len(by_file) > N_FILES:
        print(f"{len(tests)} tests failed in {len(by_file)} files: none is run again")
        return 1
    for names in by_file.values():
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "", *names]
        print("+ once more, alone:", *names, flush=True)
        try:
            if subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode != 0:
                return 1
        except subprocess.TimeoutExpired:
            print(f"not finished in {TIMEOUT_S:.0f} s")
            return 1
        with Path(sys.argv[1]).open("a", encoding="utf-8") as file:
            file.writelines(f"flaky: {name}\n" for name in names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
