"""Measure a policy on labelled rows, live or on saved logits: `python -m jobs.evaluate --config FILE`."""

from __future__ import annotations

import sys
from typing import Any

from cauc_ray.api import online
from cauc_ray.api.config import Location
from cauc_ray.api.evaluated import evaluation_summary
from cauc_ray.api.options import EvaluateOptions
from cauc_ray.api.sharding import evaluate_shards
from cauc_ray.cli import show
from cauc_ray.errors import CaucError
from cauc_ray.execution.progress import RunProgress
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath
from cauc_ray.policies.policy import Policy
from jobs.calibrate import ShardedJob, chain_files
from jobs.job import Job, JobConfig, JobResult, JobRun, main, pool_files


class LiveEvaluation(JobConfig):
    """A live run of a policy's cascade, as `cauc run` has it; its tables are in run/ of the output.

    input: Parquet with example_id, or images, a file or folder.
    """

    pool: Location
    policy: Location
    input: Location

    def inputs(self) -> set[AnyPath]:
        """Return the files, and what the pool's models come from."""
        return {self.policy, self.input, *pool_files(self.pool)}


class SavedEvaluation(ShardedJob, EvaluateOptions):
    """A replay on a split of a logit table, as `cauc evaluate` has it; its answers are predictions.parquet."""

    logits: Location
    policy: Location

    def inputs(self) -> set[AnyPath]:
        """Return the policy and its chain's part of the table."""
        try:
            models = Policy.load(self.policy).models
        except CaucError:  # work() says so
            return {self.policy}
        return {self.policy, *chain_files(self.logits, models, (self.split,))}


def work(config: LiveEvaluation | SavedEvaluation, run: JobRun) -> JobResult:
    """Measure the policy."""
    return _live(config, run) if isinstance(config, LiveEvaluation) else _replayed(config, run)


def _replayed(config: SavedEvaluation, run: JobRun) -> JobResult:
    """Replay the policy by shards."""
    options = {**config.sharding(run), **EvaluateOptions.chosen(dict(config))}
    evaluation, shards = evaluate_shards(str(config.logits), Policy.load(config.policy), **options)
    write_parquet(run.folder / "predictions.parquet", evaluation.to_arrow())
    summary = evaluation_summary(evaluation)
    results = {**summary, "n_shards": len(shards.nodes), "nodes": shards.nodes, "peak_bytes": shards.peak_bytes}
    return JobResult(results, lambda: show.evaluation(summary))


def _live(config: LiveEvaluation, run: JobRun) -> JobResult:
    """Run the cascade, going on with what an earlier attempt has committed."""

    def on_progress(progress: RunProgress) -> None:
        run.progress.report(progress.n_finished, progress.n_rows, "rows")

    out = run.folder / "run"
    summary = online.run(
        str(config.pool),
        Policy.load(config.policy),
        str(config.input),
        str(out),
        resume=(out / "run.json").is_file(),
        address=run.address,
        on_progress=on_progress,
    )
    n_failed = summary["n_failed"]
    failed = (f"{n_failed:,} rows, see {out}/failed",) if n_failed else ()
    return JobResult(summary, lambda: show.run_summary(summary), failed)


JOB: Job[Any] = Job("evaluate", "Measure a policy on labelled rows.", (LiveEvaluation, SavedEvaluation), work)

if __name__ == "__main__":
    sys.exit(main(JOB, sys.argv[1:]))
