"""A saved chain that is served, and how tests ask for its rows."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import psutil
import synthetic
import yaml
from runs import saved_pool

from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

CAUC = Path(sys.executable).with_name("cauc")
# Ends what hangs; nothing is decided by it.
DEADLINE_S = 240.0
# Outputs that feedback is on.
FEEDBACK = ("prediction", "confidence", "stage")


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
        router = {"replicas": {"min": 2}, "resources": {"num_cpus": 0.5}}
        path = saved_pool(folder, serving={"batch_size": 16, "timeout_s": 20})
        self.pool = edit_pool(path, serving={"router": router})

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


def infer(url, model, columns, outputs=(), parameters=None, **headers):
    """Ask for rows as JSON: texts or numbers by column. Return the status and the content, whatever they are."""
    inputs = [
        {
            "name": name,
            "shape": list(np.shape(data)),
            "datatype": "BYTES" if isinstance(data[0], str) else "FP64",
            "data": list(data),
        }
        for name, data in columns.items()
    ]
    body = {"inputs": inputs, "outputs": [{"name": name} for name in outputs], "parameters": parameters or {}}
    status, text, _ = http("POST", f"{url}/v2/models/{model}/infer", body, **headers)
    return status, json.loads(text)


def answered(url, model, columns, outputs=(), parameters=None):
    """Ask for rows as infer does; return the response, which has all answers."""
    status, content = infer(url, model, columns, outputs, parameters)
    assert status == 200, content
    return content


def edit_pool(path, **fields):
    """Set fields of a pool file; return its path."""
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | fields))
    return path


def require_replay(outputs, expected, rows=slice(None)):
    """Hold outputs, all that a trace has too, against the trace of their rows."""
    for name in outputs.keys() & {"prediction", "stage", "confidence", "cost"}:
        values = getattr(expected, f"{name}s")[rows]
        assert np.array_equal(np.float32(outputs[name]), np.float32(values)), name


def outputs_of(content):
    return {output["name"]: np.array(output["data"]) for output in content["outputs"]}


def feedback_of(content):
    """Return the feedback message on a response whose outputs are FEEDBACK, all but the labels."""
    answer = {name: content["parameters"][name] for name in ("policy_id", "answer_id")}
    return answer | {name: values.tolist() for name, values in outputs_of(content).items()}


def send_labels(url, model, content, labels):
    """Send the labels of a response's rows; return what the service says of them."""
    body = {**feedback_of(content), "label": np.asarray(labels).tolist()}
    status, text, _ = http("POST", f"{url}/v2/models/{model}/feedback", body)
    assert status == 200, text
    return json.loads(text)


def ask(service, ids, *args, **headers):
    """Ask for rows and return the outputs by name, and the response's parameters."""
    status, content = asked(service, ids, *args, **headers)
    assert status == 200, content
    return outputs_of(content), content["parameters"]


def asked(service, ids, parameters=None, outputs=("prediction", "stage", "cost", "confidence"), **headers):
    return infer(service.url, "six", {"example_id": list(ids)}, outputs, parameters, **headers)


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
    status, text, answered = http("PUT", f"{service.url}/v2/models/six/policy", content, **headers)
    return status, json.loads(text), answered["ETag"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Command:
    """`cauc serve` of a folder's pool.yaml, in a process and a session of its own.

    errors: where its standard error goes; a pipe is full after some hundred requests.
    """

    def __init__(self, folder, *arguments, policy="policy.json", cauc=CAUC, errors=subprocess.PIPE, **environment):
        variables = {name: value for name, value in os.environ.items() if not name.startswith("CAUC_")}
        self.process = subprocess.Popen(
            [cauc, "serve", "pool.yaml", "--policy", policy, "--json", *arguments],
            cwd=folder,
            env=variables | environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )

    @cached_property
    def said(self):
        """Return what it prints once it runs."""
        return json.loads(self.process.stdout.readline())

    @property
    def url(self):
        return self.said["url"]

    def ask(self, x=9.0):
        """Ask for a row; return the status."""
        return infer(self.url, "test", {"x": [x]})[0]

    def ended(self, *signals, group=False):
        """Send signals; return the exit code and what was written, once it is over."""
        for number in signals:
            (os.killpg if group else os.kill)(self.process.pid, number)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err

    def processes(self):
        """Return all of its child processes that still run."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def close(self):
        """Leave nothing, whatever a test has not ended."""
        for process in [*self.processes(), self.process]:
            process.kill()
        self.process.communicate()


@contextmanager
def clients(asks, n=4):
    """Have n clients ask all the time; yield what they get.   asks: called with a client's random generator."""
    answers, stop = [], threading.Event()

    def run(seed):
        rng = np.random.default_rng(seed)
        while not stop.is_set():
            answers.append(asks(rng))

    with ThreadPoolExecutor(n) as threads:
        running = [threads.submit(run, seed) for seed in range(n)]
        try:
            yield answers
        finally:
            stop.set()
    for client in running:
        client.result()


def until_answered(answers, n):
    """Wait for so many more answers."""
    n += len(answers)
    until(lambda: len(answers) >= n)


def until(condition, deadline_s=DEADLINE_S):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
