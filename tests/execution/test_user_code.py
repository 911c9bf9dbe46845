"""A user's own modules: next to the pool file, in a folder that no worker has ever seen."""

import os
import pickle
from contextlib import contextmanager

import pytest
import ray
from runs import numbered_input, rows_of, two_model_policy, write_pool

import cauc_ray
from cauc_ray.execution.user_code import import_paths
from cauc_ray.models.pool import load_pool

MODEL = """
import json, own_layers.twofold

def load(factor):
    return own_layers.twofold.logits(factor)
"""
TWOFOLD = """
import numpy as np
from .size import SIZE

def logits(factor):
    def answer(batch):
        x = batch["x"] if "x" in batch else batch["image"][:, 0]
        return np.stack([factor * x, np.zeros(len(x))], axis=1)[:, :SIZE]
    return answer
"""


@contextmanager
def seen_here_alone(folder):
    """Yield a path of a folder that leads elsewhere, or nowhere, in every other process."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@pytest.fixture
def written(tmp_path):
    """Write a pool and its modules into a folder."""
    folder = tmp_path / "code"
    (folder / "own_layers").mkdir(parents=True)
    (folder / "own_model.py").write_text(MODEL)
    (folder / "own_layers" / "twofold.py").write_text(TWOFOLD)
    (folder / "own_layers" / "size.py").write_text("SIZE = 2\n")
    (folder / "unrelated.py").write_text("SIZE = 3\n")
    resources, stages = {"num_cpus": 0.5, "memory": "64MiB"}, []
    for name, factor, cost in (("small", 1.0, 1.0), ("large", 3.0, 4.0)):
        model = {"kind": "python", "factory": "own_model:load", "kwargs": {"factor": factor}}
        stages.append({"name": name, "model": model, "cost": {"gflops": cost}, "resources": resources})
    write_pool(folder, stages, "image-classification")
    return folder


@pytest.mark.usefixtures("ray_session")
def test_a_run_takes_its_modules_along(written, tmp_path):
    inputs = numbered_input(tmp_path)
    with seen_here_alone(written) as folder:
        cauc_ray.run(f"{folder}/pool.yaml", two_model_policy(), inputs, tmp_path / "out")
    rows, failed = rows_of(tmp_path / "out")
    assert [rows[f"row-{row}"]["prediction"] for row in range(40)] == [1] * 20 + [0] * 20
    assert not failed


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_service_takes_its_modules_along(written):
    with (
        seen_here_alone(written) as folder,
        cauc_ray.serve(f"{folder}/pool.yaml", two_model_policy(), port=0) as service,
    ):
        assert service.model == "test"
        assert ray.cluster_resources()["memory"] - ray.available_resources()["memory"] == 2 * (64 << 20)


def test_modules_that_have_arrived_by_themselves_are_used_as_they_are(written):
    sent = import_paths(load_pool(written / "pool.yaml").stages)
    assert sorted(sent.files) == ["own_layers/size.py", "own_layers/twofold.py", "own_model.py"]
    assert sent == (str(written), os.getcwd())
    assert pickle.loads(pickle.dumps(sent)) == sent


def test_other_modules_of_the_same_names_do_not_take_their_places(written):
    bytes_sent = pickle.dumps(import_paths(load_pool(written / "pool.yaml").stages))
    (written / "own_model.py").write_text("raise SystemExit\n")
    first, *paths = pickle.loads(pickle.dumps(pickle.loads(bytes_sent)))  # sent on by one who has them only unpacked
    assert paths == [str(written), os.getcwd()]
    with open(os.path.join(first, "own_model.py")) as file:
        assert file.read() == MODEL
