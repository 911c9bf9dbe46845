"""The cascade that faults are put into: its input, its pool, and what is wrong in answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import cauc_ray
from jobs.bench.planted import planted_logits, write_input, write_pool, write_split
from jobs.faults.models import N_OPTIONS, NUMBER

COSTS = {"small": 1.0, "middle": 4.0, "large": 16.0}
STRENGTHS = (1.0, 1.8, 2.6)
SECONDS = (0.04, 0.08, 0.16)
BATCH_ROWS = 32
# A block's rows: so few that a run of some seconds commits many blocks.
BLOCK_ROWS = 64
# Numbers in a row's payload, so many that the rows a call defers are an object of their own in the store.
PAYLOAD = 4096

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cascade:
    """What runs and services are of, and what they must answer.

    expected: every row's answer, of the offline replay, by example_id.   at: the answer of every row that stops at
    each stage.   heads: the beginning of each row's payload, with all that models look at.
    """

    input: Path
    policy: Path
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
    expected = {row["example_id"]: row for row in cauc_ray.evaluate(table, policy).to_arrow().to_pylist()}
    state, cost, at = None, 0.0, []
    for stage, own in enumerate(logits):
        step = policy.step(stage, own, state)
        state, cost = step.state, cost + policy.stages[stage].cost
        confidences = np.asarray(step.confidences, np.float32).tolist()
        answers = zip(ids, step.predictions.tolist(), confidences, strict=True)
        at.append({one: {"prediction": p, "confidence": c, "stage": stage, "cost": cost} for one, p, c in answers})
    heads = dict(zip(ids, payload[:, : NUMBER + 1].tolist(), strict=True))
    return Cascade(folder / "input", folder / "policy.json", expected, at, heads)


def pool_file(path: Path, notes: Path, *, on_failure: str, **options: Any) -> Path:
    """Write the pool whose models note what they do in a folder.   options: of one stage (by its name), else of all."""
    of_one = {name: options.pop(name, {}) for name in COSTS}
    whole = {"batch_size": BATCH_ROWS, "batch_wait_s": 0.3, "replicas": {"min": 2}, "resources": {"num_cpus": 0.5}}
    stages = []
    for stage, name in enumerate(COSTS):
        kwargs = {"stage": stage, "seconds": SECONDS[stage], "notes": str(notes)}
        model = {"kind": "python", "factory": "jobs.faults.models:planted", "kwargs": kwargs}
        stages.append({"name": name, "model": model, **whole, **options, **of_one[name]})
    serving = {"router": {"replicas": {"min": 2}, "resources": {"num_cpus": 0.1}}}
    return write_pool(path, stages, name="faults", on_failure=on_failure, serving=serving)


def compare(
    cascade: Cascade,
    asked: Collection[str],
    answers: Sequence[Row],
    failed: Collection[str],
    must_fail: Collection[str] = (),
) -> dict[str, int]:
    """Hold answers against the replay, and count those that differ from it.

    asked: an example_id for each row, of which some must_fail. Returns the rows that were lost, doubled, different,
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
        different += any(value != truth[key] for key, value in row.items())
        n_whole += not degraded and example in must_fail
    return {
        "lost": (Counter(asked) - ended).total(),
        "doubled": (ended - Counter(asked)).total(),
        "different": different,
        "wrongly_failed": sum(example not in must_fail for example in failed) + n_whole,
        "degraded": sum(row.get("degraded", False) for row in answers),
    }


def read_rows(folder: Path) -> list[Row]:
    """Return the rows of a run's predictions or failures, if there are any."""
    found: list[Row] = pq.read_table(folder).to_pylist() if any(folder.glob("*.parquet")) else []
    return found
