from dataclasses import replace

import numpy as np
import pytest
from synthetic import chain

from cauc_ray.errors import CaucWarning, DataError, PolicyError
from cauc_ray.numbers.costs import Costs
from cauc_ray.policies.fitting import fit_base, fit_rf, refit
from cauc_ray.policies.threshold import ThresholdRule

FOUR = (0.8, 1.3, 1.8, 2.4)


def replaced(data, place, strength=1.6):
    """Return the chain with another model, of another name, in one place."""
    other = chain(99, len(data), data.logits[0].shape[1], (strength,)).logits[0]
    rng = np.random.default_rng(place)
    logits = rng.permutation(other)
    logits[np.arange(len(data)), data.labels] += 2.0
    return replace(
        data,
        models=tuple("new" if j == place else m for j, m in enumerate(data.models)),
        logits=tuple(logits if j == place else z for j, z in enumerate(data.logits)),
    )


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("rule", [{}, {"budget": 9.0}, {"threshold": 0.7}])
def test_replacing_a_model_in_rf_leaves_all_stages_before_it(place, rule):
    calibration, validation = (chain(11, 300, 4, FOUR, shift=s) for s in (0, 1))
    old = fit_rf(calibration, validation, ThresholdRule(**rule))
    new = refit(old, replaced(calibration, place), replaced(validation, place))
    assert new.stages[:place] == old.stages[:place]  # to the bit
    for j in range(place + 1, 4):
        assert new.stages[j].temperature == old.stages[j].temperature
        assert new.stages[j].diagnostics == old.stages[j].diagnostics
        assert (new.stages[j].alpha, new.stages[j].beta) != (old.stages[j].alpha, old.stages[j].beta)
    assert new.budget == old.budget
    if "threshold" in rule:
        assert new.threshold == old.threshold
    fresh = fit_rf(replaced(calibration, place), replaced(validation, place), ThresholdRule(**rule))
    assert new == fresh


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("rule", [{}, {"budget": 9.0}])
def test_replacing_a_model_in_base_leaves_the_others(place, rule):
    calibration, validation = (chain(12, 300, 4, FOUR, shift=s) for s in (0, 1))
    old = fit_base(calibration, validation, ThresholdRule(**rule))
    new = refit(old, replaced(calibration, place), replaced(validation, place))
    for j in range(4):
        if j == place:
            continue
        if place != 3:
            assert new.stages[j] == old.stages[j]  # to the bit
        else:  # complementarity is with the last model, which is new
            unchanged = {"complementarity_rate": None, "fused": True, "n_gain": None, "n_loss": None}
            assert new.stages[j].model_copy(update=unchanged) == old.stages[j].model_copy(update=unchanged)
    if place != 3 and not rule:
        assert new.threshold == old.threshold
    assert new == fit_base(replaced(calibration, place), replaced(validation, place), ThresholdRule(**rule))


def test_other_calibration_examples_keep_nothing():
    policy = fit_base(chain(13, 100))
    with pytest.raises(PolicyError, match="other calibration examples"):
        refit(policy, chain(14, 100, shift=3), None)


def test_unlabelled_calibration_is_refused_by_example():
    calibration = chain(15, 50)
    labels = calibration.labels.copy()
    labels[7] = -1
    with pytest.raises(DataError, match="'0-00007' has no label"):
        fit_base(replace(calibration, labels=labels))


def test_costs_that_do_not_rise_and_clamped_temperatures_are_told():
    calibration = chain(16, 60)
    flat = replace(calibration, costs=Costs("s", np.array([1.0, 1.0, 2.0])))
    with pytest.warns(CaucWarning, match="no more than 'm0'"):
        fit_base(flat)
    perfect = replace(calibration, logits=(np.eye(5, dtype=np.float32)[calibration.labels], *calibration.logits[1:]))
    with pytest.warns(CaucWarning, match="'m0' is separable"):
        policy = fit_base(perfect)
    assert policy.stages[0].diagnostics.status == "separable"
    assert policy.stages[0].diagnostics.standard_error is None


def test_what_to_expect_is_measured_on_validation():
    calibration, validation = chain(17, 200), chain(17, 150, shift=1)
    for fit in (fit_base, fit_rf):
        policy = fit(calibration, validation, ThresholdRule(budget=8.0))
        assert (policy.expected.split, policy.expected.n) == ("validation", 150)
        assert policy.expected.cost <= 8.0
        low, value, high = (getattr(policy.expected.accuracy, key) for key in ("low", "value", "high"))
        assert low < value < high
    assert fit_base(calibration).expected.split == "calibration"


def test_per_call_costs_decide_the_budget():
    calibration, validation = (chain(18, 300, per_call=True, shift=s) for s in (0, 1))
    policy = fit_rf(calibration, validation, ThresholdRule(budget=9.0))
    assert policy.costs == "per-call"
    assert policy.expected.cost <= 9.0
    assert policy.stages[0].cost == pytest.approx(calibration.costs.per_call[:, 0].mean())
