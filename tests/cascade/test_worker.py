"""The worker that runs and services share: models answer, policies decide, and only what goes on is carried."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_models import worker_of
from synthetic import chain

from cauc_ray.cascade.bundles import Bundle, Part
from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Answers, ModelFacts, as_answers
from cauc_ray.numbers.logits import stacked
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule

DATA = chain(3, n=120, ragged=True)
POLICIES = {
    "base": fit_base(DATA, DATA, ThresholdRule(threshold=0.7)),
    "rf": fit_rf(DATA, DATA, ThresholdRule(threshold=0.8)),
    "rf-last": fit_rf(DATA, DATA, ThresholdRule(threshold=2.0)),
}


def states_before(stage, policy, rows):
    """Return what rows carry when they reach a stage, None at the first."""
    state = None
    for earlier in range(stage):
        state = policy.step(earlier, DATA.logits[earlier][rows], state).state
    return state


def worker_at(stage, **options):
    return worker_of(lambda batch: Answers(np.array(DATA.logits[stage][batch["row"]], np.float32)), stage, **options)


@given(
    stage=st.integers(0, 2),
    parts=st.lists(
        st.tuples(st.sampled_from(sorted(POLICIES)), st.sets(st.integers(0, 119), min_size=1, max_size=9)),
        min_size=1,
        max_size=8,
    ),
    keeps=st.booleans(),
)
def test_rows_of_several_policies_are_decided_as_each_policy_does(stage, parts, keeps):
    worker = worker_at(stage, policies=POLICIES)
    asked, bundles, expected, carried_states = [], [], [], []
    for key, rows in parts:
        rows = np.array(sorted(rows))
        state = states_before(stage, POLICIES[key], rows)
        bundles.append(Bundle({"row": rows}, state))
        asked.append(Part(len(bundles) - 1, np.arange(len(rows)), key))
        expected.append(POLICIES[key].step(stage, DATA.logits[stage][rows], state))
        carried_states.append(rows % 2 == 0 if keeps else np.zeros(len(rows), bool))
    mask, wants = (np.concatenate(carried_states) if keeps else None), frozenset({"scores", "logits"})
    result, goes_on = worker.decide(asked, bundles, keeps=mask, wants=wants)
    carried = [~step.accepted | mask for step, mask in zip(expected, carried_states, strict=True)]
    for name in ("predictions", "confidences", "accepted"):
        assert np.array_equal(getattr(result, name), np.concatenate([getattr(step, name) for step in expected]))
    assert np.array_equal(result.costs, [POLICIES[key].stages[stage].cost for key, rows in parts for _ in rows])
    assert np.array_equal(result.carried, np.concatenate(carried))
    assert np.array_equal(result.vectors["scores"], stacked([step.scores for step in expected]))
    assert np.array_equal(result.vectors["logits"], stacked([DATA.logits[stage][sorted(rows)] for _, rows in parts]))
    if result.carried.any():
        states = [step.state[mask] for step, mask in zip(expected, carried, strict=True) if mask.any()]
        assert np.array_equal(goes_on.state, stacked(states))
        rows = np.concatenate([bundle.columns["row"] for bundle in bundles])
        assert np.array_equal(goes_on.columns["row"], rows[result.carried])
    else:
        assert not goes_on.columns


def test_a_worker_asks_for_a_policy_that_it_does_not_have_and_remembers_it():
    worker = worker_at(0)
    call = [Part(0, np.arange(4), "rf")], [Bundle({"row": np.arange(4)})]
    assert worker.decide(*call)[0].fault == "policy"
    answered = worker.decide(*call, policies=POLICIES)[0]
    assert answered.n_answered == 4
    assert np.array_equal(worker.decide(*call)[0].predictions, answered.predictions)


def test_rows_with_other_options_than_before_fail_and_no_others():
    policy = POLICIES["rf"]
    rows = np.arange(6)
    state = policy.step(0, DATA.logits[0][rows], None).state
    padded = np.pad(DATA.logits[1][rows], ((0, 0), (0, 1)), constant_values=-np.inf)
    failing = [2, 5]
    padded[failing, -1] = 0.0  # an option more than before
    worker = worker_of(lambda batch: Answers(np.array(padded, np.float32)), 1, {"rf": policy})
    result, _ = worker.decide([Part(0, rows, "rf")], [Bundle({"row": rows}, state)])
    assert sorted(result.failures) == failing
    answered = np.setdiff1d(rows, failing)
    expected = policy.step(1, padded[answered], state[answered])
    assert np.array_equal(result.predictions[answered], expected.predictions)
    assert np.array_equal(result.confidences[answered], expected.confidences)


@pytest.mark.parametrize("method", ["base", "rf"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_call_whose_rows_the_model_all_declines_has_their_reasons(method, stage):
    failures = {0: "too long", 1: "no question"}
    declined = Answers(np.zeros((2, 0), np.float32), failures=failures, device_s=0.25)
    worker = worker_of(lambda batch: declined, stage, {"": POLICIES[method]})
    state = states_before(stage, POLICIES[method], np.arange(2))
    result, goes_on = worker.decide([Part(0, np.arange(2))], [Bundle({"row": np.arange(2)}, state)])
    assert (result.error, result.failures) == (None, failures)
    assert result.device_s == 0.25  # what the model measured of its forward passes, nothing of the call beyond it
    assert (goes_on.columns, result.n_deferred, result.accepted.tolist()) == ({}, 0, [False, False])
    assert result.costs.tolist() == [0.0, 0.0]


def test_what_is_collected_is_what_the_model_gave():
    """Decisions are taken on the logarithms of declared probabilities; a logit table holds them as they are."""
    probabilities = np.array([[0.75, 0.25], [0.0, 1.0]], np.float32)
    worker = worker_of(lambda batch: Answers(probabilities), 0, POLICIES, facts=ModelFacts("m", "probabilities"))
    call = [Part(0, np.arange(2), "base")], [Bundle({"row": np.arange(2)})]
    result, collected = worker.collect(*call)
    assert result.accepted.all()
    assert np.array_equal(collected.answers.logits, probabilities)
    expected = POLICIES["base"].step(0, np.array([np.log(probabilities[0]), [-50.0, 0.0]], np.float32), None)
    assert np.array_equal(worker.decide(*call)[0].confidences, expected.confidences)


def test_a_row_of_zeros_and_a_one_is_no_probability_however_often_it_comes():
    """A row that is known to be good is asked again for every call that fails."""
    worker = worker_of(lambda batch: Answers(batch["x"].astype(np.float32)), 0, POLICIES)
    for row in [*([[1.0, 0.0]] * 20), [2.5, 0.7], [1.0, 0.0]]:
        assert worker.decide([Part(0, np.arange(1), "rf")], [Bundle({"x": np.array([row])})])[0].n_answered == 1


def test_different_rows_that_sum_to_one_are_probabilities_though_they_come_one_by_one():
    worker = worker_of(lambda batch: Answers(batch["x"].astype(np.float32)), 0, POLICIES)
    rows = [np.roll([1.0, 0.0, 0.0, 0.0, 0.0], position)[None] for position in range(5)]
    rows += [np.array([[0.0, half, rest, 0, 0]]) for half, rest in product([0.25, 0.75], [0.25, 0.75])]

    def answer_all():
        for row in rows:
            worker.decide([Part(0, np.arange(1), "rf")], [Bundle({"x": row})])

    with pytest.raises(ConfigError, match="probabilities"):
        answer_all()


def test_a_row_that_waits_still_waits_where_the_model_raises_on_another_of_its_call():
    def answer(batch):
        rows = batch["row"]
        if len(rows) > 1 and 3 in rows:
            raise ValueError("not these together")
        waiting = frozenset(np.flatnonzero(rows == 1).tolist())
        logits = np.array(DATA.logits[0][rows], np.float32)
        return Answers(logits, failures=dict.fromkeys(waiting, "asked"), waiting=waiting)

    result, _ = worker_of(answer, 0, POLICIES).decide([Part(0, np.arange(4), "rf")], [Bundle({"row": np.arange(4)})])
    assert (result.failures, result.waiting) == ({1: "asked"}, {1})


@given(struck=st.sets(st.integers(0, 8), min_size=1, max_size=8), times=st.integers(1, 2), n=st.integers(1, 9))
def test_a_row_is_refused_for_nan_only_if_the_model_gives_nan_for_it_twice(struck, times, n):
    rows, n_struck = np.arange(n), np.zeros(9, int)

    def answer(batch):
        logits = np.array(DATA.logits[0][batch["row"]], np.float32)
        for place, row in enumerate(batch["row"].tolist()):
            if row in struck and n_struck[row] < times:
                n_struck[row] += 1
                logits[place, 0] = np.nan
        return as_answers(logits, len(logits))

    step = POLICIES["rf"].step(0, DATA.logits[0][rows], None)
    result, _ = worker_of(answer, 0, POLICIES).decide([Part(0, rows, "rf")], [Bundle({"row": rows})])
    refused = struck & set(rows.tolist()) if times == 2 else set()
    assert set(result.failures) == result.raised == refused
    answered = [row for row in rows if row not in refused]
    assert np.array_equal(result.predictions[answered], step.predictions[answered])
    assert np.array_equal(result.accepted[answered], step.accepted[answered])
