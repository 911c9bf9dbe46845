from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import alike, examples, problem
from sklearn.linear_model import LogisticRegression

from cauc_ray.policies.baselines import embedllm
from cauc_ray.policies.baselines.embedllm import EmbedLLM, fit_embedllm


def test_its_probabilities_are_those_of_a_logistic_regression_for_each_model(monkeypatch):
    monkeypatch.setattr(embedllm, "LEARNING_RATE", 1e-3)
    monkeypatch.setattr(embedllm, "N_STEPS", 300)
    fitting, test = problem(1)
    values = fit_embedllm(fitting).cascade.values(test)
    for model, right in enumerate(fitting.calibration.correct().T):
        oracle = LogisticRegression(C=10.0).fit(fitting.calibration.embeddings, right)
        expected = oracle.predict_proba(test.embeddings)[:, 1]
        assert np.corrcoef(values[:, model], expected)[0, 1] > 0.99
        assert values[:, model].mean() == pytest.approx(test.correct()[:, model].mean(), abs=0.05)


def test_logits_are_those_of_the_papers_formula():
    generator = torch.Generator().manual_seed(0)
    network = EmbedLLM(5, 3, generator)
    queries = torch.randn((4, 5), generator=generator)
    logits = network(queries)
    for i in range(4):
        projected = network.projection.weight @ queries[i] + network.projection.bias
        for j in range(3):
            expected = network.classifier.weight @ (network.models[j] * projected) + network.classifier.bias
            torch.testing.assert_close(logits[i, j], expected)


def test_when_to_stop_is_chosen_on_validation(monkeypatch):
    monkeypatch.setattr(embedllm, "N_STEPS", 100)
    fitting, _ = problem(7, n=400)
    own, other = fitting.calibration, examples(8, 0, n=400)

    def loss_on_calibration(validation):
        values = fit_embedllm(replace(fitting, validation=validation)).cascade.values(own)
        return -np.mean(np.log(np.where(own.correct(), values, 1 - values)))

    assert loss_on_calibration(own) < loss_on_calibration(alike(other))
