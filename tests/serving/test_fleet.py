"""A fleet's edge, end to end: it takes signed policies from a web server, and reports to the cloud.

Issue 33 removes fleets; until then, this shows that they work.
"""

import json
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from asking import http, infer, until
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from runs import python_pool, two_model_policy

import cauc_ray


@pytest.fixture
def files(tmp_path):
    """Serve the test's folder at a port; return the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=tmp_path))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.soak("full")
def test_an_edge_takes_signed_policies_only_and_reports_to_the_cloud(tmp_path, files):
    private, pem = Ed25519PrivateKey.generate(), serialization.Encoding.PEM
    pkcs8, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    public = private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    (tmp_path / "private.pem").write_bytes(private.private_bytes(pem, pkcs8, plain))
    policy_file, first, second, third = tmp_path / "policy.json", *map(two_model_policy, (0.7, 0.8, 0.6))

    def sign(policy):
        policy.save(policy_file)
        cauc_ray.sign_policy(policy_file, key=tmp_path / "private.pem")

    sign(second)
    (tmp_path / "cloud").mkdir()
    with cauc_ray.serve(python_pool(tmp_path / "cloud"), first, port=0, local=True) as cloud:
        reports = f"{cloud.url}/v2/models/test/fleet"
        fleet = {"policy": f"{files}/policy.json", "public_key": "public.pem", "report": reports}
        fleet |= {"state": "state", "name": "shop-17", "every_s": 0.05}
        pool = python_pool(tmp_path)
        pool.write_text(yaml.safe_dump(yaml.safe_load(pool.read_text()) | {"serving": {"fleet": fleet}}))
        with cauc_ray.serve(pool, first, port=0, local=True) as edge:

            def active():
                return json.loads(http("GET", f"{edge.url}/v2/models/test/policy")[1])["policy_id"]

            until(lambda: active() == second.id)
            content = policy_file.read_bytes()
            policy_file.write_bytes(content.replace(b'"threshold": 0.8', b'"threshold": 0.1'))
            assert policy_file.read_bytes() != content
            until(lambda: 'outcome="refused"' in http("GET", f"{edge.url}/metrics")[1].decode())
            assert active() == second.id
            sign(third)
            until(lambda: active() == third.id)
            assert infer(edge.url, "test", {"x": [9.0] * 3})[0] == 200

            def report():
                return json.loads(http("GET", reports)[1])["edges"].get("shop-17", {})

            until(lambda: report().get("counters", {}).get("requests") == {"200": 1})
            assert report()["policy_id"] == third.id
