"""A fleet's edge: it takes signed policies from a web server, and reports to the cloud. Issue 33 removes fleets."""

import json
from contextlib import closing

import pytest
from asking import http, infer, until
from fleet_source import Key, Source, with_fleet
from runs import python_pool, two_model_policy

import cauc_ray


@pytest.mark.soak("full")
def test_an_edge_takes_signed_policies_only_and_reports_to_the_cloud(tmp_path):
    first, second, third = map(two_model_policy, (0.7, 0.8, 0.6))
    key, cloud_folder = Key(tmp_path), tmp_path / "cloud"
    cloud_folder.mkdir()
    with (
        closing(Source()) as source,
        cauc_ray.serve(python_pool(cloud_folder), first, port=0, local=True) as cloud,
    ):
        reports = f"{cloud.url}/v2/models/test/fleet"
        source.files = key.signed(second)
        follows = {"policy": f"{source.url}/policy.json", "public_key": "public.pem", "report": reports}
        pool = with_fleet(python_pool(tmp_path), **follows)
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
            assert infer(edge.url, "test", {"x": [9.0] * 3})[0] == 200

            def report():
                return json.loads(http("GET", reports)[1])["edges"].get("shop-17", {})

            until(lambda: report().get("counters", {}).get("requests") == {"200": 1})
            assert report()["policy_id"] == third.id
