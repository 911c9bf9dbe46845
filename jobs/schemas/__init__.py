"""JSON schemas of the configs of jobs, for editors and other programs.

`python -m jobs.schemas` writes them anew beside this file.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from jobs.job import Job

# Where the JOB of each name is.
JOBS: Mapping[str, str] = {
    "bench": "jobs.bench.job",
    "calibrate": "jobs.calibrate",
    "collect": "jobs.collect",
    "evaluate": "jobs.evaluate",
    "paper": "jobs.paper",
    "sweep": "jobs.sweep",
}


def job_named(name: str) -> Job[Any]:
    """Return a job by its name."""
    job: Job[Any] = importlib.import_module(JOBS[name]).JOB
    return job


def schema_of(job: Job[Any]) -> dict[str, Any]:
    """Return the schema of a job's config: of its only form, or of any of them."""
    if len(job.forms) == 1:
        only: dict[str, Any] = job.forms[0].model_json_schema()
        return only
    found, definitions = models_json_schema([(form, "validation") for form in job.forms])
    return {"anyOf": list(found.values()), **definitions}


def schema_path(name: str) -> Path:
    """Return where the schema of a job's config lies."""
    return Path(__file__).parent / f"{name}.schema.json"
