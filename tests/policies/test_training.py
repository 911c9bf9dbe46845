from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.policies.baselines.training import Schedule, batches, linear, one_thread, train, with_noise


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def walk(validation_loss, schedule, **how):
    """Train one weight from 0 towards 1, a tenth a step, and return it with the losses that were seen."""
    network = torch.nn.Module()
    network.weight = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = (lambda rows: -network.weight.sum()), (lambda: validation_loss(network.weight))
    seen = train(network, optimiser, *losses, 10, schedule, generator(), **how)
    assert not network.training
    return network.weight.item(), seen


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 2**32 - 1))
def test_every_epoch_has_every_row_once(n_rows, size, seed):
    n_batches = -(-n_rows // size)
    drawn = list(islice(batches(n_rows, size, generator(seed)), 3 * n_batches))
    for epoch in range(3):
        rows = torch.cat(drawn[epoch * n_batches : (epoch + 1) * n_batches])
        assert sorted(rows.tolist()) == list(range(n_rows))
    assert max(len(rows) for rows in drawn) <= size


@pytest.mark.parametrize("check_every", [1, 2, 3])
def test_the_weights_of_the_best_look_are_kept_and_patience_ends_training(check_every):
    schedule = Schedule(batch_size=4, n_steps=1000, check_every=check_every, patience=2)
    weight, seen = walk(lambda w: (w - 0.62) ** 2, schedule)
    looks = 0.1 * check_every * np.arange(1, len(seen) + 1)
    np.testing.assert_allclose(seen, ((looks - 0.62) ** 2), atol=1e-5)
    assert weight == pytest.approx(looks[seen.argmin()], abs=1e-5)
    assert len(seen) == seen.argmin() + 1 + schedule.patience


def test_a_validation_loss_that_tells_nothing_apart_keeps_the_last_weights():
    weight, seen = walk(lambda w: torch.zeros(()), Schedule(batch_size=4, n_steps=30, check_every=5, patience=1))
    assert weight == pytest.approx(3.0, abs=1e-5)
    assert len(seen) == 6


def test_losses_of_a_warm_up_do_not_count():
    weight, seen = walk(lambda w: w, Schedule(batch_size=4, n_steps=1000, check_every=1, patience=3, warm_up=5))
    assert weight == pytest.approx(0.6, abs=1e-5)  # of the first that counts, the sixth
    assert len(seen) == 9


@given(st.integers(1, 10))
def test_a_batch_in_parts_has_the_gradient_of_the_batch(size):
    target = torch.arange(10.0) ** 2

    def trained(**how):
        layer = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)

        def loss(rows):
            return ((layer(rows[:, None] / 10.0)[:, 0] - target[rows]) ** 2).mean()

        optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
        train(layer, optimiser, loss, lambda: 0.0, 10, Schedule(7, 6, 6, 1), generator(), **how)
        return layer.weight.item(), layer.bias.item()

    assert trained(split=lambda rows: rows.split(size)) == pytest.approx(trained(), rel=1e-5)


def test_long_gradients_are_scaled_down():
    weight, _ = walk(lambda w: -w.sum(), Schedule(4, 10, 1, 1), gradient_norm=0.5)
    assert weight == pytest.approx(0.5, abs=1e-5)


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 9))
def test_a_schedule_in_epochs_sees_each_row_once_an_epoch(n_rows, size, n_epochs):
    schedule = Schedule.in_epochs(n_rows, size, n_epochs, 2)
    drawn = list(islice(batches(n_rows, size, generator()), schedule.n_steps))
    assert (np.bincount(torch.cat(drawn)) == n_epochs).all()
    assert schedule.n_steps == n_epochs * schedule.check_every


def test_a_linear_layer_starts_as_torchs_own_does():
    layer = linear(400, 300, generator())
    own = torch.nn.Linear(400, 300)
    for drawn, theirs in ((layer.weight, own.weight), (layer.bias, own.bias)):
        assert drawn.shape == theirs.shape
        assert drawn.abs().max() <= 400**-0.5
        assert drawn.std().item() == pytest.approx(theirs.std().item(), rel=0.2)
    assert linear(4, 3, generator(), bias=False).bias is None
    assert torch.equal(layer.weight, linear(400, 300, generator()).weight)


def test_noise_has_its_deviation():
    noise = with_noise(torch.ones(300, 200), 0.25, generator()) - 1
    assert noise.std().item() == pytest.approx(0.25, rel=0.02)
    assert abs(noise.mean().item()) < 0.01


def test_the_number_of_threads_is_given_back_whatever_happens():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.raises(ZeroDivisionError), one_thread():
        1 / (torch.get_num_threads() - 1)
    found = torch.get_num_threads()
    torch.set_num_threads(before)
    assert found == 2
