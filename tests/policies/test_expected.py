"""What a policy file expects of new inputs is measured on rows that chose nothing: over draws it is not too good."""

import numpy as np
import planted
import pytest

from cauc_ray.policies.by_method import fit_method
from cauc_ray.policies.family import chain_of
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

# A threshold, several members, and a hull of models; the soak has solutions that validation searches, too.
QUICK = ("rf", "best-pair", "random")
N_DRAWS, BUDGET = 16, 20.0


@pytest.mark.parametrize(
    "method",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.soak("full"))
        for name, of in METHODS.items()
        if not of.unpublished and of.reads != "answers"
    ],
)
def test_expected_accuracy_is_not_above_that_on_new_rows(method, monkeypatch):
    if "torch" in METHODS[method].packages:
        planted.train_quickly(monkeypatch)
    rule = ThresholdRule(budget=None if METHODS[method].paradigm in ("router", "ensemble") else BUDGET)
    optimism, on_selection = [], []
    for seed in range(N_DRAWS):
        fitting, test = planted.problem(seed, n=60, n_test=2000, m=4, embedded=False)
        policy, labels = fit_method(method, fitting, rule), test.chain.labels
        accuracy = np.mean(replay(policy, chain_of(policy, test)).predictions == labels)
        # What all models have in common on a small split is chance, not choice.
        luck = fitting.validation.correct().mean() - test.correct().mean()
        optimism.append(policy.expected.accuracy.value - accuracy - luck)
        on_selection.append((policy.on_selection or policy.expected).accuracy.value - accuracy - luck)
    error = np.std(optimism) / N_DRAWS**0.5
    assert np.mean(optimism) <= 2 * error
    assert np.mean(on_selection) >= np.mean(optimism)
    if method == "frugalgpt":  # whose solutions are searched on validation
        assert np.mean(on_selection) > 2 * error
