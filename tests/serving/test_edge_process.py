"""What an edge box's process imports, and that it runs where nothing else is installed."""

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asking import DEADLINE_S, FEEDBACK, Command, answered, edit_pool, http, infer, outputs_of, send_labels, until
from runs import python_model, python_pool, write_pool
from synthetic import splits

import cauc_ray
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule

ROOT = Path(__file__).parents[2]
# What other installations have, and an edge box does not.
ABSENT = {"ray", "pyarrow", "scipy", "pandas", "sklearn", "matplotlib", "torch", "transformers", "fsspec"}
MOST_MB = 205


# A network that answers with x and 0.
LINEAR = """
<ir_version: 9, opset_import: ["": 19]>
g (float[n] x) => (float[n, 2] logits)
<int64[1] axis = {1}, float[1, 2] w = {1.0, 0.0}>
{
    column = Unsqueeze(x, axis)
    logits = MatMul(column, w)
}
"""


def write_home(folder, fit, small, large=None):
    """Write a pool whose second stage lists imported modules, or another one, and a policy with a drift reference."""
    models = {"small": small, "large": large or python_model("tells_modules", path=str(folder / "modules"))}
    stages = [{"name": name, "model": model} for name, model in models.items()]
    write_pool(folder, stages, task="classification", on_failure="degrade")
    chains = [replace(chain, models=tuple(models)) for chain in splits(3, 300, k=2, strengths=(1.0, 2.4))]
    policy = fit(*chains, ThresholdRule(threshold=0.8))
    policy.save(folder / "policy.json")
    return policy


def answered_whole(url, outputs):
    """Ask for two rows until the second stage is there: a service that degrades begins without it."""
    contents = []

    def is_whole():
        contents.append(answered(url, "test", {"x": [9.0, 0.1]}, outputs))
        return not contents[-1]["parameters"]["degraded"]

    until(is_whole)
    return contents[-1]


def require_served(service, policy):
    """Ask a service all that it answers, and stop it."""
    model = f"{service.url}/v2/models/test"
    assert http("PUT", f"{model}/policy", {"threshold": 0.7})[0] == 200
    for url in (f"{model}/policy", f"{model}/watch", f"{service.url}/metrics"):
        assert http("GET", url)[0] == 200
    assert http("PUT", f"{model}/policy", {"policy": policy.model_dump(mode="json")})[0] == 200
    content = answered_whole(service.url, FEEDBACK)
    assert outputs_of(content)["stage"].tolist() == [0, 1]
    send_labels(service.url, "test", content, [0, 0])
    assert http("GET", f"{model}/watch")[0] == 200
    assert infer(service.url, "test", {"x": [0.1]})[0] == 200  # after which the second stage lists what is imported
    assert service.ended(signal.SIGTERM)[0] == 0


def test_a_served_process_has_imported_neither_ray_nor_arrow_nor_scipy(tmp_path):
    policy = write_home(tmp_path, fit_base, python_model("by_x"))
    with closing(Command(tmp_path, "--port", "0", "--local")) as service:
        require_served(service, policy)
    modules = json.loads((tmp_path / "modules").read_text())
    assert "cauc_ray" in modules
    assert not (ABSENT | {"fastapi", "grpc", "google"}) & set(modules)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return a virtual environment of an edge's locked list and the package, nothing else."""
    folder = tmp_path_factory.mktemp("edge") / "venv"
    uv, python = Path(sys.executable).with_name("uv"), folder / "bin" / "python"
    pip = [uv, "pip", "install", "-q", "--python", python, "--compile-bytecode"]
    for command in (
        [uv, "venv", "-q", "--python", f"{sys.version_info.major}.{sys.version_info.minor}", folder],
        [*pip, "--require-hashes", "-r", ROOT / "deployments" / "edge" / "requirements.txt"],
        [*pip, "--no-deps", ROOT],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    return folder


def started(folder, environment):
    variables = {"PYTHONPATH": str(ROOT / "tests"), "PYTHONDONTWRITEBYTECODE": "1"}
    return closing(Command(folder, "--port", "0", "--local", cauc=environment / "bin" / "cauc", **variables))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_edge_runs_where_only_the_locked_list_is_installed(tmp_path, installed):
    onnx = pytest.importorskip("onnx")
    onnx.save(onnx.parser.parse_model(LINEAR), str(tmp_path / "small.onnx"))
    policy = write_home(tmp_path, fit_rf, {"kind": "onnx", "model": "small.onnx"})
    with started(tmp_path, installed) as service:
        require_served(service, policy)
    names = {path.name.partition("-")[0] for path in (installed / "lib").rglob("*.dist-info")}
    assert {"cauc_ray", "onnxruntime"} <= names
    assert not ABSENT & names
    sizes = [path.lstat().st_blocks * 512 for path in installed.rglob("*") if not path.is_symlink()]
    assert sum(sizes) / 2**20 <= MOST_MB


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_locked_list_is_enough_for_a_remote_stage(tmp_path, installed):
    labels = np.array([0, 1, 1, 1] * 10)
    alone = cauc_ray.fit({"small": 3 * np.eye(2)[[0, 1] * 20]}, labels, costs={"small": 1}, threshold=0.5)
    (cloud_folder := tmp_path / "cloud").mkdir()
    path = edit_pool(python_pool(cloud_folder), inputs={"x": {"datatype": "FP64"}})
    with cauc_ray.serve(path, alone, port=0, name="large", local=True) as cloud:
        write_home(tmp_path, fit_rf, python_model("by_x"), {"kind": "remote", "url": cloud.url, "model": "large"})
        with started(tmp_path, installed) as service:
            assert outputs_of(answered_whole(service.url, ("stage",)))["stage"].tolist() == [0, 1]


@pytest.mark.slow
def test_a_uri_is_refused_with_the_package_that_an_edge_box_lacks(tmp_path, installed):
    write_home(tmp_path, fit_rf, python_model("by_x"))
    command = [installed / "bin" / "cauc", "serve", "pool.yaml", "--policy", "s3://bucket/policy.json", "--local"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 2
    assert "pip install pyarrow" in done.stderr
