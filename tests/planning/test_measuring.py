"""Plans against real runs on Ray: what does not depend on how busy the machine is; and seconds measured there."""

import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import numbered_input, python_pool
from synthetic import chain

import cauc_ray
from cauc_ray.data.datasets import DatasetSpec, open_input
from cauc_ray.errors import CaucError
from cauc_ray.models.pool import load_pool
from cauc_ray.planning.measuring import REPEATS, time_stages, timed_sizes
from cauc_ray.policies.fitting import fit_rf

pytestmark = pytest.mark.usefixtures("ray_session")


def slow_pool(folder, seconds):
    """Write a pool of two python stages whose calls take so many seconds each."""
    logs = [str(folder / f"log{place}") for place in range(2)]
    factories = [("slow_by_x", {"seconds": s, "log": log}) for s, log in zip(seconds, logs, strict=True)]
    return python_pool(folder, factories)


@pytest.mark.slow
def test_seconds_are_measured_on_an_input_as_a_run_would_take_them(tmp_path):
    pool = slow_pool(tmp_path, (0.02, 0.05))
    rows = numbered_input(tmp_path / "in", 5)  # fewer than a batch
    told = []
    timed = time_stages(load_pool(pool).stages, open_input(DatasetSpec(str(rows), "multiple-choice")), told.append)
    assert told == ["small", "large"]
    for timing, seconds in zip(timed, (0.02, 0.05), strict=True):
        assert (timing.source, timing.least_rows, timing.most_rows) == ("measured", 1, 8)
        assert timing.n_calls == REPEATS * len(timed_sizes(8))
        assert timing.seconds.of(8) >= 0.9 * seconds
    splits = [replace(chain(31, 200, 2, (1.0, 2.0), shift=shift), models=("small", "large")) for shift in range(2)]
    steps = []
    found = cauc_ray.plan(pool, fit_rf(*splits), 5.0, input=rows, on_step=steps.append)
    assert {"starting Ray", "timing small", "timing large"} <= set(steps)
    for stage, seconds in zip(found["stages"], (0.02, 0.05), strict=True):
        assert stage["seconds"]["source"] == "measured"
        assert stage["batch_s"] >= seconds
        assert stage["seconds"]["most_rows"] == 8
    json.dumps(found, allow_nan=False)


def test_a_model_that_cannot_answer_the_input_is_told_in_one_line(tmp_path):
    pool = slow_pool(tmp_path, (0.0, 0.0))
    pq.write_table(pa.table({"example_id": ["a", "b"], "y": [1.0, 2.0]}), tmp_path / "in.parquet")
    with pytest.raises(CaucError, match="stage 'small' cannot answer the input's first rows: ") as told:
        time_stages(load_pool(pool).stages, open_input(DatasetSpec(str(tmp_path / "in.parquet"), "multiple-choice")))
    assert "\n" not in str(told.value)
