"""Every operating point against a replay, and what calls cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import f1_score
from synthetic import seeds

from cauc_ray.errors import BudgetError, DataError
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.sweep import Events, sweep

sizes = st.tuples(st.integers(1, 60), st.integers(1, 6))


def traces(seed, size, *, per_call=False, levels=12):
    """Few distinct confidences, so that ties within and across stages are common."""
    rng = np.random.default_rng(seed)
    n, m = size
    confidences = rng.integers(1, levels + 1, (n, m - 1)) / levels
    predictions, labels = rng.integers(0, 4, (n, m)), rng.integers(0, 4, n)
    per_model = rng.integers(0, 10, m).astype(float)
    costs = Costs("GFLOPs", per_model * rng.integers(1, 4, (n, m)) if per_call else per_model)
    return confidences, predictions, labels, costs


def stops_at(confidences, threshold):
    n, n_stops = confidences.shape
    return np.array([next((j for j in range(n_stops) if confidences[i, j] >= threshold), n_stops) for i in range(n)])


def by_replay(confidences, predictions, labels, costs, threshold):
    stops = stops_at(confidences, threshold)
    answers = predictions[np.arange(len(stops)), stops]
    per_call = np.broadcast_to(costs.per_call, predictions.shape)
    cost = np.mean([per_call[i, : stop + 1].sum() for i, stop in enumerate(stops)])
    f1 = f1_score(labels, answers, labels=np.unique(labels), average="macro", zero_division=0)
    return cost, np.mean(answers == labels), f1


@given(seeds, sizes, st.booleans())
def test_every_point_is_what_a_replay_gives_at_its_threshold_and_at_its_confidence(seed, size, per_call):
    data = traces(seed, size, per_call=per_call)
    accuracy, macro = sweep(*data), sweep(*data, "macro-f1")
    rows = np.arange(0, len(data[0]), 2)
    some = (data[0][rows], data[1][rows], data[2][rows], data[3].of_rows(rows))
    equal = sweep(*some), sweep(*some, events=Events.of(data[0]).of_rows(rows))
    assert np.array_equal(equal[0].confidences, equal[1].confidences)
    np.testing.assert_allclose(equal[0].cost, equal[1].cost, rtol=1e-12)
    assert (np.diff(accuracy.cost) >= -1e-12).all()
    assert accuracy.confidences.tolist() == np.unique(np.maximum.accumulate(data[0], axis=1)).tolist()
    for point, threshold in [*enumerate(accuracy.settings), *enumerate(accuracy.confidences)]:
        cost, right, f1 = by_replay(*data, threshold)
        assert accuracy.index(np.array([threshold])).tolist() == [point]
        assert accuracy.cost[point] == pytest.approx(cost, abs=1e-9)
        assert accuracy.quality[point] == pytest.approx(right, abs=1e-12)
        assert macro.quality[point] == pytest.approx(f1, abs=1e-9)
    for point, threshold in enumerate(accuracy.settings.astype(np.float32).astype(float)):  # midway between points
        assert by_replay(*data, threshold)[0] == pytest.approx(accuracy.cost[point])


@given(seeds, sizes, st.floats(0, 40), st.booleans())
def test_the_best_under_a_budget_is_that_of_brute_force(seed, size, budget, per_call):
    data = traces(seed, size, per_call=per_call)
    candidates = [by_replay(*data, t)[:2] for t in [*np.unique(data[0]), 2.0]]
    affordable = [(right, -cost) for cost, right in candidates if cost <= budget * (1 + 1e-9)]
    frontier = sweep(*data)
    if not affordable:
        with pytest.raises(BudgetError, match="below the cheapest operating point"):
            frontier.best(budget)
        return
    right, minus_cost = max(affordable)
    best = frontier.best(budget)
    assert (best.quality, best.cost) == pytest.approx((right, -minus_cost), abs=1e-9)
    assert by_replay(*data, best.threshold)[:2] == pytest.approx((best.cost, best.quality), abs=1e-9)


@given(seeds, sizes, st.integers(2, 9), st.floats(0, 1))
def test_thinned_points_are_some_of_all_and_lose_nothing_at_evenly_spaced_budgets(seed, size, most, between):
    points = sweep(*traces(seed, size))
    whole, thin = points.pareto(10**6), points.pareto(most)
    assert len(thin.cost) <= most
    assert set(thin.settings) <= set(whole.settings)
    assert (thin.settings[0], thin.settings[-1]) == (whole.settings[0], whole.settings[-1])
    if len(whole.cost) <= most:
        assert (thin.settings == whole.settings).all()
    grid = np.linspace(whole.cost[0], whole.cost[-1], most)
    for budget in grid:
        assert thin.quality[thin.index_of_best(budget)] == points.quality[points.index_of_best(budget)]
    budget = whole.cost[0] + between * (whole.cost[-1] - whole.cost[0])
    assert thin.cost[thin.index_of_best(budget)] <= budget * (1 + 1e-9)


@pytest.mark.parametrize("low", [0.7, 1e100, -1e100])
def test_between_adjacent_floats_and_beyond_probabilities_thresholds_still_part_the_points(low):
    answers = np.zeros((2, 2), int), np.zeros(2, int), Costs("s", np.array([1.0, 1.0]))
    confidences = np.array([[low], [np.nextafter(low, np.inf)]])
    frontier = sweep(confidences, *answers)
    assert [by_replay(confidences, *answers, t)[0] for t in frontier.settings] == frontier.cost.tolist()


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_costs_below_zero_or_not_finite_are_refused(bad):
    with pytest.raises(DataError, match="not a number between 0 and"):
        Costs("USD", np.array([1.0, bad]))
