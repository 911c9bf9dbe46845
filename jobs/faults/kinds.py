"""The kinds of fault that one Ray session of this machine can take."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import ray

from cauc_ray.files.parquet import parquet_files
from jobs.faults import processes
from jobs.faults.trial import Outcome, Trial

ROOT = Path(__file__).parents[2]
_MANY: dict[str, Any] = {"large": {"replicas": {"min": 6, "max": 6}, "resources": {"num_cpus": 0.1}, "batch_size": 4}}
# The last stage is down after so many seconds without a replica.
_SOON_DOWN: dict[str, Any] = {"large": {"down_after_s": 4.0}}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.   where: what it strikes.   pool, run: how its runs differ from others, disturbed or not."""

    name: str
    where: str
    put_into: Callable[[Trial], Outcome]
    pool: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


def replica_killed(stage: int) -> Callable[[Trial], Outcome]:
    """Kill replicas of a stage."""

    def put_into(trial: Trial) -> Outcome:
        with trial.striking(lambda: trial.kill(stage=stage), times=2):
            wall_s = trial.run(trial.pool())
        return trial.outcome(wall_s)

    return put_into


def all_replicas_killed(trial: Trial) -> Outcome:
    """Kill all of the last stage's many replicas at once, most of which have nothing to do just then."""

    def strike() -> bool:
        found = processes.replicas(trial.notes, 2)
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        return bool(found)

    with trial.striking(strike):
        wall_s = trial.run(trial.pool(**_MANY))
    return trial.outcome(wall_s)


def actor_killed(kind: str, times: int) -> Callable[[Trial], Outcome]:
    """Kill an actor of a kind that there is one of, or few."""

    def put_into(trial: Trial) -> Outcome:
        with trial.striking(lambda: trial.kill(kind), times=times):
            wall_s = trial.run(trial.pool())
        return trial.outcome(wall_s)

    return put_into


def replica_hangs(trial: Trial) -> Outcome:
    """Have two calls of the second stage never end."""
    faults = {1: {"fault": "hangs", "at_calls": trial.random_calls(1, 2)}}
    wall_s = trial.run(trial.pool(faults, call_timeout_s=2.0))
    trial.model_struck()
    return trial.outcome(wall_s)


def turns_bad(stage: int, fault: str, n: int, **options: Any) -> Callable[[Trial], Outcome]:
    """Have some replicas of a stage fail every call from some call on, as after a sticky error of their device."""

    def put_into(trial: Trial) -> Outcome:
        wall_s = trial.run(
            trial.pool({stage: {"fault": fault, "bad": n, "bad_from": trial.rng.randint(2, 5)}}, **options)
        )
        trial.model_struck()
        return trial.outcome(wall_s)

    return put_into


def bad_for_a_while(trial: Trial) -> Outcome:
    """Have all replicas of the second stage fail every call for some seconds, those started meanwhile, too."""
    wall_s = trial.run(trial.pool({1: {"fault": "raises", "sick_s": 8.0, "bad_from": trial.rng.randint(2, 20)}}))
    trial.model_struck()
    return trial.outcome(wall_s)


def rubbish(fault: str) -> Callable[[Trial], Outcome]:
    """Have a few calls of every stage answer something that is no answer."""

    def put_into(trial: Trial) -> Outcome:
        faults = {place: {"fault": fault, "at_calls": trial.random_calls(place, 3)} for place in range(3)}
        wall_s = trial.run(trial.pool(faults))
        trial.model_struck()
        return trial.outcome(wall_s)

    return put_into


def guilty_rows(fault: str, n: int) -> Callable[[Trial], Outcome]:
    """Have a stage fail on certain rows whenever it sees them: they, and no others, must fail."""

    def put_into(trial: Trial) -> Outcome:
        reach = sorted(example for example, row in trial.cascade.expected.items() if row["stage"] >= 1)
        guilty = trial.rng.sample(reach, n)
        wall_s = trial.run(trial.pool({1: {"fault": fault, "on_rows": guilty}}))
        trial.model_struck()
        return trial.outcome(wall_s, frozenset(guilty))

    return put_into


def input_away(trial: Trial) -> Outcome:
    """Have something else in place of all input files for a moment when they are first read."""
    own = _own_input(trial)

    def strike() -> bool:
        hidden = {path: path.with_name(f".{path.name}") for path in parquet_files(own)}
        for path, aside in hidden.items():
            path.rename(aside)
            path.write_bytes(b"not now " * 100)
            os.utime(path, (0, time.time()))  # so that it is seen when one is read
        processes.wait_until(lambda: any(path.stat().st_atime for path in hidden), 10.0)
        time.sleep(trial.rng.uniform(0.0, 0.5))
        seen = any(path.stat().st_atime for path in hidden)
        for path, aside in hidden.items():
            aside.replace(path)
        return seen

    with trial.striking(strike, after=lambda: bool(processes.actors("BlockReader"))):
        wall_s = trial.run(trial.pool(), input=own)
    return trial.outcome(wall_s)


def input_damaged(trial: Trial) -> Outcome:
    """Damage a row group of the input for good: its rows, and no others, must fail."""
    own = _own_input(trial)
    path = trial.rng.choice(parquet_files(own))
    with pq.ParquetFile(path) as file:
        n_groups = file.metadata.num_row_groups
        group = trial.rng.randrange(n_groups)
        place = file.schema_arrow.names.index("payload")
        column = file.metadata.row_group(group).column(place)
        rows = file.read_row_group(group, columns=["example_id"]).column(0).to_pylist()
        start = column.data_page_offset + 1000
    with path.open("r+b") as raw:
        raw.seek(start)
        raw.write(os.urandom(4096))
    wall_s = trial.run(trial.pool(), input=own)
    trial.struck = 1
    return trial.outcome(wall_s, frozenset(rows))


def driver_killed(trial: Trial) -> Outcome:
    """Kill the process that asked for the run; ask again, with resume."""
    pool, policy = trial.pool(), trial.folder / "policy.json"
    policy.write_text(trial.cascade.policy.to_json())
    address = ray.get_runtime_context().gcs_address
    words = [pool, policy, trial.cascade.input, trial.out, address]
    command = [sys.executable, "-m", "jobs.faults.driver", *map(str, words)]
    started = time.perf_counter()
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def strike() -> bool:
        if not (trial.out / "run.json").exists():
            return False
        driver.kill()
        return driver.wait() < 0

    with trial.striking(strike):
        driver.wait(120)
        processes.wait_until(lambda: trial.struck > 0, 5.0)
    wall_s = time.perf_counter() - started
    if not trial.struck and driver.returncode:
        raise AssertionError(f"the driver ended by itself with {driver.returncode}")
    return trial.outcome(wall_s + trial.run(pool, resume=True))


def trouble_loading(how: str) -> Callable[[Trial], Outcome]:
    """Have replicas of the last stage die while they load, or be slow to, and one more die later."""

    def put_into(trial: Trial) -> Outcome:
        with trial.striking(lambda: trial.kill(stage=2)):
            wall_s = trial.run(trial.pool({2: {"loading": how, "times": 3}}))
        n_killed = trial.struck
        trial.model_struck()
        trial.struck += n_killed
        return trial.outcome(wall_s)

    return put_into


def stage_down(trial: Trial) -> Outcome:
    """Kill the last stage for good at some moment: the run ends, and is resumed once the stage is well."""
    with trial.striking(lambda: _take_down(trial, 2)):
        wall_s = trial.run_badly(trial.pool({2: {"loading": "down"}}, **_SOON_DOWN), "has had no live replica for")
    n_left = processes.left_over()
    (trial.notes / "down").unlink(missing_ok=True)  # on a busy machine the stage may be down before anything strikes it
    outcome = trial.outcome(wall_s + trial.run(trial.pool(), resume=True))
    return replace(outcome, left_over=outcome.left_over + n_left)


def stage_down_degrade(trial: Trial) -> Outcome:
    """Kill the last stage for good at some moment: rows that still need it are answered without it, and say so."""
    with trial.striking(lambda: _take_down(trial, 2)):
        pool = trial.pool({2: {"loading": "down"}}, **_SOON_DOWN, on_failure="degrade")
        wall_s = trial.run(pool)
    outcome = trial.outcome(wall_s)
    return replace(outcome, struck=min(outcome.struck, outcome.seen.degraded))


def _take_down(trial: Trial, stage: int) -> bool:
    """Kill all replicas of a stage, and every one that loads from now on. Returns whether there was one."""
    if not processes.replicas(trial.notes, stage):
        return False
    (trial.notes / "down").touch()
    for process in processes.replicas(trial.notes, stage):
        with suppress(psutil.Error):
            process.kill()
    return True


def _own_input(trial: Trial) -> Path:
    """Return a copy of the input that may be damaged."""
    return Path(shutil.copytree(trial.cascade.input, trial.folder / "input"))


KINDS = (
    Kind("replica-killed", "stage 1", replica_killed(0)),
    Kind("replica-killed-last", "last stage", replica_killed(2)),
    Kind("replicas-killed", "last stage, all 6 at once", all_replicas_killed, pool=_MANY),
    Kind("replica-hangs", "stage 2", replica_hangs),
    Kind("replica-hangs-on", "stage 2", turns_bad(1, "hangs", 1, call_timeout_s=2.0)),
    Kind("replica-turns-bad", "stage 2", turns_bad(1, "raises", 1)),
    Kind("replica-turns-nan", "stage 1", turns_bad(0, "nan", 1)),
    Kind("replica-turns-shape", "last stage", turns_bad(2, "shape", 1)),
    Kind("replica-turns-deadly", "stage 2", turns_bad(1, "dies", 2)),
    Kind("replicas-turn-bad", "last stage, 4 of 6", turns_bad(2, "length", 4, **_MANY), pool=_MANY),
    Kind("bad-for-a-while", "stage 2, all replicas", bad_for_a_while),
    Kind("nan", "every stage", rubbish("nan")),
    Kind("shape", "every stage", rubbish("shape")),
    Kind("length", "every stage", rubbish("length")),
    Kind("raises", "every stage", rubbish("raises")),
    Kind("row-raises", "stage 2", guilty_rows("raises", 3)),
    Kind("row-kills", "stage 2", guilty_rows("dies", 1)),
    Kind("dies-loading", "last stage", trouble_loading("dies")),
    Kind("slow-loading", "last stage", trouble_loading("slow")),
    Kind("stage-down", "last stage, resumed", stage_down),
    Kind("stage-down-degrade", "last stage", stage_down_degrade),
    Kind("input-away", "input", input_away),
    Kind("input-damaged", "input", input_damaged),
    Kind("reader-killed", "reader", actor_killed("BlockReader", 2)),
    Kind("controller-killed", "controller", actor_killed("RunController", 1)),
    Kind("driver-killed", "driver, resumed", driver_killed),
)
