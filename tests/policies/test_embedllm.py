from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import alike, examples, gain_over_lot, problem, scaled
from sklearn.linear_model import LogisticRegression

from cauc_ray.policies.baselines import embedllm
from cauc_ray.policies.baselines.embedllm import EmbedLLM, fit_embedllm
from cauc_ray.policies.baselines.training import linear


@pytest.fixture(scope="module")
def learnable():
    fitting, test = problem(1)
    return fitting, test, fit_embedllm(fitting)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(embedllm, "N_STEPS", 100)


def test_it_beats_lots_at_equal_cost_where_the_embedding_says_who_is_right(learnable):
    _, test, fitted = learnable
    assert gain_over_lot(fitted, test) > 0.06
    quality_first = fitted.curve(test, np.array([fitted.default]))
    assert quality_first.accuracy[0] > test.correct().mean(axis=0).max() + 0.03


def test_it_gains_nothing_where_the_embedding_says_nothing():
    fitting, test = problem(2, strength=0.0)
    assert abs(gain_over_lot(fit_embedllm(fitting), test)) < 0.03


def test_its_probabilities_are_those_of_a_logistic_regression_for_each_model(learnable):
    fitting, test, fitted = learnable
    values = fitted.cascade.values(test)
    for model, right in enumerate(fitting.calibration.correct().T):
        oracle = LogisticRegression(C=10.0).fit(fitting.calibration.embeddings, right)
        expected = oracle.predict_proba(test.embeddings)[:, 1]
        assert np.corrcoef(values[:, model], expected)[0, 1] > 0.99
        assert values[:, model].mean() == pytest.approx(test.correct()[:, model].mean(), abs=0.05)


def test_logits_are_those_of_the_papers_formula():
    generator = torch.Generator().manual_seed(0)
    models, projection, classifier = (
        torch.randn((3, 7), generator=generator),
        linear(5, 7, generator),
        linear(7, 2, generator),
    )
    queries = torch.randn((4, 5), generator=generator)
    logits = EmbedLLM(None, models, projection, classifier).logits(queries)
    for i in range(4):
        projected = projection.weight @ queries[i] + projection.bias
        for j in range(3):
            expected = classifier.weight @ (models[j] * projected) + classifier.bias
            torch.testing.assert_close(logits[i, j], expected)


@pytest.mark.parametrize("m", [1, 3, 4])
@pytest.mark.parametrize("embedded", [False, True])
def test_chains_of_any_length_with_questions_of_any_number_of_options(m, embedded, short):
    fitting, test = problem(3, n=80, n_test=50, m=m, ragged=True, embedded=embedded)
    fitted = fit_embedllm(fitting)
    answers = fitted.answers(test.without_labels(), fitted.default)
    own = np.stack([logits.argmax(axis=1) for logits in test.chain.logits], axis=1)
    chosen = m - 1 - answers.calls[:, ::-1].argmax(axis=1)
    assert (answers.predictions == own[np.arange(50), chosen]).all()
    paid = m > 1 and not embedded
    assert (answers.calls.sum(axis=1) == 1 + (paid & (chosen > 0))).all()
    assert fitted.note == ("features: the first model's outputs, its call paid" if paid else "")


def test_the_first_models_outputs_do_where_there_are_no_embeddings():
    fitting, test = problem(4, embedded=False)
    assert gain_over_lot(fit_embedllm(fitting), test) > 0.06


def test_the_same_seed_gives_the_same_numbers_and_the_length_of_embeddings_none(short):
    fitting, test = problem(5, n=100, n_test=50)
    before = torch.get_rng_state()
    values = fit_embedllm(fitting).cascade.values(test)
    assert (values == fit_embedllm(fitting).cascade.values(test)).all()
    assert (values != fit_embedllm(replace(fitting, seed=6)).cascade.values(test)).any()
    longer = replace(fitting, calibration=scaled(fitting.calibration, 8), validation=scaled(fitting.validation, 8))
    assert (values == fit_embedllm(longer).cascade.values(scaled(test, 8))).all()  # by a power of two: to the bit
    assert torch.equal(torch.get_rng_state(), before)


def test_when_to_stop_is_chosen_on_validation(short):
    fitting, _ = problem(7, n=400)
    own, other = fitting.calibration, examples(8, 0, n=400)

    def loss_on_calibration(validation):
        values = fit_embedllm(replace(fitting, validation=validation)).cascade.values(own)
        return -np.mean(np.log(np.where(own.correct(), values, 1 - values)))

    assert loss_on_calibration(own) < loss_on_calibration(alike(other))
