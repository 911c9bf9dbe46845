import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.errors import BudgetError
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.subsets import sweep_subsets
from cauc_ray.numbers.sweep import sweep


def cascade(seed, n, m, *, per_call):
    """Return confidences with ties, predictions, labels, costs and a table of subsets."""
    rng = np.random.default_rng(seed)
    confidences = rng.integers(1, 9, (n, m - 1)) / 8
    predictions, labels = rng.integers(0, 3, (n, m)), rng.integers(0, 3, n)
    costs = rng.uniform(0, 3, (n, m) if per_call else m)
    members = rng.random((n, 4)) < 0.5
    members[:, 0] = True
    members[0] = True
    return confidences, predictions, labels, Costs("GFLOPs", costs), members


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 40),
    m=st.integers(1, 5),
    per_call=st.booleans(),
    objective=st.sampled_from(["accuracy", "macro-f1"]),
    budget=st.floats(0, 8) | st.none(),
)
def test_every_subset_has_what_a_sweep_of_it_alone_has(seed, n, m, per_call, objective, budget):
    confidences, predictions, labels, costs, members = cascade(seed, n, m, per_call=per_call)
    together = sweep_subsets(confidences, predictions, labels, costs, members.T, objective)
    best = together.best(budget)
    for place, rows in enumerate(members.T):
        own = Costs("GFLOPs", costs.per_call[rows]) if per_call else costs
        alone = sweep(confidences[rows], predictions[rows], labels[rows], own, objective)
        for threshold in (0.0, 0.5, 0.6, 1.0, 2.0):
            at, point = together.at(threshold), int(alone.index(np.array(threshold)))
            assert at.quality[place] == pytest.approx(alone.quality[point])
            assert at.cost[place] == pytest.approx(alone.cost[point])
        try:
            expected = alone.best(budget)
        except BudgetError:
            assert best.quality[place] == -np.inf
        else:
            assert best.quality[place] == pytest.approx(expected.quality)
            assert best.cost[place] == pytest.approx(expected.cost)
