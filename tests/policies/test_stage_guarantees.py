"""The propositions of whole policies, against the decisions that a row-by-row replay takes."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import chain, steps

from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.guarantees import stage_guarantees
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure_guarantees


@pytest.mark.parametrize("per_call", [False, True])
def test_stages_and_fallbacks_by_a_slow_loop(fit, per_call):
    data = chain(5, 150, per_call=per_call, ragged=True)
    some = data.labels.copy()
    some[::7] = UNKNOWN_LABEL
    data = replace(data, labels=some)
    policy = fit(chain(5, 200, shift=1), rule=ThresholdRule(threshold=0.6))
    guarantees, taken = measure_guarantees(policy, data), list(steps(policy, data.logits))
    costs_of_calls = np.broadcast_to(data.costs.per_call, (len(data), 3))
    assert guarantees[-1] is None
    for stage in range(2):
        rows = []
        for row in range(len(data)):
            if some[row] == UNKNOWN_LABEL or any(step.confidences[row] >= 0.6 for step in taken[:stage]):
                continue
            later = next(at for at in range(stage + 1, 3) if taken[at].confidences[row] >= 0.6 or at == 2)
            own_right, later_right = (taken[at].predictions[row] == some[row] for at in (stage, later))
            cost = costs_of_calls[row, stage + 1 : later + 1].sum()
            rows.append((taken[stage].confidences[row], own_right, later_right, cost))
        confidences, right, fallback_right, costs = (np.array(column) for column in zip(*rows, strict=True))
        expected = stage_guarantees(confidences, right, fallback_right, costs, 0.6)
        assert guarantees[stage].n == len(rows)
        assert guarantees[stage].as_json() == pytest.approx(expected.as_json(), abs=1e-9)


def test_a_stage_that_no_labelled_row_reaches_has_no_guarantees(fit):
    data = chain(1, 100)
    policy = fit(data, rule=ThresholdRule(threshold=0.0))
    assert measure_guarantees(policy, data)[1:] == (None, None)
    unknown = replace(data, labels=np.full(100, UNKNOWN_LABEL, dtype=np.int32))
    assert measure_guarantees(policy, unknown) == (None, None, None)
    without_answers = measure_guarantees(policy.with_threshold(2.0), data)[0].as_json()
    assert without_answers["coverage"] == 0.0
    assert without_answers["accepted_accuracy"] is without_answers["accepted_accuracy_bound"] is None
