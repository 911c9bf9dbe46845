"""What a service logs is a logit table: fitted as it is, the policy is that of logits which were collected."""

import json
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from asking import http, infer, outputs_of, until
from runs import python_model

import cauc_ray
from cauc_ray.files.parquet import parquet_below, read_parquet
from cauc_ray.files.paths import path_of

NAME, K = "logged", 4
MODELS = {"small": 0.6, "large": 2.5}


def pool_in(folder, to, shadow=1.0, router=None, **log):
    stages = [
        {
            "name": name,
            "model": python_model("planted", strength=strength, seed=place),
            "cost": {"gflops": 1.0 + 9.0 * place},
            "batch_size": 64,
            "resources": {"num_cpus": 0.5},
        }
        for place, (name, strength) in enumerate(MODELS.items())
    ]
    serving = {"shadow": shadow, "log": {"to": str(to), "flush_s": 0.2, **log}}
    if router:
        serving["router"] = router
    content = {"name": NAME, "task": "classification", "inputs": {"x": {"datatype": "FP64"}}, "stages": stages}
    path = folder / "pool.yaml"
    path.write_text(yaml.safe_dump({**content, "serving": serving}))
    return path


@pytest.fixture(scope="module")
def policy():
    """A policy that answers about half of the rows early."""
    x = np.arange(10_000, 10_600.0)
    logits = {name: planted(x, place) for place, name in enumerate(MODELS)}
    costs = {"small": 1.0, "large": 10.0}
    return cauc_ray.fit(
        logits, (x % K).astype(int), costs=costs, cost_unit="GFLOPs", method="rf", validation=0.5, budget=6.0
    )


def planted(x, place):
    import user_models

    return user_models.planted(list(MODELS.values())[place], place)({"x": x})


def ask(service, x, **parameters):
    """Ask for rows; return the outputs and the response's parameters."""
    outputs = ("prediction", "confidence", "stage")
    status, content = infer(service.url, NAME, {"x": list(x)}, outputs, parameters)
    assert status == 200, content
    return outputs_of(content), content["parameters"]


def tell(service, outputs, parameters, labels):
    """Send the labels of an answer's rows."""
    own = {name: parameters[name] for name in ("policy_id", "answer_id")}
    body = {**own, **{name: values.tolist() for name, values in outputs.items()}, "label": [int(one) for one in labels]}
    return http("POST", f"{service.url}/v2/models/{NAME}/feedback", body)


def traffic(service, x, size=20, labelled=lambda x: True, **parameters):
    """Ask for rows in requests of a size and tell their labels; return x by example id."""
    found = {}
    for start in range(0, len(x), size):
        own = x[start : start + size]
        outputs, said = ask(service, own, **parameters)
        found |= {f"{said['answer_id']}-{row}": one for row, one in enumerate(own)}
        if labelled(own):
            status, text, _ = tell(service, outputs, said, own % K)
            assert status == 200, text
    return found


def logged(table, model="small"):
    """Return the ids that a log has for a model."""
    folder = path_of(table) / f"model={model}"
    files = parquet_below(folder) if folder.is_dir() else []
    return [example for file in files for example in read_parquet(file)["example_id"].to_pylist()]


def n_labels(table):
    folder = path_of(table) / "labels"
    return sum(len(read_parquet(file)) for file in (parquet_below(folder) if folder.is_dir() else ()))


def fitted(table, method, **options):
    return cauc_ray.fit(table, method=method, validation=0.5, budget=6.0, **options)


@pytest.fixture(scope="module")
def log(tmp_path_factory, policy):
    """Return the log of a service that has ended, and x by example id of all that was asked."""
    folder = tmp_path_factory.mktemp("log")
    with cauc_ray.serve(pool_in(folder, "LOG", split="all", shadow=0.7), policy, port=0, local=True) as service:
        found = traffic(service, np.arange(600.0))
        until(lambda: len(logged(folder / "LOG")) > 300)
        time.sleep(0.5)
    return folder, found


def test_a_policy_fitted_on_the_log_is_that_of_collected_logits_to_the_byte(log, ray_session):
    folder, found = log
    ids = logged(folder / "LOG")
    assert len(set(ids)) == len(ids)
    assert abs(len(ids) - 0.7 * 600) < 60
    rows = {"example_id": ids, "x": [found[one] for one in ids], "label": [int(found[one] % K) for one in ids]}
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    cauc_ray.collect(folder / "pool.yaml", folder / "rows.parquet", folder / "LOGITS", split="all")
    for method in ("base", "rf"):
        own = fitted(folder / "LOG", method, calibration_split="all")
        other = fitted(folder / "LOGITS", method, calibration_split="all")
        assert own.id == other.id
        assert own.to_json() == other.to_json()
    infos = [json.loads((folder / name / "pool.json").read_text()) for name in ("LOG", "LOGITS")]
    assert infos[0]["models"] == infos[1]["models"]
