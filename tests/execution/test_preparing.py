"""Runs whose models prepare the next batch while they compute one: faster, and with the same answers and failures."""

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from runs import by_example, numbered_input, python_pool, read_all, run, two_model_policy
from user_models import by_x

pytestmark = pytest.mark.usefixtures("ray_session")

ROWS, BATCH = 96, 8
STEP_S = 0.2


def test_a_batch_is_prepared_while_the_one_before_is_computed(tmp_path):
    """Here no batch is answered before the next one is being prepared."""
    first = ("waits_for_the_next", {"n_batches": ROWS // BATCH})
    policy, inputs = two_model_policy(threshold=0.0), numbered_input(tmp_path, ROWS)
    summary = run(tmp_path, python_pool(tmp_path, [first, ("by_x", {})]), policy, inputs)
    assert (summary["n"], summary["n_failed"]) == (ROWS, 0)
    found = by_example(read_all(tmp_path / "out" / "predictions"))
    rows = pq.read_table(inputs).to_pylist()
    step = policy.start(by_x()({"x": np.array([row["x"] for row in rows])}).astype(np.float32))
    assert [found[row["example_id"]]["prediction"] for row in rows] == step.predictions.tolist()
    assert [found[row["example_id"]]["confidence"] for row in rows] == step.confidences.astype(np.float32).tolist()


@pytest.mark.slow
def test_a_batch_takes_the_longer_of_its_halves(tmp_path):
    """Of batches that are prepared and computed in 0.2 s each, many take a little over 0.2 s each, in place of 0.4."""
    slow = {"factory": "by_x", "host_s": STEP_S, "device_s": STEP_S}
    pool = python_pool(tmp_path, [("prepared", slow), ("by_x", {})])
    run(tmp_path, pool, two_model_policy(threshold=0.0), numbered_input(tmp_path, ROWS))
    ledger = read_all(tmp_path / "out" / "ledger")
    began = pc.cast(ledger["started_at"], "int64").to_numpy() / 1e6
    took = ledger["compute_s"].to_numpy()
    span_s, n = (began + took).max() - began.min(), ROWS // BATCH
    assert len(took) == n
    assert n * STEP_S < span_s < 0.75 * n * 2 * STEP_S
    assert took.sum() <= span_s + 1e-3  # what two calls overlap counts once


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "says"), [("fails_on", "cannot look at row-20"), ("dies_on", "died")])
def test_a_row_that_cannot_be_prepared_fails_by_itself(tmp_path, fault, says):
    first = ("prepared", {"factory": fault, "example": "row-20", "device_s": 0.05})
    pool = python_pool(tmp_path, [first, ("by_x", {"factor": 5.0})])
    summary = run(tmp_path, pool, two_model_policy(threshold=0.5), numbered_input(tmp_path, 200))
    failed = by_example(read_all(tmp_path / "out" / "failed"))
    assert set(failed) == {"row-20"}
    assert says in failed["row-20"]["reason"]
    assert (summary["n"], summary["n_failed"]) == (200, 1)
