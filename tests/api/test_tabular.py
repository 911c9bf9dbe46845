"""Tables of features: own classifiers collected, fitted, run and served under the columns' own names."""

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import yaml
from runs import read_all

import cauc_ray

NAMES = ["leaves", "stays"]
MODELS = """
import numpy as np


def model(strength):
    def answer(batch):
        plan = np.where(batch["plan"] == "gold", 1.0, -1.0)
        x = strength * (batch["age"] / 10 - 4 + plan)
        return np.stack([np.zeros(len(x)), x], axis=1).astype(np.float32)

    return answer
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tabular")
    rng = np.random.default_rng(0)
    n = 400
    age, plan = rng.integers(18, 80, n), rng.choice(["gold", "basic"], n)
    churn = (age / 10 - 4 + np.where(plan == "gold", 1.0, -1.0) + rng.logistic(0, 0.5, n) > 0).astype(int)
    names = pa.array([NAMES[label] for label in churn])
    table = pa.table({"age": age, "plan": plan, "outcome": names})
    pyarrow.csv.write_csv(table, folder / "labelled.csv")
    pq.write_table(table.append_column("id", pa.array(range(n))), folder / "labelled.parquet")
    pyarrow.csv.write_csv(table.select(["plan", "age"]), folder / "new.csv")
    (folder / "odd.csv").write_text("age,plan,label\n1,gold,perhaps\n2,gold,stays\n3,gold,leaves\n4,gold,stays\n")
    (folder / "churn_models.py").write_text(MODELS)
    stages = []
    for name, strength, cost in (("small", 0.5, 1.0), ("large", 2.0, 10.0)):
        model = {"kind": "python", "factory": "churn_models:model", "kwargs": {"strength": strength}}
        stages.append({"name": name, "model": model, "cost": {"seconds": cost}, "resources": {"num_cpus": 0.5}})
    inputs = {"age": {"datatype": "FP64", "shape": []}, "plan": {"datatype": "BYTES", "shape": []}}
    pool = {"name": "churn", "task": "classification", "labels": NAMES, "inputs": inputs, "stages": stages}
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    return folder


@pytest.mark.soak("full")
def test_features_are_collected_and_run_under_their_own_names(home, ray_session, tmp_path):
    columns = {"label": "outcome"}
    collection = cauc_ray.collect(home / "pool.yaml", home / "labelled.parquet", tmp_path / "logits", columns=columns)
    accuracies = [model["accuracy"] for model in collection["models"]]
    assert min(accuracies) > 0.7
    policy = cauc_ray.fit(tmp_path / "logits", method="rf")
    summary = cauc_ray.run(home / "pool.yaml", policy, home / "new.csv", tmp_path / "out")
    rows = read_all(tmp_path / "out" / "predictions")
    assert (summary["n"], summary["n_failed"]) == (400, 0)
    assert sorted(rows["example_id"].to_pylist()) == sorted(f"new-{row}" for row in range(400))
    named = zip(rows["prediction"].to_pylist(), rows["prediction_label"].to_pylist(), strict=True)
    assert all(NAMES[prediction] == name for prediction, name in named)
    replayed = cauc_ray.evaluate(tmp_path / "logits", policy).to_arrow()
    assert set(replayed["prediction_label"].to_pylist()) <= set(NAMES)
