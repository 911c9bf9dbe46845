"""Measure what faults do to runs and services: rows lost, doubled, different or wrongly failed, and time."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from shutil import which
from typing import Any

from jobs.bench.part import LeftOut, require
from jobs.bench.processes import printed
from jobs.faults.kinds import KINDS, SESSIONS, WHERE

WRONG = ("lost", "doubled", "different", "wrongly_failed", "refused", "left_over")
COUNTS = (*WRONG, "degraded", "again")
NAMES = tuple(kind.name for kind in KINDS)
# A cluster of its own; Serve misses a proxy that died after seconds, not after half a minute.
RAY = {"RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled", "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1"}


def measure(
    where: tuple[str, ...] = WHERE,
    kinds: tuple[str, ...] = NAMES,
    seeds: int = 10,
    rows: int = 2560,
    keep: str = "",
) -> dict[str, Any]:
    """Measure each kind of fault in runs and services.

    where: what is struck.   kinds: of fault.   seeds: trials of each kind, each at other moments.   rows: of a run;
    multiples of 1280 fill all blocks.   keep: a folder that keeps what the trials leave.
    """
    require("starlette", "aiohttp", "psutil")
    of_session = {
        (struck, session): names
        for struck, session in product(where, SESSIONS)
        if (names := [k.name for k in KINDS if k.name in kinds and k.session == session and struck in k.on])
    }
    may_cut = not os.geteuid() and which("unshare") and which("ip")
    if not may_cut and any(session == "network" for _, session in of_session):
        raise LeftOut("to cut networks takes root, unshare and ip; --kinds names other kinds")
    results: dict[str, Any] = {struck: {} for struck in where}
    with tempfile.TemporaryDirectory(prefix="faults") as scratch:
        for (struck, session), names in of_session.items():
            folder = Path(keep or scratch).resolve() / f"{struck}-{session}"
            for kind, trials in groupby(_trials(session, struck, folder, rows, seeds, *names), key=itemgetter("kind")):
                results[struck][kind] = _figures([*trials])
                print(f"{struck}, {kind}: {'sound' if results[struck][kind]['sound'] else 'NOT sound'}", flush=True)
    return {**results, "sound": all(found["sound"] for of_struck in results.values() for found in of_struck.values())}


def _trials(session: str, *words: object) -> Iterator[dict[str, Any]]:
    """Make a session's trials in a process of its own, and yield what each found."""
    alone = ["unshare", "--net"] if session == "network" else []  # a network of its own, which it may change
    return printed(*alone, sys.executable, "-m", "jobs.faults.trial", session, *words, env=RAY)


def _figures(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum a kind's trials up: counts other than 0, seconds, and what went wrong."""
    struck = [trial for trial in trials if trial["struck"] and "error" not in trial]
    errors = [f"seed {trial['seed']}: {trial['error']} ({trial['folder']})" for trial in trials if "error" in trial]
    counts = {key: n for key in COUNTS if (n := sum(trial.get(key, 0) for trial in trials))}
    return {
        "hit": len(struck),
        "missed": len(trials) - len(struck) - len(errors),
        **counts,
        "seconds": [round(trial["seconds"], 1) for trial in struck],
        "why": [trial["why"] for trial in trials if trial.get("why")],
        "errors": errors,
        "sound": counts.keys().isdisjoint(WRONG) and len(struck) == len({trial["seed"] for trial in trials}),
    }
