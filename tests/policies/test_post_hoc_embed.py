from dataclasses import replace

import numpy as np
import torch
from planted import changed, problem

from cauc_ray.policies.baselines.post_hoc_embed import GainNetwork, fit_post_hoc_embed


def predicted_gains(fitted, test):
    return -fitted.cascade(test.without_labels()).confidences


def test_the_network_is_the_one_that_torch_would_build_of_its_layers():
    network = GainNetwork(7, torch.Generator().manual_seed(0)).eval()
    modules = []
    for layer in network.layers:
        linear = torch.nn.utils.skip_init(torch.nn.Linear, len(layer) - 1, layer.shape[1])
        linear.load_state_dict({"weight": layer[:-1].T, "bias": layer[-1]})
        modules += [linear, torch.nn.ReLU()]
    assert [tuple(m.weight.shape) for m in modules[::2]] == [(128, 7), (128, 128), (1, 128)]
    vectors = torch.randn(30, 7, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(network(vectors), torch.nn.Sequential(*modules[:-1])(vectors)[:, 0])


def test_in_training_a_tenth_of_the_inner_outputs_is_dropped_and_the_mean_stays():
    network = GainNetwork(1, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in network.layers:
            layer.fill_(1 / 128)
    outputs = network(torch.ones(4000, 1))
    whole = network.eval()(torch.ones(1, 1)).item()
    assert outputs.std() > 0
    torch.testing.assert_close(outputs.mean().item(), whole, rtol=0.01, atol=0)


def test_what_it_predicts_is_the_gain_that_there_is():
    fitting, test = problem(2, n=1500)
    right = test.correct().astype(float)
    gains, predicted = right[:, 1] - right[:, 0], predicted_gains(fit_post_hoc_embed(fitting), test)[:, 0]
    assert np.corrcoef(gains, predicted)[0, 1] > 0.4
    for low, high in np.quantile(predicted, [[0.0, 0.3], [0.3, 0.7], [0.7, 1.0]]):
        rows = (predicted >= low) & (predicted <= high)
        assert abs(gains[rows].mean() - predicted[rows].mean()) < 0.1


def test_every_stage_predicts_the_gain_of_the_last_model():
    """The model in the middle says what the first says: deferring to the next alone would never gain."""

    def made(part):
        first, _, last = part.chain.logits
        return replace(part, chain=replace(part.chain, logits=(first, first, last)))

    fitting, test = problem(3, n=1000, m=3)
    gains = predicted_gains(fit_post_hoc_embed(changed(fitting, made)), made(test))[:, :2]
    right = test.correct().astype(float)
    for stage in (0, 1):
        assert np.corrcoef(gains[:, stage], right[:, 2] - right[:, 0])[0, 1] > 0.4


def test_noise_is_not_memorised():
    """200 epochs on embeddings this long would leave of the gains' variance a few hundredths."""
    fitting, _ = problem(7, n=400, n_test=1, strength=0.0, d=100)
    right = fitting.calibration.correct().astype(float)
    gains = right[:, 1] - right[:, 0]
    predicted = predicted_gains(fit_post_hoc_embed(fitting), fitting.calibration)[:, 0]
    assert np.mean((predicted - gains) ** 2) > 0.5 * np.var(gains)
