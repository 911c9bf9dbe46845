"""Run the benchmark: `python -m jobs.bench [PART [OPTIONS]] ...`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cauc_ray.display import Sheet
from cauc_ray.errors import unknown_name
from jobs.bench.part import PARTS, measured
from jobs.bench.ratios import grid, judged, save

# Runs for hours, and only where it is named.
LONG = ("faults",)

USAGE = f"""usage: python -m jobs.bench [--save DIR] [PART [OPTIONS]] ...

Parts: {", ".join(PARTS)}. Without a name, all but {", ".join(LONG)} run that have what they need here.
python -m jobs.bench PART --help lists a part's options; each default is the full size.
--save DIR keeps the figures that jobs/bench/ratios.toml lists in DIR/COMMIT.json, with the machine.
What people read is printed first; the last line is one JSON object, {{part: figures}}."""


def main(argv: Sequence[str]) -> int:
    """Run the parts that the arguments name, or all that can run here. Returns the exit code."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    folder = None
    if argv and argv[0] == "--save":
        if len(argv) < 2:
            print(f"--save needs a folder\n\n{USAGE}", file=sys.stderr)
            return 2
        folder, argv = Path(argv[1]), argv[2:]
    if argv and argv[0] not in PARTS:
        print(f"{unknown_name('part', argv[0], PARTS)}\n\n{USAGE}", file=sys.stderr)
        return 2
    results = {name: measured(name, words) for name, words in options_by_part(argv).items()}
    if rows := list(judged(results)):
        Sheet("", [grid(rows)]).print()
    if folder is not None:
        print(f"written to {save(folder, results)}")
    print(json.dumps(results))
    return 1 if any("failed" in result for result in results.values()) else 0


def options_by_part(argv: Sequence[str]) -> dict[str, list[str]]:
    """Return what follows each part's name; every part but the long ones, bare, where none is named."""
    words: dict[str, list[str]] = {}
    current: list[str] = []
    for word in argv:
        if word in PARTS:
            current = words.setdefault(word, [])
        else:
            current.append(word)
    return words or {name: [] for name in PARTS if name not in LONG}


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # At once: with torch and Ray both loaded, the interpreter has crashed while it took itself apart.
    os._exit(code)
