import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from strategies import seeds

from cauc_ray.numbers.calibrators import fit_isotonic


@st.composite
def answers(draw):
    """Draw confidences, some of them equal or 0 or 1, and whether they were right."""
    n = draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(seeds))
    confidences = rng.beta(3, 1, n)
    if draw(st.booleans()):
        confidences = np.round(confidences, draw(st.integers(0, 2)))
    right = confidences ** draw(st.sampled_from([0.3, 1.0, 4.0]))
    return confidences, rng.random(n) < right


@given(answers())
def test_is_the_regression_that_scikit_learn_finds_but_for_its_tilt(drawn):
    confidences, correct = drawn
    n, asked = len(confidences), np.linspace(0, 1, 101)
    theirs = IsotonicRegression(out_of_bounds="clip").fit(confidences, correct)
    fitted = fit_isotonic(confidences, correct)
    for at in (confidences, asked):
        expected = theirs.predict(at)
        np.testing.assert_allclose(fitted.of(at), expected + (at - expected) / n, atol=1e-9)


@given(answers())
def test_what_is_more_confident_before_is_so_after(drawn):
    confidences, correct = drawn
    fitted = fit_isotonic(confidences, correct)
    assert fitted.confidences[0] == 0
    assert fitted.confidences[-1] == 1
    assert (np.diff(fitted.confidences) > 0).all()
    assert (np.diff(fitted.accuracies) > 0).all()
    assert 0 <= fitted.accuracies[0] < fitted.accuracies[-1] <= 1
    distinct = np.unique(np.round(confidences, 6))
    assert (np.diff(fitted.of(distinct)) > 0).all()


@given(answers())
def test_on_its_own_rows_the_mean_is_kept_and_nothing_is_left_to_calibrate(drawn):
    confidences, correct = drawn
    after = fit_isotonic(confidences, correct).of(confidences)
    assert after.mean() == pytest.approx(correct.mean(), abs=1.01 / len(correct))
    _, block = np.unique(np.round(IsotonicRegression().fit_transform(confidences, correct), 9), return_inverse=True)
    gaps = np.bincount(block, weights=after - correct) / np.bincount(block)
    assert np.abs(gaps).max() <= 1.01 / len(correct)
    assert ((after - correct) ** 2).mean() <= ((confidences - correct) ** 2).mean() + 1e-12


@given(answers())
def test_the_order_of_rows_changes_nothing(drawn):
    confidences, correct = drawn
    order = np.random.default_rng(len(correct)).permutation(len(correct))
    assert fit_isotonic(confidences, correct) == fit_isotonic(confidences[order], correct[order])


def test_confidences_closer_than_the_tilt_can_tell_are_one():
    confidences = np.array([0.5, np.nextafter(0.5, 1), np.nextafter(np.nextafter(0.5, 1), 1), 0.9])
    fitted = fit_isotonic(confidences, np.array([True, False, True, True]))
    assert (np.diff(fitted.accuracies) > 0).all()
    assert (np.diff(fitted.confidences) > 0).all()
