"""Plans against real runs on Ray: what does not depend on how busy the machine is; and seconds measured there."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import numbered_input, python_pool
from synthetic import chain

import cauc_ray
from cauc_ray.data.inputs import open_input
from cauc_ray.errors import CaucError
from cauc_ray.models.pool import load_pool
from cauc_ray.planning.measuring import REPEATS, time_stages, timed_sizes
from cauc_ray.policies.fitting import fit_rf
from jobs.bench import plan as bench

pytestmark = pytest.mark.usefixtures("ray_session")


@pytest.mark.slow
def test_runs_and_services_are_held_against_their_plans():
    of = bench.plan(seconds=4.0, pools=("narrow",), turns=1)["pools"]["narrow"]
    assert of["measured_to_predicted"] == pytest.approx(of["predicted_s"] / of["measured_s"])
    # Sleeping stages take what they are told or more; a busy machine makes a run slower, none makes it faster.
    assert of["measured_to_predicted"] < 1.1
    for stage in of["stages"].values():
        predicted, measured = stage["computed_s"]
        assert measured > 0.85 * predicted
        predicted, measured = stage["calls"]
        assert measured == pytest.approx(predicted, rel=0.25, abs=2)
        predicted, measured = stage["fill"]
        assert measured == pytest.approx(predicted, abs=0.2)
        assert 0 < stage["busy_share"] <= 1.0
        # Beyond what they are told: the worker's own milliseconds.
        told, fitted = (np.array(pair) for pair in zip(stage["per_call_s"], stage["per_row_s"], strict=True))
        assert fitted @ [1, 8] >= 0.9 * told @ [1, 8]
    assert [service["load"] for service in of["services"]] == [0.5, 0.8]
    for service in of["services"]:
        # Requests come at random times; those of a busy machine that answers late are not all in the window.
        assert 2 * service["rate"] < service["n_measured"] < 5 * service["rate"]
        for what in ("mean", "p99"):
            ratio = service["plan_to_measured"][what]
            assert ratio == pytest.approx(service["plan"][what] / service["measured"][what])
            assert ratio < 1.3  # no service is much faster than its plan


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
    timed = time_stages(load_pool(pool).stages, open_input(rows), told.append)
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
        time_stages(load_pool(pool).stages, open_input(tmp_path / "in.parquet"))
    assert "\n" not in str(told.value)
