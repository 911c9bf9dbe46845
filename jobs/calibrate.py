"""Fit a policy on logits that need not fit in one process: `python -m jobs.calibrate --config FILE`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from cauc_ray.api import tables
from cauc_ray.api.config import Location
from cauc_ray.api.options import FitOptions, Names
from cauc_ray.api.sharding import calibrate
from cauc_ray.cli.show_policy import show_policy
from cauc_ray.data.logits import FAILED
from cauc_ray.execution.sharded import DEADLINE_S
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.resources import Resources
from jobs.job import Job, JobConfig, JobResult, JobRun, main

POLICY = "policy.json"


class ShardedJob(JobConfig):
    """How a job cuts the logits that it reads.

    shards: actors that hold them, as many as the cluster has room for where this is left out.   resources: what each
    occupies, and the labels of the nodes that it may stand on.   deadline_s: for one answer of all shards.
    """

    BY_CONTENT = True

    shards: int | None = Field(default=None, ge=1)
    resources: Resources = Resources()
    deadline_s: float = Field(default=DEADLINE_S, gt=0)

    def sharding(self, run: JobRun) -> dict[str, Any]:
        """Return what calibrate() and evaluate_shards() are told of it."""

        def report(n_passes: int) -> None:
            run.progress.report(n_passes, None, "passes over all shards")

        own = {name: getattr(self, name) for name in ("shards", "resources", "deadline_s")}
        return {**own, "address": run.address, "on_pass": report}


def chain_files(logits: AnyPath, models: Sequence[str], splits: Sequence[str]) -> set[AnyPath]:
    """Return what is read of a table for some models on some splits."""
    parts = {table / f"model={model}" for table in (logits, logits / FAILED) for model in models}
    return {logits / "pool.json"} | {part / f"split={split}" for part in parts for split in splits}


class CalibrateJob(ShardedJob, FitOptions):
    """What `cauc fit` is told, but search and a validation share; the policy is policy.json of the output."""

    logits: Location
    models: Names = Field(min_length=1, description="the chain, cheapest first")

    def inputs(self) -> set[AnyPath]:
        """Return the chain's part of the table."""
        return chain_files(self.logits, self.models, self.splits)


def work(config: CalibrateJob, run: JobRun) -> JobResult:
    """Fit the policy."""
    found = calibrate(str(config.logits), **config.sharding(run), **FitOptions.chosen(dict(config)))
    found.policy.save(run.folder / POLICY)
    results = {
        "policy": str(run.folder / POLICY),
        "policy_id": found.policy.id,
        "n_rows": list(found.n_rows),
        "n_shards": len(found.shards.nodes),
        "nodes": found.shards.nodes,
        "n_passes": found.shards.n_passes,
        "peak_bytes": found.shards.peak_bytes,
        "start_s": found.shards.start_s,
        "read_s": found.read_s,
        "open_s": found.shards.open_s,
        "fit_s": found.fit_s,
    }

    def show_result() -> None:
        show_policy(found.policy)
        tables.line(
            f"{found.shards.n_passes} passes over {len(found.shards.nodes)} shards in {found.fit_s:.1f} s, after "
            f"{found.read_s + found.shards.open_s:.1f} s of reading; a shard took "
            f"{max(found.shards.peak_bytes) / 1e6:.0f} MB at most"
        )

    return JobResult(results, show_result)


JOB = Job("calibrate", "Fit a policy on logits that stay in shards.", (CalibrateJob,), work)

if __name__ == "__main__":
    sys.exit(main(JOB, sys.argv[1:]))
