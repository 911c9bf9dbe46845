"""The cascade that faults are put into: its misbehaving models, its input, and what is wrong in answers."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import cauc_ray
from cauc_ray.files.parquet import parquet_below, read_parquet
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.policy import Policy
from jobs.bench.planted import planted_logits, write_input, write_pool, write_split

N_OPTIONS = 4
# Where in a row's payload its number is, behind the logits of three stages.
NUMBER = 3 * N_OPTIONS
# Options of a model whose answers are so large that they stay on its node, and the logits of all but a few of them.
WIDE, FILLER = 2000, np.float32(-9.0)
# A model that hangs does so for longer than any deadline of a trial.
HANGS_S = 600.0
# How likely each call is to be one of a few.
CHANCE = 0.25
COSTS = {"small": 1.0, "middle": 4.0, "large": 16.0}
STRENGTHS = (1.0, 1.8, 2.6)
SECONDS = (0.04, 0.08, 0.16)
BATCH_ROWS = 32
# A block's rows: so few that a run of some seconds commits many blocks.
BLOCK_ROWS = 64
# Numbers in a row's payload, so many that the rows a call defers are an object of their own in the store.
PAYLOAD = 4096
Row = dict[str, Any]


def give_order(notes: Path, stage: int, **order: Any) -> bool:
    """Order what the models of a stage do from now on, in all of its processes. Returns True.

    Args:
        notes: The folder of their notes.
        stage: The stage.
        order: `does` ("nan", "shape", "length", "raises", "hangs" or "dies"), and when. `calls`: in this many of
            the next ones, at random. `replicas`: in all calls of this many processes. `until`: in all calls before this
            time. `rows`: whenever a batch has one of these numbers. `loads`: this many of the next processes die
            while they load.
    """
    written = notes / f".order-{stage}"
    written.write_text(json.dumps(order))
    return written.rename(notes / f"order-{stage}").exists()


def planted(
    stage: int, seconds: float, notes: str, n_options: int = N_OPTIONS, shift: int = 0, load_s: float = 0.0
) -> Callable[[Batch], object]:
    """Answer with a stage's logits, from the input's payload, after some seconds.

    Args:
        stage: The stage.
        seconds: How long a call takes.
        notes: A folder with orders, where every process notes itself and each fault.
        n_options: Options of a row; those beyond the planted ones are as unlikely as FILLER.
        shift: Places by which the planted ones are shifted.
        load_s: How long the model takes to load.
    """
    folder = Path(notes)
    time.sleep(load_s)
    order = _order(folder, stage)
    if _claim(folder / f"struck-{stage}-loading", order.get("loads", 0)):
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"process-{stage}-{os.getpid()}").touch()
    is_bad = False

    def is_due(order: dict[str, Any], numbers: Floats) -> bool:
        nonlocal is_bad
        struck = folder / f"struck-{stage}"
        is_bad = is_bad or _claim(struck, order.get("replicas", 0))
        is_one = random.random() < CHANCE and _claim(struck, order.get("calls", 0))
        always = time.time() < order.get("until", 0.0) or not set(order.get("rows", ())).isdisjoint(numbers)
        if always:
            _claim(struck, 1)
        return is_bad or is_one or always

    def answer(batch: Batch) -> object:
        (folder / f"called-{stage}").touch()
        order = _order(folder, stage)
        due = is_due(order, batch["payload"][:, NUMBER])
        time.sleep(seconds)
        logits = np.full((len(batch["payload"]), n_options), FILLER, dtype=np.float32)
        of_stage = batch["payload"][:, N_OPTIONS * stage : N_OPTIONS * (stage + 1)]
        logits[:, :N_OPTIONS] = np.roll(of_stage, shift, axis=1)
        return _misbehaved(order["does"], logits) if due else logits

    return answer


def _order(folder: Path, stage: int) -> dict[str, Any]:
    path = folder / f"order-{stage}"
    order: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return order


def _misbehaved(does: str, logits: Floats) -> object:
    """Return what a fault makes of an answer, or do not return."""
    if does == "raises":
        raise RuntimeError("the device has gone away")
    if does == "hangs":
        time.sleep(HANGS_S)
    if does == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if does == "nan":
        logits[len(logits) // 2, 1] = np.nan
    return {"nan": logits, "shape": logits[:, :, None], "length": logits[:-1]}[does]


def _claim(path: Path, times: int) -> bool:
    """Say whether this is among the first to ask for a path, as many as times, of all processes."""
    for number in range(times):
        try:
            os.close(os.open(f"{path}-{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False


@dataclass(frozen=True, slots=True)
class Cascade:
    """What runs, collections and services are of, and what they must answer.

    Attributes:
        input: The folder of the input.
        policy: The policy's file.
        next_table: The test split as the models of the next version answer it, whose logits are shifted by a place.
        expected: Every row's answer, of the offline replay, by example_id.
        at: The answer of every row that stops at each stage.
        heads: The beginning of each row's payload, with all that models look at.
    """

    input: Path
    policy: Path
    next_table: Path
    expected: Mapping[str, Row]
    at: Sequence[Mapping[str, Row]]
    heads: Mapping[str, list[float]]


def write_cascade(folder: Path, n: int, *, files: int = 5) -> Cascade:
    """Plant n rows in a folder: their logit table, a policy fitted on others, and the input of runs."""
    table = folder / "LOGITS"
    for seed, split in enumerate(("calibration", "validation", "test")):
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, N_OPTIONS, n if split == "test" else 1000).astype(np.int32)
        logits = [planted_logits(rng, labels, N_OPTIONS, strength) for strength in STRENGTHS]
        ids = [f"{split}-{row}" for row in range(len(labels))]
        write_split(table, COSTS, split, ids, labels, logits)
    policy = cauc_ray.fit(table, models=list(COSTS), method="rf", budget=8.0)
    policy.save(folder / "policy.json")
    payload = np.random.default_rng(9).standard_normal((n, PAYLOAD)).astype(np.float32)
    payload[:, : NUMBER + 1] = np.hstack([*logits, np.arange(n)[:, None]])
    values = pa.FixedSizeListArray.from_arrays(pa.array(payload.ravel()), PAYLOAD)
    columns = {"example_id": ids, "label": labels, "payload": values}
    groups = {"row_group_size": 4 * BLOCK_ROWS, "use_dictionary": False, "write_page_checksum": True}
    write_input(folder / "input", columns, files=files, **groups)
    write_split(folder / "NEXT", COSTS, "test", ids, labels, [np.roll(of_stage, 1, axis=1) for of_stage in logits])
    expected = answers_of(table, policy)
    state, cost, at = None, 0.0, []
    for stage, stage_logits in enumerate(logits):
        step = policy.step(stage, stage_logits, state)
        state, cost = step.state, cost + policy.stages[stage].cost
        confidences = np.asarray(step.confidences, np.float32).tolist()
        answers = zip(ids, step.predictions.tolist(), confidences, strict=True)
        at.append({one: {"prediction": p, "confidence": c, "stage": stage, "cost": cost} for one, p, c in answers})
    heads = dict(zip(ids, payload[:, : NUMBER + 1].tolist(), strict=True))
    return Cascade(folder / "input", folder / "policy.json", folder / "NEXT", expected, at, heads)


def answers_of(table: Path, policy: Policy) -> dict[str, Row]:
    """Return a policy's answers to the test split of a logit table, by example_id."""
    return {row["example_id"]: row for row in cauc_ray.evaluate(table, policy).to_arrow().to_pylist()}


def pool_file(path: Path, notes: Path, *, on_failure: str, **options: Any) -> Path:
    """Write the pool whose models note what they do in a folder.

    options: those of planted, of one stage (by its name), else of all stages.
    """
    of_models: dict[str, Any] = {
        name: options.pop(name) for name in ("n_options", "shift", "load_s") if name in options
    }
    of_one = {name: options.pop(name, {}) for name in COSTS}
    whole = {"batch_size": BATCH_ROWS, "batch_wait_s": 0.3, "replicas": {"min": 2}, "resources": {"num_cpus": 0.5}}
    stages = []
    for stage, name in enumerate(COSTS):
        kwargs: dict[str, Any] = {"stage": stage, "seconds": SECONDS[stage], "notes": str(notes), **of_models}
        model = {"kind": "python", "factory": "jobs.faults.cascade:planted", "kwargs": kwargs}
        cost = {"seconds": COSTS[name]}
        stages.append({"name": name, "model": model, "cost": cost, **whole, **options, **of_one[name]})
    serving = {"router": {"replicas": {"min": 2}, "resources": {"num_cpus": 0.1}}}
    return write_pool(path, stages, "classification", name="faults", on_failure=on_failure, serving=serving)


def compare(
    cascade: Cascade,
    asked: Collection[str],
    answers: Sequence[Row],
    failed: Collection[str],
    must_fail: Collection[str] = (),
    of_next: Mapping[str, Row] | None = None,
) -> dict[str, int]:
    """Hold answers against the replay, and count those that differ from it.

    asked: an example_id for each row, of which some must_fail.   of_next: the answers of the next version, which are
    right as well. Returns the rows that were lost, doubled, different,
    wrongly_failed (failed without a reason, or answered whole where there was one), and degraded: answered without
    a stage and marked, which is right where the replay answers them so there.
    """
    ended = Counter(row["example_id"] for row in answers) + Counter(failed)
    different = n_whole = 0
    for row in answers:
        example, degraded = row["example_id"], row.get("degraded", False)
        truth = cascade.expected[example] | {"degraded": degraded and row["stage"] < cascade.expected[example]["stage"]}
        if truth["degraded"]:
            truth |= cascade.at[row["stage"]][example]
        truths = [truth] if of_next is None else [truth, of_next[example] | {"degraded": False}]
        different += all(any(value != right[key] for key, value in row.items()) for right in truths)
        n_whole += not degraded and example in must_fail
    return {
        "lost": (Counter(asked) - ended).total(),
        "doubled": (ended - Counter(asked)).total(),
        "different": different,
        "wrongly_failed": sum(example not in must_fail for example in failed) + n_whole,
        "degraded": sum(row.get("degraded", False) for row in answers),
    }


def compare_logits(cascade: Cascade, stage: int, answers: Sequence[Row], failed: Collection[str]) -> dict[str, int]:
    """Hold the collected logits of a stage against the planted ones, and count as compare does."""
    ended = Counter(row["example_id"] for row in answers) + Counter(failed)
    options = slice(N_OPTIONS * stage, N_OPTIONS * (stage + 1))
    different = sum(
        row["logits"] != [*cascade.heads[row["example_id"]][options], *[float(FILLER)] * (WIDE - N_OPTIONS)]
        for row in answers
    )
    asked = Counter(list(cascade.expected))
    lost, doubled = (asked - ended).total(), (ended - asked).total()
    return {"lost": lost, "doubled": doubled, "different": different, "wrongly_failed": len(failed)}


def read_rows(folder: AnyPath) -> list[Row]:
    """Return the rows of a folder of predictions, failures, calls or logits, if there are any."""
    files = parquet_below(folder) if folder.is_dir() else []
    return [row for file in files for row in read_parquet(file).to_pylist()]
