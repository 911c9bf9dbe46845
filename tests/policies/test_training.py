from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.policies.baselines.training import Schedule, batches, linear, one_thread, train, with_noise


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def walk(validation_loss, schedule):
    """Train one weight from 0 towards 1, a tenth a step, and return it with the losses that were seen."""
    weight = torch.zeros(1, requires_grad=True)
    optimiser = torch.optim.SGD([weight], lr=0.1)
    seen = train(optimiser, lambda rows: -weight.sum(), lambda: validation_loss(weight), 10, schedule, generator())
    return weight.item(), seen


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


def test_lots_are_drawn_from_the_generator_alone():
    before = torch.get_rng_state()
    layer = linear(3, 1, generator())
    optimiser = torch.optim.Adam(layer.parameters())
    vectors = torch.ones(5, 3)
    drawn = generator(1)
    train(
        optimiser,
        lambda rows: layer(with_noise(vectors[rows], 0.1, drawn)).sum(),
        lambda: layer(vectors).sum(),
        5,
        Schedule(batch_size=2, n_steps=4, check_every=1, patience=1),
        drawn,
    )
    assert torch.equal(torch.get_rng_state(), before)


def test_the_number_of_threads_is_given_back():
    def fail():
        with one_thread():
            assert torch.get_num_threads() == 1
            raise ArithmeticError

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with pytest.raises(ArithmeticError):
            fail()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
