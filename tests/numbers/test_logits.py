"""Masks are missing options, and options far below the others change no fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import fit_bias_corrected, planted

from cauc_ray.errors import DataError
from cauc_ray.numbers.calibration import FitStatus, fit_pair, fit_temperature
from cauc_ray.numbers.logits import SumsToOne, as_logits, kind_of, real_options

MASKS = (-1e4, -65504.0, -1e9, float(np.finfo(np.float32).min))


@given(st.integers(0, 999), st.sampled_from(MASKS), st.sampled_from([np.float32, np.float64]))
def test_a_mask_is_a_missing_option_and_all_else_stays(seed, mask, dtype):
    rng = np.random.default_rng(seed)
    _, (logits,) = planted(rng, 20, 6, [2.0], ragged=True, dtype=dtype)
    given_ = np.where(np.isneginf(logits), dtype(mask), logits)
    before = given_.copy()
    cleaned = real_options(given_)
    assert np.array_equal(cleaned, logits)
    assert cleaned.dtype == dtype
    assert np.array_equal(given_, before)
    assert real_options(logits) is logits  # nothing to do, nothing copied


def test_the_depth_is_counted_from_the_rows_largest_logit():
    rows = np.array([[0.0, -5000.0, -5000.5], [-1e9, -1e9 - 4000, -1e9 - 6000], [9e3, 0.0, 5e3]])
    expected = [[True, True, False], [True, True, False], [True, False, True]]
    assert np.isfinite(real_options(rows)).tolist() == expected
    assert np.isfinite(real_options(rows[[0, 2]].astype(np.float32))).tolist() == [expected[0], expected[2]]
    assert real_options(np.array([[3, -10_000]])).tolist() == [[3.0, -np.inf]]
    assert real_options(np.zeros((0, 4))).shape == (0, 4)


def unreachable(depth, *, n=2000, n_more=1, seed=3):
    """Return labels drawn from softmax(a / 0.686 + b / 0.4), the logits a and b, and both with options at -depth."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0.0, 2.0, (2, n, 4))
    scores = a / 0.686 + b / 0.4
    terms = np.exp(scores - scores.max(axis=1, keepdims=True))
    labels = np.array([rng.choice(4, p=row / row.sum()) for row in terms])
    more = np.full((n, n_more), -depth)
    return labels, (a, b), tuple(np.concatenate([z, more], axis=1) for z in (a, b))


@pytest.mark.parametrize("depth", [100.0, 1e3, 4e3])
@pytest.mark.parametrize("n_more", [1, 60])
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_options_that_no_weight_brings_near_change_no_fit(depth, n_more, scale):
    labels, plain, deep = unreachable(depth, n_more=n_more)
    plain, deep = ([scale * z[:, :4] for z in plain], [np.c_[scale * z[:, :4], z[:, 4:]] for z in deep])
    for own, with_more in zip(plain, deep, strict=True):
        expected, found = fit_temperature(own, labels), fit_temperature(with_more, labels)
        assert found.status == expected.status == FitStatus.CONVERGED
        assert found.temperature == pytest.approx(expected.temperature, rel=1e-8)
        assert found.standard_error == pytest.approx(expected.standard_error, rel=1e-4)
    expected, found = fit_pair(*plain, labels), fit_pair(*deep, labels)
    assert found.statuses == (FitStatus.CONVERGED, FitStatus.CONVERGED)
    assert found.temperatures == pytest.approx(expected.temperatures, rel=1e-8)
    assert [2 * at for at in found.temperatures] == pytest.approx([0.686 * scale, 0.4 * scale], rel=0.15)


def test_a_temperature_with_offsets_is_found_with_an_option_far_below():
    labels, _, (deep, _) = unreachable(4e3)
    alone, found = fit_temperature(deep, labels), fit_bias_corrected(deep, labels)
    assert found.status == FitStatus.CONVERGED
    assert found.temperature == pytest.approx(alone.temperature, rel=0.05)


def test_separable_logits_are_still_found_so_with_an_option_far_below():
    _, (logits, _), (deep, _) = unreachable(4e3, n=300)
    for z in (logits, deep):
        assert fit_temperature(z, z.argmax(axis=1)).status == FitStatus.SEPARABLE


@given(st.integers(0, 999), st.booleans())
def test_probabilities_become_their_logarithms_and_zeros_stay_options(seed, ragged):
    rng = np.random.default_rng(seed)
    _, (logits,) = planted(rng, 30, 5, [2.0], ragged=ragged, dtype=np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[:10, 0] = 0.0
    missing = np.isneginf(logits)
    found = as_logits(np.where(missing, -1e9, p), "probabilities")
    with np.errstate(divide="ignore"):
        expected = np.where(missing, -np.inf, np.maximum(np.log(p), -50.0))
    assert np.allclose(found[~missing], expected[~missing], rtol=1e-12)
    assert np.array_equal(np.isneginf(found), missing)
    assert (found[:10, 0][~missing[:10, 0]] == -50.0).all()


@pytest.mark.parametrize("row", [[0.5, -0.5, 1.0], [0.2, 1.5, 0.1], [0.0, 0.0, 0.0]])
def test_what_cannot_be_probabilities_is_refused_by_row(row):
    with pytest.raises(DataError, match=r"row 1 .*outside 0 to 1"):
        as_logits(np.array([[0.2, 0.3, 0.5], row]), "probabilities")


@given(st.integers(0, 9999), st.sampled_from([np.float16, np.float32, np.float64]), st.integers(2, 200))
def test_softmax_rows_are_known_as_probabilities_and_logits_are_not(seed, dtype, k):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 3.0, (40, k))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = (p / p.sum(axis=1, keepdims=True)).astype(dtype).astype(np.float32)
    assert SumsToOne.of(p).certain
    parts = [SumsToOne.of(p[a : a + 4]) for a in range(0, 40, 4)]
    assert sum(parts, SumsToOne()).certain
    assert SumsToOne.of(p.round(3) if k <= 5 else p).certain
    p[7, 0] = 0.0  # cut off, so that it sums to less
    assert SumsToOne.of(p).certain
    p[7] = logits[7] - logits[7].max() - 0.1
    assert not SumsToOne.of(p).certain
    assert not SumsToOne.of(np.abs(logits)).certain


def test_a_few_raw_rows_that_sum_to_one_by_accident_are_not_probabilities():
    assert not SumsToOne.of(np.array([[1.0, 0.0], [0.0, 1.0]])).certain  # logits of zeros and ones
    assert not SumsToOne.of(np.array([[0.301, 0.7]])).certain
    assert not SumsToOne.of(np.ones((20, 1))).certain  # one option says nothing
    assert not SumsToOne.of(np.array([[0.3, 0.7], [0.3, 2.0]])).certain
    assert SumsToOne.of(np.array([[0.3, 0.7]])).certain
    assert SumsToOne.of(np.eye(4)[np.arange(40) % 4]).certain


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("unknown", "raw"),
        ("as the model returns them", "raw"),
        ("raw next-token logits of the options' letters", "raw"),
        ("log-likelihoods of the options' texts per byte", "log-probabilities"),
        ("surrogate: log p on the answered option", "surrogate"),
        ("probabilities", "probabilities"),
        ("mixed: each model's source says which", None),
    ],
)
def test_texts_of_earlier_versions_name_their_kind(text, kind):
    assert kind_of(text) == kind
