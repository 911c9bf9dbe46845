"""Pools, inputs and policies for tests that run cascades."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from stored import write

import cauc_ray
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.threshold import ThresholdRule

MODELS = ["m0", "m1", "m2"]


def saved_pool(folder, **stage):
    """Write a pool of saved stages over the table in folder/LOGITS; stage: further settings of all of them."""
    stages = [
        {
            "name": model,
            "model": {"kind": "saved", "logits": "LOGITS", "model": model, "split": "test"},
            "batch_size": 16,
            "resources": {"num_cpus": 0.5},
            **stage,
        }
        for model in MODELS
    ]
    return write_pool(folder, stages)


def python_pool(folder, factories, **stage):
    """Write a pool of two stages, small and large, from factories of user_models."""
    stages = [
        {
            "name": name,
            "model": {"kind": "python", "factory": f"user_models:{factory}", "kwargs": kwargs},
            "batch_size": 8,
            "resources": {"num_cpus": 0.5},
            **stage,
        }
        for name, (factory, kwargs) in zip(("small", "large"), factories, strict=True)
    ]
    return write_pool(folder, stages)


def write_pool(folder, stages):
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump({"name": "test", "task": "multiple-choice", "stages": stages}))
    return path


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


def two_model_policy(threshold=0.7):
    """Return an RF policy for the stages small and large, of two options."""
    from dataclasses import replace

    from synthetic import chain

    calibration = replace(chain(31, 200, 2, (1.0, 2.0)), models=("small", "large"))
    return fit_rf(calibration, rule=ThresholdRule(threshold=threshold))


def read_all(folder):
    """Return the rows of a folder of Parquet files, by example_id."""
    return pa.concat_tables([read_parquet(f) for f in parquet_files(folder)])


def by_example(table):
    """Return a table's rows as dicts by example_id; an id that stands twice is an error."""
    rows = {row["example_id"]: row for row in table.to_pylist()}
    assert len(rows) == table.num_rows
    return rows


def run(folder, pool, policy, inputs):
    """Run a cascade into folder/out and return its summary."""
    return cauc_ray.run(pool, policy, inputs, folder / "out")
