import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.models.answers import Answers, ModelFacts
from cauc_ray.models.costs import FAR, MEASURED_UNIT, cost_far_off, cost_unit, model_cost
from cauc_ray.models.flops import MEASURED_ROWS, measured_gflops
from cauc_ray.models.pool import COST_UNITS, CostSpec, StageSpec
from cauc_ray.models.python import python_model

FACTS = ModelFacts("m", gflops=4.0, params_b=7.0)
UNKNOWN = ModelFacts("m")


# What a call costs.


@pytest.mark.parametrize("key", COST_UNITS)
def test_a_declared_number_is_the_cost(key):
    declared = CostSpec(**{key: 3.5})
    assert model_cost(declared, FACTS, 8.0, 0.1) == 3.5
    assert model_cost(CostSpec(**{key: 0}), FACTS, 8.0, 0.1) == 0


@pytest.mark.parametrize(
    ("declared", "facts", "measured", "per_call", "expected"),
    [
        (CostSpec(gflops="auto"), FACTS, 8.0, 0.1, 4.0),
        (CostSpec(gflops="auto"), UNKNOWN, 8.0, 0.1, 8.0),
        (CostSpec(gflops="auto"), UNKNOWN, None, 0.1, None),
        (CostSpec(params_b="auto"), FACTS, 8.0, 0.1, 7.0),
        (CostSpec(params_b="auto"), UNKNOWN, 8.0, 0.1, None),
        (None, FACTS, 8.0, 0.1, 0.1),
        (None, FACTS, 8.0, 0.0, 0.0),
        (None, FACTS, 8.0, None, 4.0),
        (None, UNKNOWN, 8.0, None, 8.0),
        (None, UNKNOWN, None, None, None),
    ],
)
def test_without_a_number_the_nearest_source_counts(declared, facts, measured, per_call, expected):
    assert model_cost(declared, facts, measured, per_call) == expected


def stage(cost=None, **model):
    return StageSpec.model_validate({"name": "s", "model": model or PYTHON, **({"cost": cost} if cost else {})})


PYTHON = {"kind": "python", "factory": "user_models:by_x"}


def test_the_unit_is_declared_or_the_calls_own_or_gflops():
    assert cost_unit(stage()) == MEASURED_UNIT == COST_UNITS["gflops"]
    for key, unit in COST_UNITS.items():
        assert cost_unit(stage({key: 2})) == unit
        assert cost_unit(stage({key: 2}, kind="openai", model="m", prices={"input": 1, "output": 2})) == unit
    own = stage(kind="openai", model="m", prices={"input": 1, "output": 2})
    assert cost_unit(own) == own.model.cost_unit == "USD"


@given(
    measured=st.floats(1e-3, 1e3), nominal=st.sampled_from([1 / FAR, FAR, 2 / FAR, 2 * FAR]), off=st.floats(0.8, 1.2)
)
def test_a_cost_is_far_off_when_it_and_the_measured_one_are_more_than_a_quarter_apart(measured, nominal, off):
    cost = measured * nominal * off
    told = cost_far_off("lite", cost, measured)
    ratio = cost / measured
    assert (told is None) == (1 / FAR <= ratio <= FAR)
    if told is not None:
        assert "\n" not in told
        assert "stage 'lite'" in told
        assert f"{measured:.4g}" in told
        assert ("two operations" in told) == (2 / FAR <= ratio <= 2 * FAR)


def test_twice_the_cost_is_reported_as_such():
    assert cost_far_off("a", 8.0, 4.0) == (
        "stage 'a': its cost of 8 GFLOPs is 2 times the measured 4; "
        "it may count a multiply-add as two operations instead of one"
    )
    assert cost_far_off("a", 2.0, 4.0) == "stage 'a': its cost of 2 GFLOPs is 0.5 times the measured 4"
    assert cost_far_off("a", 4.0, 4.0) is None
    assert cost_far_off("a", 4.0, None) is None
    assert cost_far_off("a", 4.0, 0.0) is None
    assert cost_far_off("a", 0.0, 4.0) is None  # free is what somebody said


# What is counted.


def torch_model(*layers, shape):
    """Make a model of layers whose rows are vectors of the column x, laid out in a shape."""
    import torch

    network = torch.nn.Sequential(*layers).eval()

    def answer(batch):
        with torch.inference_mode():
            return network(torch.tensor(batch["x"], dtype=torch.float32).reshape(-1, *shape)).flatten(1).numpy()

    return python_model(answer, "test")


def rows(n, width):
    return {"x": np.ones((n, width))}


def test_linear_layers_are_counted_exactly():
    from torch import nn

    model = torch_model(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3), shape=(10,))
    assert measured_gflops(model, rows(5, 10)) == pytest.approx((10 * 20 + 20 * 3) / 1e9)
    assert measured_gflops(model, rows(1, 10)) == measured_gflops(model, rows(50, 10))


def test_convolutions_are_counted_exactly():
    from torch import nn

    model = torch_model(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 3, groups=3), shape=(4, 8, 8))
    first, second = 4 * 4 * (4 * 6 * 9), 2 * 2 * (2 * 6 * 9)
    assert measured_gflops(model, rows(2, 4 * 8 * 8)) == pytest.approx((first + second) / 1e9)


def test_attention_is_counted_whichever_way_torch_computes_it():
    import torch

    def attend(batch):
        with torch.inference_mode():
            x = torch.ones(len(batch["x"]), 2, 16, 8)
            y = torch.nn.functional.scaled_dot_product_attention(x, x, x)
            return y.flatten(1).numpy()

    # Two heads, 16 positions, 8 wide: scores and their sum are a product of matrices each.
    assert measured_gflops(python_model(attend, "test"), rows(2, 1)) == pytest.approx(2 * 2 * 16 * 16 * 8 / 1e9)


def test_a_published_count_is_what_is_measured():
    import torch
    from torchvision import models

    network = models.resnet18(weights=None).eval()

    def answer(batch):
        with torch.inference_mode():
            return network(torch.zeros(len(batch["x"]), 3, 224, 224)).numpy()

    published = models.ResNet18_Weights.DEFAULT.meta["_ops"]
    assert measured_gflops(python_model(answer, "test"), rows(1, 1)) == pytest.approx(published, rel=1e-3)


def test_the_count_is_a_mean_over_the_first_rows_each_alone():
    import torch

    layer = torch.nn.Linear(1, 1)
    sizes = []

    def answer(batch):
        sizes.append(len(batch["x"]))
        longest = int(batch["x"].max())  # as padding does
        with torch.inference_mode():
            layer(torch.ones(len(batch["x"]), longest, 1))
        return np.zeros((len(batch["x"]), 2))

    lengths = np.arange(1, MEASURED_ROWS + 40)
    expected = lengths[:MEASURED_ROWS].mean() / 1e9
    assert measured_gflops(python_model(answer, "test"), {"x": lengths}) == pytest.approx(expected)
    assert sizes == [1] * MEASURED_ROWS


def test_rows_that_fail_are_left_out():
    import torch

    class Model:
        facts = ModelFacts("test")

        def __call__(self, batch):
            bad = {row: "it is bad" for row, x in enumerate(batch["x"]) if x < 0}
            with torch.inference_mode():
                if not bad:
                    torch.ones(1, 6) @ torch.ones(6, 5)
            return Answers(np.zeros((len(batch["x"]), 2), np.float32), failures=bad)

    assert measured_gflops(Model(), {"x": np.array([-1.0, 1.0, -1.0, 1.0])}) == pytest.approx(30 / 1e9)
    assert measured_gflops(Model(), {"x": np.full(4, -1.0)}) is None


def test_what_cannot_be_counted_has_no_count():
    import torch

    assert "torch" in sys.modules
    in_numpy = python_model(lambda batch: batch["x"] @ np.ones((10, 4)), "test")
    assert measured_gflops(in_numpy, rows(3, 10)) is None

    def raises(batch):
        torch.ones(3, 3) @ torch.ones(3, 3)
        raise RuntimeError("only whole batches")

    assert measured_gflops(python_model(raises, "test"), rows(3, 10)) is None
    assert measured_gflops(python_model(raises, "test"), rows(0, 10)) is None


def test_the_batch_stays_as_it_was():
    def writes(batch):
        batch["x"][:] = 9.0
        logits = np.zeros((len(batch["x"]), 2))
        batch.clear()
        return logits

    import torch  # noqa: F401

    batch = rows(3, 2)
    measured_gflops(python_model(writes, "test"), batch)
    assert (batch["x"] == 1.0).all()


def test_counting_does_not_load_torch():
    code = """
        import sys
        import numpy as np
        from cauc_ray.models.flops import measured_gflops
        from cauc_ray.models.python import python_model
        model = python_model(lambda batch: 1 / 0, "test")
        assert measured_gflops(model, {"x": np.zeros(2)}) is None
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
