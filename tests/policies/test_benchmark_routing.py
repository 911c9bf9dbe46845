from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import problem
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import StandardScaler
from synthetic import seeds

from cauc_ray.policies.baselines.benchmark_routing import SHARPNESSES, fit_benchmark_routing, sizes_to_try
from cauc_ray.policies.baselines.features import option_features


def slow_estimates(known, correct, vectors, k, sharpness):
    """Return g by a loop over queries and models."""
    estimates = np.zeros((len(vectors), correct.shape[1]))
    for row, cosines in enumerate(cosine_similarity(np.float64(vectors), np.float64(known))):
        near = np.argsort(-cosines)[:k]
        weights = np.exp(sharpness * (cosines[near] - 1))
        estimates[row] = [np.average(right, weights=weights) for right in correct[near].T]
    return estimates


def values_of(fitted):
    return fitted.cascade.values


@given(seeds, st.integers(1, 40), st.sampled_from(SHARPNESSES), st.integers(2, 4))
@settings(max_examples=30)
def test_estimates_are_those_of_a_slow_loop(seed, k, sharpness, m):
    fitting, test = problem(seed, n=40, n_test=20, m=m)
    nearest = replace(values_of(fit_benchmark_routing(fitting)), k=k, sharpness=sharpness)
    known = fitting.calibration
    expected = slow_estimates(known.embeddings, known.correct(), test.embeddings, k, sharpness)
    np.testing.assert_allclose(nearest(test.without_labels()), expected, atol=1e-5)


def test_all_neighbours_of_equal_weight_are_the_base_rate_and_choose_the_best_model_for_all():
    fitting, test = problem(0, n=200)
    fitted = fit_benchmark_routing(fitting)
    rates = fitting.calibration.correct().mean(axis=0)
    everyone = replace(values_of(fitted), k=200, sharpness=0.0)
    np.testing.assert_allclose(everyone(test), np.tile(rates, (len(test), 1)), rtol=1e-12)
    searched = everyone.estimates(test, (200,), (0.0,))[0, 0]
    np.testing.assert_allclose(searched, everyone(test), rtol=1e-12)
    answers = replace(fitted, cascade=replace(fitted.cascade, values=everyone)).answers(test, fitted.default)
    assert (answers.calls == (np.arange(2) == rates.argmax())).all()


@given(seeds)
@settings(max_examples=10)
def test_no_other_size_and_weight_are_better_on_validation(seed):
    fitting, _ = problem(seed, n=60, n_test=1)
    known, validation = fitting.calibration, fitting.validation
    chosen = values_of(fit_benchmark_routing(fitting))

    def loss(k, sharpness):
        estimates = slow_estimates(known.embeddings, known.correct(), validation.embeddings, k, sharpness)
        return np.mean((estimates - validation.correct()) ** 2)

    tried = [(k, sharpness) for k in sizes_to_try(60) for sharpness in SHARPNESSES]
    assert loss(chosen.k, chosen.sharpness) <= min(loss(*pair) for pair in [*tried, (60, 0.0)]) + 1e-6


def test_without_embeddings_neighbours_are_those_of_standardised_outputs():
    fitting, test = problem(4, n=300, n_test=200, ragged=True, embedded=False)
    nearest = values_of(fit_benchmark_routing(fitting))
    features = [option_features(part.chain.logits[0]) for part in (fitting.calibration, test)]
    scaler = StandardScaler().fit(features[0])
    known, asked = (scaler.transform(part) for part in features)
    expected = slow_estimates(known, fitting.calibration.correct(), asked, nearest.k, nearest.sharpness)
    assert np.mean(np.abs(nearest(test) - expected) > 1e-4) < 0.02  # but where two neighbours are equally near
