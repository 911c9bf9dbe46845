from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain

from cauc_ray.errors import CaucWarning, PolicyError
from cauc_ray.policies.baselines.simple import margins, raw_cascade
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, measure_replay, replay, trace_policy

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.sampled_from([fit_base, fit_rf]), st.booleans(), st.booleans())
@settings(max_examples=30)
def test_the_sweep_equals_a_replay_at_every_operating_point(seed, fit, ragged, per_call):
    calibration = chain(seed, 120, ragged=ragged, per_call=per_call)
    test = chain(seed, 40, ragged=ragged, per_call=per_call, shift=1)
    policy = fit(calibration, rule=ThresholdRule(threshold=0.5))
    frontier = trace_policy(policy, test).frontier(test)
    deepest = np.zeros(len(test), int)
    for point, threshold in enumerate(frontier.thresholds):
        result, measures = measure_replay(policy.model_copy(update={"threshold": threshold}), test)
        assert measures.cost == pytest.approx(frontier.cost[point])
        assert measures.accuracy.value == pytest.approx(frontier.quality[point])
        assert (result.stages >= deepest).all()  # stop sets are nested
        deepest = result.stages


def test_measures_add_up():
    test = chain(5, 300, shift=1)
    result, measures = measure_replay(fit_rf(chain(5, 300), chain(5, 300, shift=2)), test)
    assert sum(stage.answered for stage in measures.stages) == measures.n == 300
    assert measures.stages[0].reached == 300
    for stage, following in zip(measures.stages, measures.stages[1:], strict=False):
        assert following.reached == stage.reached - stage.answered
    hits = sum(s.accepted_accuracy.value * s.accepted_accuracy.n for s in measures.stages if s.answered)
    assert measures.accuracy.value == pytest.approx(hits / 300)
    assert measures.cost == pytest.approx(result.costs.mean())
    assert measures.relative_cost == pytest.approx(measures.cost / 15.0)


def test_rows_without_a_label_are_answered_but_not_scored():
    test = chain(6, 100, shift=1)
    labels = test.labels.copy()
    labels[::2] = -1
    partly = replace(test, labels=labels)
    policy = fit_base(chain(6, 200))
    result, measures = measure_replay(policy, partly)
    whole, _ = measure_replay(policy, test)
    assert (result.predictions == whole.predictions).all()
    assert (measures.n, measures.n_labelled) == (100, 50)
    assert measures.accuracy.value == np.mean(result.predictions[1::2] == test.labels[1::2])
    none = replace(test, labels=np.full(100, -1))
    assert measure_replay(policy, none)[1].accuracy is None


def test_a_chain_that_is_not_the_policys_is_refused_and_another_kind_of_logits_told():
    policy = fit_base(chain(7, 100))
    with pytest.raises(PolicyError, match="the policy is for m0, m1, m2"):
        replay(policy, chain(7, 50, strengths=(1.0, 2.0)))
    other = replace(chain(7, 50), logit_kind=("raw", "log-probabilities", "raw"))
    with pytest.warns(CaucWarning, match="'m1' .*'log-probabilities'.*fitted on 'raw'"):
        replay(policy, other)


@given(seeds)
@settings(max_examples=20)
def test_margin_sampling_is_the_gap_of_the_two_best(seed):
    test = chain(seed, 30, ragged=True)
    trace = raw_cascade(margins, Examples(test))
    for j, logits in enumerate(test.logits):
        for i, row in enumerate(logits.astype(float)):
            p = np.exp(row[np.isfinite(row)] - row.max())
            p = np.sort(p / p.sum())
            assert trace.confidences[i, j] == pytest.approx(p[-1] - p[-2], abs=1e-12)
            assert trace.predictions[i, j] == row.argmax()
