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
from asking import DEADLINE_S, Command, http, infer, outputs_of, until
from fleet_source import Key, Source, with_fleet
from runs import python_model, python_pool, write_pool
from synthetic import splits

import cauc_ray
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


def write_home(folder, method, first, later=None):
    """Write a pool of a first stage and one that tells what is imported, and a policy with all that can be watched.

    later: another second stage.
    """
    models = {"small": first, "large": later or python_model("tells_modules", path=str(folder / "modules"))}
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


def environment_of(folder, *lists):
    """Make a virtual environment of an edge's locked lists and the package, nothing else."""
    uv, python = Path(sys.executable).with_name("uv"), folder / "bin" / "python"
    pip = [uv, "pip", "install", "-q", "--python", python, "--compile-bytecode"]
    for command in (
        [uv, "venv", "-q", "--python", f"{sys.version_info.major}.{sys.version_info.minor}", folder],
        *([*pip, "--require-hashes", "-r", ROOT / "deployments" / "edge" / name] for name in lists),
        [*pip, "--no-deps", ROOT],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return environment_of(tmp_path_factory.mktemp("edge") / "venv", "requirements.txt")


@pytest.fixture
def with_fleets(tmp_path):
    return environment_of(tmp_path / "venv", "requirements.txt", "fleet.txt")


def started(folder, environment):
    own = {"PYTHONPATH": str(ROOT / "tests"), "PYTHONDONTWRITEBYTECODE": "1"}
    return Command(folder, "--port", "0", "--local", cauc=environment / "bin" / "cauc", **own)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", FITS)
def test_it_runs_where_only_the_locked_list_is_installed(tmp_path, installed, method):
    policy = write_home(tmp_path, method, linear(tmp_path / "small.onnx"))
    service = started(tmp_path, installed)
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
@pytest.mark.timeout(600)
def test_the_list_is_enough_for_stages_elsewhere(tmp_path, installed):
    labels = np.array([0, 1, 1, 1] * 10)
    alone = cauc_ray.fit({"small": 3 * np.eye(2)[[0, 1] * 20]}, labels, costs={"small": 1}, threshold=0.5)
    (cloud_folder := tmp_path / "cloud").mkdir()
    path = python_pool(cloud_folder)
    path.write_text(f"{path.read_text()}inputs: {{x: {{datatype: FP64}}}}\n")
    with cauc_ray.serve(path, alone, port=0, name="large", local=True) as cloud:
        write_home(tmp_path, "rf", python_model("by_x"), {"kind": "remote", "url": cloud.url, "model": "large"})
        service = started(tmp_path, installed)
        try:
            status, content = infer(service.url, "test", {"x": [9.0, 0.1]}, ("stage",))
            assert (status, content["parameters"]["degraded"]) == (200, False), content
            assert outputs_of(content)["stage"].tolist() == [0, 1]
        finally:
            service.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_two_lists_are_enough_for_a_fleet(tmp_path, with_fleets):
    policy, source, key = write_home(tmp_path, "rf", python_model("by_x")), Source(), Key(tmp_path)
    newer = policy.with_threshold(0.6)
    source.files = key.signed(newer)
    urls = {"policy": f"{source.url}/policy.json", "report": f"{source.url}/fleet"}
    with_fleet(tmp_path / "pool.yaml", public_key=key.public_file, **urls)
    service = started(tmp_path, with_fleets)
    try:
        policy_url = f"{service.url}/v2/models/test/policy"
        until(lambda: json.loads(http("GET", policy_url)[1])["policy_id"] == newer.id)
        until(lambda: source.posted)
    finally:
        service.kill()
        source.close()


@pytest.mark.slow
def test_a_uri_needs_what_an_edge_box_lacks_and_is_told_so(tmp_path, installed):
    write_home(tmp_path, "rf", python_model("by_x"))
    done = subprocess.run(
        [installed / "bin" / "cauc", "serve", "pool.yaml", "--policy", "s3://bucket/policy.json", "--local"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install pyarrow" in done.stderr
