"""Measure what faults do to runs and services: rows lost, doubled, different or wrongly failed, and time."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from shutil import which
from typing import Any

from jobs.bench.children import printed
from jobs.bench.part import absent
from jobs.faults.kinds import KINDS, SESSIONS, WHERE

WRONG = ("lost", "doubled", "different", "wrongly_failed", "refused", "left_over")
FIGURES = ("hit", "missed", *WRONG, "degraded", "again")
NAMES = tuple(kind.name for kind in KINDS)
# A cluster of its own; Serve misses a proxy that died after seconds, not after half a minute.
RAY = {"RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled", "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes, each with its full one as the default."""
    parser.add_argument("--where", nargs="+", choices=WHERE, default=list(WHERE), help="what is struck")
    parser.add_argument("--kinds", nargs="+", choices=NAMES, default=list(NAMES), help="kinds of fault")
    parser.add_argument("--seeds", type=int, default=10, help="trials of each kind, each at other moments")
    parser.add_argument("--rows", type=int, default=2560, help="rows of a run; multiples of 1280 fill all blocks")
    parser.add_argument("--keep", help="a folder that keeps what the trials leave")


def missing(options: argparse.Namespace) -> str | None:
    """Need Ray Serve, what makes the load and finds processes, and for kinds of the network what cuts it."""
    if _names(options, options.where, "network") and (os.geteuid() or not (which("unshare") and which("ip"))):
        return "to cut networks takes root, unshare and ip; --kinds names other kinds"
    return absent("starlette", "aiohttp", "psutil")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print what people read, and return the figures of each kind, by where it was put."""
    results: dict[str, dict[str, Any]] = {where: {} for where in options.where}
    with tempfile.TemporaryDirectory(prefix="faults") as scratch:
        sessions = product(options.where, SESSIONS)
        for where, session, names in [(w, s, names) for w, s in sessions if (names := _names(options, [w], s))]:
            print(_LINE.format(where, "strikes", *FIGURES, "seconds"), flush=True)
            folder = Path(options.keep or scratch).resolve() / f"{where}-{session}"
            words = map(str, (session, where, folder, options.rows, options.seeds, *names))
            for kind, trials in groupby(_trials([*words]), key=itemgetter("kind")):
                found = results[where][kind] = _figures([*trials])
                hits = KINDS[NAMES.index(kind)].hits
                print(_LINE.format(kind, hits, *map(found.get, FIGURES), str(found["seconds"])), flush=True)
                print(*(f"    {error}\n" for error in found["errors"]), sep="", end="", flush=True)
    sound = all(found["sound"] for of_where in results.values() for found in of_where.values())
    print("all sound" if sound else "NOT all sound")
    return {**results, "sound": sound}


def _names(options: argparse.Namespace, where: Sequence[str], session: str) -> list[str]:
    kinds = [kind for kind in KINDS if kind.name in options.kinds and kind.session == session]
    return [kind.name for kind in kinds if not set(kind.on).isdisjoint(where)]


def _trials(words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Make a session's trials in a process of its own, and yield what each found."""
    alone = ["unshare", "--net"] if words[0] == "network" else []  # a network of its own, which it may change
    return printed(*alone, sys.executable, "-m", "jobs.faults.trial", *words, env=RAY)


def _figures(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum a kind's trials up."""
    errors = [f"seed {trial['seed']}: {trial['error']} ({trial['folder']})" for trial in trials if "error" in trial]
    figures = {key: sum(trial.get(key, 0) for trial in trials) for key in FIGURES}
    struck = [trial for trial in trials if trial["struck"] and "error" not in trial]
    return {
        **figures,
        "hit": len(struck),
        "missed": len(trials) - len(struck) - len(errors),
        "seconds": [round(trial["seconds"], 1) for trial in struck],
        "why": [trial["why"] for trial in trials if trial.get("why")],
        "errors": errors,
        "sound": not any(figures[key] for key in WRONG) and len(struck) == len({trial["seed"] for trial in trials}),
    }


_LINE = "{:<24}{:<25}" + "{:>15}" * len(FIGURES) + "  {}"
