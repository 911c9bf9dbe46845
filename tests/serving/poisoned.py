"""A service on Ray whose models are harmed by some rows, and clients that send these next to good ones."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import yaml
from asking import http
from runs import python_pool, two_model_policy

import cauc_ray


def infer(url, x, datatype="FP32", binary=False, **parameters):
    """Ask for rows x, lists of numbers or texts; return the status, and the content or the error."""
    tensor = {"name": "x", "datatype": datatype, "shape": list(np.shape(x))}
    raw = np.array(x, "<f4").tobytes() if binary else b""
    tensor |= {"parameters": {"binary_data_size": len(raw)}} if binary else {"data": x}
    text = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))} if binary else {}
    status, body, _ = http("POST", f"{url}/v2/models/poisoned/infer", text + raw, **headers)
    return status, json.loads(body)


def poisoned(folder, replicas, timeout_s=30.0, call_timeout_s=60.0):
    """Serve a stage that may be poisoned by x's first number, and one that may be by its second."""
    serving = {"timeout_s": timeout_s}
    pool = python_pool(
        folder, [("poisonable", {}), ("poisonable", {"column": 1})], serving=serving, call_timeout_s=call_timeout_s
    )
    content = yaml.safe_load(pool.read_text())
    content |= {"on_failure": "degrade", "serving": {"max_queued_rows": 32}}
    for stage in content["stages"]:
        stage |= {"resources": {"num_cpus": 0.2}, "replicas": {"min": replicas}}
    pool.write_text(yaml.safe_dump(content))
    return cauc_ray.serve(pool, two_model_policy(0.9), port=0, name="poisoned")


# What raises, ends its thread, returns NaN or too few rows; NaN as raw bytes; another shape and another type.
SOFT = [([[float(code), 0.0]], {}) for code in (666, 667, 668, 669)]
SOFT += [([[float("nan"), 0.0]], {"binary": True}), ([1.0], {}), ([["a", "b"]], {"datatype": "BYTES"})]


def require_harmless(url, turns, bad):
    """Send good rows and poison ones next to each other; return the status of each poison one.

    bad: arguments of infer, in turn.
    """
    assert infer(url, [[1.0, 0.0]])[0] == 200  # before any good row is known, poison may be the stage's own fault: 503
    good, poison = [], []
    with ThreadPoolExecutor(16) as clients:
        for turn in range(turns):
            arguments, options = bad[turn % len(bad)]
            poison.append(clients.submit(infer, url, arguments, **options))
            good.append(clients.submit(infer, url, [[(-1.0) ** turn * (1.0 + turn / 100)] * 2]))
    for turn, (status, content) in enumerate(request.result() for request in good):
        assert (status, content["outputs"][0]["data"]) == (200, [turn % 2]), content
        assert not content["parameters"]["degraded"]
    statuses = [request.result()[0] for request in poison]
    assert 200 not in statuses
    return statuses
