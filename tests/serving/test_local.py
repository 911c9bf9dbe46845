"""The local shell in a process of its own: no Ray, a quick start, an orderly end."""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runs import python_pool, two_model_policy

import cauc_ray
from cauc_ray.errors import ConfigError, ExecutionError
from cauc_ray.models.pool import load_pool
from cauc_ray.serving.local import LocalClient

CAUC = Path(sys.executable).with_name("cauc")
DEADLINE_S = 60.0
# Told by a process that served one request: what it has imported.
SERVES = """
import json, sys, urllib.request
import cauc_ray
with cauc_ray.serve("pool.yaml", "policy.json", port=0, local=True) as service:
    row = {"name": "x", "shape": [1], "datatype": "FP64", "data": [0.1]}
    body = json.dumps({"inputs": [row], "outputs": [{"name": "stage"}]}).encode()
    with urllib.request.urlopen(f"{service.url}/v2/models/test/infer", body, timeout=60) as answer:
        stages = json.load(answer)["outputs"][0]["data"]
print(json.dumps([stages, sorted({name.split(".")[0] for name in sys.modules})]))
"""


@pytest.fixture
def home(tmp_path):
    python_pool(tmp_path, [("by_x", {}), ("by_x", {})])
    (tmp_path / "policy.json").write_text(two_model_policy().to_json())
    return tmp_path


def test_a_service_and_its_command_import_neither_ray_nor_torch(home):
    done = subprocess.run([sys.executable, "-c", SERVES], cwd=home, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    data, modules = json.loads(done.stdout)
    assert data == [1]
    assert not {"ray", "torch", "fastapi", "transformers", "sklearn"} & set(modules)
    assert "cauc_ray" in modules


class Command:
    """`cauc serve --local` in a session of its own."""

    def __init__(self, home):
        self.process = subprocess.Popen(
            [CAUC, "serve", "pool.yaml", "--policy", "policy.json", "--port", "0", "--local", "--json"],
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def started(self):
        self.url = json.loads(self.process.stdout.readline())["url"]
        return self

    def status(self, x):
        try:
            return self.ask(x)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def ask(self, x=9.0):
        row = {"name": "x", "shape": [1], "datatype": "FP64", "data": [x]}
        body = json.dumps({"inputs": [row]}).encode()
        with urllib.request.urlopen(f"{self.url}/v2/models/test/infer", body, timeout=DEADLINE_S) as answer:
            return answer.status

    def end(self):
        """Leave nothing, whatever a test has not ended."""
        self.process.kill()
        self.process.communicate()


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_answers_what_is_open_and_ends_with_0(home):
    log = home / "calls"
    python_pool(home, [("slow_by_x", {"seconds": 1.0, "log": str(log)}), ("by_x", {})])
    command, answers = Command(home).started(), []
    try:
        asker = threading.Thread(target=lambda: answers.append(command.ask()))
        asker.start()
        until(log.exists)
        os.killpg(command.process.pid, signal.SIGTERM)
        out, err = command.process.communicate(timeout=DEADLINE_S)
        asker.join()
    finally:
        command.end()
    assert (command.process.returncode, out) == (0, "")
    assert [json.loads(line)["status"] for line in err.splitlines()] == [200]
    assert answers == [200]


def test_a_service_that_ends_by_itself_ends_its_command(home):
    """Here user code raises SystemExit on the event loop, which ends it."""
    path = home / "pool.yaml"
    path.write_text(path.read_text() + "\nserving: {tracing: 'user_models:tracing_that_exits'}\n")
    command = Command(home).started()
    try:
        with pytest.raises((OSError, http.client.HTTPException)):
            command.ask()
        out, err = command.process.communicate(timeout=DEADLINE_S)
    finally:
        command.end()
    assert (command.process.returncode, out) == (2, "")
    assert "the service ended unexpectedly" in err.splitlines()[-1]


def test_a_stop_while_models_load_is_orderly(home):
    begun = home / "begun"
    python_pool(home, [("loads_slowly", {"seconds": 60.0, "log": str(begun)}), ("by_x", {})])
    command = Command(home)
    try:
        until(begun.exists)
        command.process.send_signal(signal.SIGTERM)
        out, err = command.process.communicate(timeout=DEADLINE_S)
    finally:
        command.end()
    assert (command.process.returncode, out, err) == (0, "", "")


def test_a_model_that_cannot_load_is_reported_in_one_line(home):
    python_pool(home, [("by_x", {}), ("cannot_load", {})])
    with (
        pytest.raises(ExecutionError, match=r"does not start: stage large: OSError: weights\.pt is not there$"),
        cauc_ray.serve(home / "pool.yaml", home / "policy.json", port=0, local=True),
    ):
        pass


def test_one_process_has_no_cluster(home):
    with (
        pytest.raises(ConfigError, match="local"),
        cauc_ray.serve(home / "pool.yaml", home / "policy.json", port=0, local=True, address="auto"),
    ):
        pass


def test_a_call_that_hangs_costs_its_own_request_and_ends_with_the_process(home):
    """A thread cannot be ended: its model is loaded anew in another, and the process does not wait for it."""
    python_pool(home, [("hangs_on", {"x": 99.0}), ("by_x", {})], serving={"timeout_s": 1.0}, call_timeout_s=1.0)
    command = Command(home).started()
    try:
        assert command.status(99.0) in (422, 503)
        until(lambda: command.status(9.0) == 200)
        asked = time.monotonic()
        command.process.send_signal(signal.SIGINT)
        command.process.communicate(timeout=DEADLINE_S)
        assert time.monotonic() - asked < 10.0
    finally:
        command.end()
    assert command.process.returncode == 0


def test_a_batch_is_prepared_while_the_one_before_is_computed(home):
    """Here no batch is answered before the next one is being prepared."""
    python_pool(home, [("waits_for_the_next", {"n_batches": 3}), ("by_x", {})])
    body = json.dumps({"inputs": [{"name": "x", "shape": [8], "datatype": "FP64", "data": [9.0] * 8}]}).encode()

    def asked(url):
        with urllib.request.urlopen(f"{url}/v2/models/test/infer", body, timeout=DEADLINE_S) as answer:
            return json.load(answer)["outputs"][0]["shape"]

    running = cauc_ray.serve(home / "pool.yaml", home / "policy.json", port=0, local=True)
    with running as service, ThreadPoolExecutor(3) as clients:
        assert list(clients.map(asked, [service.url] * 3)) == [[8]] * 3


def threads_of_models():
    return [one.name for one in threading.enumerate() if one.name.startswith(("small-", "large-"))]


def test_no_thread_outlives_a_service(home):
    with cauc_ray.serve(home / "pool.yaml", home / "policy.json", port=0, local=True):
        assert sorted(threads_of_models()) == ["large-1: model", "small-1: model"]
    until(lambda: not threads_of_models())


def test_a_model_that_cannot_be_loaded_anew_is_loaded_once_it_can(home):
    gone = home / "gone"
    pool = load_pool(python_pool(home, [("loads_unless", {"path": str(gone)}), ("by_x", {})]))
    client = LocalClient(pool.stages[0], 0)
    client.load(DEADLINE_S)
    assert list(asyncio.run(client.replicas())) == ["small-1"]
    gone.touch()
    client.replace("small-1")
    for _ in range(3):
        assert asyncio.run(client.replicas()) == {}
    gone.unlink()
    until(lambda: asyncio.run(client.replicas()))
    client.close()
    until(lambda: not threads_of_models())


def test_a_service_without_a_block_runs_until_it_is_stopped(home):
    service = cauc_ray.serve(home / "pool.yaml", home / "policy.json", port=0, local=True)
    with urllib.request.urlopen(f"{service.url}/v2/health/ready", timeout=DEADLINE_S) as answer:
        assert answer.status == 200
    service.stop()
    service.stop()  # which is done
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{service.url}/v2/health/ready", timeout=DEADLINE_S)
