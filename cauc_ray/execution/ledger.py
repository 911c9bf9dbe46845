"""The folder that a run leaves: its record, predictions and failed rows in parts, the ledger of model calls."""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from cauc_ray.cascade.rows import Call, CallResult, Owner
from cauc_ray.data.blocks import ids_digest
from cauc_ray.errors import ConfigError
from cauc_ray.execution import commits
from cauc_ray.execution.commits import Claim, FailedBlock, FinishedBlock, Parts, PartWriter, Sink, failed_rows
from cauc_ray.files.documents import make_folder, read_model, write_json
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath, visible
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.predictions import predictions_table

LEDGER_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("stage", pa.string()),
        ("replica", pa.int32()),
        ("node", pa.string()),
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("batch", pa.int32()),
        ("accepted", pa.int32()),
        ("deferred", pa.int32()),
        ("queue_s", pa.float64()),
        ("compute_s", pa.float64()),
        ("device_s", pa.float64()),
        ("cost", pa.float64()),
        ("attempt", pa.int32()),
        ("bytes_out", pa.int64()),
        ("bytes_in", pa.int64()),
    ]
)
FORMAT: Literal["cauc-run/5"] = "cauc-run/5"
# The replicas of a run's next attempt are numbered on from here.
ATTEMPT_REPLICAS = 100_000


class RunRecord(BaseModel):
    """The record of a run in its folder (run.json), so that only the same run can be resumed.

    Attributes:
        format: Its version.
        run_id: The run's id.
        policy_id: The policy's id.
        block_rows: Most rows in a block of input.
        input: Rows of the input by a name that changes with its content.
        costs: Costs of the policy's calls, which its id leaves out; None if calls report their own.
        models: Stage names to the identities of their models; empty in records of earlier versions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cauc-run/5"] = FORMAT
    run_id: str
    policy_id: str
    block_rows: int
    input: dict[str, int]
    costs: tuple[float, ...] | None = None
    models: dict[str, str] = {}


def new_record(policy_id: str, block_rows: int, input_rows: dict[str, int], **facts: Any) -> RunRecord:
    """Return the record of a run that starts now; its id is the time in UTC and a few random digits."""
    run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    return RunRecord(run_id=run_id, policy_id=policy_id, block_rows=block_rows, input=input_rows, **facts)


def read_record(out: AnyPath) -> RunRecord:
    """Return the record of the run in a folder. Raises CaucError as read_model does, where it is of another version."""
    return read_model(out / "run.json", RunRecord, FORMAT)


def resumed_record(out: AnyPath, now: RunRecord) -> RunRecord:
    """Return the record of the run in a folder, which must be of the policy, input and models of now.

    Its blocks are as they were. Raises ConfigError without a run, and for one of something else.
    """
    if not (out / "run.json").is_file():
        raise ConfigError(f"{out} has no run to resume; remove --resume to start one")
    record = read_record(out)
    for what, of in (("policy_id", "policy"), ("input", "input"), ("costs", "policy with other costs")):
        if getattr(record, what) != getattr(now, what):
            raise ConfigError(f"the run in {out} has another {of}; start a new run in another folder")
    for stage, model in record.models.items():
        if now.models.get(stage) != model:
            raise ConfigError(
                f"the run in {out} has another model, or one with other settings, at stage {stage!r}; give the stage "
                "its earlier model, or start a new run in another folder"
            )
    return record


def parts_of(out: AnyPath) -> Parts:
    """Return where a run's folder has its rows."""
    return Parts(out / "predictions", out / "failed", out / "manifest")


def new_claim(out: AnyPath) -> Claim:
    """Return the claim of a run's next attempt, whose number is above those in its ledger."""
    files = visible(out / "ledger") if (out / "ledger").is_dir() else []
    numbers = [int(match[1]) for file in files if (match := re.match(r"attempt-(\d+)-", file.name))]
    return Claim(out, 1 + max(numbers, default=-1))


class RunTables(Sink):
    """Writes a run's tables: predictions and failed rows in parts, and before each the calls that were made."""

    def __init__(
        self,
        out: AnyPath,
        record: RunRecord,
        stages: Sequence[str],
        *,
        degrade: bool,
        names: Sequence[str] | None = None,
        sources: Sequence[str] | None = None,
        claim: Claim | None = None,
        retried: Mapping[int, FailedBlock] | None = None,
    ) -> None:
        """Take a run's results.

        Args:
            out: The run's folder.
            record: Its record.
            stages: The names of its stages.
            degrade: Whether predictions have a column `degraded`.
            names: Names of the options, None if unknown.
            sources: What the confidences of each stage are based on, where stages answer in words; else None.
            claim: The attempt's; None for that of a new run.
            retried: Blocks that are committed, of which only failed rows are done again.
        """
        self.commit_s = commits.COMMIT_S
        self._out, self._record, self._stages, self._degrade = out, record, tuple(stages), degrade
        self._names, self._sources = names, sources
        self._retried = retried or {}
        self._claim = claim or new_claim(out)
        self._new, self._again = (PartWriter(parts_of(out), self._claim, retries=again) for again in (False, True))
        self._calls: list[tuple[object, ...]] = []  # as dicts they would take twice the memory
        self._n_written, self._has_record = 0, False

    @property
    def n_bytes(self) -> int:
        """Return what is not written yet of predictions and failed rows."""
        return self._new.n_bytes + self._again.n_bytes

    def add_call(self, call: Call, result: CallResult, collected: object) -> None:
        """Note a batch of a call. A failed one, or a probe, accepted and deferred nothing and cost nothing."""
        self._write_record()
        # Calls have the controller's clock, which no one sets; started_at is the replica's time of day.
        ready_at = call.ready_at + time.time() - time.monotonic()
        n_accepted, n_deferred, cost = int(result.accepted.sum()), result.n_deferred, float(result.costs.sum())
        if call.probe:
            n_accepted, n_deferred, cost = 0, 0, 0.0
        self._calls.append(
            (
                self._record.run_id,
                self._stages[call.stage],
                self._claim.number * ATTEMPT_REPLICAS + call.replica,
                result.node,
                int(1e6 * result.started_at),
                len(call) if result.error is not None else len(result.accepted),
                n_accepted,
                n_deferred,
                max(0.0, result.started_at - ready_at),
                result.compute_s,
                result.device_s,
                cost,
                call.attempt,
                None if result.wire is None else result.wire.bytes_out,
                None if result.wire is None else result.wire.bytes_in,
            )
        )

    def add_block(self, block: Owner, example_ids: pa.Array, labels: Ints | None) -> None:
        """Take a block that is done. One whose rows have all failed has a predictions table without rows."""
        self._write_record()
        answered = block.stages >= 0
        answered_labels = None if labels is None else labels[answered]
        table = predictions_table(
            example_ids.filter(pa.array(answered)),
            block.predictions[answered],
            block.confidences[answered],
            block.stages[answered],
            block.costs[answered],
            answered_labels,
            self._names,
        )
        if self._sources is not None:
            texts = np.full(block.n, None) if block.texts is None else block.texts
            sources = np.array([*self._sources, None], dtype=object)[block.sources]  # None of stage -1
            table = table.append_column("answer", pa.array(texts[answered], pa.string()))
            table = table.append_column("source", pa.array(sources[answered], pa.string()))
        if self._degrade:
            table = table.append_column("degraded", pa.array(block.degraded[answered]))
        names = example_ids.to_pylist()
        reasons = [(row, self._stages[at] if at >= 0 else None, reason) for row, (at, reason) in block.failures.items()]
        failed, by_stage = failed_rows(names, reasons)
        before = self._retried.get(block.block)
        digest = "" if by_stage[""] else ids_digest(names)  # what could not be read has no ids to be compared
        failed_at = block.failures.keys() if before is None else [before.rows[row] for row in block.failures]
        if before is not None:
            by_stage.subtract(before.by_stage)
        costs = block.costs[answered]
        totals: dict[str, Mapping[str, float]] = {
            "answered": Counter({name: int((block.stages == at).sum()) for at, name in enumerate(self._stages)}),
            "called": Counter(
                {name: int((block.visited[answered] >> at & 1).sum()) for at, name in enumerate(self._stages)}
            ),
            "failed": by_stage,
            "rows": {
                "degraded": int(block.degraded[answered].sum()),
                "labelled": 0 if answered_labels is None else int((answered_labels >= 0).sum()),
                "right": 0 if answered_labels is None else int((block.predictions[answered] == answered_labels).sum()),
            },
            "cost": {"sum": float(costs.sum()), "squares": float(np.square(costs).sum())},
        }
        (self._new if before is None else self._again).add(
            FinishedBlock(block.block, table, failed, sorted(failed_at), digest if before is None else None, totals)
        )

    def commit(self) -> None:
        """Write what has been taken: first the calls that led there."""
        if self._calls:
            make_folder(self._out / "ledger")
            name = f"attempt-{self._claim.number:03d}-{self._claim.token}-{self._n_written:06d}.parquet"
            columns = zip(zip(*self._calls, strict=True), LEDGER_SCHEMA.types, strict=True)
            table = pa.Table.from_arrays([pa.array(values, kind) for values, kind in columns], schema=LEDGER_SCHEMA)
            write_parquet(self._out / "ledger" / name, table)
            self._calls, self._n_written = [], self._n_written + 1
        self._new.commit()
        self._again.commit()

    def _write_record(self) -> None:
        """Write the run's record before anything else: without it the run cannot be resumed."""
        if not self._has_record:
            make_folder(self._out)
            self._claim.require()
            write_json(self._out / "run.json", self._record.model_dump())
            self._has_record = True
