"""Ridge regressions with the penalty of least leave-one-out error, against refits without each row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from synthetic import seeds

from cauc_ray.numbers.ridge import PENALTIES, fit_ridge


@given(seeds, st.integers(4, 25), st.integers(1, 8), st.integers(1, 3))
@settings(max_examples=8)
def test_left_out_rows_are_predicted_as_by_refits_and_the_best_penalty_is_chosen(seed, n, d, n_targets):
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n, d)) + rng.normal(0, 5, d)
    targets = features[:, :1] * rng.standard_normal(n_targets) + rng.standard_normal((n, n_targets))

    def refitted(penalty):
        predictions = []
        for row in range(n):
            rows = np.arange(n) != row
            oracle = Ridge(alpha=penalty, solver="svd").fit(features[rows], targets[rows].reshape(n - 1, -1))
            predictions.append(oracle.predict(features[[row]]).reshape(-1))
        return np.array(predictions)

    fit = fit_ridge(features, targets)
    assert fit.held_out == pytest.approx(refitted(fit.penalty), abs=1e-6)
    errors = {penalty: ((refitted(penalty) - targets) ** 2).sum() for penalty in PENALTIES}
    assert errors[fit.penalty] == pytest.approx(min(errors.values()))
    whole = Ridge(alpha=fit.penalty, solver="svd").fit(features, targets)
    assert fit.predict(features) == pytest.approx(whole.predict(features).reshape(n, -1), abs=1e-6)


def test_features_that_are_linear_in_others_do_no_harm():
    rng = np.random.default_rng(0)
    features = np.repeat(rng.standard_normal((30, 2)), 20, axis=1)
    assert fit_ridge(features, features[:, :1]).predict(features) == pytest.approx(features[:, :1], abs=0.05)
