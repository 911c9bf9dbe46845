"""Trials on one Ray session: arguments are its name, a folder, rows, seeds and kinds; prints a JSON object for each."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from jobs.faults import processes
from jobs.faults.cascade import Cascade, small_blocks, write_cascade
from jobs.faults.kinds import KINDS, Kind
from jobs.faults.nodes import Nodes, node_killed
from jobs.faults.store import STORE_BYTES, store_full
from jobs.faults.trial import Trial

SESSIONS: dict[str, tuple[str, ...]] = {
    "machine": tuple(kind.name for kind in KINDS),
    "nodes": ("node-killed", "node-replaced"),
    "small-store": ("store-full",),
    "store-without-disk": ("store-full-no-spilling",),
}
# A trial that the fault has missed is made again so often, at other moments.
TRIES = 3


@contextmanager
def session(name: str) -> Iterator[tuple[Kind, ...]]:
    """Start a session for the length of the block. Yields the kinds of fault that it is for."""
    if name == "nodes":
        nodes = Nodes()
        try:
            yield (
                Kind("node-killed", "a node, with room elsewhere", node_killed(nodes, replaced=False)),
                Kind("node-replaced", "a node, another comes", node_killed(nodes, replaced=True)),
            )
        finally:
            nodes.close()
        return
    options: dict[str, Any] = {"object_store_memory": 5 * 10**8}
    kinds: tuple[Kind, ...] = KINDS
    if name in ("small-store", "store-without-disk"):
        spills = name == "small-store"
        options = {"object_store_memory": STORE_BYTES, "_system_config": {"automatic_object_spilling_enabled": spills}}
        where = "object store" if spills else "object store that cannot spill"
        kinds = (Kind(SESSIONS[name][0], where, store_full),)
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR", **options
    )
    try:
        yield kinds
    finally:
        ray.shutdown()


def trials(kind: Kind, cascade: Cascade, folder: Path, n_seeds: int) -> Iterator[dict[str, Any]]:
    """Yield how an undisturbed run went, and then what the fault did with each seed."""
    undisturbed = Trial(cascade, _new(folder / f"{kind.name}-undisturbed"), random.Random(0), 0.0)
    wall_s = undisturbed.run(undisturbed.pool(**kind.pool), **kind.run)
    assert undisturbed.outcome(wall_s).is_sound
    yield {"kind": kind.name, "where": kind.where, "undisturbed_s": wall_s}
    for seed in range(n_seeds):
        for attempt in range(TRIES):
            rng = random.Random(f"{kind.name} {seed} {attempt}")
            trial = Trial(cascade, _new(folder / f"{kind.name}-{seed}-{attempt}"), rng, undisturbed.run_s)
            found: dict[str, Any] = {"kind": kind.name, "seed": seed, "attempt": attempt, "folder": str(trial.folder)}
            try:
                outcome = kind.put_into(trial)
            except Exception as error:
                yield {**found, "struck": trial.struck, "error": f"{type(error).__name__}: {error}"}
                processes.left_over()
                break
            yield {**found, **asdict(outcome), **asdict(outcome.seen), "is_sound": outcome.is_sound}
            if outcome.struck:
                break


def main(argv: Sequence[str]) -> None:
    """Make the trials."""
    name, where, n_rows, n_seeds, *names = argv
    folder = Path(where)
    small_blocks()
    cascade = write_cascade(folder, int(n_rows))
    with session(name) as kinds:
        for kind in kinds:
            for found in trials(kind, cascade, folder, int(n_seeds)) if kind.name in names else ():
                print(json.dumps(found), flush=True)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main(sys.argv[1:])
