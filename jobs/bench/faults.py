"""Measure what faults do to runs: rows lost, twice, or different, and the time that they cost."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from cauc_ray.errors import ConfigError, ExecutionError, unknown_name
from jobs.bench.part import absent
from jobs.faults.session import SESSIONS

ROOT = Path(__file__).parents[2]
KINDS = tuple(kind for kinds in SESSIONS.values() for kind in kinds)
COUNTS = ("lost", "duplicated", "different", "wrongly_failed", "repeated")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes, each with its full one as the default."""
    parser.add_argument("--seeds", type=int, default=10, help="trials of each kind of fault, each at other moments")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of fault, by name")
    parser.add_argument("--rows", type=int, default=2560, help="rows of a run; multiples of 2560 fill all blocks")
    parser.add_argument("--keep", help="a folder that keeps what the runs leave")


def missing(options: argparse.Namespace) -> str | None:
    """Return what the part needs and does not find here, None where it can run."""
    return absent("psutil")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print what people read, and return the figures, ratios included."""
    wanted = options.kinds.split(",")
    for kind in wanted:
        if kind not in KINDS:
            raise ConfigError(unknown_name("kind of fault", kind, KINDS))
    print(_LINE.format(*_HEADINGS), flush=True)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="faults") as scratch:
        for name, kinds in SESSIONS.items():
            own = [kind for kind in kinds if kind in wanted]
            folder = Path(options.keep or scratch) / name
            for found in _trials(name, folder, options, own) if own else ():
                results[found["kind"]] = found
                print(_LINE.format(*_cells(found)), flush=True)
                for error in found["errors"]:
                    print(f"    {error}", flush=True)
    totals = {key: sum(found[key] for found in results.values()) for key in (*COUNTS, "left_over", "missed")}
    sound = all(found["sound"] for found in results.values())
    print(f"{len(results)} kinds of fault, {'all sound' if sound else 'NOT all sound'}: {totals}")
    return {"kinds": results, **totals, "sound": sound}


def _trials(session: str, folder: Path, options: argparse.Namespace, kinds: Sequence[str]) -> Any:
    """Make a session's trials in a process of its own, and yield the figures of each kind."""
    folder.mkdir(parents=True)
    words = [session, folder, options.rows, options.seeds, *kinds]
    with subprocess.Popen(
        [sys.executable, "-m", "jobs.faults.session", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # Ray tells there of every process that has died
        text=True,
        env={**os.environ, "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"},
    ) as process:
        assert process.stdout is not None
        trials: list[dict[str, Any]] = []
        for line in process.stdout:
            said = json.loads(line) if line.startswith("{") else None  # Ray may write there, too
            if said is None:
                continue
            if trials and said["kind"] != trials[0]["kind"]:
                yield _figures(trials)
                trials = []
            trials.append(said)
        if trials:
            yield _figures(trials)
    if process.returncode:
        raise ExecutionError(f"the trials of session {session!r} ended with {process.returncode} before they were done")


def _figures(said: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum a kind's trials up.   said: the undisturbed run, then the trials."""
    first, *trials = said
    ended = [trial for trial in trials if "error" not in trial]
    counted = [trial for trial in ended if trial["struck"]]
    errors = [f"seed {trial['seed']}: {trial['error']} ({trial['folder']})" for trial in trials if "error" in trial]
    walls = [trial["wall_s"] / first["undisturbed_s"] for trial in counted]
    figures = {key: sum(trial[key] for trial in ended) for key in (*COUNTS, "left_over")}
    return {
        "kind": first["kind"],
        "where": first["where"],
        "seeds": len({trial["seed"] for trial in counted}),
        "strikes": sum(trial["struck"] for trial in counted),
        "missed": len(ended) - len(counted),
        **figures,
        "undisturbed_s": first["undisturbed_s"],
        "wall_ratio": median(walls) if walls else None,
        "wall_ratio_worst": max(walls, default=None),
        "errors": errors,
        "sound": not errors and all(trial["is_sound"] for trial in ended),
    }


_HEADINGS = ("kind", "strikes", "seeds", "hits", "missed", "lost", "twice", "other", "wrongly", "again", "left", "wall")
_LINE = "{:<24}{:<31}{:>6}{:>6}{:>7}{:>6}{:>6}{:>6}{:>8}{:>7}{:>5}  {}"


def _cells(found: dict[str, Any]) -> list[Any]:
    keys = ("kind", "where", "seeds", "strikes", "missed", *COUNTS, "left_over")
    ratios = (found["wall_ratio"], found["wall_ratio_worst"])
    wall = "–" if None in ratios else "{:.2f}, worst {:.2f}".format(*ratios)
    return [*(found[key] for key in keys), wall]
