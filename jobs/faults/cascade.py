"""The cascade that faults are put into: its input, its pool, and what must come out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

import cauc_ray
from cauc_ray.data.table_info import PoolModel, TableInfo, write_info
from cauc_ray.data.writing import write_logits
from cauc_ray.execution import manifest, runner
from cauc_ray.files.documents import write_text
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.policy import Policy
from jobs.faults.models import N_OPTIONS

COSTS = {"small": 1.0, "middle": 4.0, "large": 16.0}
STRENGTHS = (1.0, 1.8, 2.6)
SECONDS = (0.04, 0.08, 0.16)
BATCH_ROWS = 32
# A block's rows: so few that a run of some seconds commits many blocks.
BLOCK_ROWS = 64
ROW_GROUP_ROWS = 4 * BLOCK_ROWS
# Numbers in a row's payload, so many that the rows a call defers are an object of their own in the store.
PAYLOAD = 4096

Row = dict[str, Any]


def small_blocks() -> None:
    """Have runs of this process commit blocks of few rows, each at once."""
    runner.BLOCK_ROWS, manifest.COMMIT_S = BLOCK_ROWS, 0.0


@dataclass(frozen=True, slots=True)
class Cascade:
    """What runs are of, and what they must end with.

    expected: every row's answer, of the offline replay, by example_id.   degraded: the answer of a row that reaches
    the last stage and is answered without it.
    """

    input: Path
    policy: Policy
    expected: Mapping[str, Row]
    degraded: Mapping[str, Row]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a run's rows differ from what they must be.

    wrongly_failed: failed without a reason, or answered where there was one.   degraded: rows answered without a
    stage, rightly.   repeated: rows that a stage computed more than once.
    """

    lost: int
    duplicated: int
    different: int
    wrongly_failed: int
    degraded: int
    repeated: int

    @property
    def is_sound(self) -> bool:
        """Say whether nothing is wrong."""
        return not (self.lost or self.duplicated or self.different or self.wrongly_failed)


def write_cascade(folder: Path, n: int, *, files: int = 5) -> Cascade:
    """Plant n rows in a folder: their logit table, a policy fitted on others, and the input of runs.

    Row groups hold whole blocks where each file's rows do.
    """
    table = folder / "LOGITS"
    for seed, split in enumerate(("calibration", "validation", "test")):
        labels, logits = _planted(np.random.default_rng(seed), n if split == "test" else 1000)
        ids = [f"{split}-{row}" for row in range(len(labels))]
        for model, own in zip(COSTS, logits, strict=True):
            write_logits(table, model, split, example_ids=ids, labels=labels, logits=own)
    models = [PoolModel(name=name, cost=cost) for name, cost in COSTS.items()]
    write_info(table, TableInfo(cost_unit="GFLOPs", logit_kind="raw", models=models))
    policy = cauc_ray.fit(table, models=list(COSTS), method="rf", budget=8.0)
    payload = np.random.default_rng(9).standard_normal((n, PAYLOAD)).astype(np.float32)
    for place, own in enumerate(logits):
        payload[:, N_OPTIONS * place : N_OPTIONS * (place + 1)] = own
    (folder / "input").mkdir()
    for number, rows in enumerate(np.array_split(np.arange(n), files)):
        values = pa.FixedSizeListArray.from_arrays(pa.array(payload[rows].ravel()), PAYLOAD)
        part = pa.table({"example_id": [ids[row] for row in rows], "label": labels[rows], "payload": values})
        path = folder / "input" / f"{number}.parquet"
        pq.write_table(part, path, row_group_size=ROW_GROUP_ROWS, use_dictionary=False, write_page_checksum=True)
    expected = {row["example_id"]: row for row in cauc_ray.evaluate(table, policy).to_arrow().to_pylist()}
    return Cascade(folder / "input", policy, expected, _without_last(policy, logits, expected))


def write_pool(path: Path, notes: Path, faults: Mapping[int, Mapping[str, Any]], **options: Any) -> Path:
    """Write the pool whose models note what they do in a folder.

    faults: what a stage's model is told beside.   options: of the pool (on_failure), of one stage (by its name), else
    of every stage.
    """
    whole = {"on_failure": options.pop("on_failure")} if "on_failure" in options else {}
    of_one = {name: options.pop(name, {}) for name in COSTS}
    stages = []
    for place, name in enumerate(COSTS):
        told = {"place": place, "seconds": SECONDS[place], "notes": str(notes), **faults.get(place, {})}
        stages.append(
            {
                "name": name,
                "model": {"kind": "python", "factory": "jobs.faults.models:planted", "kwargs": told},
                "batch_size": BATCH_ROWS,
                "batch_wait_s": 0.3,
                "resources": {"num_cpus": 0.5},
                "replicas": {"min": 2, "max": 2},
                **options,
                **of_one[name],
            }
        )
    pool = {"name": "faults", "task": "multiple-choice", "stages": stages, **whole}
    write_text(path, yaml.safe_dump(pool))
    return path


def compare(cascade: Cascade, out: Path, must_fail: frozenset[str] = frozenset()) -> Comparison:
    """Hold all that a run left against what it must be.   must_fail: rows that no run can answer."""
    answers = _rows(out / "predictions")
    failures = {row["example_id"] for row in _rows(out / "failed")}
    by_id: dict[str, Row] = {row["example_id"]: row for row in answers}
    different = n_degraded = 0
    for example, row in by_id.items():
        degraded = row.pop("degraded", False)
        n_degraded += degraded
        different += row != (cascade.degraded if degraded else cascade.expected).get(example)
    return Comparison(
        lost=len(cascade.expected.keys() - by_id.keys() - failures),
        duplicated=len(answers)
        - len(by_id)
        + len(_rows(out / "failed"))
        - len(failures)
        + len(by_id.keys() & failures),
        different=different,
        wrongly_failed=len(failures ^ must_fail),
        degraded=n_degraded,
        repeated=n_repeated(out, answers),
    )


def n_repeated(out: Path, answers: Sequence[Row]) -> int:
    """Return the rows that stages answered or deferred beyond those that the predictions imply.

    Raises ValueError where the ledger has fewer: then it does not tell all that was done.
    """
    if not (out / "ledger").is_dir():
        return 0
    ledger = pa.concat_tables([read_parquet(file) for file in parquet_files(out / "ledger")])
    failed_at = [row["stage"] for row in _rows(out / "failed")]
    repeated = 0
    for place, name in enumerate(COSTS):
        own = ledger.filter(pc.equal(ledger.column("stage"), name))
        done = sum(pc.sum(own.column(column)).as_py() or 0 for column in ("accepted", "deferred"))
        implied = sum(row["stage"] >= place for row in answers)
        implied += sum(at is not None and list(COSTS).index(at) > place for at in failed_at)
        if done < implied:
            raise ValueError(f"the ledger of {out} has {done} rows at {name!r}, the predictions imply {implied}")
        repeated += done - implied
    return repeated


def _planted(rng: np.random.Generator, n: int) -> tuple[Any, list[Floats]]:
    labels = rng.integers(0, N_OPTIONS, n).astype(np.int32)
    logits = []
    for strength in STRENGTHS:
        own = rng.standard_normal((n, N_OPTIONS))
        own[np.arange(n), labels] += rng.normal(strength, 1.5, n)
        logits.append(own.astype(np.float32))
    return labels, logits


def _without_last(policy: Policy, logits: Sequence[Floats], expected: Mapping[str, Row]) -> dict[str, Row]:
    state = None
    reached = np.arange(len(expected))
    for place in range(len(logits) - 1):
        step = policy.step(place, logits[place][reached], state)
        deferred = ~step.accepted
        state, reached = step.state[deferred], reached[deferred]
    cost = np.float32(sum(stage.cost for stage in policy.stages[:-1]))
    answers = zip(reached, step.predictions[deferred], step.confidences[deferred], strict=True)
    return {
        f"test-{row}": expected[f"test-{row}"]
        | {
            "prediction": int(prediction),
            "confidence": float(np.float32(confidence)),
            "stage": len(logits) - 2,
            "cost": float(cost),
        }
        for row, prediction, confidence in answers
    }


def _rows(folder: Path) -> list[Row]:
    if not folder.is_dir() or not any(folder.glob("*.parquet")):
        return []
    found: list[Row] = pa.concat_tables([read_parquet(file) for file in parquet_files(folder)]).to_pylist()
    return found
