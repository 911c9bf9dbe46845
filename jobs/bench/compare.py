"""Seconds and memory of every method, of several budgets and of the report on tables of the paper's size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from cauc_ray.comparison.selection import choose_methods
from cauc_ray.policies.method import METHODS
from jobs.bench.fitting import write_table
from jobs.bench.processes import PEAK, ROOT, scratch

# Seven models, cheapest first: how much logits favour the label, and the cost of a call.
CHAIN = {f"model-{j}": (4.0 + 0.5 * j, float(2**j)) for j in range(7)}
# Those that read nothing but logits; on recalibrated logits they take as long.
TIMED = tuple(name for name in choose_methods(("all",), ())[0] if name in METHODS)
# One call of a public function in a new process, whose memory is that of the call; without a function, what the bytes
# of a table bound: they are read, and exp is taken of each number.
CALL = """
import json, sys, time
import numpy as np
import cauc_ray
from cauc_ray.data.logits import LogitTable
door, path, options = *sys.argv[1:3], json.loads(sys.argv[3])
started = time.perf_counter()
if door:
    result = getattr(cauc_ray, door)(path, **options)
else:
    for split in ("calibration", "validation", "test"):
        for logits in LogitTable(path).read_chain(options["models"], split).logits:
            np.exp(logits).sum()
seconds = time.perf_counter() - started
if door == "fit":
    result.save(sys.argv[4])
print(json.dumps({"seconds": seconds, "gb": peak() / 1e9}))
"""


def compare(
    rows: int = 50_000,
    options: int = 1_000,
    models: tuple[int, ...] = (2, 7),
    methods: tuple[str, ...] = TIMED,
    points: int = 21,
    limit_s: float = 600.0,
) -> dict[str, Any]:
    """Time calls on a table that is cut 25/25/50, each in a new process: what it takes, reading included, and memory.

    Args:
        rows: Rows of the table.
        options: Options of a row.
        models: Models of each chain.
        methods: Methods that are compared, each by itself.
        points: Budgets of the comparison of several.
        limit_s: A call that takes longer is ended, and has these seconds.
    """
    with scratch() as folder:
        quarter = rows // 4
        splits = {"calibration": quarter, "validation": quarter, "test": rows - 2 * quarter}
        table = write_table(folder / "logits", options, dict(islice(CHAIN.items(), max(models))), **splits)
        figures: dict[str, Any] = {
            f"{m} models": {kind: {} for kind in ("seconds", "ours", "others", "gb", "failed")} for m in models
        }
        for kinds in (("seconds", "ours"), ("others",)):  # those that take minutes last
            for m, of_chain in zip(models, figures.values(), strict=True):
                for kind, name, call in _calls(folder, table, list(CHAIN)[:m], methods, points):
                    if kind in kinds:
                        print(f"{m} models, {name}: ", end="", flush=True)
                        for of, figure in _measured(call, limit_s).items():
                            of_chain[kind if of == "seconds" else of][name] = figure
    return figures


def _calls(
    folder: Path, table: Path, models: Sequence[str], methods: Sequence[str], points: int
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the kind and name of each call on a chain, and the words of CALL; methods that cannot run on it are not."""
    chain, policy = {"models": list(models)}, str(folder / "policy.json")
    yield "seconds", "numbers read, exp of each", ["", str(table), json.dumps(chain)]
    for method in ("stacked", "base", "rf"):
        yield "seconds", f"fit, {method}", ["fit", str(table), json.dumps({**chain, "method": method}), policy]
    page = {"logits": str(table), "policy": policy, "output": str(folder / "report.html")}
    yield "seconds", "report", ["report", str(folder), json.dumps(page)]
    several = {**chain, "methods": ["base", "rf"], "points": points}
    yield "seconds", f"compare, {points} budgets", ["compare", str(table), json.dumps(several)]
    for method in choose_methods(methods, models)[0]:
        # A search, by auto, fits every sub-chain.
        kind = "ours" if METHODS[method].paradigm == "ours" and method != "auto" else "others"
        yield kind, method, ["compare", str(table), json.dumps({**chain, "methods": [method]})]


def _measured(call: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Return the seconds and gigabytes of a call in a new process; its limit where it takes too long, or why it failed.

    What other calls have taken is not lost with one that fails.
    """
    command = [sys.executable, "-c", PEAK + CALL, *call]
    figures: dict[str, Any]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        print(f"ended after {limit_s:.0f} s", flush=True)
        return {"seconds": limit_s}
    if done.returncode:
        figures = {"failed": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
        print(figures["failed"], flush=True)
    else:
        figures = json.loads(done.stdout.splitlines()[-1])
        print(f"{figures['seconds']:.1f} s, {figures['gb']:.2f} GB", flush=True)
    return figures
