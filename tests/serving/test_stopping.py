"""How `cauc serve` starts and stops, as a process manager sees it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from runs import python_pool, two_model_policy

pytestmark = pytest.mark.slow

CAUC = Path(sys.executable).with_name("cauc")
STOP_S = 10.0
DEADLINE_S = 120.0


class Service:
    """`cauc serve` in a session of its own, whose first stage notes its calls and takes a second for each."""

    def __init__(self, folder):
        self.log = folder / "calls"
        python_pool(folder, [("slow_by_x", {"seconds": 1.0, "log": str(self.log)}), ("by_x", {})])
        (folder / "policy.json").write_text(two_model_policy().to_json())
        self.ray_folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # sockets need a short path
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v2"
        self.shared_memory = set(os.listdir("/dev/shm"))
        self.process = subprocess.Popen(
            [CAUC, "serve", "pool.yaml", "--policy", "policy.json", "--port", str(port), "--json"],
            cwd=folder,
            env={**os.environ, "RAY_TMPDIR": str(self.ray_folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ready(self):
        """Return the status of readiness, None where nothing answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health/ready", timeout=DEADLINE_S) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def ask(self):
        """Ask for a row that the first stage answers, and return the status."""
        row = {"name": "x", "shape": [1], "datatype": "FP64", "data": [9.0]}
        body = json.dumps({"inputs": [row]}).encode()
        with urllib.request.urlopen(f"{self.url}/models/test/infer", body, timeout=DEADLINE_S) as answer:
            return answer.status

    def n_calls(self):
        return len(self.log.read_text().split()) if self.log.exists() else 0

    def stop(self, *signals, group):
        """Send signals one after another; return the exit code and what was written, once all is over and gone.

        It must be over in ten seconds, open requests included.
        """
        started, asked = self.processes(), time.monotonic()
        for number in signals:
            (os.killpg if group else os.kill)(self.process.pid, number)
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert time.monotonic() - asked < STOP_S
        left = [process for process in started if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        return self.process.returncode, out, err, left

    def processes(self):
        """Return all processes that have come of it and still run."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def files(self):
        """Return what there is of files and shared memory that no process has open."""
        shared = sorted(set(os.listdir("/dev/shm")) - self.shared_memory)
        return [*self.ray_folder.iterdir(), *(name for name in shared if not in_use(f"/dev/shm/{name}"))]

    def end(self):
        """Leave nothing, whatever a test has not ended."""
        for process in [*self.processes(), self.process]:
            process.kill()
        self.process.communicate()
        subprocess.run(["rm", "-rf", str(self.ray_folder)], check=True)


def in_use(path):
    """Say whether some process has a file open or in its memory, or has just deleted it."""
    if not os.path.exists(path):
        return True
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path in (folder / "maps").read_text() or path in map(os.path.realpath, (folder / "fd").iterdir()):
                return True
    return False


@pytest.fixture
def service(tmp_path):
    one = Service(tmp_path)
    yield one
    one.end()


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_start_is_not_ready_until_it_is_and_a_stop_of_the_group_answers_what_is_open(service):
    statuses = [None]
    while statuses[-1] != 200:
        assert service.process.poll() is None
        if (status := service.ready()) != statuses[-1]:
            statuses.append(status)
        time.sleep(0.01)
    assert service.ask() == 200  # the first stage has loaded
    assert set(statuses[:-1]) <= {None, 404, 503}
    assert {service.ready() for _ in range(30)} == {200}

    answers, n_before = [], service.n_calls()
    asker = threading.Thread(target=lambda: answers.append(service.ask()))
    asker.start()
    until(lambda: service.n_calls() > n_before)
    started = service.process.stdout.readline()
    assert json.loads(started)["model"] == "test"
    assert service.stop(signal.SIGTERM, group=True) == (0, "", "", [])
    asker.join()
    assert answers == [200]
    assert service.files() == []


def test_a_stop_at_once_leaves_nothing(service):
    until(lambda: any(service.ray_folder.iterdir()))  # from here on it is said to be orderly
    assert service.stop(signal.SIGTERM, group=False) == (0, "", "", [])
    assert service.files() == []


def test_two_stops_of_the_group_while_ray_starts_leave_nothing(service):
    until(lambda: any("raylet" in process.name() for process in service.processes()))
    assert service.stop(signal.SIGTERM, signal.SIGTERM, group=True) == (0, "", "", [])
    assert service.files() == []


def test_a_stop_while_stages_load_leaves_nothing(service):
    until(lambda: service.ready() is not None)
    assert service.stop(signal.SIGTERM, group=False) == (0, "", "", [])
    assert service.files() == []


def test_an_interrupt_of_what_runs_leaves_nothing(service):
    until(lambda: service.ready() == 200)
    assert service.process.stdout.readline()
    assert service.stop(signal.SIGINT, signal.SIGTERM, group=True) == (0, "", "", [])
    assert service.files() == []


def test_what_is_killed_leaves_no_process(service):
    """Nothing can be deleted then, but nothing goes on either."""
    until(lambda: service.ready() == 200)
    started = service.processes()
    service.process.kill()
    until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started))
