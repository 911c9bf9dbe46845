"""The local shell in a process of its own: no Ray, a quick start, an orderly end."""

import asyncio
import http.client
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import psutil
import pytest
from asking import DEADLINE_S, Command, edit_pool, in_force, until
from runs import python_pool, two_model_policy

import cauc_ray
from cauc_ray.errors import ConfigError, ExecutionError
from cauc_ray.models.pool import load_pool
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.local import LocalClient


@pytest.fixture
def home(tmp_path):
    python_pool(tmp_path, [("by_x", {}), ("by_x", {})])
    (tmp_path / "policy.json").write_text(two_model_policy().to_json())
    return tmp_path


@pytest.fixture
def command(home):
    """Return a function that starts a service of the folder's pool."""
    with ExitStack() as services:
        yield lambda: services.enter_context(closing(Command(home, "--port", "0", "--local")))


def test_a_signal_answers_open_requests_closes_models_and_ends_with_0(home, command):
    log, closed = home / "calls", home / "closed"
    small = ("slow_by_x", {"seconds": 1.0, "log": str(log)})
    python_pool(home, [small, ("notes_its_end", {"path": str(closed)})])
    service = command()
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(service.ask)
        until(log.exists)
        code, out, err = service.ended(signal.SIGTERM, group=True)
        assert (code, out, answer.result()) == (0, "", 200)
    assert [json.loads(line)["status"] for line in err.splitlines() if not line.startswith("cauc: ")] == [200]
    assert len(closed.read_text().split()) == 1


def test_a_policy_file_is_read_again_and_a_bad_one_leaves_the_active_policy(home):
    python_pool(home, [("by_x", {})] * 2)
    edit_pool(home / "pool.yaml", serving={"policy_every_s": 0.05})
    policy = Policy.load(home / "policy.json")
    second, third = (policy.with_threshold(threshold) for threshold in (0.7, 0.8))
    with pytest.raises(ConfigError, match="--local"):
        cauc_ray.serve(home / "pool.yaml", home / "policy.json", port=0)
    with cauc_ray.serve(home / "pool.yaml", home / "policy.json", port=0, local=True, name="six") as service:
        assert in_force(service) == policy.id
        second.save(home / "policy.json")
        until(lambda: in_force(service) == second.id)
        (home / "policy.json").write_text("{")
        cauc_ray.set_policy(url=service.url, threshold=0.9)
        (home / "policy.json").unlink()
        assert in_force(service) == policy.with_threshold(0.9).id
        third.save(home / "policy.json")
        until(lambda: in_force(service) == third.id)


def test_a_service_that_ends_by_itself_ends_its_command(home, command):
    """Here user code raises SystemExit on the event loop, which ends it."""
    edit_pool(home / "pool.yaml", serving={"tracing": "user_models:tracing_that_exits"})
    service = command()
    with pytest.raises((OSError, http.client.HTTPException, ValueError)):  # in which way is up to the server
        service.ask()
    code, out, err = service.ended()
    assert (code, out) == (4, "")
    assert "the service ended unexpectedly" in err.splitlines()[-1]


def test_a_model_that_cannot_load_is_reported_in_one_line(home):
    python_pool(home, [("by_x", {}), ("cannot_load", {})])
    with (
        pytest.raises(ExecutionError, match=r"does not start: stage large: OSError: weights\.pt is not there$"),
        cauc_ray.serve(home / "pool.yaml", home / "policy.json", port=0, local=True),
    ):
        pass


@pytest.mark.parametrize("factory", [pytest.param("hangs_on", marks=pytest.mark.soak("full")), "dies_on_x"])
def test_a_call_that_hangs_or_ends_its_process_costs_its_own_request_and_leaves_no_process(home, command, factory):
    python_pool(home, [(factory, {"x": 99.0}), ("by_x", {})], serving={"timeout_s": 1.0}, call_timeout_s=1.0)
    service = command()
    assert service.ask(99.0) in (422, 503)
    until(lambda: service.ask(9.0) == 200)
    until(lambda: len(service.processes()) == 2)  # one for each stage
    processes = service.processes()
    assert service.ended(signal.SIGINT)[0] == 0
    assert not any(process.is_running() for process in processes)


def test_a_service_that_is_killed_leaves_no_process(home, command):
    python_pool(home, [("hangs_on", {"x": 99.0}), ("by_x", {})])
    service = command()
    assert service.ask() == 200
    processes = service.processes()
    service.process.kill()
    until(lambda: not any(process.is_running() for process in processes))


def replica_processes():
    children = psutil.Process().children(recursive=True)
    return [one for one in children if "cauc_ray.serving.processes" in one.cmdline()]


def test_replicas_outlive_the_thread_that_starts_their_service(home):
    with ThreadPoolExecutor(1) as starter:
        starting = starter.submit(cauc_ray.serve, home / "pool.yaml", home / "policy.json", port=0, local=True)
    with starting.result():
        time.sleep(0.5)
        assert [process.status() == psutil.STATUS_ZOMBIE for process in replica_processes()] == [False, False]


def test_a_model_that_cannot_be_loaded_anew_is_loaded_once_it_can(home):
    gone = home / "gone"
    pool = load_pool(python_pool(home, [("loads_unless", {"path": str(gone)}), ("by_x", {})]))
    client = LocalClient(pool.stages[0], 0)
    assert client.load(DEADLINE_S) is None
    assert list(asyncio.run(client.replicas())) == ["small-1"]
    gone.touch()
    client.replace("small-1")
    for _ in range(3):
        assert asyncio.run(client.replicas()) == {}
    gone.unlink()
    until(lambda: asyncio.run(client.replicas()))
    client.close()
    until(lambda: not replica_processes())
