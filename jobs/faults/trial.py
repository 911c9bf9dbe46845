"""Trials of faults on one cluster, each a JSON object, and the part `faults` of the benchmark, which sums them up."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from shutil import which
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.errors import ExecutionError
from cauc_ray.files.parquet import parquet_files
from cauc_ray.files.paths import path_of
from jobs.bench.load import OK, TIMEOUT, Load, LoadResult, body_of, run_load
from jobs.bench.part import LeftOut
from jobs.bench.processes import printed, processes
from jobs.faults.cascade import Row, compare, compare_logits, pool_file, read_rows, write_cascade
from jobs.faults.cluster import Cluster, kill, wait_until
from jobs.faults.kinds import KINDS, SESSIONS, SOMETIMES, TARGETS, Kind, Scene
from jobs.faults.store import object_store

# A trial that the fault has missed is made again so often, at other moments.
TRIES = 3
# Of so many trials of a kind, some must show what it sometimes brings about.
SOME = 5
BUCKET = "faults"
# A request to the store takes this many seconds longer than here.
AWAY_S = 0.05
# Faults strike within this many seconds of the first call: about the shortest run.
STRIKES_S = 2.0
# Rows that a service is asked for, again and again.
N_SERVED = 150
# The titles of what a run or a service must not leave behind.
LEFT_OVER = ("StageWorker", "RunController", "read_blocks", "ServeReplica", "ProxyActor", "ServeController")
N_CLIENTS = 16
# How long a client waits for an answer, and how long a load is.
PATIENCE_S, LOAD_S = 60.0, 3.0
HEALING_S = 180.0
OUTPUTS = ("prediction", "confidence", "stage", "cost", "degraded")
# What becomes of a request, apart from what a client meets that gets no answer. Any is right for a row that must fail.
WHOLE, GUILTY, DEGRADED, FAILED, AGAIN, SERVES_OWN = "whole", "guilty", "degraded", "failed", "again", "Serve's own"
WRONG = ("lost", "doubled", "different", "wrongly_failed", "refused", "left_over")
COUNTS = (*WRONG, "degraded", "again")
NAMES = tuple(kind.name for kind in KINDS)
# A cluster of its own; Serve misses a proxy that died after seconds, not after half a minute.
RAY = {"RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled", "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1"}


@dataclass(slots=True)
class Answers:
    """Asks a service for the rows of a scene, and keeps what it answers.   why: with which status and reason."""

    url: str
    scene: Scene
    rows: list[Row] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    results: list[LoadResult] = field(default_factory=list)
    why: Counter[str] = field(default_factory=Counter)

    def ask_until_well(self, struck: threading.Event) -> float:
        """Make loads until every row has been asked for after the fault without trouble.

        Returns how long the trouble lasted, in seconds. Raises ExecutionError where it does not end.
        """
        bodies = [body_of({"payload": [self.scene.cascade.heads[example]]}, OUTPUTS) for example in self.scene.asked]
        began = well_since = time.monotonic()
        n_asked = n_well = 0
        while time.monotonic() - began < HEALING_S:
            was_struck, since, first = struck.is_set(), time.monotonic(), n_asked % len(bodies)
            judge = partial(self._judge, first)
            shifted = [*bodies[first:], *bodies[:first]]
            load = Load(self.url, shifted, LOAD_S, N_CLIENTS, warm_up_s=0.0, timeout_s=PATIENCE_S, judge=judge)
            self.results.append(result := run_load(load))
            n_asked += len(result)
            if not (was_struck and np.isin(result.kinds, (WHOLE, GUILTY)).all()):
                n_well = 0
                continue
            well_since = well_since if n_well else since
            n_well += len(result)
            if n_well >= len(bodies):
                return well_since - began
        raise ExecutionError(f"the service was not well after {HEALING_S:g} s: {dict(self.why)}")

    def _judge(self, first: int, row: int, status: int, body: bytes) -> str:
        """Take an answer, and return what became of the request.   first: the row that its load began with."""
        example = self.scene.asked[(first + row) % len(self.scene.asked)]
        guilty = example in self.scene.must_fail
        try:
            answer = json.loads(body)
        except ValueError:
            return SERVES_OWN
        self.why[f"{status} {answer.get('error') or answer['parameters'].get('reason')}"] += 1
        if status == OK:
            outputs = {output["name"]: output["data"][0] for output in answer["outputs"]}
            numbers = {name: float(np.float32(outputs[name])) for name in ("confidence", "cost")}
            self.rows.append({"example_id": example, **outputs, **numbers})
            self.scene.note_answer(self.rows[-1])
            return GUILTY if guilty else DEGRADED if outputs["degraded"] else WHOLE
        if status in (429, 503) and not guilty:
            return AGAIN
        self.failed.append(example)
        return GUILTY if guilty else FAILED

    def figures(self, kind: Kind) -> dict[str, Any]:
        """Return what was wrong under a kind of fault."""
        asked = [*(row["example_id"] for row in self.rows), *self.failed]
        scene, loses = self.scene, kind.loses
        outcome = compare(scene.cascade, asked, self.rows, self.failed, scene.must_fail, scene.of_next)
        kinds = Counter(np.concatenate([result.kinds for result in self.results]).tolist())
        n_troubled = kinds.total() - kinds[WHOLE] - kinds[GUILTY]
        n_lost = n_troubled - kinds[DEGRADED] - kinds[FAILED] - kinds[AGAIN]
        return {
            **outcome,
            "lost": kinds[TIMEOUT] if loses else n_lost,
            # Nothing is wrong there but rows of others.
            "refused": n_troubled if scene.must_fail or kind.goes_unnoticed else 0,
            "again": kinds[AGAIN] + (n_lost - kinds[TIMEOUT] if loses else 0),
            "asked": kinds.total(),
            "why": dict(self.why.most_common(4)),
        }


def disturbed_run(scene: Scene, kind: Kind, moments: Sequence[float]) -> dict[str, Any]:
    """Make a run or a collection with a fault in it. Returns what was wrong with its rows, and its seconds."""
    scene.start()
    called = f"called-{2 if scene.target == 'collection' else 0}"
    begun = partial(processes, "RunController") if kind.when == "reading" else (scene.notes / called).exists
    scene.until(lambda: scene.is_over or bool(begun()), "begin")
    began = time.monotonic()
    scene.strike(kind.strike, moments)
    code = scene.wait()
    if kind.ends is not None and scene.hits and code and kind.ends in scene.last_line():
        for order in scene.notes.glob("order-*"):
            order.unlink()
        scene.start(resumed=True)
        code = scene.wait()
    if code not in (0, 5):  # 5: with failed rows, which are compared below
        raise ExecutionError(f"it ended with {code}: {scene.last_line()}")
    seconds = time.monotonic() - began
    failed = [row["example_id"] for row in read_rows(scene.out / "failed")]
    if scene.target == "collection":
        answers = read_rows(scene.out / "model=large" / "split=all")
        return compare_logits(scene.cascade, 2, answers, failed) | {"seconds": seconds}
    outcome = compare(scene.cascade, scene.asked, read_rows(scene.out / "predictions"), failed, scene.must_fail)
    calls = read_rows(scene.out / "ledger")
    return outcome | {
        "seconds": seconds,
        "reached": [path for path, shows in SOMETIMES.items() if any(map(shows, calls))],
    }


def disturbed_service(scene: Scene, kind: Kind, moments: Sequence[float]) -> dict[str, Any]:
    """Strike a service under load. Returns what was wrong with its answers, and the seconds until it was well again."""
    with (
        cauc_ray.serve(scene.folder / "pool.yaml", scene.cascade.policy, port=0) as service,
        ThreadPoolExecutor(1) as clients,
    ):
        scene.url = service.url
        answers, struck = Answers(f"{service.url}/v2/models/{service.model}/infer", scene), threading.Event()
        asking = clients.submit(answers.ask_until_well, struck)
        try:
            scene.strike(kind.strike, moments)
        finally:
            struck.set()
        seconds = asking.result()
    reached = {"reached": sorted(scene.reached)} if kind.on == ("service",) else {}
    return {**answers.figures(kind), "seconds": seconds, **reached}


def trials(kind: Kind, scene: Scene, seeds: Iterable[int]) -> Iterator[dict[str, Any]]:
    """Yield what a kind of fault did with each seed.   scene: the cascade, its cluster, and a folder for all trials."""
    for seed in seeds:
        for attempt in range(TRIES):
            rng, folder = random.Random(f"{kind.name} {seed} {attempt}"), scene.folder / f"{kind.name}-{seed}-{attempt}"
            asked = rng.sample(scene.asked, N_SERVED) if scene.serves else scene.asked
            outcome = trial(kind, replace(scene, folder=folder, rng=rng, asked=asked, must_fail=set(), reached=set()))
            yield {"kind": kind.name, "seed": seed, "folder": str(folder), **outcome}
            scene.cluster.restore()
            if outcome["struck"] or "error" in outcome:
                break


def trial(kind: Kind, scene: Scene) -> dict[str, Any]:
    """Return what a fault did once: "error" where the run or the service did not come to its end."""
    scene.notes.mkdir(parents=True)
    options = {"on_failure": "degrade" if scene.serves else "fail", **kind.pool}
    pool_file(scene.folder / "pool.yaml", scene.notes, **options)
    scene.input, scene.out = scene.folder / "input", scene.folder / "out"
    shutil.copytree(scene.cascade.input, scene.input)
    if kind.remote:
        _move_away(scene)
    moments = [scene.rng.uniform(0.0, STRIKES_S if kind.when == "calls" else 0.0) for _ in range(kind.times)]
    if kind.when == "before":
        scene.hits, moments = int(kind.strike(scene)), []
    try:
        outcome = (disturbed_service if scene.serves else disturbed_run)(scene, kind, moments)
    except Exception as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
        kill([scene.child] if scene.child else [])
    shutil.rmtree(scene.folder / "input", ignore_errors=True)
    wait_until(lambda: not processes(*LEFT_OVER), 15.0)
    left_over = processes(*LEFT_OVER)
    kill(left_over)
    n_struck = len(list(scene.notes.glob("struck-*"))) if any(scene.notes.glob("order-*")) else scene.hits
    return {**outcome, "left_over": len(left_over), "struck": n_struck}


def _move_away(scene: Scene) -> None:
    """Have a run read its input from a store at a distance, and a collection write there."""
    store = path_of(f"s3://{BUCKET}/{scene.folder.name}")
    if scene.target == "collection":
        scene.out = store
        return
    for file in parquet_files(scene.input):
        (store / file.name).write_bytes(file.read_bytes())
    scene.input = store


def main(argv: Sequence[str]) -> None:
    """Make the trials of a session."""
    session, target, path, n_rows, seed, n_seeds, *names = argv
    cascade = write_cascade(Path(path), int(n_rows))
    kinds = [kind for kind in KINDS if kind.name in names]
    with ExitStack() as resources:
        if any(kind.remote for kind in kinds):
            resources.enter_context(object_store(BUCKET, AWAY_S))
        cluster = Cluster(**SESSIONS[session])
        resources.callback(cluster.close)
        scene = Scene(cascade, cluster, Path(path), random.Random(0), target, list(cascade.expected))
        for kind in kinds:
            for outcome in trials(kind, scene, range(int(seed), int(seed) + int(n_seeds))):
                print(json.dumps(outcome), flush=True)


def faults(
    targets: tuple[str, ...] = TARGETS,
    kinds: tuple[str, ...] = NAMES,
    seed: int = 0,
    seeds: int = 10,
    rows: int = 2560,
    folder: str = "",
) -> dict[str, Any]:
    """Measure what faults do: rows lost, doubled, different or wrongly failed, and time.

    Args:
        targets: What is struck.
        kinds: The kinds of fault.
        seed: The random seed of the first trial of each kind, which decides when and what is struck.
        seeds: Trials of each kind, each with the next seed.
        rows: Rows of a run; multiples of 1280 fill all blocks of a collection.
        folder: A folder for what the trials leave, which is else deleted.
    """
    print(f"seeds {seed} to {seed + seeds - 1}", flush=True)
    of_session = {
        (struck, session): names
        for struck, session in product(targets, SESSIONS)
        if (names := [k.name for k in KINDS if k.name in kinds and k.session == session and struck in k.on])
    }
    may_cut = not os.geteuid() and which("unshare") and which("ip")
    if not may_cut and any(session == "network" for _, session in of_session):
        raise LeftOut("to cut networks takes root, unshare and ip; --kinds names other kinds")
    results: dict[str, Any] = {struck: {} for struck in targets}
    with tempfile.TemporaryDirectory(prefix="faults") as scratch:
        for (struck, session), names in of_session.items():
            place = Path(folder or scratch).resolve() / f"{struck}-{session}"
            outcomes = _trials(session, struck, place, rows, seed, seeds, *names)
            for kind, trials in groupby(outcomes, key=itemgetter("kind")):
                results[struck][kind] = _figures(kind, [*trials])
                print(f"{struck}, {kind}: {'sound' if results[struck][kind]['sound'] else 'NOT sound'}", flush=True)
    return {**results, "sound": all(figures["sound"] for of_kind in results.values() for figures in of_kind.values())}


def _trials(session: str, *words: object) -> Iterator[dict[str, Any]]:
    """Make a session's trials in a process of its own, and yield what each outcome."""
    alone = ["unshare", "--net"] if session == "network" else []  # a network of its own, which it may change
    return printed(*alone, sys.executable, "-m", "jobs.faults.trial", session, *words, env=RAY)


def _figures(name: str, trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum a kind's trials up: counts other than 0, seconds, and what went wrong."""
    kind = next(kind for kind in KINDS if kind.name == name)
    struck = [trial for trial in trials if trial["struck"] and "error" not in trial]
    errors = [f"seed {trial['seed']}: {trial['error']} ({trial['folder']})" for trial in trials if "error" in trial]
    reached = Counter(path for trial in trials for path in trial.get("reached", ()))
    due = [] if len(trials) < SOME or "reached" not in trials[0] else kind.sometimes
    never = [path for path in due if not reached[path]]
    n_seeds = len({trial["seed"] for trial in trials})
    counts = {key: n for key in COUNTS if (n := sum(trial.get(key, 0) for trial in trials))}
    return {
        "hit": len(struck),
        "missed": len(trials) - len(struck) - len(errors),
        **counts,
        "seconds": [round(trial["seconds"], 1) for trial in struck],
        "why": [trial["why"] for trial in trials if trial.get("why")],
        "errors": errors,
        "reached": dict(reached),
        "never": never,
        "sound": counts.keys().isdisjoint(WRONG) and not never and len(struck) == n_seeds,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
