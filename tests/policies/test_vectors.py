import numpy as np
import pytest
from planted import examples, scaled

from cauc_ray.policies.baselines.routing import features_of
from cauc_ray.policies.baselines.vectors import QueryVectors, unit_rows


def test_embeddings_have_length_one_whatever_their_encoder_gives():
    calibration, test = examples(0, 0, n=50), examples(0, 1, n=50)
    vectors = QueryVectors.of(features_of(calibration))
    np.testing.assert_allclose(vectors(test), test.embeddings, rtol=1e-5)
    np.testing.assert_allclose(vectors(scaled(test, 40)), test.embeddings, rtol=1e-5)
    assert vectors(test).dtype == np.float32


def test_a_vector_without_a_length_stays():
    assert (unit_rows(np.array([[0.0, 0.0], [3.0, 4.0]])) == [[0.0, 0.0], [0.6, 0.8]]).all()


@pytest.mark.parametrize("ragged", [False, True])
def test_the_first_models_outputs_are_standardised_by_calibration(ragged):
    calibration, test = (examples(0, split, n=200, ragged=ragged, embedded=False) for split in (0, 1))
    vectors = QueryVectors.of(features_of(calibration))
    of_calibration = vectors(calibration)
    np.testing.assert_allclose(of_calibration.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(of_calibration.std(axis=0), 1, atol=1e-3)
    own = features_of(calibration).vectors.astype(np.float64)
    expected = (features_of(test).vectors - own.mean(axis=0)) / own.std(axis=0)
    np.testing.assert_allclose(vectors(test), expected, atol=1e-3)
