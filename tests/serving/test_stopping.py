"""How `cauc serve` starts and stops, as a process manager sees it."""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest
from asking import Command, free_port, http, until
from runs import python_pool, two_model_policy

from cauc_ray.serving.service import repeat


class Service(Command):
    """One whose first stage notes its calls and takes a second for each."""

    def __init__(self, folder):
        self.log = folder / "calls"
        python_pool(folder, [("slow_by_x", {"seconds": 1.0, "log": str(self.log)}), ("by_x", {})])
        (folder / "policy.json").write_text(two_model_policy().to_json())
        self.ray_folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))  # sockets need a short path
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.shared_memory = set(os.listdir("/dev/shm"))
        super().__init__(folder, "--port", str(port), RAY_TMPDIR=str(self.ray_folder))

    url = None  # known before it runs

    def ready(self):
        """Return the status of readiness, None where nothing answers."""
        try:
            return http("GET", f"{self.url}/v2/health/ready")[0]
        except OSError:
            return None

    def n_calls(self):
        return len(self.log.read_text().split()) if self.log.exists() else 0

    def require_clean_stop(self, *signals, group):
        """Send signals one after another: it ends with 0 and no word, and leaves no process and no file."""
        started = self.processes()
        code, out, err = self.ended(*signals, group=group)
        # On a busy machine it reports what it waits for.
        lines = [line for line in err.splitlines() if not line.startswith("cauc: starting")]
        assert (code, out, lines, list(filter(lives, started)), self.files()) == (0, "", [], [], [])

    def files(self):
        """Return what there is of files and shared memory that no process has open."""
        shared = sorted(set(os.listdir("/dev/shm")) - self.shared_memory)
        return [*self.ray_folder.iterdir(), *(name for name in shared if not in_use(f"/dev/shm/{name}"))]


def lives(process):
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


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
    one.close()
    subprocess.run(["rm", "-rf", str(one.ray_folder)], check=True)


@pytest.mark.soak("full")
def test_a_start_is_not_ready_until_it_is_and_a_stop_of_the_group_answers_open_requests(service):
    statuses = [None]
    while statuses[-1] != 200:
        assert service.process.poll() is None
        if (status := service.ready()) != statuses[-1]:
            statuses.append(status)
        time.sleep(0.01)
    assert service.ask() == 200  # the first stage has loaded
    assert set(statuses[:-1]) <= {None, 404, 503}
    assert {service.ready() for _ in range(30)} == {200}

    n_before = service.n_calls()
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(service.ask)
        until(lambda: service.n_calls() > n_before)
        assert service.said["model"] == "test"
        service.require_clean_stop(signal.SIGTERM, group=True)
        assert answer.result() == 200


MOMENTS = {
    "at once": lambda service: any(service.ray_folder.iterdir()),  # from here on it is expected to be orderly
    "while Ray starts": lambda service: any("raylet" in process.name() for process in service.processes()),
    "while stages load": lambda service: service.ready() is not None,
    "once it runs": lambda service: service.said and service.ready() == 200,
}


@pytest.mark.soak("faults")
@pytest.mark.parametrize(
    ("moment", "signals", "group"),
    [
        ("at once", [signal.SIGTERM], False),
        ("while Ray starts", [signal.SIGTERM, signal.SIGTERM], True),
        ("while stages load", [signal.SIGTERM], False),
        ("once it runs", [signal.SIGINT, signal.SIGTERM], True),
    ],
)
def test_a_stop_at_any_moment_leaves_nothing(service, moment, signals, group):
    until(lambda: MOMENTS[moment](service))
    service.require_clean_stop(*signals, group=group)


@pytest.mark.soak("faults")
def test_a_command_that_is_killed_leaves_no_process(service):
    """Nothing can be deleted then, but nothing goes on either."""
    until(lambda: service.ready() == 200)
    started = service.processes()
    service.process.kill()
    until(lambda: not any(map(lives, started)))


def test_a_background_task_ends_where_what_it_calls_keeps_its_end_to_itself():
    calls = []

    async def kept_to_itself():
        calls.append("called")
        with suppress(asyncio.CancelledError) if len(calls) == 1 else nullcontext():
            await asyncio.sleep(60)

    async def cancelled():
        task = asyncio.create_task(repeat(kept_to_itself, 0.0))
        while not calls:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        return task.done()

    assert asyncio.run(cancelled())
    assert len(calls) == 1
