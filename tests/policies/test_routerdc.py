from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planted import examples, problem
from sklearn.metrics import adjusted_rand_score
from synthetic import seeds, softmax

from cauc_ray.policies.baselines import routerdc
from cauc_ray.policies.baselines.routerdc import (
    Neighbours,
    answer_quality,
    clusters,
    fit_routerdc,
    sample_model_loss,
    sample_sample_loss,
)


@given(seeds, st.integers(2, 9))
def test_the_sample_model_loss_is_that_of_a_loop(seed, m):
    rng = np.random.default_rng(seed)
    similarities = rng.uniform(-1, 1, (5, m)).astype(np.float32)
    quality = np.where(rng.random((5, m)) < 0.5, rng.random((5, m)), 0.0).astype(np.float32)
    total = 0.0
    for own, right in zip(similarities, quality, strict=True):
        order = sorted(range(m), key=lambda j: -right[j])
        n_contrasted = min(3, m // 2)
        worst = [j for j in order[m - n_contrasted :] if right[j] <= 0.5]
        for j in order[:n_contrasted]:
            if right[j] > 0:
                total -= np.log(softmax([own[j], *own[worst]])[0])
    loss = sample_model_loss(torch.from_numpy(similarities), torch.from_numpy(quality))
    assert loss.item() == pytest.approx(total / 5, abs=1e-5)


@given(seeds)
def test_the_sample_sample_loss_is_that_of_a_loop(seed):
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((6, 5, 4)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    terms = [-np.log(softmax([row[0] @ other for other in row[1:]])[0]) for row in vectors.astype(float)]
    loss = sample_sample_loss(torch.from_numpy(vectors[:, 0]), torch.from_numpy(vectors[:, 1:]))
    assert loss.item() == pytest.approx(np.mean(terms), abs=1e-5)


def test_quality_is_the_probability_of_the_right_answer_where_it_was_given():
    split = examples(0, 0, n=60, m=3, ragged=True)
    quality = answer_quality(split)
    for j, logits in enumerate(split.chain.logits):
        for i, label in enumerate(split.chain.labels):
            expected = softmax(logits[i])[label] if logits[i].argmax() == label else 0.0
            assert quality[i, j] == pytest.approx(expected, abs=1e-6)


def test_clusters_that_lie_apart_are_found():
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(8), 20)
    centres = np.pad(10 * np.linalg.qr(rng.standard_normal((8, 8)))[0][:, :5], ((0, 0), (0, 25)))
    vectors = centres[truth] + 0.01 * rng.standard_normal((160, 30))
    assert adjusted_rand_score(truth, clusters(vectors.astype(np.float32), 0)) == 1.0


@pytest.mark.parametrize(("n", "d", "expected"), [(1, 9, 1), (15, 9, 1), (16, 9, 2), (40, 2, 5), (500, 9, 8)])
def test_few_queries_make_few_clusters(n, d, expected):
    found = clusters(np.random.default_rng(0).standard_normal((n, d)).astype(np.float32), 0)
    assert found.shape == (n,)
    assert len(np.unique(found)) == expected


def test_queries_that_are_all_the_same_are_one_cluster():
    assert (clusters(np.ones((100, 6), np.float32), 0) == 0).all()


@given(seeds, st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda found: len(set(found)) > 1))
def test_neighbours_are_of_the_own_cluster_and_of_others(seed, found):
    of_cluster = np.unique(found, return_inverse=True)[1]
    neighbours = Neighbours(of_cluster, torch.Generator().manual_seed(seed))
    rows = torch.arange(len(found)).repeat(200)
    drawn = of_cluster[neighbours.draw(rows).numpy()]
    assert (drawn[:, 0] == of_cluster[rows]).all()
    assert (drawn[:, 1:] != of_cluster[rows][:, None]).all()


def test_every_neighbour_has_the_same_chance():
    of_cluster = np.array([0, 1, 0, 2, 1, 1])
    drawn = Neighbours(of_cluster, torch.Generator().manual_seed(0)).draw(torch.full((30_000,), 1)).numpy()
    same, others = (np.bincount(part.ravel(), minlength=6) for part in (drawn[:, 0], drawn[:, 1:]))
    np.testing.assert_allclose(same, [0, 10_000, 0, 0, 10_000, 10_000], rtol=0.05)
    np.testing.assert_allclose(others, [30_000, 0, 30_000, 30_000, 0, 0], rtol=0.05)


def test_queries_are_drawn_to_the_model_that_is_right(monkeypatch):
    monkeypatch.setattr(routerdc, "SCHEDULE", replace(routerdc.SCHEDULE, n_steps=100))
    fitting, test = problem(1)
    shares = fit_routerdc(fitting).cascade.values(test)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    right = test.correct()
    for model in range(2):
        alone = right[:, model] & ~right[:, 1 - model]
        assert shares[alone, model].mean() > shares[~right[:, model], model].mean()
