"""A fleet's edge takes signed policies, and no other, from a web server. Issue 33 removes fleets."""

import json
from contextlib import closing

import pytest
from asking import http, until
from fleet_source import Key, Source, with_fleet
from runs import python_pool, two_model_policy

import cauc_ray


@pytest.mark.soak("full")
def test_an_edge_takes_signed_policies_only(tmp_path):
    first, second, third = map(two_model_policy, (0.7, 0.8, 0.6))
    key = Key(tmp_path)
    with closing(Source()) as source:
        source.files = key.signed(second)
        pool = with_fleet(python_pool(tmp_path), policy=f"{source.url}/policy.json", public_key="public.pem")
        with cauc_ray.serve(pool, first, port=0, local=True) as edge:

            def active():
                return json.loads(http("GET", f"{edge.url}/v2/models/test/policy")[1])["policy_id"]

            until(lambda: active() == second.id)
            content, signature = key.signed(third)
            source.files = (content.replace(b'"threshold": 0.6', b'"threshold": 0.1'), signature)
            until(lambda: 'outcome="refused"' in http("GET", f"{edge.url}/metrics")[1].decode())
            assert active() == second.id
            source.files = content, signature
            until(lambda: active() == third.id)
