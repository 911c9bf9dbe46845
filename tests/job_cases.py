"""Small inputs of jobs, and what their configs say."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from synthetic import write_table

import cauc_ray

MODELS = ["m0", "m1", "m2"]
CHAINS = [["m0", "m1", "m2"], ["m0", "m2"]]


def write_inputs(folder):
    """Write what jobs read: a logit table, a policy on it, a pool, its input, and a dataset with another pool."""
    chains = write_table(folder / "sets" / "planted", n=600)
    policy = cauc_ray.fit(folder / "sets" / "planted", models=MODELS, method="rf", budget=8.0)
    (folder / "policy.json").write_text(policy.to_json())
    write_pool(folder / "pool.yaml", [saved_stage(model) for model in MODELS])
    write_pool(folder / "slow.yaml", [saved_stage(model, seconds_per_call=0.5) for model in MODELS])
    ids = [f"test-{example}" for example in chains["test"].example_ids]
    # Wide rows, so that a run has several blocks; a footer counts what is not compressed.
    rows = pa.table({"example_id": ids, "label": chains["test"].labels, "padding": [b"\0" * 200_000] * len(ids)})
    pq.write_table(rows, folder / "input.parquet", use_dictionary=False)
    questions = [
        {"id": f"q{row}", "question": f"{row}?", "choices": ["x" * (1 + (row + k) % 7) for k in range(4)], "label": 1}
        for row in range(40)
    ]
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(question)}\n" for question in questions))
    model = {"kind": "python", "factory": "user_models:longest"}
    stage = {"name": "long", "model": model, "batch_size": 16, "resources": {"num_cpus": 0.5}, "cost": {"seconds": 1}}
    write_pool(folder / "python.yaml", [stage])


def saved_stage(model, **more):
    spec = {"kind": "saved", "logits": "sets/planted", "model": model, "split": "test", **more}
    return {"name": model, "model": spec, "batch_size": 16, "resources": {"num_cpus": 0.5}}


def write_pool(path, stages):
    path.write_text(yaml.safe_dump({"name": "test", "task": "multiple-choice", "stages": stages}))


def write_config(folder, name, content):
    """Write a config of a verb into a folder of inputs."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


SWEEP = {
    "sets": [{"name": "planted", "logits": "sets/planted", "chains": CHAINS}],
    "methods": ["single", "rf", "margin", "random"],
    "seeds": [0, 1],
    "relative_budgets": [0.5, 0.9],
    "budgets": [4.0],
}
# Every model alone counts as a method; two seeds at three budgets.
N_ROWS = sum(3 + len(chain) for chain in CHAINS) * 2 * 3
RUN = {"pool": "pool.yaml", "policy": "policy.json", "input": "input.parquet", "resume": True}
