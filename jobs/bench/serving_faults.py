"""Measure what faults do to a service under load: answers that are wrong, refused, late or never come, and recovery.

A cascade of three stages that sleep is asked by closed-loop clients, is struck in their midst, and each answer is
checked. A pool that degrades marks what it answers without a stage that should have; one that fails refuses with 503.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cauc_ray.errors import ExecutionError
from jobs.bench.part import absent
from jobs.bench.serving_faults_session import KINDS, Plan

ROOT = Path(__file__).parents[2]
NAMES = tuple(kind.name for kind in KINDS)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes, each with its full one as the default."""
    parser.add_argument("--kinds", nargs="+", choices=NAMES, default=list(NAMES), help="kinds of fault")
    parser.add_argument("--clients", type=int, default=16, help="clients that each wait for their answer")
    parser.add_argument("--seconds", type=float, default=18.0, help="of load for each kind")
    parser.add_argument("--rows", type=int, default=1000, help="different requests")


def missing(options: argparse.Namespace) -> str | None:
    """Need Ray Serve, the client that makes the load, and what finds processes."""
    return absent("fastapi", "aiohttp", "psutil")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print what people read, and return the figures, ratios included."""
    plan = Plan(tuple(options.kinds), options.clients, options.seconds, options.rows)
    print(_LINE.format(*_HEADINGS), flush=True)
    results: dict[str, Any] = {}
    for found in session(plan):
        results[found["kind"]] = {**found, "sound": is_sound(found)}
        print(_LINE.format(*_cells(found)), flush=True)
    print("500*: Serve's own, to those whose router died; degr.: marked as answered by an earlier stage", flush=True)
    sound = all(found["sound"] for found in results.values())
    n_wrong, n_hung = (sum(found[key] for found in results.values()) for key in ("wrong", "hung"))
    print(f"{len(results)} kinds of fault, {'all sound' if sound else 'NOT all sound'}: {n_wrong} wrong, {n_hung} hung")
    return {"kinds": results, "wrong": n_wrong, "hung": n_hung, "sound": sound}


def session(plan: Plan) -> Iterator[dict[str, Any]]:
    """Strike in a process of its own, and yield what each kind did. Raises ExecutionError when it ends before."""
    with subprocess.Popen(
        [sys.executable, "-m", "jobs.bench.serving_faults_session", json.dumps(asdict(plan))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Ray tells there of every process that has died
        text=True,
        env={**os.environ, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):  # Ray may write there, too
                yield json.loads(line)
    if process.returncode:
        raise ExecutionError(f"the session ended with {process.returncode} before all kinds were through")


def is_sound(found: dict[str, Any]) -> bool:
    """Say whether nothing was wrong, lost or refused without a word, and all was well again."""
    bad = ("wrong", "hung", "without_retry_after")
    return not (any(found[key] for key in bad) or found["other_status"] or found.get("outdated"))


_HEADINGS = (
    "kind", "where", "sent", "right", "degr.", "429", "503", "500*", "other", "wrong", "conn.", "hung", "longest",
    "p99 before, during, after", "recovery",
)  # fmt: skip
_LINE = "{:<21}{:<21}{:>6}{:>6}{:>6}{:>6}{:>6}{:>5}{:>6}{:>6}{:>6}{:>5}{:>9}  {:<26}{:>9}"


def _cells(found: dict[str, Any]) -> list[Any]:
    p99 = ", ".join(_seconds(found["p99_s"][name]) for name in ("before", "during", "after"))
    return [
        *(found[key] for key in ("kind", "where", "sent", "right", "degraded", "status_429", "status_503")),
        found["serves_own_500"],
        sum(found["other_status"].values()),
        found["wrong"],
        found["refused"] + found["reset"],
        found["hung"],
        _seconds(found["longest_s"]),
        p99,
        _seconds(found["recovery_s"]),
    ]


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.2f} s"
