from dataclasses import replace

import numpy as np
import pytest
import torch
from routable import confident, gains, splits

from cauc_ray.policies.baselines.post_hoc_embed import _trained, fit_post_hoc_embed
from cauc_ray.policies.trace import Examples, calls_in_turn


def trace(fitted, test):
    return fitted.cascade.trace(test.without_labels())


def test_each_stage_answers_for_itself_and_pays_for_all_before():
    fitting, test = confident(0, n=100, n_test=80, n_models=3, ragged=True)
    seen = trace(fit_post_hoc_embed(fitting), test)
    for stage, logits in enumerate(test.chain.logits):
        assert (seen.predictions[:, stage] == logits.argmax(axis=1)).all()
    assert (seen.calls == calls_in_turn(3)).all()


def test_the_network_is_the_one_that_torch_would_build_of_its_layers():
    fitting, _ = confident(1, n=100, embedded=True)
    (gain,) = fit_post_hoc_embed(fitting).cascade.gains
    modules = []
    for weights, bias in gain.network.layers:
        linear = torch.nn.utils.skip_init(torch.nn.Linear, *weights.shape)
        linear.load_state_dict({"weight": torch.tensor(weights.T), "bias": torch.tensor(bias)})
        modules += [linear, torch.nn.ReLU()]
    assert [tuple(m.weight.shape) for m in modules[::2]][1:] == [(128, 128), (1, 128)]
    vectors = np.random.default_rng(0).standard_normal((30, len(gain.scaling.mean))).astype(np.float32)
    with torch.no_grad():
        expected = torch.nn.Sequential(*modules[:-1])(torch.from_numpy(vectors))[:, 0].numpy()
    np.testing.assert_allclose(gain.network(vectors), expected, atol=1e-5)


def test_what_it_foresees_is_the_gain_that_there_is():
    fitting, test = splits(2, told=True, n=2000)
    foreseen = -trace(fit_post_hoc_embed(fitting), test).confidences[:, 0]
    truth = np.where(test.embeddings[:, 0] > 0, 0.85 - 0.3, 0.85 - 0.95)
    assert np.mean((foreseen - truth) ** 2) < 0.5 * np.var(truth)


def test_every_stage_foresees_the_last_model():
    """The model in the middle says what the first says: deferring to the next alone would never gain."""

    def made(part):
        first, _, last = part.chain.logits
        return replace(part, chain=replace(part.chain, logits=(first, first, last)))

    fitting, test = splits(3, told=True, n=1000, n_models=3)
    fitted = fit_post_hoc_embed(replace(fitting, calibration=made(fitting.calibration), validation=made(test)))
    foreseen = -trace(fitted, made(test)).confidences[:, :2]
    hard = test.embeddings[:, 0] > 0
    assert (foreseen[hard].mean(axis=0) > 0.3).all()
    assert (foreseen[~hard].mean(axis=0) < 0.1).all()


def test_it_beats_the_mixture_where_the_embedding_tells():
    fitting, test = splits(4, told=True)
    assert gains(fit_post_hoc_embed(fitting), test).max() > 0.1


def test_it_beats_the_mixture_where_the_outputs_tell():
    fitting, test = confident(5, n=1000)
    assert gains(fit_post_hoc_embed(fitting), test).max() > 0.02


def test_it_gains_nothing_where_nothing_tells():
    fitting, test = splits(6, told=False)
    assert gains(fit_post_hoc_embed(fitting), test).max(initial=0.0) < 0.03


def test_noise_is_not_memorised():
    """200 epochs would fit these targets to a mean squared error of a few hundredths."""
    rng = np.random.default_rng(7)
    vectors = rng.standard_normal((400, 100)).astype(np.float32)
    targets = rng.standard_normal(400).astype(np.float32)
    assert np.mean((_trained(vectors, targets, (0, 0))(vectors) - targets) ** 2) > 0.5


def test_the_same_seed_gives_the_same_network_and_the_global_generator_is_left_alone():
    fitting, test = confident(8, n=150, n_test=60)
    before = torch.random.get_rng_state()
    first = trace(fit_post_hoc_embed(fitting), test).confidences
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(7)
    assert (trace(fit_post_hoc_embed(fitting), test).confidences == first).all()
    other = trace(fit_post_hoc_embed(replace(fitting, seed=1)), test).confidences
    assert not (other == first).all()


def test_a_stage_sees_its_own_outputs_and_no_later_ones():
    fitting, test = confident(9, n=120, n_test=60, n_models=3)
    fitted = fit_post_hoc_embed(fitting)
    seen = trace(fitted, test).confidences
    logits = (*test.chain.logits[:1], *(np.roll(z, 1, axis=0) for z in test.chain.logits[1:]))
    other = trace(fitted, replace(test, chain=replace(test.chain, logits=logits))).confidences
    assert (other[:, 0] == seen[:, 0]).all()
    assert not (other[:, 1] == seen[:, 1]).all()


@pytest.mark.parametrize("n_models", [1, 2, 4])
def test_chains_of_one_to_four_models_with_ragged_options_and_costs_of_calls(n_models):
    fitting, test = confident(10, n=80, n_test=60, n_models=n_models, ragged=True, per_call=True)
    fitted = fit_post_hoc_embed(fitting)
    curve = fitted.curve(test, fitted.points.settings)
    costs = test.chain.costs.means
    assert curve.cost.min() == pytest.approx(costs[0])
    assert curve.cost.max() == pytest.approx(costs.sum())


def test_questions_of_more_options_than_any_that_it_was_fitted_on():
    fitting, test = confident(11, n=80, n_test=40)
    padded = tuple(np.pad(z, ((0, 0), (0, 2)), constant_values=-np.inf) for z in test.chain.logits)
    fitted = fit_post_hoc_embed(fitting)
    wider = Examples(replace(test.chain, logits=padded))
    np.testing.assert_allclose(trace(fitted, wider).confidences, trace(fitted, test).confidences, atol=1e-5)
