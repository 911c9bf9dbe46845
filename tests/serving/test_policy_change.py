"""Changes of policy that a service refuses, whoever asks for them."""

import pytest
from synthetic import chain

from cauc_ray.errors import CaucError
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.serving.policies_live import PolicyChange

DATA = chain(4)
RF = fit_rf(DATA, DATA)
BASE = fit_base(DATA, DATA)


def of_kind(kind):
    """Return the RF policy as it were fitted on logits of another kind."""
    content = RF.model_dump(mode="json")
    stages = [{**stage, "logit_kind": kind} for stage in content["stages"]]
    return {**content, "logit_kind": kind, "stages": stages}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "a policy, a threshold or a budget"),
        ({"policies": "x"}, "unknown key 'policies'"),
        ({"threshold": 0.5, "budget": 3.0}, "not both"),
        ({"threshold": "high"}, "threshold"),
        ({"threshold": -1.0}, "threshold"),
        ({"budget": RF.curve[0].cost / 2}, "cheapest operating point"),
        ({"policy": "nowhere.json"}, "policy"),
        ({"policy": {"format": "cauc-policy/2"}}, "cauc-policy/1"),
        (
            {"policy": fit_rf(chain(strengths=(1.0, 2.0)), rule=ThresholdRule(0.5)).model_dump(mode="json")},
            "the service runs",
        ),
        ({"policy": {**RF.model_dump(mode="json"), "cost_unit": "USD"}}, "costs in USD"),
        ({"policy": {**RF.model_dump(mode="json"), "logit_kind": "other"}}, "logit_kind 'other'"),
        ({"policy": of_kind("surrogate")}, "of kind 'surrogate'"),
        (["policy"], "invalid change of policy"),
    ],
)
def test_a_change_that_cannot_be_is_refused_in_one_line(change, reason):
    with pytest.raises(CaucError) as error:
        PolicyChange.of(change).applied(RF)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
