"""What an edge box's process imports, and that it runs where nothing else is installed."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from asking import DEADLINE_S, Command, http, infer, until
from runs import python_model, write_pool
from synthetic import splits

from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule

ROOT = Path(__file__).parents[2]
FITS = {"base": fit_base, "rf": fit_rf}
# What other installations have, and an edge box does not.
ELSEWHERE = {"ray", "pyarrow", "scipy", "pandas", "sklearn", "matplotlib", "torch", "transformers", "fsspec"}
MOST_MB = 200


def linear(path):
    """Write a network that answers with x and 0."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    ends = [helper.make_tensor_value_info(*one) for one in (("x", 1, ["n"]), ("logits", 1, ["n", 2]))]
    weights = [numpy_helper.from_array(np.array([[1.0, 0.0]], np.float32), "w")]
    weights.append(numpy_helper.from_array(np.array([1], np.int64), "axis"))
    nodes = [helper.make_node("Unsqueeze", ["x", "axis"], ["column"])]
    nodes.append(helper.make_node("MatMul", ["column", "w"], ["logits"]))
    assert TensorProto.FLOAT == 1
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), str(path))
    return {"kind": "onnx", "model": path.name}


def write_home(folder, method, first):
    """Write a pool of a first stage and one that tells what is imported, and a policy with all that can be watched."""
    models = {"small": first, "large": python_model("tells_modules", path=str(folder / "modules"))}
    stages = [{"name": name, "model": model} for name, model in models.items()]
    path = write_pool(folder, stages, task="classification")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"on_failure": "degrade"}))
    chains = [replace(one, models=tuple(models)) for one in splits(3, 300, k=2, strengths=(1.0, 2.4))]
    policy = FITS[method](*chains, ThresholdRule(threshold=0.8))
    policy.save(folder / "policy.json")
    return policy


def used(service, policy):
    """Ask a service all that it answers; return the stages of its answers."""
    model = f"{service.url}/v2/models/test"
    body = {"policy_id": policy.id, "answers": [{"stage": 0, "confidence": 0.9, "correct": True}]}
    assert http("PUT", f"{model}/policy", {"threshold": 0.7})[0] == 200
    for path, status in ((f"{model}/policy", 200), (f"{model}/watch", 200), (f"{service.url}/metrics", 200)):
        assert http("GET", path)[0] == status
    assert http("PUT", f"{model}/policy", {"policy": policy.model_dump(mode="json")})[0] == 200
    http("POST", f"{model}/feedback", body)
    status, content = infer(service.url, "test", {"x": [9.0, 0.1] * 100}, ("stage", "probabilities"))
    assert status == 200, content
    until(lambda: http("GET", f"{model}/watch")[0] == 200)
    status, content = infer(service.url, "test", {"x": [9.0, 0.1]}, ("stage",))
    return content["outputs"][0]["data"]


@pytest.mark.parametrize("method", FITS)
def test_a_served_process_has_imported_neither_ray_nor_arrow_nor_scipy(tmp_path, method):
    policy = write_home(tmp_path, method, python_model("by_x"))
    service = Command(tmp_path, "--port", "0", "--local")
    try:
        assert used(service, policy) == [0, 1]
        modules = json.loads((tmp_path / "modules").read_text())
        assert "cauc_ray" in modules
        assert not ELSEWHERE & set(modules)
        assert service.ended(signal.SIGTERM)[0] == 0
    finally:
        service.kill()


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a virtual environment of the edge's locked list and the package, nothing else."""
    folder, uv = tmp_path_factory.mktemp("edge") / "venv", Path(sys.executable).with_name("uv")
    python, lock = folder / "bin" / "python", ROOT / "deployments" / "edge" / "requirements.txt"
    pip = [uv, "pip", "install", "-q", "--python", python, "--compile-bytecode"]
    for command in (
        [uv, "venv", "-q", "--python", f"{sys.version_info.major}.{sys.version_info.minor}", folder],
        [*pip, "--require-hashes", "-r", lock],
        [*pip, "--no-deps", ROOT],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", FITS)
def test_it_runs_where_only_the_locked_list_is_installed(tmp_path, installed, method):
    policy = write_home(tmp_path, method, linear(tmp_path / "small.onnx"))
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PYTHONDONTWRITEBYTECODE": "1"}
    service = Command(tmp_path, "--port", "0", "--local", cauc=installed / "bin" / "cauc", **environment)
    try:
        assert used(service, policy) == [0, 1]
        assert service.ended(signal.SIGTERM)[0] == 0
    finally:
        service.kill()
    names = {path.name.partition("-")[0] for path in (installed / "lib").rglob("*.dist-info")}
    assert {"cauc_ray", "onnxruntime"} <= names
    assert not ELSEWHERE & names
    sizes = [path.lstat().st_blocks * 512 for path in installed.rglob("*") if not path.is_symlink()]
    assert sum(sizes) / 2**20 <= MOST_MB


@pytest.mark.slow
def test_a_uri_needs_what_an_edge_box_lacks_and_is_told_so(tmp_path, installed):
    write_home(tmp_path, "rf", python_model("by_x"))
    done = subprocess.run(
        [installed / "bin" / "cauc", "serve", "pool.yaml", "--policy", "s3://bucket/policy.json", "--local"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install pyarrow" in done.stderr
