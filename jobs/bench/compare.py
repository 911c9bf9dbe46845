"""Seconds and memory of every method, of several budgets and of the report on tables of the paper's size."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from cauc_ray.comparison.selection import choose_methods
from cauc_ray.errors import ExecutionError
from cauc_ray.policies.method import METHODS
from jobs.bench.fitting import write_table
from jobs.bench.processes import ROOT, scratch

# Seven models, cheapest first: how much logits favour the label, and the cost of a call.
CHAIN = {f"model-{j}": (4.0 + 0.5 * j, float(2**j)) for j in range(7)}
# Those that read nothing but logits; a method on recalibrated logits takes as long as the method itself.
TIMED = tuple(name for name in choose_methods(("all",), ())[0] if name in METHODS)
# One call of a public function in a new process, whose memory is that of the call.
CALL = """
import json, resource, sys, time
import cauc_ray
started = time.perf_counter()
result = getattr(cauc_ray, sys.argv[1])(sys.argv[2], **json.loads(sys.argv[3]))
seconds = time.perf_counter() - started
if sys.argv[1] == "fit":
    result.save(sys.argv[4])
print(json.dumps({"seconds": seconds, "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}))
"""
# What the bytes of a table bound: they are read once, and exp is taken of each number.
PASS = """
import json, sys, time
import numpy as np
from cauc_ray.data.logits import LogitTable
table, models = LogitTable(sys.argv[1]), json.loads(sys.argv[2])
started = time.perf_counter()
for split in ("calibration", "validation", "test"):
    for logits in table.read_chain(models, split).logits:
        np.exp(logits).sum()
print(json.dumps({"seconds": time.perf_counter() - started}))
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
        return {f"{m} models": _of_chain(folder, table, list(CHAIN)[:m], methods, points, limit_s) for m in models}


def _of_chain(
    folder: Path, table: Path, models: Sequence[str], methods: Sequence[str], points: int, limit_s: float
) -> dict[str, Any]:
    """Time each call on one chain; of methods that cannot run on it, nothing."""
    policy = folder / f"policy-{len(models)}.json"
    chain = {"models": list(models)}
    calls: dict[str, tuple[str, Path, dict[str, Any]]] = {
        f"fit, {method}": ("fit", table, {**chain, "method": method}) for method in ("stacked", "base", "rf")
    }
    for method in choose_methods(methods, models)[0]:
        calls[method] = ("compare", table, {**chain, "methods": [method]})
    page = {"logits": str(table), "policy": str(policy), "output": str(folder / "report.html")}
    calls[f"compare, {points} budgets"] = ("compare", table, {**chain, "methods": ["base", "rf"], "points": points})
    calls["report"] = ("report", folder, page)
    read = _printed(PASS, table, json.dumps(list(models)))
    figures: dict[str, Any] = {"read_s": read["seconds"], "seconds": {}, "ours": {}, "others": {}, "gb": {}}
    for name, (door, path, asked) in calls.items():
        kind = "seconds" if name not in METHODS else "ours" if METHODS[name].paradigm == "ours" else "others"
        try:
            call = _printed(CALL, door, path, json.dumps(asked), policy, limit_s=limit_s)
        except subprocess.TimeoutExpired:
            figures[kind][name] = limit_s
            print(f"{name}: ended after {limit_s:.0f} s", flush=True)
        else:
            figures[kind][name], figures["gb"][name] = call["seconds"], call["gb"]
            print(f"{name}: {call['seconds']:.1f} s, {call['seconds'] / read['seconds']:.1f} x reading", flush=True)
    return figures


def _printed(script: str, *words: object, limit_s: float | None = None) -> dict[str, float]:
    """Run a script in a new process; return the JSON object that it prints last."""
    command = [sys.executable, "-c", script, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode:
        raise ExecutionError(f"{words[0]} failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
