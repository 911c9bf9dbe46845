"""A user's own modules: next to the pool file, or in the working directory of Ray's runtime environment."""

import json

import pytest
from runs import numbered_input, python, rows_of, two_model_policy, write_pool

import cauc_ray

MODEL = """
import own_layers.twofold

def load(factor):
    return own_layers.twofold.logits(factor)
"""
TWOFOLD = """
import numpy as np
from .size import SIZE

def logits(factor):
    return lambda batch: np.stack([factor * batch["x"], np.zeros(len(batch["x"]))], axis=1)[:, :SIZE]
"""
# Runs and serves a pool whose folder is at a path that leads elsewhere, or nowhere, in every other process.
ON_A_CLUSTER = """
import os, sys, cauc_ray, ray

folder, inputs, out = sys.argv[1:]
pool = f"/proc/self/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}/pool.yaml"
ray.init(num_cpus=4, include_dashboard=False, runtime_env={"working_dir": folder})
cauc_ray.run(pool, f"{folder}/policy.json", inputs, out)
with cauc_ray.serve(pool, f"{folder}/policy.json", port=0):
    print("both stages have loaded their models")
"""


@pytest.fixture
def written(tmp_path):
    """Write a pool, its policy and its modules into a folder."""
    folder = tmp_path / "code"
    (folder / "own_layers").mkdir(parents=True)
    (folder / "own_model.py").write_text(MODEL)
    (folder / "own_layers" / "twofold.py").write_text(TWOFOLD)
    (folder / "own_layers" / "size.py").write_text("SIZE = 2\n")
    stages = []
    for name, factor, cost in (("small", 1.0, 1.0), ("large", 3.0, 4.0)):
        model = {"kind": "python", "factory": "own_model:load", "kwargs": {"factor": factor}}
        stages.append({"name": name, "model": model, "cost": {"gflops": cost}, "resources": {"num_cpus": 0.5}})
    write_pool(folder, stages, "classification")
    two_model_policy().save(folder / "policy.json")
    return folder


def require_answers(folder):
    rows, failed = rows_of(folder)
    assert [rows[f"row-{row}"]["prediction"] for row in range(40)] == [1] * 20 + [0] * 20
    assert not failed


@pytest.mark.usefixtures("ray_session")
def test_modules_next_to_the_pool_file_are_imported_on_the_workers(written, tmp_path):
    cauc_ray.run(written / "pool.yaml", written / "policy.json", numbered_input(tmp_path), tmp_path / "out")
    require_answers(tmp_path / "out")


@pytest.mark.soak("full")
def test_rays_runtime_environment_brings_modules_to_runs_and_services(written, tmp_path):
    python("-c", ON_A_CLUSTER, written, numbered_input(tmp_path), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["n"] == 40
    require_answers(tmp_path / "out")
