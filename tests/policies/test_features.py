import numpy as np
import pytest
from planted import examples, scaled
from synthetic import planted

from cauc_ray.policies.baselines.features import (
    LOWEST_LOG_PROBABILITY,
    QueryVectors,
    option_features,
    scaler_of,
    unit_rows,
)


def logits(seed, n=200, *, ragged=True):
    return planted(np.random.default_rng(seed), n, 5, (1.5,), ragged=ragged)[1][0]


def test_features_of_more_columns_than_options_are_those_of_options_that_a_row_does_not_have():
    own = logits(0)
    wider = np.pad(own, ((0, 0), (0, 2)), constant_values=-np.inf)
    np.testing.assert_allclose(option_features(own, 7), option_features(wider), atol=1e-6)
    np.testing.assert_allclose(option_features(wider, 5), option_features(own), atol=1e-6)
    np.testing.assert_array_equal(option_features(own, 5), option_features(own))


def test_features_of_fewer_columns_keep_the_best_options_among_the_sorted_ones():
    own = logits(1, ragged=False)
    narrow, full = option_features(own, 3), option_features(own)
    np.testing.assert_array_equal(narrow[:, :3], full[:, :3])
    np.testing.assert_array_equal(narrow[:, 3:6], full[:, 5:8])
    np.testing.assert_array_equal(narrow[:, 6:], full[:, 10:])


def test_scaled_features_have_mean_0_and_deviation_1():
    features = option_features(logits(2))
    standard = scaler_of(features).transform(features)
    np.testing.assert_allclose(standard.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(standard.std(axis=0), 1, atol=1e-4)


@pytest.mark.parametrize("value", [LOWEST_LOG_PROBABILITY, 0.1, 1 / 3, 12345.678])
def test_a_feature_that_never_changed_is_not_blown_up_when_it_does(value):
    scaler = scaler_of(np.full((1000, 1), value, dtype=np.float32))
    changed = np.float32(value) * np.float32(1.01)
    assert abs(scaler.transform(np.array([[changed]]))[0, 0]) == pytest.approx(0.01 * abs(value), rel=1e-2)


def test_embeddings_have_length_one_whatever_their_encoder_gives():
    calibration, test = examples(0, 0, n=50), examples(0, 1, n=50)
    vectors = QueryVectors.of(calibration)
    np.testing.assert_allclose(vectors(test), test.embeddings, rtol=1e-5)
    np.testing.assert_allclose(vectors(scaled(test, 40)), test.embeddings, rtol=1e-5)
    assert vectors(test).dtype == np.float32


def test_a_vector_without_a_length_stays():
    assert (unit_rows(np.array([[0.0, 0.0], [3.0, 4.0]])) == [[0.0, 0.0], [0.6, 0.8]]).all()


@pytest.mark.parametrize("ragged", [False, True])
def test_the_first_models_outputs_are_standardised_by_calibration(ragged):
    calibration, test = (examples(0, split, n=200, ragged=ragged, embedded=False) for split in (0, 1))
    vectors = QueryVectors.of(calibration)
    of_calibration = vectors(calibration)
    np.testing.assert_allclose(of_calibration.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(of_calibration.std(axis=0), 1, atol=1e-3)
    own = option_features(calibration.chain.logits[0]).astype(np.float64)
    expected = (option_features(test.chain.logits[0]) - own.mean(axis=0)) / own.std(axis=0)
    np.testing.assert_allclose(vectors(test), expected, atol=1e-3)
