"""What is claimed of few labels, over many draws of them: budgets, expected accuracies, risks in each segment."""

import numpy as np
import pytest
import synthetic

import cauc_ray

N = 250  # rows of each split
COSTS = {"m0": 1.0, "m1": 4.0, "m2": 15.0}


def drawn(seed, n, strengths=(1.0, 1.7, 2.4)):
    """Return logits by model and labels."""
    labels, logits = synthetic.planted(np.random.default_rng(seed), n, 5, strengths)
    return dict(zip(COSTS, logits, strict=True)), labels


draws = pytest.mark.parametrize("n_draws", [40, pytest.param(200, marks=pytest.mark.soak("full"))])
# So many rows that their mean costs are those of all inputs.
POPULATION, LABELS = drawn(999_983, 40_000)


def fitted(seed, **options):
    """Fit on a draw of both splits."""
    (calibration, labels), validation = drawn(2 * seed, N), drawn(2 * seed + 1, N)
    return cauc_ray.fit(calibration, labels, costs=COSTS, validation=validation, **options)


@draws
@pytest.mark.filterwarnings("ignore::cauc_ray.CaucWarning")
@pytest.mark.parametrize(
    ("budget", "options"),
    [
        (7.0, {"method": "base"}),
        (7.0, {"method": "base", "search": True}),
        (5.0, {"method": "rf"}),
        pytest.param(7.0, {"method": "stacked"}, marks=pytest.mark.soak("full")),
    ],
)
def test_a_budget_at_a_confidence_is_exceeded_no_more_often_than_that(budget, options, n_draws):
    n_draws //= 2 if options["method"] == "stacked" or "search" in options else 1
    policies = [fitted(seed, budget=f"{budget}@0.95", **options) for seed in range(n_draws)]
    costs = np.array([policy.predict(_of(policy, POPULATION)).cost.mean() for policy in policies])
    assert np.mean(costs > budget) <= 0.05 + 2 * (0.05 * 0.95 / n_draws) ** 0.5
    assert np.mean(costs) > 0.6 * budget  # it is not kept by spending nothing
    for policy in policies:
        if policy.search is not None:  # what was chosen for a cost on validation is what was fitted
            assert policy.on_selection.cost == pytest.approx(policy.search.chosen.cost)


def _of(policy, logits):
    return {model: logits[model] for model in policy.models}


@draws
@pytest.mark.filterwarnings("ignore::cauc_ray.CaucWarning")
@pytest.mark.parametrize(
    "options", [{"method": "rf"}, pytest.param({"method": "rf", "search": True}, marks=pytest.mark.soak("full"))]
)
def test_the_expected_accuracy_has_an_interval_that_covers_that_of_a_test_set(options, n_draws):
    n_covered = 0
    for seed in range(n_draws):
        policy = fitted(seed, budget=7.0, **options)
        test, labels = drawn(1_000_000 + seed, N)
        accuracy = np.mean(policy.predict(test).prediction == labels)
        expected = policy.expected.accuracy
        n_covered += expected.low <= accuracy <= expected.high
        evaluation = cauc_ray.evaluate(test, policy, labels=labels).as_json()
        assert evaluation["expected_interval"] == pytest.approx([expected.low, expected.high])
    assert n_covered / n_draws >= (0.92 if n_draws >= 200 else 0.85)
