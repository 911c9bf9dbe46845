"""Inputs that are read again and are others by then: a run ends, and no answer is another row's."""

import time

import numpy as np
import pyarrow.parquet as pq
import pytest
from runs import SOUND, answers_of, numbered_input, python_pool, two_model_policy
from stored import write

import cauc_ray
from cauc_ray.data import inputs as files
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution import runner
from jobs.bench.processes import processes

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    # Ray Data's own context sets an option that Ray Data has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    # Ray gives the processes of Ray Data the lowest priority.
    pytest.mark.timeout(900),
]
# In the third block of a run's input: two are committed when a model gives up on it.
LATE = "row-18000"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["parquet", "csv", "ray dataset"])
def test_as_many_rows_in_another_order_are_not_resumed_with(tmp_path, kind):
    import ray.data

    rows, policy, out = pq.read_table(numbered_input(tmp_path, 20_000)), two_model_policy(), tmp_path / "out"

    def given(rows):
        if kind == "ray dataset":
            return ray.data.from_arrow(rows)
        return write(tmp_path / f"x.{kind}", rows if kind == "parquet" else rows.to_pylist())

    pool = python_pool(tmp_path, [("gives_up_on", {"example": LATE}), SOUND[1]], batch_size=256)
    with pytest.raises(ExecutionError, match="is down"):
        cauc_ray.run(pool, policy, given(rows), out)
    assert any((out / "predictions").iterdir())
    pool = python_pool(tmp_path, batch_size=256)
    with pytest.raises(DataError, match=r"returned other rows .* block \d+ .* other rows.* start a new run"):
        cauc_ray.run(pool, policy, given(rows[::-1]), out, resume=True)
    assert not (out / "summary.json").exists()
    assert cauc_ray.run(pool, policy, given(rows), out, resume=True)["n"] == len(answers_of(out)) == 20_000


def changing(flag):
    """Return what gives a Ray Dataset of numbers its rows: in another order once there is a file at a path."""

    def rows(batch):
        numbers = batch["id"][::-1] if flag.exists() else batch["id"]
        return {"example_id": np.array([f"row-{n}" for n in numbers], dtype=object), "x": numbers % 7 - 3.0}

    return rows


@pytest.mark.slow
def test_a_dataset_that_gives_other_rows_when_it_is_read_again_ends_the_run(tmp_path, monkeypatch):
    """The task is killed inside the input; the one that takes its place executes the dataset once more."""
    import ray.data

    monkeypatch.setattr(runner, "BLOCK_ROWS", 64)
    pool = python_pool(tmp_path, [("slow_by_x", {"seconds": 0.1, "log": str(tmp_path / "log")}), ("by_x", {})])
    flag = tmp_path / "flag"
    dataset = ray.data.range(2560, override_num_blocks=4).map_batches(changing(flag), batch_size=None)
    killed = []

    def kill(progress):
        tasks = processes("read_blocks")
        if progress.n_finished >= 768 and tasks and not killed:
            flag.touch()
            killed.extend(tasks)
            for task in tasks:
                task.kill()

    with pytest.raises(DataError, match=r"Ray dataset returned other rows .*has other rows.*start a new run"):
        cauc_ray.run(pool, two_model_policy(), dataset, tmp_path / "out", on_progress=kill)
    assert killed
    assert len(answers_of(tmp_path / "out")) >= 768  # what was committed before stays, each row once


@pytest.mark.slow
def test_a_first_block_that_takes_longer_than_files_may_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DEADLINE_S", 1.0)

    def slow(batch):
        time.sleep(5)
        return {"example_id": batch["id"].astype(str), "x": batch["id"] % 7 - 3.0}

    import ray.data

    dataset = ray.data.range(40, override_num_blocks=1).map_batches(slow)
    assert cauc_ray.run(python_pool(tmp_path), two_model_policy(), dataset, tmp_path / "out")["n"] == 40
