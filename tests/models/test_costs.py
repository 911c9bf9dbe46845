import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision import models

from cauc_ray.models.answers import Answers, ModelFacts
from cauc_ray.models.costs import FAR, MEASURED_ROWS, cost_far_off, measured, model_cost
from cauc_ray.models.pool import COST_UNITS, CostSpec
from cauc_ray.models.python import python_model

FACTS = ModelFacts("m", gflops=4.0, params_b=7.0)
UNKNOWN = ModelFacts("m")


# What a call costs.


@pytest.mark.parametrize(
    ("declared", "facts", "measured", "per_call", "expected"),
    [
        (CostSpec(gflops="auto"), FACTS, 8.0, 0.1, 4.0),
        (CostSpec(gflops="auto"), UNKNOWN, 8.0, 0.1, 8.0),
        (CostSpec(params_b="auto"), FACTS, 8.0, 0.1, 7.0),
        (CostSpec(params_b="auto"), UNKNOWN, 8.0, 0.1, None),
        (None, FACTS, 8.0, 0.0, 0.0),
        (None, FACTS, 8.0, None, 4.0),
        (None, UNKNOWN, None, None, None),
        *((CostSpec(**{key: value}), FACTS, 8.0, 0.1, value) for key in COST_UNITS for value in (3.5, 0)),
    ],
)
def test_a_declared_number_or_the_nearest_source_is_the_cost(declared, facts, measured, per_call, expected):
    assert model_cost(declared, facts, measured, per_call) == expected


@given(
    measured=st.floats(1e-3, 1e3), nominal=st.sampled_from([1 / FAR, FAR, 2 / FAR, 2 * FAR]), off=st.floats(0.8, 1.2)
)
def test_a_cost_is_far_off_when_it_and_the_measured_one_are_more_than_a_quarter_apart(measured, nominal, off):
    cost = measured * nominal * off
    warning = cost_far_off("lite", cost, measured)
    ratio = cost / measured
    assert (warning is None) == (1 / FAR <= ratio <= FAR)
    if warning is not None:
        assert ("two operations" in warning) == (2 / FAR <= ratio <= 2 * FAR)
    for cost, unmeasured in ((measured, None), (measured, 0.0), (0.0, measured)):  # free is what somebody said
        assert cost_far_off("lite", cost, unmeasured) is None


# What is counted.


def test_operations_are_counted_as_published():
    network = models.resnet18(weights=None).eval()

    def answer(batch):
        with torch.inference_mode():
            return network(torch.zeros(len(batch["x"]), 3, 224, 224)).numpy()

    gflops = measured(python_model(answer, "test"), {"x": np.ones(2)})[0]
    assert gflops == pytest.approx(models.ResNet18_Weights.DEFAULT.meta["_ops"], rel=1e-3)


def test_operations_and_noise_are_those_of_the_first_rows_each_alone_without_those_that_fail():
    layer = torch.nn.Linear(1, 1)
    sizes = []

    class Model:
        facts = ModelFacts("test", dtype="float32")

        def __call__(self, batch):
            sizes.append(len(batch["x"]))
            longest = int(batch["x"].max())  # as padding does
            if longest > 100:
                raise RuntimeError("only whole batches")
            failures = {0: "it is bad"} if longest == 3 else {}
            with torch.inference_mode():
                layer(torch.ones(len(batch["x"]), longest, 1))
            batch["x"][:] = 9
            neighbours = 0.25 * (len(batch["x"]) > 1)
            return Answers(np.full((len(batch["x"]), 2), neighbours, np.float32), failures=failures)

    batch = {"x": np.arange(1, MEASURED_ROWS + 40)}
    together = Model()({"x": batch["x"].copy()})
    sizes.clear()
    expected = (batch["x"][:MEASURED_ROWS].sum() - 3) / (MEASURED_ROWS - 1) / 1e9
    assert measured(Model(), batch, together) == (pytest.approx(expected), 0.25)
    assert measured(Model(), batch) == (pytest.approx(expected), None)
    assert sizes == [1] * 2 * MEASURED_ROWS
    assert (batch["x"] == np.arange(1, MEASURED_ROWS + 40)).all()
    for values in ([3, 3], [1, 101]):
        assert measured(Model(), {"x": np.array(values)})[0] is None


def test_counting_does_not_load_torch():
    code = """
        import sys
        import numpy as np
        from cauc_ray.models.costs import measured
        from cauc_ray.models.python import python_model
        asked = []
        model = python_model(asked.append, "test")
        assert measured(model, {"x": np.zeros(2)})[0] is None
        assert "torch" not in sys.modules
        assert not asked
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
