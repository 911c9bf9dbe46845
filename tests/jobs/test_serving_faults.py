"""How answers under faults are judged and counted, laid out by hand."""

import json

import numpy as np
import pytest

from jobs.bench.cascades import planted_rows, write_table
from jobs.bench.serving_faults_answers import AND, DEGRADED, RIGHT, WRONG, Judge, Struck, Truth, together
from jobs.bench.serving_load import RESET, TIMEOUT, LoadResult

ROWS = planted_rows(np.random.default_rng(0), 200, (0.4, 0.5))


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    models = {"a": 1.0, "b": 2.0, "c": 3.0}
    policy = write_table(tmp_path_factory.mktemp("table"), models, (0.4, 0.5), test=ROWS)
    return policy, policy.with_threshold(0.0)


def answer(policy, prediction, stage, reason=None):
    told = {"policy_id": policy.id, "stage": stage, "degraded": reason is not None}
    outputs = [{"name": "prediction", "data": [prediction]}, {"name": "stage", "data": [stage]}]
    return json.dumps({"outputs": outputs, "parameters": told | ({"reason": reason} if reason else {})}).encode()


def kind(judge, place, *answered, status=200):
    return judge(place, status, *answered).split(AND)[0]


def test_answers_are_judged_by_the_policy_that_they_name_and_the_stage_that_gave_them(policies):
    policy, other = policies
    truth = Truth.of(policy, ROWS.gaps)
    assert np.bincount(truth.stages).tolist() == [120, 40, 40]
    judge = Judge({one.id: Truth.of(one, ROWS.gaps) for one in policies})
    for place, last in enumerate(truth.stages.tolist()):
        of_stage = truth.predictions[:, place].tolist()
        assert of_stage[0] == int(ROWS.gaps[place, 0] < 0)  # alone, a model answers by its own gap
        assert judge(place, 200, answer(policy, of_stage[last], last)) == f"{RIGHT}{AND}{policy.id}"
        assert kind(judge, place, answer(policy, 1 - of_stage[last], last)) == WRONG
        assert kind(judge, place, answer(policy, of_stage[last], last, reason="late")) == WRONG
        for stage in set(range(3)) - {last}:
            assert kind(judge, place, answer(policy, of_stage[stage], stage)) == WRONG
            marked = kind(judge, place, answer(policy, of_stage[stage], stage, reason="late"))
            assert marked == (DEGRADED if stage < last else WRONG)
        # The other policy accepts all answers of the first stage.
        assert judge(place, 200, answer(other, of_stage[0], 0)) == f"{RIGHT}{AND}{other.id}"
    stranger = policy.with_threshold(0.5)
    assert kind(judge, 0, answer(stranger, int(truth.predictions[0, 0]), 0)) == WRONG


def test_what_is_no_answer_is_told_apart_by_status_and_by_who_says_it():
    judge, ours = Judge({}), b'{"error": "busy"}'
    assert judge(0, 429, ours) == judge(0, 503, ours) == "turned away | busy"
    assert kind(judge, 0, b"The actor died", status=500) == "Serve's 500"
    assert kind(judge, 0, ours, status=500) == "other"
    assert kind(judge, 0, b"unavailable", status=503) == "other"  # not in our words


def load(*requests):
    """Return a load of requests, each (seconds at its start, seconds it took, status, kind, Retry-After)."""
    started, took, statuses, kinds, tells = zip(*sorted(requests, key=lambda one: one[0] + one[1]), strict=True)
    return LoadResult(0.0, 0.0, 10.0, *map(np.array, (started, took, statuses, kinds, tells)))


def steadily(start, stop, kind="right | p", status=200, every=0.1):
    return [(at, 0.05, status, kind, False) for at in np.arange(start, stop, every)]


def test_every_request_is_counted_once_and_all_is_well_when_no_answer_is_bad_any_more():
    bad = [
        (4.1, 0.5, 503, "turned away | down", True),
        (4.2, 0.5, 503, "turned away | down", False),
        (4.3, 0.5, 500, "Serve's 500 | gone", False),
        (4.4, 0.5, 0, RESET, False),
        (4.5, 1.5, 200, "degraded | late", False),
        (4.6, 0.2, 500, "other | oh", False),
    ]
    struck = Struck(load(*steadily(0, 4), *bad, *steadily(6.5, 10)), at_s=4.0, over_s=5.0)
    found = struck.figures()
    parts = ("right", "degraded", "status_429", "status_503", "serves_own_500", "wrong", "refused", "reset", "hung")
    assert sum(found[key] for key in parts) + sum(found["other_status"].values()) == found["sent"] == 81
    assert (found["right"], found["degraded"], found["status_503"], found["without_retry_after"]) == (75, 1, 2, 1)
    assert found["other_status"] == {"500": 1}
    assert found["longest_s"] == 1.5
    assert found["struck_s"] == 1.0
    # The last bad answer came at 6 s; only from 6.4 s on does a second hold 8 of the 10 answers that one had before.
    assert found["per_s"]["before"] == pytest.approx(10.0, rel=0.05)
    assert found["recovery_s"] == pytest.approx(1.3, abs=0.11)
    assert found["p99_s"]["before"] == found["p99_s"]["after"] == pytest.approx(0.05)
    assert found["p99_s"]["during"] > 1.0


def test_what_never_gets_well_has_no_time_of_recovery():
    for late in (steadily(5, 10, "degraded | late"), steadily(5, 10, every=0.5), [(5.0, 4.0, 0, TIMEOUT, False)]):
        found = Struck(load(*steadily(0, 4), *late), at_s=4.0, over_s=4.0).figures()
        assert found["recovery_s"] is None
        assert found["p99_s"]["after"] is None


def test_a_fault_that_nobody_notices_is_over_at_once():
    found = Struck(load(*steadily(0, 10)), at_s=4.0, over_s=4.0).figures()
    assert (found["right"], found["recovery_s"]) == (100, 0.0)


def test_answers_by_a_policy_that_was_replaced_before_they_were_asked_for():
    requests = [
        (0.5, 0.1, 200, "right | old", False),
        (0.9, 0.3, 200, "right | old", False),  # asked for before the change was done
        (1.5, 0.1, 200, "right | new", False),
        (1.6, 0.1, 200, "right | old", False),  # outdated
        (1.9, 0.3, 200, "right | old", False),  # ends after the next change has begun
        (2.5, 0.1, 200, "right | old", False),
        (2.6, 0.1, 200, "right | new", False),  # outdated
    ]
    struck = Struck(load(*requests), at_s=1.0, over_s=2.2)
    assert struck.n_outdated([(0.8, 1.0, "new"), (2.0, 2.2, "old")]) == 2


def test_loads_beside_each_other_are_on_one_clock():
    one = load(*steadily(0, 1))
    other = LoadResult(0.5, 0.0, 1.0, *(getattr(load((0.0, 0.2, 429, "turned away | busy", True)), name) for name in (
        "started_s", "latency_s", "statuses", "kinds", "retry_after_mask"
    )))  # fmt: skip
    both = together(one, other)
    assert len(both) == len(one) + 1
    assert both.ended_s[both.statuses == 429].tolist() == [0.7]
    assert both.kinds[-1] == "turned away | busy"
