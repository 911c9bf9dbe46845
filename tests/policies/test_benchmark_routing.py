from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routable import confident, gains, splits
from sklearn.metrics.pairwise import cosine_similarity

from cauc_ray.policies.baselines.benchmark_routing import SHARPNESSES, fit_benchmark_routing, sizes_to_try
from cauc_ray.policies.baselines.features import Scaling, option_features
from cauc_ray.policies.method import Fitting
from cauc_ray.policies.trace import Examples

seeds = st.integers(0, 2**32 - 1)


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


@given(seeds, st.integers(1, 40), st.sampled_from(SHARPNESSES), st.integers(1, 4))
@settings(max_examples=30)
def test_estimates_are_those_of_a_slow_loop(seed, k, sharpness, n_models):
    fitting, test = splits(seed, told=True, n=40, n_test=20, n_models=n_models)
    nearest = replace(values_of(fit_benchmark_routing(fitting)), k=k, sharpness=sharpness)
    known = fitting.calibration
    expected = slow_estimates(known.embeddings, known.correct(), test.embeddings, k, sharpness)
    np.testing.assert_allclose(nearest(test.without_labels()), expected, atol=1e-5)


def test_all_neighbours_of_equal_weight_are_the_base_rate_and_choose_the_best_model_for_all():
    fitting, test = splits(0, told=True, n=200)
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
    fitting, _ = splits(seed, told=True, n=60, n_test=1)
    known, validation = fitting.calibration, fitting.validation
    chosen = values_of(fit_benchmark_routing(fitting))

    def loss(k, sharpness):
        estimates = slow_estimates(known.embeddings, known.correct(), validation.embeddings, k, sharpness)
        return np.mean((estimates - validation.correct()) ** 2)

    tried = [(k, sharpness) for k in sizes_to_try(60) for sharpness in SHARPNESSES]
    assert loss(chosen.k, chosen.sharpness) <= min(loss(*pair) for pair in [*tried, (60, 0.0)]) + 1e-6


def test_it_beats_the_mixture_where_the_embedding_tells():
    fitting, test = splits(1, told=True)
    fitted = fit_benchmark_routing(fitting)
    assert gains(fitted, test).max() > 0.1
    answers = fitted.answers(test.without_labels(), fitted.default)
    assert np.mean(answers.predictions == test.chain.labels) > test.correct().mean(axis=0).max() + 0.02


def test_it_gains_nothing_where_the_embedding_does_not_tell():
    fitting, test = splits(2, told=False)
    fitted = fit_benchmark_routing(fitting)
    assert gains(fitted, test).max(initial=0.0) < 0.03


def test_the_scale_of_embeddings_makes_no_difference():
    fitting, test = splits(3, told=True, n=100, n_test=50)

    def scaled(examples):
        return replace(examples, embeddings=8 * examples.embeddings)

    plain = values_of(fit_benchmark_routing(fitting))(test)
    other = values_of(fit_benchmark_routing(Fitting(scaled(fitting.calibration), scaled(fitting.validation))))
    np.testing.assert_allclose(other(scaled(test)), plain, atol=1e-6)


def test_without_embeddings_it_pays_for_the_first_model_and_looks_at_its_outputs():
    fitting, test = confident(4, n=300, n_test=200, ragged=True)
    fitted = fit_benchmark_routing(fitting)
    assert fitted.answers(test.without_labels(), fitted.default).calls[:, 0].all()
    assert "first model's outputs, its call paid" in fitted.note
    nearest = values_of(fitted)
    vectors = [option_features(part.chain.logits[0]) for part in (fitting.calibration, test)]
    scaling = Scaling.of(vectors[0])
    known, asked = (scaling(part) for part in vectors)
    expected = slow_estimates(known, fitting.calibration.correct(), asked, nearest.k, nearest.sharpness)
    assert np.mean(np.abs(nearest(test) - expected) > 1e-4) < 0.02  # but where two neighbours are equally near


@pytest.mark.parametrize("n_models", [1, 2, 3, 4])
def test_chains_of_one_to_four_models(n_models):
    fitting, test = confident(5, n=150, n_test=100, n_models=n_models, ragged=True, embedded=True)
    fitted = fit_benchmark_routing(fitting)
    curve = fitted.curve(test, fitted.points.settings)
    assert curve.cost.min() >= test.chain.costs.means.min()
    assert curve.cost.max() <= test.chain.costs.means.max()


def test_a_split_whose_questions_have_fewer_or_more_options():
    fitting, test = confident(6, n=100, n_test=50, ragged=True)
    fitted = fit_benchmark_routing(fitting)

    def of_width(width):
        logits = [np.pad(z, ((0, 0), (0, 9)), constant_values=-np.inf)[:, :width] for z in test.chain.logits]
        return Examples(replace(test.chain, logits=tuple(logits)))

    expected = values_of(fitted)(test)
    np.testing.assert_allclose(values_of(fitted)(of_width(6)), expected, atol=1e-6)
    short = np.isinf(test.chain.logits[0][:, 3])
    np.testing.assert_allclose(values_of(fitted)(of_width(3))[short], expected[short], atol=1e-6)


def test_one_known_query_is_enough():
    fitting, test = splits(7, told=True, n=1, n_test=5)
    nearest = values_of(fit_benchmark_routing(fitting))
    assert (nearest(test) == fitting.calibration.correct()[0]).all()
