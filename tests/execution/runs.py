"""Pools, inputs and policies for tests that run cascades."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from stored import write
from synthetic import chain

import cauc_ray
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule

MODELS = ["m0", "m1", "m2"]
# Factories of two stages that answer every row.
SOUND = (("by_x", {}), ("by_x", {"factor": 5.0}))


def cauc(*words, **options):
    """Run `cauc` in a process of its own, and return how it ended."""
    command = [Path(sys.executable).with_name("cauc"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, **options)


def python(*arguments, timeout=580):
    """Run Python in a process of its own. Returns its last line of output."""
    folder = Path(__file__).parent
    path = os.pathsep.join([str(folder.parents[1]), str(folder), os.environ["PYTHONPATH"]])
    process = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=timeout, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout.splitlines()[-1]


def ranked(cases, quick, slow):
    """Return cases as parameters: the first few quick, the next few slow, the rest for .ci/soak."""
    marks = [()] * quick + [pytest.mark.slow] * slow + [pytest.mark.soak("full")] * len(cases)
    return [pytest.param(case, marks=mark) for case, mark in zip(cases, marks, strict=False)]


def python_model(factory, /, **kwargs):
    return {"kind": "python", "factory": f"user_models:{factory}", "kwargs": kwargs}


def saved_model(name, /, logits="LOGITS", split="test", **more):
    return {"kind": "saved", "logits": str(logits), "model": name, "split": split, **more}


def write_pool(folder, stages, task="multiple-choice", **more):
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump({"name": "test", "task": task, "stages": list(stages), **more}))
    return path


def pool_of(folder, models, **stage):
    """Write a pool of some models by name; stage: further settings of all stages."""
    common = {"batch_size": 16, "resources": {"num_cpus": 0.5}, **stage}
    return write_pool(folder, [{"name": name, "model": model, **common} for name, model in models.items()])


def saved_pool(folder, **stage):
    """Write a pool of saved stages over the table in folder/LOGITS; stage: further settings of all of them."""
    return pool_of(folder, {name: saved_model(name) for name in MODELS}, **stage)


def python_pool(folder, factories=SOUND, **stage):
    """Write a pool of two stages, small and large, from factories of user_models."""
    small, large = (python_model(factory, **kwargs) for factory, kwargs in factories)
    return pool_of(folder, {"small": small, "large": large}, **{"batch_size": 8, **stage})


def split_input(folder, chain):
    """Write the ids and labels of a table's test split as a run's input, in two files."""
    (folder / "input").mkdir()
    ids = [f"test-{example}" for example in chain.example_ids]
    half = len(ids) // 2
    for name, part in (("a", slice(None, half)), ("b", slice(half, None))):
        table = pa.table({"example_id": ids[part], "label": chain.labels[part]})
        pq.write_table(table, folder / "input" / f"{name}.parquet")
    return folder / "input"


def numbered_input(folder, n=40, ending="parquet"):
    """Write n rows with a column x in [-2, 2]."""
    x = [4 * row / max(1, n - 1) - 2 for row in range(n)]
    table = pa.table({"example_id": [f"row-{row}" for row in range(n)], "x": x})
    return write(folder / f"input.{ending}", table if ending == "parquet" else table.to_pylist())


def write_questions(path, n, seed=0):
    """Write questions of two to five choices, each of another length. Returns the rows by id."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in range(n):
        k = int(rng.integers(2, 6))
        choices = ["x" * int(length) for length in rng.choice(30, size=k, replace=False) + 1]
        # The longest is right more often than by chance: something to calibrate.
        label = int(np.argmax([len(choice) for choice in choices]) if rng.random() < 0.5 else rng.integers(k))
        rows.append({"id": f"q{row}", "question": f"{row}?", "choices": choices, "label": label})
    write(path, rows)
    return {row["id"]: row for row in rows}


def two_model_policy(threshold=0.7):
    """Return an RF policy for the stages small and large, of two options."""
    calibration = replace(chain(31, 200, 2, (1.0, 2.0)), models=("small", "large"))
    return fit_rf(calibration, rule=ThresholdRule(threshold=threshold))


def read_all(folder):
    """Return the rows of a folder of Parquet files, by example_id."""
    return pa.concat_tables([read_parquet(f) for f in parquet_files(folder)])


def by_example(table):
    """Return a table's rows as dicts by example_id; a duplicate id is an error."""
    rows = {row["example_id"]: row for row in table.to_pylist()}
    assert len(rows) == table.num_rows
    return rows


def answers_of(out):
    """Return a run's predictions by example_id."""
    return by_example(read_all(out / "predictions"))


def rows_of(out):
    """Return a run's answers and its failures by example_id. Each row is in one of them, once."""
    answered = answers_of(out)
    failed = by_example(read_all(out / "failed")) if (out / "failed").exists() else {}
    assert not answered.keys() & failed.keys()
    return answered, failed


def run(folder, pool, policy, inputs):
    """Run a cascade into folder/out and return its summary."""
    return cauc_ray.run(pool, policy, inputs, folder / "out")
