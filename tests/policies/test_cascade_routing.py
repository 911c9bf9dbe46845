"""Cascade routing by its definition, one row after the other."""

import math
from itertools import combinations

import numpy as np
import pytest
from planted import problem

from cauc_ray.policies.method import METHODS
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay


def by_definition(policy, row_logits, query_features):
    """Return a row's answer, the stages called, and what it cost, in plain numbers."""
    costs, called = [stage.cost for stage in policy.answering], ()
    while True:
        logs = [row_logits[model] - np.logaddexp.reduce(row_logits[model]) for model in called]
        features = list(query_features)
        for log in logs:
            features += [math.exp(log.max()), -sum(math.exp(x) * x for x in log if np.isfinite(x))]
        for first, second in combinations(logs, 2):
            p, q = np.exp(first), np.exp(second)
            mean = (p + q) / 2
            parts = [a[a > 0] @ np.log2(a[a > 0] / mean[a > 0]) for a in (p, q)]
            features += [first.argmax() == second.argmax(), sum(parts) * math.log(2) / 2]
        weights = policy.arrays["after/" + ",".join(map(str, called))]
        q = [1 / (1 + math.exp(-(w[:-1] @ np.array(features, dtype=float) + w[-1]))) for w in weights]
        best = max((q[model] for model in called), default=-math.inf)
        later = range(called[-1] + 1 if called else 0, len(costs))
        if len(called) < len(policy.solution) and later:
            price = policy.solution[len(called)]
            worth = {model: max(q[model], best) - price * costs[model] for model in later}
            to = max(worth, key=worth.get)
            if worth[to] > best:
                called = (*called, to)
                continue
        taken = max(called, key=lambda model: q[model])
        return row_logits[taken].argmax(), called, sum(costs[model] for model in called)


@pytest.mark.parametrize(("m", "embedded", "share"), [(3, False, 0.6), (3, True, 0.2)])
def test_a_policy_does_what_the_definition_says(m, embedded, share):
    fitting, test = problem(4, n=200, n_test=60, m=m, k=5, ragged=True, embedded=embedded)
    fitted = METHODS["cascade-routing"].family(fitting)
    costs = np.sort(fitted.points.cost)
    policy = fitted.published(fitting, ThresholdRule(budget=float(costs[0] + share * (costs[-1] - costs[0]))))
    answered = replay(policy, test.own_chain([stage.name for stage in policy.answering], encoded=embedded))
    query_features = policy.query_odds(test.embeddings) if embedded else np.zeros((60, 0))
    logits = [z.astype(np.float64) for z in test.chain.logits]
    for row in range(60):
        prediction, called, cost = by_definition(policy, [z[row] for z in logits], query_features[row])
        assert answered.predictions[row] == prediction
        assert answered.costs[row] == pytest.approx(cost)
        assert set(np.flatnonzero(answered.calls[row, int(embedded) :])) == set(called)
