"""Collect models' logits on a labelled dataset into a logit table: `python -m jobs.collect --config FILE`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from cauc_ray.api.collecting import collect
from cauc_ray.api.config import Location, folder_of, located
from cauc_ray.cli import show
from cauc_ray.data.benchmarks import BENCHMARKS
from cauc_ray.execution.progress import RunProgress
from cauc_ray.files.paths import AnyPath, RemotePath, path_of
from jobs.job import Job, JobConfig, JobResult, JobRun, main, pool_files


def _dataset(name: str, info: ValidationInfo) -> str:
    """Take the path in a dataset's name from the config's folder."""
    benchmark, is_named, path = name.partition("=")
    if is_named and benchmark in BENCHMARKS:
        return f"{benchmark}={located(path, info)}" if path else name
    if name in BENCHMARKS or name.startswith("hub:"):
        return name
    return str(located(name, info))


def _located_if_there(name: str, info: ValidationInfo) -> str:
    """Take an encoder for a folder where there is one, else for a name."""
    path = folder_of(info) / name
    return str(path.resolve()) if path.exists() else name


class CollectJob(JobConfig):
    """What `cauc collect` is told.

    output: the logit table.   dataset: a benchmark by name, NAME=PATH, the path of a file or folder, or hub:ORG/NAME.
    split: only this one.   models: only these of the pool.   columns: the dataset's own names.   embedding: an
    encoder, whose embeddings are collected into the table after the logits.   seed: of the splits.
    """

    pool: Location
    dataset: Annotated[str, AfterValidator(_dataset)]
    split: str | None = None
    models: tuple[str, ...] | None = Field(default=None, min_length=1)
    columns: dict[str, str] = Field(default_factory=dict)
    embedding: Annotated[str, AfterValidator(_located_if_there)] | None = None
    seed: int = Field(default=0, ge=0)

    def inputs(self) -> set[AnyPath]:
        """Return the pool and what its models come from, and dataset and encoder where they are paths."""
        name, _, path = self.dataset.partition("=")
        named = (path if name in BENCHMARKS else self.dataset, *([] if self.embedding is None else [self.embedding]))
        paths = {at for at in map(path_of, named) if isinstance(at, RemotePath) or at.is_absolute()}
        return paths | pool_files(self.pool)

    def fixed(self) -> set[AnyPath]:
        """Return all but the pool's file: rows are kept by their model's settings, whatever else it says."""
        return self.inputs() - {self.pool}


def work(config: CollectJob, run: JobRun) -> JobResult:
    """Collect the logits, then the embeddings; what the table holds already is not asked for again."""

    def on_progress(models: Mapping[str, RunProgress]) -> None:
        totals = [model.n_rows for model in models.values()]
        known = [total for total in totals if total is not None]
        done = sum(model.n_finished for model in models.values())
        run.progress.report(done, sum(known) if len(known) == len(totals) else None, "rows")

    def collected(**what: Any) -> dict[str, Any]:
        return collect(
            str(config.pool),
            config.dataset,
            str(run.folder),
            split=config.split,
            columns=config.columns,
            seed=config.seed,
            address=run.address,
            on_progress=on_progress,
            **what,
        )

    summary = collected(models=config.models)
    parts = [summary]
    if config.embedding is not None:
        parts.append(collected(embedding=config.embedding))
        summary = {**summary, "embedding": parts[-1]}
    failed = tuple(
        f"{model['name']}: {model['n_failed']:,} rows, see {run.folder}/failed"
        for part in parts
        for model in part["models"]
        if model["n_failed"]
    )

    def show_parts() -> None:
        for part in parts:
            show.collected(part)

    return JobResult(summary, show_parts, failed)


JOB = Job("collect", "Collect models' logits on a labelled dataset.", (CollectJob,), work)

if __name__ == "__main__":
    sys.exit(main(JOB, sys.argv[1:]))
