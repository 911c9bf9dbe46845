"""A saved chain that is served, and how tests ask for its rows."""

import json
import urllib.error
import urllib.request

import numpy as np
import synthetic
import yaml
from runs import saved_pool

from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay


class Chain:
    """A saved chain, two policies for it and where they are served."""

    def __init__(self, folder):
        chains = synthetic.write_table(folder / "LOGITS", n=200, ragged=True)
        self.test = chains["test"]
        self.ids = np.array([f"test-{example}" for example in self.test.example_ids])
        self.policies = {
            "rf": fit_rf(chains["calibration"], chains["validation"], ThresholdRule()),
            "base": fit_base(chains["calibration"], chains["validation"]),
        }
        self.other = fit_rf(synthetic.chain(strengths=(1.0, 2.4)), rule=ThresholdRule(threshold=0.8))
        path = saved_pool(folder, serving={"batch_size": 16, "timeout_s": 20})
        content = yaml.safe_load(path.read_text())
        content["serving"] = {"router": {"replicas": {"min": 2}, "resources": {"num_cpus": 0.5}}}
        path.write_text(yaml.safe_dump(content))
        self.pool = path

    def expected(self, name):
        return replay(self.policies[name], self.test)


def http(method, url, body=None, **headers):
    """Return the status, the body and the headers of one request."""
    body = json.dumps(body).encode() if isinstance(body, dict | list) else body
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers, method=method), timeout=60) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def ask(service, ids, *args, **headers):
    """Ask for rows as JSON and return the outputs by name, and the response's parameters."""
    status, content = asked(service, ids, *args, **headers)
    assert status == 200, content
    return {output["name"]: np.array(output["data"]) for output in content["outputs"]}, content["parameters"]


def asked(service, ids, parameters=None, outputs=("prediction", "stage", "cost", "confidence"), **headers):
    """Ask for rows as JSON and return the status and the content, whatever they are."""
    inputs = [{"name": "example_id", "shape": [len(ids)], "datatype": "BYTES", "data": list(ids)}]
    body = {"inputs": inputs, "outputs": [{"name": name} for name in outputs], "parameters": parameters or {}}
    status, text, _ = http("POST", f"{service.url}/v2/models/six/infer", body, **headers)
    return status, json.loads(text)


def refused(service, body, path="/v2/models/six/infer", method="POST", **headers):
    """Ask for what cannot be had, and return the status and the sentence that says why."""
    status, text, _ = http(method, f"{service.url}{path}", body, **headers)
    content = json.loads(text)
    assert list(content) == ["error"], content
    assert "\n" not in content["error"]
    assert "Traceback" not in content["error"]
    return status, content["error"]


def in_force(service):
    return json.loads(http("GET", f"{service.url}/v2/models/six/policy")[1])["policy_id"]


def put_policy(service, content, **headers):
    """Ask for a change of the policy; return the status, the content and the tag of the version."""
    status, text, told = http("PUT", f"{service.url}/v2/models/six/policy", content, **headers)
    return status, json.loads(text), told["ETag"]
